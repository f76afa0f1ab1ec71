#!/usr/bin/env bash
# macros.sh COMPILER DIR: nsa.h behind headers that take lower-case words, or names of one letter, for macros: those of
# <windows.h>, Arduino, AltiVec, BSD, <complex.h>, <termios.h>, X11, Qt and lwIP. Each is garbage here, so that one use of
# it ends the compilation: declarations and implementation, C and C++. What the header includes of the system stands
# above, for that is the platform's own affair. <windows.h> itself is tried where a compiler for Windows is.
set -euo pipefail

compiler=$1
dir=$2
nsa=$(cd "$(dirname "$0")/../../nsa" && pwd)
"$(dirname "$0")/need.sh" "$compiler" || exit $?
mkdir -p "$dir"

# As objects: any use of the name.
objects='near far huge small hyper interface pascal cdecl byte BYTE WORD DWORD IN OUT OPTIONAL CONST VOID TRUE FALSE
ERROR DIFFERENCE I complex imaginary index rindex bcmp bcopy bzero y0 y1 yn j0 j1 jn major minor makedev B0 B1 B2 B50 B75
B110 F PI HALF_PI TWO_PI EULER INPUT OUTPUT HIGH LOW DEFAULT min max round bit word boolean vector pixel linux unix i386
sun sparc mips None Status Bool True False Success Always slots signals emit foreach forever check verify require nil Nil
OVERFLOW UNDERFLOW DOMAIN SING HUGE MIN MAX ABS SWAP COUNT STRICT DELETE ALIGN PAGE_SIZE BLOCK_SIZE NO_ERROR IGNORE ECHO
NEAR FAR PASCAL CDECL CALLBACK CONTEXT CHAR SHORT LONG INT FLOAT DOUBLE BOOL RGB THIS finite unused packed always_inline
noinline optimize target aligned may_alias vector_size noreturn pure likely unlikely deprecated weak sq lowByte
interrupts u_int u_char'
for name in $objects; do echo "#undef $name
#define $name @$name@"; done >"$dir/garbage.h"
for letter in {A..Z} _{A..Z} _{a..z} R0 R1 R2 SP PC; do echo "#undef $letter
#define $letter @$letter@"; done >>"$dir/garbage.h"
# As calls: the name before a parenthesis.
for name in abs radians degrees select read write close open send recv bind accept bitRead bitSet; do
    echo "#undef $name
#define $name(x) @$name@"
done >>"$dir/garbage.h"

cat >"$dir/system.h" <<'TEXT'
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __unix__
#include <sched.h>
#include <sys/auxv.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif
TEXT
failures=0
for how in "" "-DNSA_STATIC -DNSA_IMPLEMENTATION" "-DNSA_IMPLEMENTATION -fopenmp" "-DNSA_IMPLEMENTATION -DNSA_REAL=double"; do
    if [[ $how = *-fopenmp ]] && ! echo '#include <omp.h>' | "$compiler" -fopenmp -E - >/dev/null 2>&1; then
        echo "left out: $compiler has no omp.h (clang: libomp-dev)"
        continue
    fi
    printf '#include "system.h"\n#include "garbage.h"\n#include "nsa.h"\n' >"$dir/behind.c"
    case $compiler in
    *++*) language=(-xc++ -std=c++11) ;;
    *) language=(-std=c99) ;;
    esac
    # shellcheck disable=SC2086 # a list of words
    "$compiler" "${language[@]}" $how -Wall -Wextra -Werror -I "$nsa" -I "$dir" -fsyntax-only "$dir/behind.c" || {
        echo "nsa.h does not compile behind others' macros ($compiler $how)"
        failures=$((failures + 1))
    }
done

# The check is able to fail.
printf '#include "system.h"\n#include "garbage.h"\nint near(int x);\n' >"$dir/planted.c"
! "$compiler" "${language[@]}" -I "$dir" -fsyntax-only "$dir/planted.c" 2>"$dir/planted.txt" || {
    echo "a planted use of near is not found"
    failures=$((failures + 1))
}

if [ "$compiler" = gcc ] && command -v x86_64-w64-mingw32-gcc >/dev/null; then
    printf '#include <windows.h>\n#define NSA_IMPLEMENTATION\n#include "nsa.h"\n' >"$dir/windows.c"
    x86_64-w64-mingw32-gcc -std=c99 -Wall -Wextra -Werror -I "$nsa" -fsyntax-only "$dir/windows.c" || failures=$((failures + 1))
fi
exit "$failures"
