#!/usr/bin/env bash
# release.sh DIR: scripts/release builds both archives, twice the same bytes, and refuses a tree that
# is not one to release.
set -euo pipefail

dir=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
"$root/tests/package/need.sh" git cmake sha256sum || exit $?
git -C "$root" rev-parse HEAD >/dev/null 2>&1 || { echo "left out: not a git checkout" && exit 77; }
rm -rf "$dir"
mkdir -p "$dir"
"$root/scripts/release" --draft "$dir/first"
name=$(basename "$dir"/first/nsa-*.sha256 .sha256)
tar -xzf "$dir/first/$name-header.tar.gz" -C "$dir"
diff <(cd "$root" && git ls-files nsa) <(cd "$dir/$name" && find nsa -type f | LC_ALL=C sort)

# A copy of the checkout with the version written a second time, and one that is not released.
git clone -q --local "$root" "$dir/copy"
cp "$root/scripts/release" "$dir/copy/scripts/release"
if "$dir/copy/scripts/release" "$dir/second" >"$dir/log" 2>&1; then
    echo "a tree whose CHANGELOG says \"not released yet\", or with changes, was released"
    exit 1
fi
grep -q 'not released yet\|not committed' "$dir/log"
echo "${name#nsa-}" >>"$dir/copy/README.md"
if "$dir/copy/scripts/release" --draft "$dir/second" >"$dir/log" 2>&1; then
    echo "a version in a second place was not seen"
    exit 1
fi
grep -q 'second place' "$dir/log"
