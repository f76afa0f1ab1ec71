#!/usr/bin/env bash
# copies.sh CC CXX DIR: several copies of nsa.h in one program: one extern implementation in C, used
# from C and from C++, beside two private copies (NSA_STATIC), one of them in double.
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
cat >main.c <<'TEXT'
#include <stdio.h>
int from_extern(void), from_user(void), from_cpp(void), from_static_float(void), from_static_double(void);
int main(void) {
    printf("%d %d %d %d %d\n", from_extern(), from_user(), from_cpp(), from_static_float(),
           from_static_double());
    return 0;
}
TEXT
for file in *.c; do "$cc" -std=c99 -Wall -Wextra -Werror -O1 -I "$nsa" -c "$file"; done
"$cxx" -std=c++11 -Wall -Wextra -Werror -O1 -I "$nsa" -c user.cpp -o user_cpp.o
"$cxx" ./*.o -o copies -lm

# 100 tokens hold (100 - 32) / 16 + 1 = 5 compressed blocks; a float has 4 bytes, a double 8.
./copies | tee output
[ "$(cat output)" = "9 9 9 9 13" ]
