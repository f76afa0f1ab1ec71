#!/usr/bin/env bash
# names.sh CC DIR [OBJECT]: what nsa.h adds to a program. Every symbol, static or not, begins with nsa_, every
# macro with NSA_; no macro of the user disappears or changes; no writable data (no global state); and
# nothing is called but arithmetic and memory moves of the C library: nothing allocates, prints or
# aborts. OBJECT is the implementation as the tree's own build has optimised it.
set -euo pipefail

cc=$1
dir=$2
object=${3:-}
nsa=$(cd "$(dirname "$0")/../../nsa" && pwd)
"$(dirname "$0")/need.sh" "$cc" nm objdump || exit $?
mkdir -p "$dir"
failures=0

# expect_none WHAT FILE: the file lists offenders and must be empty.
expect_none() {
    [ -s "$2" ] || return 0
    echo "$1:"
    sed 's/^/  /' "$2"
    failures=$((failures + 1))
}

allowed='mem(cpy|move|set|cmp)'
allowed+='|(exp|exp2|log|log1p|log2|sqrt|pow|sin|cos|sincos|floor|ceil|fabs|fmax|fmin|ldexp|frexp)f?'
allowed+='|__cpu_(model|features2|indicator_init)|sched_yield|(omp|GOMP|__kmpc)_[a-z_0-9]+|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail'

cat >"$dir/implementation.c" <<'TEXT'
#define NSA_IMPLEMENTATION
#include "nsa.h"
TEXT

# check FILE HOW: the names in an object.
check() {
    nm "$1" >"$dir/symbols"
    # Names that compilers make up hold a dot, so they cannot clash with anybody's.
    awk '$1 != "U" && $2 != "U" { print $NF }' "$dir/symbols" |
        grep -vE '^nsa_|\.' >"$dir/leaks" || true
    expect_none "symbols that do not begin with nsa_ ($2)" "$dir/leaks"
    # By section, because constants with addresses are .data.rel.ro where code may lie anywhere.
    objdump -t "$1" | awk -F'\t' '{ n = split($1, left, " "); split($2, right, " ") }
        left[n] ~ /^(\.(data|bss|tdata|tbss)|\*COM\*)$/ && right[2] != left[n] { print right[2] }' >"$dir/state"
    expect_none "writable data ($2)" "$dir/state"
    awk '$1 == "U" { print $2 }' "$dir/symbols" | sort -u | grep -vE "^($allowed)$" >"$dir/calls" || true
    expect_none "functions that it may not call ($2)" "$dir/calls"
    grep -q ' T nsa_attention_forward$' "$dir/symbols" || [[ $2 = *NSA_STATIC* ]] || {
        echo "no implementation ($2)"
        failures=$((failures + 1))
    }
}

# vectors FILE HOW: products of bf16 are compiled with any flags, whatever this machine has.
vectors() {
    [ "$(uname -m)" = x86_64 ] || return 0
    objdump -d "$1" >"$dir/instructions"
    { grep -q vdpbf16ps "$dir/instructions" || echo vdpbf16ps; } >"$dir/missing"
    expect_none "instructions that are missing ($2)" "$dir/missing"
}

# prefetches FILE HOW: to GCC a function that only prefetches has no effect, and it removes the calls.
prefetches() {
    [[ $(uname -m) =~ ^(x86_64|aarch64)$ ]] || return 0
    objdump -d "$1" >"$dir/instructions"
    grep -qw ret "$dir/instructions" || return 0 # clang leaves out static functions that nobody calls
    { grep -qE 'prefetch|prfm' "$dir/instructions" || echo prefetch; } >"$dir/missing"
    expect_none "instructions that are missing ($2)" "$dir/missing"
}

# inlined FILE HOW: a shared library's public functions may be replaced by a program's, so compilers do not inline
# them. What runs for each number of a row may not be one.
inlined() {
    objdump -r "$1" | grep -oE 'nsa_(bf16|f16|f32)_to_(bf16|f16|f32)' | sort -u >"$dir/calls" || true
    expect_none "public functions that loops call ($2)" "$dir/calls"
}

