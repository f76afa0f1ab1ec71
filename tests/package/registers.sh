#!/usr/bin/env bash
# registers.sh COMPILER DIR: the sums of a product are held in registers at -O1 and -O2, which is what people build
# with; and the sets that the flags promise are used. A loop over an array that a compiler does not unroll there
# keeps the array in memory, and takes twice as long.
set -euo pipefail

compiler=$1
dir=$2
nsa=$(cd "$(dirname "$0")/../../nsa" && pwd)
[ "$(uname -m)" = x86_64 ] || exit 77
"$(dirname "$0")/need.sh" "$compiler" objdump || exit $?
mkdir -p "$dir"
printf '#define NSA_IMPLEMENTATION\n#include "nsa.h"\n' >"$dir/implementation.c"
failures=0
for level in -O1 -O2; do
    "$compiler" -std=c99 $level -I "$nsa" -c "$dir/implementation.c" -o "$dir/implementation.o"
    # Loops without another in them and with a dozen multiply-adds of vectors, from a jump back to where it goes.
    objdump -d --no-show-raw-insn "$dir/implementation.o" | awk '
        /^[0-9a-f]+ </ { name = $2; n = inner = 0; split("", at) }
        { sub(":", "", $1); at[$1] = ++n; line[n] = $0 }
        $2 ~ /^j/ && $3 in at && at[$3] > inner {
            products = stack = 0
            inner = n
            for (i = at[$3]; i < n; i++) {
                products += line[i] ~ /fmadd.*[yz]mm|dpbf16ps/
                stack += line[i] ~ /[yz]mm[0-9]+,.*\(%r[sb]p/
            }
            if (products >= 12) loops++
            if (products >= 12 && stack) print name, products " products,", stack " vectors to memory"
        }
        END { if (loops < 6) print "this check sees " loops + 0 " loops" }' >"$dir/found"
    [ -s "$dir/found" ] || continue
    echo "$compiler $level:" && cat "$dir/found"
    failures=$((failures + 1))
done
# Zig's runtime says no to every question about the processor, as this macro does.
cat >"$dir/promised.c" <<'END'
#define NSA_IMPLEMENTATION
#include "src/isa.h"
int main(void) {
    return !nsa_isa_available(NSA_ISA_AVX2) + 2 * !nsa_isa_available(NSA_ISA_AVX512);
}
END
"$compiler" -w -std=c99 -O1 -march=x86-64-v4 -D'__builtin_cpu_supports(x)=0' -I "$nsa" "$dir/promised.c" -o "$dir/promised"
"$dir/promised" || { echo "$compiler: a set that the flags promise is not used: $?" && failures=$((failures + 1)); }
exit "$failures"
