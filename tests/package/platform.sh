#!/usr/bin/env bash
# platform.sh NAME DIR: nsa.h on another C library or another machine: musl, 32-bit, Arm (NEON) and two
# big-endian ones, the last three under qemu-user. The examples must print what they print here, and a
# few of the library's own tests must pass. Exit code 77: this machine has no such compiler.
set -euo pipefail

name=$1
dir=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
flags=(-O2 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
run=()
tests=(test_block_index test_rope test_gate test_select_blocks test_findings)
amount=quick

# What runs a foreign program: an emulator, or, without one, what the kernel has been told.
emulator() {
    local program
    for program in "qemu-$1-static" "qemu-$1"; do
        command -v "$program" >/dev/null && run=("$program" -L "$2") && return
    done
    echo "left out: no qemu-$1 on this machine (Debian, Ubuntu: qemu-user-static)"
    exit 77
}

has() {
    echo 'int main(void) { return 0; }' >"$dir/has.c"
    "$@" "$dir/has.c" -o "$dir/has" 2>/dev/null && return
    echo "left out: $1 ${*:2} does not work on this machine ($package)"
    exit 77
}

mkdir -p "$dir"
case $name in
musl)
    compiler=(musl-gcc) package=musl-tools
    tests+=(test_attend_win test_attend_cmp test_decode)
    ;;
# The x87 keeps more bits in registers than in memory: no two loops have equal bits there, which the
# tests of attention and of decoding ask for.
32bit) compiler=(gcc -m32) package=gcc-multilib ;;
32bit_sse2)
    compiler=(gcc -m32 -msse2 -mfpmath=sse) package=gcc-multilib
    tests+=(test_attend_win test_attend_cmp test_decode test_attention)
    ;;
# An emulator takes minutes where the machine itself takes a second: few cases; on s390x, whose loops
# have no vectors, of the branches no more than the whole chain.
aarch64)
    compiler=(aarch64-linux-gnu-gcc) package=gcc-aarch64-linux-gnu amount=little
    tests+=(test_decode test_attention test_compress test_attend_cmp test_attend_win test_attend_slc)
    ;;
aarch64_be) # by clang, which has that machine's C library in the wheel of Zig
    compiler=(python3 -m ziglang cc -target aarch64_be-linux-musl) package="ziglang, a package for Python" amount=little
    tests+=(test_row_formats test_convert_rows)
    ;;
s390x)
    compiler=(s390x-linux-gnu-gcc) package=gcc-s390x-linux-gnu amount=little
    tests+=(test_decode test_attention)
    ;;
*) echo "platform.sh: NAME is musl, 32bit, 32bit_sse2, aarch64, aarch64_be or s390x" && exit 2 ;;
esac
has "${compiler[@]}"
case $name in aarch64* | s390x) emulator "$name" "/usr/$name-linux-gnu" ;; esac
[ "$name" != aarch64 ] || run+=(-cpu max) # with BFDOT

# check PROGRAM: prints what the examples print on this machine.
check() { "${run[@]}" "$1" | diff "$root/examples/embed/expected.txt" -; }

cd "$dir"
for standard in c99 c17; do
    "${compiler[@]}" -std=$standard "${flags[@]}" -I "$root/nsa" "$root/examples/embed/embed.c" \
        -o embed -lm
    check ./embed
done
"${compiler[@]}" -std=c99 "${flags[@]}" -D_XOPEN_SOURCE=700 -I "$root/nsa" \
    "$root/examples/embed/pool.c" -o pool -lm -lpthread
"${run[@]}" ./pool | diff <(tail -n 1 "$root/examples/embed/expected.txt") -

"${compiler[@]}" -O2 -I "$root/nsa" -c "$root/tests/harness/nsa_impl.c" -o nsa_impl.o
for test in "${tests[@]}"; do
    "${compiler[@]}" -std=c99 -O2 -I "$root/nsa" -I "$root/tests" "$root/tests/$test.c" nsa_impl.o \
        -o "$test" -lm
    words=$amount
    [ "$test" != test_decode ] || words=2
    "${run[@]}" "./$test" $words >"$test.log" || { cat "$test.log" && exit 1; }
    tail -1 "$test.log"
done
[ "$name" != aarch64 ] || grep "multiplied by NEON BF16" ./*.log
