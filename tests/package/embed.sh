#!/usr/bin/env bash
# embed.sh WAY BUILD DIR [STATIC]: examples/embed as a project of somebody else, who takes nsa in that way:
# bare, static, shared, pool, add_subdirectory, fetch_content, installed, find_package, pkg_config, meson or
# meson_subproject. BUILD is a configured build folder of this project; find_package, pkg_config and meson
# install from it and move what was installed.
# What docs/embedding.md says of a build system is built as it stands there.
# STATIC is the folder of `static`: with it the implementation is not compiled again, but the caller is,
# against the header that this way finds, which must be nsa.h to the byte.
set -euo pipefail

way=$1
build=$2
dir=$3
static=${4:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$dir"
mkdir -p "$dir"
cp "$root"/examples/embed/{embed.c,embed.cpp,pool.c} "$root"/tests/package/consumer/CMakeLists.txt "$dir"
library=()
if [ -n "$static" ]; then
    sed -i '/define NSA_IMPLEMENTATION/d' "$dir"/{embed.c,embed.cpp,pool.c}
    library=("$static/libnsa.a")
fi

# The lines of the page for this way, whose program is called app.
page_lines() {
    awk -v head="run: tests/package/embed.sh $way" '/^```/ { on = substr($0, index($0, " ") + 1) == head; next } on' \
        "$root/docs/embedding.md" | tee page
    [ -s page ] || { echo "docs/embedding.md has no lines for $way" >&2 && return 1; }
}

install_and_move() {
    cmake --install "$build" --prefix "$dir/first" >/dev/null
    mv "$dir/first" "$dir/moved"
    if grep -rn "$dir/first\|$root" "$dir/moved"; then
        echo "the installed files hold the path that they were installed to or built from"
        return 1
    fi
    cmp "$root/nsa/nsa.h" "$dir/moved/include/nsa/nsa.h"
}

check() { "$1" | diff "$root/examples/embed/expected.txt" -; }

cd "$dir"
case $way in
bare)
    cc embed.c -I"$root/nsa" -lm -o embed
    check ./embed
    ;;
static)
    # Without the vector tiles, which bare compiles.
    cc -O1 -U__SSE2__ -DNSA_IMPLEMENTATION -x c -c "$root/nsa/nsa.h" -o nsa.o
    ar rcs libnsa.a nsa.o
    sed '/define NSA_IMPLEMENTATION/d' embed.c >caller.c
    cc caller.c -I"$root/nsa" -L. -lnsa -lm -o embed
    check ./embed
    ;;
shared)
    # The line that examples/embed/embed.py begins with, without the widest tiles, which the Python package's
    # build has; then that example, and a caller in C.
    cc -O2 -shared -fPIC -DNSA__WITHOUT_AVX -DNSA_IMPLEMENTATION -x c "$root/nsa/nsa.h" -o libnsa.so -lm
    sed '/define NSA_IMPLEMENTATION/d' embed.c >caller.c
    cc caller.c -I"$root/nsa" -L. -lnsa -Wl,-rpath,"$dir" -o embed
    check ./embed
    "$root/tests/package/need.sh" python3 || exit $?
    [ "$(python3 "$root/examples/embed/embed.py" ./libnsa.so)" = "NSA_OK: 0.5034" ]
    ;;
pool)
    cc -O1 -D_XOPEN_SOURCE=700 pool.c "${library[@]}" -I"$root/nsa" -lm -lpthread -o pool
    ./pool | diff <(tail -n 1 "$root/examples/embed/expected.txt") -
    ;;
