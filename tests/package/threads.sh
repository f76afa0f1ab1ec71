#!/usr/bin/env bash
# threads.sh COMPILER DIR [OPTION...]: test_threads by this compiler with these options, for each has an
# OpenMP of its own. The vector tiles know no threads, so the widest stay out. Without -fopenmp the caller's
# pool is all that there is.
set -euo pipefail

compiler=$1
dir=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" "$compiler" || exit $?
mkdir -p "$dir"
cd "$dir"
if [ $# -gt 0 ] && ! echo 'int main(void) { return 0; }' | "$compiler" -x c "$@" -o probe - 2>probe.log; then
    echo "left out: $compiler $* does not link here (clang: libomp-dev)"
    exit 77
fi
"$compiler" -std=c11 -O1 -DNSA__WITHOUT_AVX "$@" -I "$root/nsa" -I "$root/tests" "$root/tests/test_threads.c" \
    -o test_threads -lm -pthread
exec ./test_threads
