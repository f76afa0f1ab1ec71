#!/usr/bin/env bash
# syntax.sh TARGET DIR: what clang says to nsa.h for a machine whose C library is not at hand: macOS on
# arm64, Windows with MSVC's rules (clang-cl), of 32 bits too, Emscripten. The C library is a few
# declarations made here, so this is the header's syntax and types alone: nothing is linked or run.
set -euo pipefail

target=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" clang || exit $?
rm -rf "$dir"
mkdir -p "$dir/c"

{
    for f in exp exp2 log log1p log2 sqrt floor ceil fabs cos sin tanh; do
        echo "double $f(double);"
        echo "float ${f}f(float);"
    done
    echo 'double pow(double, double); float powf(float, float); double ldexp(double, int);'
    echo 'double fmax(double, double); double fmin(double, double);'
    echo '#define INFINITY __builtin_inff()'
    echo '#define HUGE_VAL __builtin_huge_val()'
    echo '#define NAN __builtin_nanf("")'
    echo '#define isfinite(x) __builtin_isfinite(x)'
    echo '#define isnan(x) __builtin_isnan(x)'
} >"$dir/c/math.h"
{
    echo '#include <stddef.h>'
    echo 'void *memcpy(void *, const void *, size_t); void *memmove(void *, const void *, size_t);'
    echo 'void *memset(void *, int, size_t); int memcmp(const void *, const void *, size_t);'
    echo 'int strcmp(const char *, const char *); size_t strlen(const char *);'
} >"$dir/c/string.h"
printf '#define NSA_IMPLEMENTATION\n#include "nsa.h"\n' >"$dir/one.c"

# Clang's own stddef.h and stdint.h ask for no others where there is no operating system.
common=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
case $target in
*-msvc)
    cc=(clang --driver-mode=cl "--target=$target" /c -Xclang -fsyntax-only -Xclang -ffreestanding
        "-I$dir/c" "-I$root/nsa" -Wno-unused-command-line-argument "${common[@]/-Wall/\/W4}")
    ;;
*)
    cc=(clang "--target=$target" -std=c99 -fsyntax-only -ffreestanding -nostdlibinc "-I$dir/c"
        "-I$root/nsa" "${common[@]}")
    ;;
esac
# Emscripten's -msse2 and -mavx2 say that there is SSE2 and AVX2, of WebAssembly's vectors.
[[ $target != wasm32-* ]] || cc+=(-msimd128 -D__SSE2__ -D__AVX2__ -D__FMA__)
cd "$dir" # to clang-cl a path that begins with /w is an option
for options in "" -DNSA_STATIC -DNSA_REAL=double; do
    "${cc[@]}" ${options:+"$options"} one.c
done
