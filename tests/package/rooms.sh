#!/usr/bin/env bash
# rooms.sh CC DIR: nsa.h and the files of nsa/src that it is made from. To a compiler they are the same; each of
# them includes what it uses; and nsa.h can be pasted into a program, renamed, or read from stdin.
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

# seen WORD...: what the compiler is left with when includes and macros are gone, without indents and empty lines.
seen() {
    "$cc" -std=c99 -E -P -DNSA_IMPLEMENTATION "$@" | sed 's,^ *,,' | grep -v '^$'
}

python3 "$root/scripts/amalgamate.py" --check || fail "nsa.h is out of date"
for options in "" "-DNSA_REAL=double -fopenmp" "-U__SSE2__ -DNSA_STATIC" \
    "-DNSA__BF16_BY_HAND=\"$root/tests/harness/bf16_by_hand.h\""; do
    # shellcheck disable=SC2086 # $options is a list of words
    seen $options -x c "$root/nsa/nsa.h" >whole
    # shellcheck disable=SC2086
    seen $options -x c "$root/nsa/src/all.h" >rooms
    [ "$(grep -c nsa__ whole)" -gt 1000 ] || fail "the compiler sees no implementation: $options"
    cmp whole rooms || fail "nsa.h and nsa/src/all.h differ: $options"
done

# alone FILE: that it can be compiled without any other in front of it. What it uses is then above it, and with
# NSA_STATIC that holds of public functions too; not in views.h, which nsa_cuda.cuh has without them.
alone() {
    local static=-DNSA_STATIC
    [[ $1 != */views.h ]] || static=-UNSA_STATIC
    echo "#include \"$1\"" >alone.c
    "$cc" -std=c99 -Wall -Wextra -Wno-unused-function -Wno-unused-const-variable -Werror -U__SSE2__ \
        -DNSA_IMPLEMENTATION "$static" -fsyntax-only alone.c >log 2>&1
}
for room in "$root"/nsa/src/*.h; do
    alone "$room" || { cat log && fail "cannot be compiled alone: $room"; }
done
# The same of a file that does not include what it uses, and of one that calls what stands below it.
sed '/^#include "/d' "$root/nsa/src/rope.h" >no_include.h
! alone "$PWD/no_include.h" || fail "a file without its includes passes"
{
    echo "#include \"$root/nsa/src/index.h\""
    echo "static nsa_status nsa__up(const nsa_rope *x, const nsa_desc *d) { return nsa_rope_forward(x, d); }"
    echo "static nsa_status (*const nsa__used)(const nsa_rope *, const nsa_desc *) = nsa__up;"
} >upwards.h
! alone "$PWD/upwards.h" || fail "a file that calls what stands below it passes"

# A program with nsa.h pasted between its own lines.
! grep -n '^#include "' "$root/nsa/nsa.h" || fail "nsa.h includes a file of its own"
include='#include "nsa.h"'
[ "$(grep -cFx "$include" "$root/examples/embed/embed.c")" = 1 ]
awk -v include="$include" -v file="$root/nsa/nsa.h" '
    $0 != include { print; next }
    { while ((getline line < file) > 0) print line }' "$root/examples/embed/embed.c" >pasted.c
"$cc" -std=c99 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -U__SSE2__ pasted.c -o pasted -lm
./pasted | diff "$root/examples/embed/expected.txt" - || fail "pasted: prints other text"

# From stdin, and under another name.
seen -x c "$root/nsa/nsa.h" >whole
seen -x c - <"$root/nsa/nsa.h" >other
cmp whole other || fail "not nsa.h from stdin"
cp "$root/nsa/nsa.h" other_name.h
seen -x c other_name.h >other
cmp whole other || fail "not nsa.h under another name"
exit "$failures"
