#!/usr/bin/env bash
# release.sh DIR: scripts/release builds both archives, the same bytes from the same commit, and
# refuses a tree that is not one to release.
set -euo pipefail

dir=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" git cmake sha256sum || exit $?
git -C "$root" rev-parse HEAD >/dev/null 2>&1 || { echo "left out: not a git checkout" && exit 77; }
rm -rf "$dir"
mkdir -p "$dir"
# The example that a release runs, without the vector tiles, which package_embed_bare compiles as users do.
export CC="${CC:-cc} -U__SSE2__"
"$root/scripts/release" --draft "$dir/first"
name=$(basename "$dir"/first/nsa-*.sha256 .sha256)
tar -xzf "$dir/first/$name-header.tar.gz" -C "$dir"
diff <(cd "$root" && git ls-files nsa ':!nsa/src') <(cd "$dir/$name" && find nsa -type f | LC_ALL=C sort)

# A copy of the checkout, in which one thing after another is wrong.
copy=$dir/copy
git clone -q --local "$root" "$copy"
cp "$root/scripts/release" "$copy/scripts/release"

# refused WORDS OPTION...: that release ends with an error that holds the words.
refused() {
    local words=$1
    shift
    if "$copy/scripts/release" "$@" "$dir/second" >"$dir/log" 2>&1; then
        echo "not refused: $words"
        exit 1
    fi
    grep -q "$words" "$dir/log" || { cat "$dir/log" && exit 1; }
}
version=${name#nsa-}
sed -i "s/^## $version.*/## $version, not released yet/" "$copy/CHANGELOG.md"
refused 'not released yet'
sed -i "s/^## $version.*/## $version, 2000-01-01/" "$copy/CHANGELOG.md"
refused 'not committed'
echo "$version" >>"$copy/README.md"
refused 'second place' --draft
git -C "$copy" -c user.name=x -c user.email=x commit -qam changed
refused 'second place'

# What a release is: the same bytes once more, from the commit alone.
git -C "$copy" reset -q --hard HEAD~1
"$copy/scripts/release" --draft "$dir/second" >/dev/null
cmp "$dir/first/$name.sha256" "$dir/second/$name.sha256"
