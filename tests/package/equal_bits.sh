#!/usr/bin/env bash
# equal_bits.sh COMPILER DIR: the implementation compiled with UndefinedBehaviorSanitizer, whose checks
# stand between a product and the sum that it goes into: whether the two become one rounding must not
# depend on that, or a token that is decoded gets other bits than in the whole. test_decode compares.
# The checks trap, so that no runtime library is needed, which clang's package does not bring.
set -euo pipefail

compiler=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" "$compiler" || exit $?
mkdir -p "$dir"
cd "$dir"
flags=(-std=c99 -O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error -I "$root/nsa" -I "$root/tests")
"$compiler" "${flags[@]}" -c "$root/tests/harness/nsa_impl.c" -o nsa_impl.o
"$compiler" "${flags[@]}" "$root/tests/test_decode.c" nsa_impl.o -o test_decode -lm
./test_decode 1
# Plain tiles on a machine whose compiler may make multiply-adds of all code: GCC did so of one copy of a loop alone.
grep -qw fma /proc/cpuinfo 2>/dev/null && [ "$(uname -m)" = x86_64 ] || exit 0
flags=(-std=c99 -O1 -mfma -U__SSE2__ -I "$root/nsa" -I "$root/tests")
"$compiler" "${flags[@]}" -c "$root/tests/harness/nsa_impl.c" -o nsa_impl.o
"$compiler" "${flags[@]}" "$root/tests/test_decode.c" nsa_impl.o -o test_decode_plain -lm
./test_decode_plain 1
