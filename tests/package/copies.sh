#!/usr/bin/env bash
# copies.sh CC CXX DIR: several copies of nsa.h in one program: one extern implementation in C, used
# from C and from C++, beside private copies (NSA_STATIC), one of them in double and one of another
# version of the header.
set -euo pipefail

cc=$1
cxx=$2
dir=$3
nsa=$(cd "$(dirname "$0")/../../nsa" && pwd)
mkdir -p "$dir"
cd "$dir"

# source FILE FUNCTION DEFINES: one file of the program; FUNCTION returns what nsa.h thinks of a
# descriptor, and how wide its numbers are.
source_file() {
    {
        printf '%b' "$3"
        echo '#include "nsa.h"'
        echo '#ifdef __cplusplus'
        echo 'extern "C"'
        echo '#endif'
        echo "int $2(void);"
        echo "int $2(void) {"
        echo '    nsa_desc d = nsa_desc_default(1, 100, 4, 2, 16);'
        echo '    return nsa_desc_check(&d) == NSA_OK ? (int)sizeof(nsa_real) + nsa_cmp_count(&d, 100) : -1;'
        echo '}'
    } >"$1"
}

source_file extern.c from_extern '#define NSA_IMPLEMENTATION\n'
source_file user.c from_user ''
source_file user.cpp from_cpp ''
source_file static_float.c from_static_float '#define NSA_STATIC\n#define NSA_IMPLEMENTATION\n'
source_file static_double.c from_static_double \
    '#define NSA_STATIC\n#define NSA_IMPLEMENTATION\n#define NSA_REAL double\n'
mkdir -p later
sed 's/^\(#define NSA_VERSION_MINOR\) .*/\1 99/' "$nsa/nsa.h" >later/nsa.h
source_file later.c from_later '#define NSA_STATIC\n#define NSA_IMPLEMENTATION\n'
sed -i -e 's/sizeof(nsa_real)/NSA_VERSION_MINOR/' -e 's/"nsa.h"/"later\/nsa.h"/' later.c
cat >main.c <<'TEXT'
#include <stdio.h>
int from_extern(void), from_user(void), from_cpp(void), from_static_float(void), from_static_double(void);
int from_later(void);
int main(void) {
    printf("%d %d %d %d %d %d\n", from_extern(), from_user(), from_cpp(), from_static_float(),
           from_static_double(), from_later());
    return 0;
}
TEXT
# Without the vector tiles, which names.sh looks at: this is about names and links.
for file in *.c; do "$cc" -std=c99 -Wall -Wextra -Werror -O0 -U__SSE2__ -I "$nsa" -I . -c "$file"; done
"$cxx" -std=c++11 -Wall -Wextra -Werror -O0 -I "$nsa" -c user.cpp -o user_cpp.o
"$cxx" ./*.o -o copies -lm

# 100 tokens hold (100 - 32) / 16 + 1 = 5 compressed blocks; a float has 4 bytes, a double 8,
# and the other version is 0.99.
./copies | tee output
[ "$(cat output)" = "9 9 9 9 13 104" ]