# The tiles of the vector units are the same text once more: the optimised object has them all, the first
# way those of SSE2, the others only the plain ones, which compile in a quarter of the time.
ways=("-O0 -fno-builtin -DNSA__WITHOUT_AVX" "-O0 -DNSA_REAL=double -U__SSE2__" "-O0 -DNSA_STATIC -U__SSE2__"
    "-O1 -U__SSE2__ -fPIC -fopenmp")
if [ -z "$object" ]; then
    object=$dir/optimised.o
    "$cc" -std=c99 -fno-pic -O2 -I "$nsa" -c "$dir/implementation.c" -o "$object"
fi
check "$object" optimised
vectors "$object" optimised
prefetches "$object" optimised
for options in "${ways[@]}"; do
    if [[ $options = *-fopenmp ]] && ! echo '#include <omp.h>' | "$cc" -fopenmp -E - >/dev/null 2>&1; then
        echo "left out: $cc has no OpenMP here"
        [ -z "${CI:-}" ] || failures=$((failures + 1))
        continue
    fi
    # shellcheck disable=SC2086 # a list of words
    "$cc" -std=c99 -fno-pic $options -I "$nsa" -c "$dir/implementation.c" -o "$dir/implementation.o"
    check "$dir/implementation.o" "$options"
    prefetches "$dir/implementation.o" "$options"
    [[ $options != *-fPIC* ]] || inlined "$dir/implementation.o" "$options"
done

# Macros: those with the header minus those with the system headers that it includes.
# macros HEADER OPTION...
macros() {
    local header=$1
    shift
    "$cc" -std=c99 "$@" -I "$nsa" -H -fsyntax-only -xc "$nsa/$header" 2>"$dir/includes"
    awk '/^\.+ \/usr/ && /include\/[^\/]*$/ { n = split($2, part, "/"); print "#include <" part[n] ">" }' \
        "$dir/includes" >"$dir/system.c"
    "$cc" -std=c99 "$@" -dM -E "$dir/system.c" | sort >"$dir/macros.system"
    "$cc" -std=c99 "$@" -I "$nsa" -dM -E -xc "$nsa/$header" | sort >"$dir/macros.nsa"
    comm -13 "$dir/macros.system" "$dir/macros.nsa" | awk '{ print $2 }' >"$dir/macros"
    grep -v '^NSA_' "$dir/macros" >"$dir/leaks" || true
    expect_none "macros that do not begin with NSA_ ($*)" "$dir/leaks"
    comm -23 "$dir/macros.system" "$dir/macros.nsa" >"$dir/lost"
    expect_none "macros that the header takes away ($*)" "$dir/lost"
    [ "$(grep -c '^NSA_' "$dir/macros")" -gt 3 ] || {
        echo "this check sees no macros of $header at all ($*)"
        failures=$((failures + 1))
    }
}
macros nsa.h
macros nsa.h -DNSA_IMPLEMENTATION
macros nsa_cuda.cuh

# A user's own macros, of every capital letter, and the I of <complex.h>: nsa.h uses none and leaves
# all as they are.
{
    echo '#include <complex.h>'
    for letter in {A..H} {J..Z} AT IN OUT; do echo "#define $letter user_$letter"; done
} >"$dir/user_macros.h"
cat >"$dir/user.c" <<'TEXT'
#include "user_macros.h"
#define NSA_IMPLEMENTATION
#include "nsa.h"
enum { T = 1, L = 2, V = 4, AT = 8, IN = 16 };
int main(void) {
    double complex z = 2 * I;
    return user_T + user_L + user_V + user_AT + user_IN == 31 && cimag(z) > 1 ? 0 : 1;
}
TEXT
# All tiles are read; the plain ones run.
"$cc" -std=c99 -Wall -Wextra -Werror -I "$nsa" -fsyntax-only "$dir/user.c" &&
    "$cc" -std=c99 -Wall -Wextra -Werror -O0 -U__SSE2__ -I "$nsa" "$dir/user.c" -o "$dir/user" -lm &&
    "$dir/user" || {
    echo "nsa.h does not stand beside a user's macros"
    failures=$((failures + 1))
}
"$cc" -std=c99 -dM -E "$dir/user_macros.h" | sort >"$dir/macros.user"
"$cc" -std=c99 -I "$nsa" -dM -E "$dir/user.c" | sort | comm -23 "$dir/macros.user" - >"$dir/lost"
expect_none "macros of a user that the header takes away" "$dir/lost"
exit "$failures"
