#!/usr/bin/env bash
# one_file.sh CC DIR: nsa_one.h, which scripts/one_file.py makes, works where nsa.h cannot include
# itself: pasted into a program, read from stdin, renamed without __FILE_NAME__. It computes the same
# bits. There nsa.h says what to do; with NSA_THIS_FILE it can be renamed too.
set -euo pipefail

cc=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" "$cc" python3 || exit $?
rm -rf "$dir"
mkdir -p "$dir"
cd "$dir"
failures=0

fail() {
    echo "$*"
    failures=$((failures + 1))
}

# same OPTION... FILE: that what the compiler sees of FILE, its includes and macros gone, is nsa.h.
same() {
    "$cc" -std=c99 -E -P -DNSA_IMPLEMENTATION "$@" >seen
    cmp -s seen whole || fail "not nsa.h: $*"
}

# refused WORDS COMMAND...: that the compiler ends with an error that holds the words.
refused() {
    local words=$1
    shift
    if "$@" >log 2>&1; then
        fail "compiles: $*"
    elif ! grep -q "error.*$words" log; then
        cat log
        fail "another error: $*"
    fi
}

python3 "$root/scripts/one_file.py" nsa_one.h
! grep -n '^#include "\|^#include NSA' nsa_one.h || fail "nsa_one.h includes a file of its own"

# A program with nsa_one.h, then nsa.h, pasted between its own lines.
include='#include "nsa.h"'
[ "$(grep -cFx "$include" "$root/examples/embed/embed.c")" = 1 ]
build_with() {
    awk -v include="$include" -v file="$1" '
        $0 != include { print; next }
        { while ((getline line < file) > 0) print line }' "$root/examples/embed/embed.c" >"$2"
}
build_with nsa_one.h pasted.c
# Without the vector tiles, for `same` below looks at all of the text.
"$cc" -std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -U__SSE2__ pasted.c -o pasted -lm
./pasted | diff "$root/examples/embed/expected.txt" - || fail "pasted: prints other text"

# From stdin; renamed, with a compiler that does not know __FILE_NAME__.
"$cc" -std=c99 -E -P -DNSA_IMPLEMENTATION -x c "$root/nsa/nsa.h" >whole
[ "$(grep -c nsa__ whole)" -gt 1000 ] || fail "the compiler sees no implementation"
same -x c - <nsa_one.h
cp nsa_one.h other_name.h
unknown=(-Wno-builtin-macro-redefined -U__FILE_NAME__)
same "${unknown[@]}" -x c other_name.h

# nsa.h itself in the same places.
build_with "$root/nsa/nsa.h" pasted.c
refused 'pasted into this file' "$cc" -std=c99 -fsyntax-only pasted.c
refused 'cannot include itself' "$cc" -DNSA_IMPLEMENTATION -fsyntax-only -x c - <"$root/nsa/nsa.h"
cp "$root/nsa/nsa.h" other_name.h
refused 'cannot include itself' "$cc" -std=c99 "${unknown[@]}" -DNSA_IMPLEMENTATION -fsyntax-only -x c other_name.h
same "${unknown[@]}" '-DNSA_THIS_FILE="other_name.h"' -I . -x c other_name.h
exit "$failures"
