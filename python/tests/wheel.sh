#!/usr/bin/env bash
# wheel.sh ARCH DIR: the package's wheel for Linux on ARCH, x86_64 or aarch64, in DIR/dist, built from an sdist that lies
# in DIR/sdist, without the checkout; then pip installs it, and test_core runs with it. auditwheel says by its tag which
# glibc it needs: 2.28 at most. On an x86-64 machine the wheel for aarch64 is cross-compiled, and runs under qemu-user in
# Debian's Python for arm64, which apt-get fetches into DIR without root: on processors with BFDOT and without. Versions
# are pinned in wheel.txt. Exit code 77: something is missing here. Not in CI.
set -euo pipefail

arch=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$2"
dir=$(cd "$2" && pwd)
tests=$root/python/tests
skip() { echo "left out: $1" && exit 77; }
"$root/tests/package/need.sh" "${PYTHON:-python3}" || exit $?

run=() # what runs a Python, where the wheel is for another machine
case $(uname -m)-$arch in
x86_64-x86_64 | aarch64-aarch64) ;;
x86_64-aarch64)
    "$root/tests/package/need.sh" aarch64-linux-gnu-gcc apt-get dpkg-deb || exit $?
    export CC=aarch64-linux-gnu-gcc CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64"
    run=("$(command -v qemu-aarch64-static || command -v qemu-aarch64)" -L "$dir/root") ||
        skip "no qemu-aarch64 on this machine (Debian: qemu-user-static)"
    ;;
*) echo "wheel.sh: on $(uname -m) no wheel for $arch is made" && exit 2 ;;
esac

tools=$dir/tools
[ -x "$tools/bin/python" ] || "${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --no-deps --requirement "$tests/wheel.txt"
export PATH=$tools/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1

rm -rf "$dir/built" "$dir/dist" "$dir/sdist"
(cd "$root/python" &&
    python -c 'import scikit_build_core.build as b, sys; b.build_sdist(sys.argv[1])' "$dir/sdist" >/dev/null)
_PYTHON_HOST_PLATFORM=linux-$arch pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$dir/built" \
    "$dir"/sdist/*.tar.gz
auditwheel repair --exclude libgomp.so.1 --plat auto --wheel-dir "$dir/dist" "$dir"/built/*.whl \
    >"$dir/repair.log" 2>&1 || { cat "$dir/repair.log" && exit 1; }
wheel=$(echo "$dir"/dist/*.whl)
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
[[ $wheel =~ -py3-none-manylinux_2_([0-9]+)_$arch\.whl$ ]] || { echo "no manylinux wheel" && exit 1; }
[ "${BASH_REMATCH[1]}" -le 28 ] || { echo "needs a glibc newer than 2.28" && exit 1; }
if python -m zipfile -l "$wheel" | grep '\.libs/'; then
    echo "holds another's library" && exit 1
fi

# arm64 PACKAGE...: these and what they need, of the distribution's release here, unpacked into DIR/root.
arm64() {
    mkdir -p "$dir/apt/state/lists/partial" "$dir/apt/cache/archives/partial"
    : >"$dir/apt/status"
    local package options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$dir/apt/state"
        -o "Dir::State::status=$dir/apt/status" -o "Dir::Cache=$dir/apt/cache" -o Debug::NoLocking=true
        -o "APT::Sandbox::User=$(id -un)")
    apt-get "${options[@]}" update || echo "apt-get update failed; going on with old lists"
    apt-get "${options[@]}" install --yes --no-install-recommends --download-only "$@" >"$dir/apt/log" ||
        skip "apt-get cannot have packages for arm64 here (Ubuntu keeps them on other servers)"
    for package in "$dir"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$dir/root"; done
}

rm -rf "$dir/site"
python=("$tools/bin/python")
if [ ${#run[@]} -gt 0 ]; then
    [ -x "$dir/root/usr/bin/python3" ] || arm64 python3 python3-pip-whl libgomp1 libstdc++6
    python=("${run[@]}" -cpu max "$dir/root/usr/bin/python3")
    pip=$(echo "$dir"/root/usr/share/python-wheels/pip-*.whl)
fi
PYTHONPATH=${pip:-} "${python[@]}" -m pip install --quiet --no-deps --target "$dir/site" "$wheel" \
    "$(grep '^numpy==' "$tests/newest.txt")"

cd "$tests"
export PYTHONPATH=$dir/site OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
"${python[@]}" -m unittest test_core
[ ${#run[@]} -gt 0 ] || exit 0
says='import nsa, sys; sys.exit(nsa.isa_available(nsa.Isa.NEON_BF16) != (sys.argv[1] == "with"))'
"${python[@]}" -c "$says" with
python=("${run[@]}" -cpu cortex-a72 "$dir/root/usr/bin/python3")
"${python[@]}" -c "$says" without
"${python[@]}" -m unittest test_core
