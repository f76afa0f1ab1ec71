#!/usr/bin/env bash
# 10,000 tiny steps with evaluations and checkpoints, while the process's memory is looked at: it must
# not grow. Then a verdict.
#
#   scripts/soak.sh [--device cuda|cpu] [--steps 10000] [--data PATH] [--out-dir DIR] [--build DIR]
#                   [-- OPTION of the trainer...]
#
# Memory is read five times a second (VmRSS). The largest of the second half may be at most 1 MiB above the
# largest of the first; $out/memory.csv has all of them. Exit code: 0 GO and no growth, 1 neither, else
# the trainer's.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=run_lib.sh disable=SC2034
source "$(dirname "$0")/run_lib.sh"

steps=10000
out=artifacts/soak
config=$root/configs/train_showcase.yaml
options "$@"

# From the program's start on, for it alone: mpirun and tee are not looked at.
watch_memory() {
    local pid
    echo seconds,kib
    while sleep 0.2; do
        pid=$(pgrep -o -f -- "--out-dir $out/soak" || true)
        [ -z "$pid" ] || awk -v t="$SECONDS" '/^VmRSS:/ { print t "," $2 }' \
            "/proc/$pid/status" 2>/dev/null || true
    done
}

watch_memory >"$out/memory.csv" &
watcher=$!
trap 'kill "$watcher" 2>/dev/null || true' EXIT
phase soak "$steps" --seq-len 64 --batch-size 2 --layers 2 --dim 32 --heads 4 --d-k 8 --d-v 8 \
    --log-every 500 --eval-every 250 --save-every 500
kill "$watcher"

awk -F, 'NR > 1 { kib[NR - 1] = $2 } END {
    n = NR - 1
    if (n < 4) { print "memory: looked at " n " times, which says nothing: more steps"; exit 1 }
    for (i = 1; i <= n; i++) { h = i > n / 2; if (kib[i] > most[h]) most[h] = kib[i] }
    printf "memory: at most %.1f MiB in the first half, %.1f in the second, of %d looks\n",
        most[0] / 1024, most[1] / 1024, n
    exit most[1] > most[0] + 1024
}' "$out/memory.csv" || fail "the memory grew" 1
verdict soak
