#!/usr/bin/env bash
# windows.sh COMPILER DIR: nsa.h for Windows, as wine runs it: gcc or clang for mingw-w64. The examples
# must print what they print here, every test of a primitive must pass, and the build must hold the
# instruction sets that it should. Exit code 77: this machine has no such compiler, or no wine.
set -euo pipefail

compiler=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
gcc=x86_64-w64-mingw32-gcc
"$root/tests/package/need.sh" $gcc wine || exit $?
mkdir -p "$dir"
cd "$dir"
export WINEPREFIX=$dir/wine WINEDEBUG=-all
flags=(-O2 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)

# Wine keeps the stack where wide aligned moves happen to be aligned, Windows does not: so the
# disassembly, not a run, shows that none of them reaches memory.
no_aligned_spills() {
    echo 'vmovaps %ymm0, 32(%rsp)' | x86_64-w64-mingw32-as -muse-unaligned-vector-move -o probe.o -
    for object in probe.o nsa_impl.o; do
        x86_64-w64-mingw32-objdump -d "$object" >code
        if grep -E 'vmov(ap[sd]|dqa(32|64)?) .*(%[yz]mm.*\(|\(.*%[yz]mm)' code; then
            echo "$object: an aligned move of a wide vector to or from memory"
            return 1
        fi
    done
}

case $compiler in
gcc) cc=($gcc) ;;
gcc_avx) cc=($gcc -DNSA_UNALIGNED_SPILLS -Wa,-muse-unaligned-vector-move) ;;
clang)
    "$root/tests/package/need.sh" clang || exit $?
    # Clang looks for gcc's runtime in the folder of one threading model only.
    cc=(clang --target=x86_64-w64-mingw32 -Wno-unused-command-line-argument
        "-L$(dirname "$($gcc -print-libgcc-file-name)")")
    ;;
*) echo "windows.sh: COMPILER is gcc, gcc_avx or clang" && exit 2 ;;
esac

# run PROGRAM argument...: without wine's own words and Windows' ends of lines.
run() { wine "$@" 2>/dev/null | tr -d '\r'; }

for standard in c99 c17; do
    "${cc[@]}" -std=$standard "${flags[@]}" -I "$root/nsa" "$root/examples/embed/embed.c" \
        -o embed.exe -lm
    run ./embed.exe | diff "$root/examples/embed/expected.txt" -
done

"${cc[@]}" -O2 -I "$root/nsa" -c "$root/tests/harness/nsa_impl.c" -o nsa_impl.o
[ "$compiler" != gcc_avx ] || no_aligned_spills

for path in "$root"/tests/test_*.c; do
    test=$(basename "$path" .c)
    # It counts the calls that a compiler's option reports, which are the same everywhere.
    [ "$test" != test_checked_once ] || continue
    "${cc[@]}" -std=c99 -O2 -I "$root/nsa" -I "$root/tests" "$path" nsa_impl.o -o "$test.exe" \
        -lm -static -pthread
    words=little
    [ "$test" != test_decode ] || words=2
    run "./$test.exe" $words | tail -1
done
