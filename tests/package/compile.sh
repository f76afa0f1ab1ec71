#!/usr/bin/env bash
# compile.sh COMPILER STANDARD DIR all|some: nsa.h under the strict warnings as errors, in that
# standard, at all optimisation levels and with -ffast-math, or at -O2 alone. The examples of
# examples/embed are what is compiled; each binary must print what examples/embed/expected.txt says.
# need.sh says what happens where the compiler is missing.
set -euo pipefail

compiler=$1
standard=$2
dir=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" "$compiler" || exit $?

warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
case $standard in
c++*) source=$root/examples/embed/embed.cpp ;;
*)
    source=$root/examples/embed/embed.c
    warnings+=(-Wstrict-prototypes -Wmissing-prototypes)
    ;;
esac
mkdir -p "$dir"

# Declarations alone, as most files of a program see them; those for CUDA need no nvcc.
for header in nsa.h nsa_cuda.cuh; do
    echo "#include \"$header\"" >"$dir/alone.${source##*.}"
    "$compiler" -std="$standard" "${warnings[@]}" -fsyntax-only -I "$root/nsa" \
        "$dir/alone.${source##*.}"
done

levels=("-O2")
[ "$4" = some ] || levels=("-O0" "-O1" "-O2" "-O3" "-O2 -ffast-math" "-O1 -DNSA_STATIC")
for options in "${levels[@]}"; do
    echo "$compiler -std=$standard $options"
    # shellcheck disable=SC2086 # $options is a list of words
    "$compiler" -std="$standard" "${warnings[@]}" $options -I "$root/nsa" "$source" \
        -o "$dir/embed" -lm
    "$dir/embed" | diff "$root/examples/embed/expected.txt" -
done

# In double the example's views of floats would be refused, so that build is only compiled.
[ "$4" = some ] || "$compiler" -std="$standard" "${warnings[@]}" -O1 -DNSA_REAL=double \
    -I "$root/nsa" -c "$source" -o "$dir/embed.o"
