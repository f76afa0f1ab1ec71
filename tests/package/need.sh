#!/usr/bin/env bash
# need.sh PROGRAM...: exit code 77, which ctest reports as skipped, if one of them is missing here; on
# CI that is a failure, so that nothing is left out unseen.
for program in "$@"; do
    command -v "$program" >/dev/null && continue
    echo "left out: no $program on this machine"
    [ -n "${CI:-}" ] && exit 1
    exit 77
done
