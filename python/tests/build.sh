#!/usr/bin/env bash
# build.sh PYTHON CC DIR: the package's folder nsa/ in DIR, by python/CMakeLists.txt, and what must hold
# for it to run elsewhere: no symbol younger than glibc 2.28, no library but libc, libm and OpenMP's. Without
# the serial libraries, whose compilation would take as long again: newest.sh, where pip builds, has them.
set -euo pipefail

python=$1
cc=$2
dir=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$dir"
rm -rf "$dir/nsa" # what an earlier build left
log=$dir/build.log
{
    cmake -S "$root/python" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER="$cc" \
        -DNSA_PYTHON_SERIAL=OFF \
        -DPython3_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')"
    cmake --build "$dir/build" --parallel 2
    cmake --install "$dir/build" --prefix "$dir"
} >"$log" 2>&1 || { cat "$log" && exit 1; }
if grep -n 'warning:' "$log"; then
    echo "the package does not build without warnings"
    exit 1
fi

"$root/tests/package/need.sh" objdump || exit $?
for library in "$dir"/nsa/libnsa_*.so; do
    newest=$(objdump -T "$library" | grep -o 'GLIBC_2\.[0-9]*' | sort -t. -k2 -n | tail -n 1)
    echo "$(basename "$library"): $newest, $(objdump -p "$library" | grep -c NEEDED) libraries"
    [ "${newest#GLIBC_2.}" -le 28 ] || { echo "needs a glibc newer than 2.28" && exit 1; }
    if objdump -p "$library" | grep NEEDED | grep -v 'libc\.so\|libm\.so\|libgomp\.so\|libomp\.so\|ld-linux'; then
        echo "needs another library" && exit 1
    fi
    leaked=$(objdump -T "$library" | awk '$4 == ".text" { print $NF }' | grep -v '^nsa_' || true)
    [ -z "$leaked" ] || { echo "exports more than the header's names: $leaked" && exit 1; }
done
