#!/usr/bin/env bash
# compilers.sh DIR [RESULTS]: nsa.h by every gcc from 10 and clang from 14 that Debian has, from sid back to bullseye, each
# from the newest suite that has it. debootstrap installs a suite as a tree in DIR; there each compiler runs compile.sh,
# in C99 with all levels and in C++17 with one, and macros.sh: a minute of a core for each. RESULTS
# (bench/results/compilers.json) is what scripts/write_numbers.py makes the table of docs/embedding.md from. Needs root and
# the network. SUITES and COMPILERS may name fewer. Not in CI.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" debootstrap || exit $?
[ "$(id -u)" -eq 0 ] || { echo "left out: debootstrap needs root" && exit 77; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
results=${2:-$dir/compilers.json}
# The tiles of the vector units are three quarters of a compilation: two levels have them.
levels=("-O3" "-Os" "-Ofast -U__SSE2__" "-O0 -U__SSE2__" "-O2 --coverage -U__SSE2__")

# inside COMMAND...: in the tree, without this machine's language and folders.
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C DEBIAN_FRONTEND=noninteractive \
    chroot "$tree" "$@"; }

# A tree that was left half made is made again.
prepare() {
    tree=$dir/$suite
    if [ ! -e "$tree/made" ]; then
        rm -rf "${tree:?}"
        debootstrap --variant=minbase "$suite" "$tree" >"$tree.log"
        # a mirror that is weeks behind serves too
        echo 'Acquire::Check-Valid-Until "false";' >"$tree/etc/apt/apt.conf.d/mirror"
        touch "$tree/made"
    fi
    inside apt-get -qq update
    rm -rf "$tree/nsa"
    mkdir "$tree/nsa"
    tar -C "$root" -c nsa examples/embed tests/package | tar -C "$tree/nsa" -x
}

# has PACKAGE: whether the suite can install it; apt takes what it does not know for a pattern.
has() { [[ $(inside apt-cache policy "$1") == *"Candidate: "[!\(]* ]]; }

# packages COMPILER: in `packages`, what has it; not every clang has its runtime apart.
packages() {
    packages=("$1" "${1/gcc/g++}")
    [[ $1 == clang* ]] || return 0
    packages=("$1" "libclang-rt-${1#clang-}-dev" "libomp-${1#clang-}-dev" g++)
    has "${packages[1]}" || packages[1]=libclang-common-${1#clang-}-dev
}

# try COMPILER: prints "clean", or the first thing that is not.
try() {
    local cxx=${1/gcc/g++} quiet='' job words
    cxx=${cxx/clang/clang++}
    if [[ $1 == clang* ]] && inside "$1" -Werror -Wno-deprecated-ofast -E -xc /dev/null >/dev/null 2>&1; then quiet=' -Wno-deprecated-ofast'; fi
    for job in "compile.sh $1 c99" "compile.sh $cxx c++17" "macros.sh $1" "macros.sh $cxx"; do
        read -ra words <<<"$job"
        words+=("/tmp/$1")
        case $job in
        compile*c99) words+=("${levels[@]/%/$quiet}") ;;
        compile*) words+=("-O3 -U__SSE2__") ;;
        esac
        inside "/nsa/tests/package/${words[0]}" "${words[@]:1}" >"$dir/$1.log" 2>&1 && continue
        head -n 40 "$dir/$1.log" >&2 # of some twenty thousand lines the first ones say it
        echo "$job fails"
        return
    done
    echo clean
}

# record COMPILER FOUND: its row.
record() {
    PYTHONPATH=$root/python/tests python3 - "$results" "$1" "$suite" "$(inside "$1" --version | head -n 1)" "$2" <<'PYTHON'
import sys
from hosts import commit, write_row

results, compiler, suite, version, found = sys.argv[1:]
write_row(results, dict(compiler=compiler, suite=suite, version=version, found=found), commit(), "compiler")
PYTHON
}

read -ra wanted <<<"${COMPILERS:-$(echo gcc-{30..10} clang-{30..14})}"
seen=' '
failures=0
for suite in ${SUITES:-sid trixie bookworm bullseye}; do
    prepare
    for compiler in "${wanted[@]}"; do
        [[ $seen != *" $compiler "* ]] || continue
        packages "$compiler"
        has "$compiler" || continue
        # one clang after another, for their omp.h stand in each other's way
        inside apt-get -qq --no-install-recommends install "${packages[@]}" >>"$tree.log" 2>&1
        seen+="$compiler "
        found=$(try "$compiler")
        [ "$found" = clean ] || failures=$((failures + 1))
        echo "$suite $compiler: $found"
        record "$compiler" "$found"
    done
done
[ "$seen" != ' ' ] || { echo "no compiler was found" && exit 1; }
exit "$failures"
