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
run() { # TESTS FLAG...: the flags are those of the implementation
    local test tests=$1
    shift
    "$compiler" -std=c99 -O1 "$@" -I "$root/nsa" -I "$root/tests" -c "$root/tests/harness/nsa_impl.c" -o nsa_impl.o
    for test in $tests; do
        "$compiler" -std=c99 -O1 -I "$root/nsa" -I "$root/tests" "$root/tests/$test.c" nsa_impl.o -o "$test" -lm
        "./$test" 1
    done
}
if [[ $compiler == *clang* ]]; then
    run test_decode -fsanitize=undefined -fsanitize-undefined-trap-on-error
    # The bits of NaN and -inf, where the compiler is told that there are none, and scales of 8 bits.
    run "test_attend_cmp test_convert_rows" -O3 -ffast-math
    exit
fi
grep -qw fma /proc/cpuinfo 2>/dev/null && [ "$(uname -m)" = x86_64 ] || exit 77
# Plain tiles on a machine whose compiler may make multiply-adds of all code: GCC did so of one copy of a loop alone.
run test_decode -mfma -U__SSE2__
# Tuned for a machine where GCC keeps chains of products and sums apart if they are alone.
run test_findings -mtune=znver2
