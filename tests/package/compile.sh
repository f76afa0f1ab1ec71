#!/usr/bin/env bash
# compile.sh COMPILER STANDARD DIR OPTIONS...: nsa.h under the strict warnings as errors, in that
# standard, once for each OPTIONS, such as "-O2 -ffast-math"; "all" stands for every one that
# there is. The examples of examples/embed are what is compiled; a binary must print what
# examples/embed/expected.txt says. need.sh says what happens where the compiler is missing.
set -euo pipefail

compiler=$1
standard=$2
dir=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" "$compiler" || exit $?

warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
case $standard in
c++*)
    source=$root/examples/embed/embed.cpp
    examples=("$source")
    ;;
*)
    source=$root/examples/embed/embed.c
    examples=("$source" "$root"/examples/embed/{decode,window,paged}.c)
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

# The whole text, as far as a look without an optimizer goes.
for example in "${examples[@]}"; do
    "$compiler" -std="$standard" "${warnings[@]}" -fsyntax-only -I "$root/nsa" "$example"
done

levels=("$@")
[ "$1" != all ] || levels=("-O0" "-O1" "-O2" "-O3" "-O2 -ffast-math" "-O1 -DNSA_STATIC"
    "-O1 -DNSA_REAL=double")
for options in "${levels[@]}"; do
    echo "$compiler -std=$standard $options"
    # shellcheck disable=SC2086 # $options is a list of words
    "$compiler" -std="$standard" "${warnings[@]}" $options -I "$root/nsa" "$source" \
        -o "$dir/embed" -lm
    # In double the example's views of floats are refused, so that build is only compiled.
    [[ $options == *NSA_REAL=double* ]] || "$dir/embed" | diff "$root/examples/embed/expected.txt" -
done