pkg_config)
    "$root/tests/package/need.sh" pkg-config || exit $?
    install_and_move
    export PKG_CONFIG_PATH=$dir/moved/share/pkgconfig
    version=$(sed -n 's/^#define NSA_VERSION_[A-Z]* *//p' "$root/nsa/nsa.h" | paste -sd.)
    [ "$(pkg-config --modversion nsa)" = "$version" ]
    # shellcheck disable=SC2046 # lists of words
    cc embed.c "${library[@]}" $(pkg-config --cflags --libs nsa) -o embed
    check ./embed
    # A folder outside of the prefix, as Nix gives for headers, or for what nsa.pc lies in; CMake takes none in the tree.
    outside=$(mktemp -d)
    trap 'rm -rf "$outside"' EXIT
    for given in INCLUDEDIR="$outside/an include" DATADIR="$outside/share"; do
        rm -rf build
        cmake -S "$root" -B build -DMESON_PS_LOADED=ON -DCMAKE_INSTALL_PREFIX="$dir/out" \
            -DCMAKE_INSTALL_"$given" >log 2>&1 || { cat log && exit 1; }
        cmake --install build >/dev/null
        found=$(PKG_CONFIG_PATH=$dir/out/share/pkgconfig:$outside/share/pkgconfig pkg-config --cflags-only-I nsa |
            xargs printf %s) # words as a shell reads them
        cmp "$root/nsa/nsa.h" "${found#-I}/nsa.h"
        rm -rf out "${outside:?}"/*
    done
    ;;
meson | meson_subproject)
    "$root/tests/package/need.sh" meson ninja pkg-config || exit $?
    if [ "$way" = meson ]; then
        install_and_move
        export PKG_CONFIG_PATH=$dir/moved/share/pkgconfig
    else
        mkdir subprojects
        ln -s "$root" subprojects/nsa
    fi
    mv embed.c app.c
    export LDFLAGS=${library[*]}
    { echo "project('app', 'c')" && page_lines; } >meson.build
    meson setup build >log 2>&1 || { cat log && exit 1; }
    grep -q '^Build targets in project: 1$' log || {
        echo "the programs of nsa have become programs of the project that embeds it"
        grep 'Build targets' log
        exit 1
    }
    ninja -C build >log 2>&1 || { cat log && exit 1; }
    check build/app
    ;;
add_subdirectory | fetch_content | find_package)
    [ "$way" != find_package ] || install_and_move
    mkdir -p app/third_party
    ln -s "$root" app/third_party/nsa
    ln -s "$root" nsa
    mv embed.c app/app.c
    mv embed.cpp CMakeLists.txt app
    page_lines >app/page.cmake
    given=(-DCMAKE_PREFIX_PATH="$dir/moved" -DLIBRARY="${library[*]}")
    # Bare metal, which is no UNIX to CMake, needs libm as well.
    [ "$way" != fetch_content ] || given+=(-DCMAKE_SYSTEM_NAME=Generic)
    [ "$way" != find_package ] || cat >>app/page.cmake <<'TEXT'
find_package(nsa QUIET COMPONENTS cuda OPTIONAL_COMPONENTS nope)
set(found "${nsa_FOUND};${nsa_cuda_FOUND};${nsa_nope_FOUND}")
find_package(nsa QUIET COMPONENTS nope)
if(NOT "${found};${nsa_FOUND}" STREQUAL "1;TRUE;FALSE;0")
    message(FATAL_ERROR "components of nsa found: ${found};${nsa_FOUND}")
endif()
TEXT
    cmake -S app -B build "${given[@]}" >log 2>&1 || { cat log && exit 1; }
    cmake --build build >log 2>&1 || { cat log && exit 1; }
    check build/app
    check build/embed_cpp
    [ "$(cd build && ctest -N | grep -c 'Test *#')" -eq 0 ] || {
        echo "the tests of nsa have become tests of the project that embeds it"
        exit 1
    }
    ;;
installed)
    mkdir app user third_party
    ln -s "$root" third_party/nsa
    mv third_party app
    mv embed.c user
    printf '%s\n' '#include "nsa.h"' 'int app(void);' 'int app(void) { return NSA_VERSION_MAJOR; }' >app/app.c
    { printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(app C)' 'add_library(app STATIC app.c)' &&
        page_lines; } >app/CMakeLists.txt
    printf '%s\n' 'cmake_minimum_required(VERSION 3.22)' 'project(user C)' 'find_package(app REQUIRED)' \
        'add_executable(embed embed.c)' "target_link_libraries(embed PRIVATE ${library[*]} app::app)" \
        >user/CMakeLists.txt
    {
        cmake -S app -B first && cmake --build first && cmake --install first --prefix "$dir/prefix" &&
            cmake -S user -B build -DCMAKE_PREFIX_PATH="$dir/prefix" && cmake --build build
    } >log 2>&1 || { cat log && exit 1; }
    cmp "$root/nsa/nsa.h" prefix/include/nsa/nsa.h
    check build/embed
    ;;
*)
    echo "embed.sh: WAY is bare, static, shared, pool, add_subdirectory, fetch_content," \
        "installed, find_package, pkg_config, meson or meson_subproject"
    exit 2
    ;;
esac
