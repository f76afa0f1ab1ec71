#!/usr/bin/env bash
# test_scripts.sh - the run scripts on the CPU, with few steps of a small model: what they leave, and that
# a failure of any part is theirs. Arguments: the root, the build folder, a folder to write in, and
# "mpi" where there is MPI.
set -euo pipefail
root=$1 build=$2 work=$3/test_scripts mpi=${4:-}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
failures=0

for i in $(seq 3000); do echo "line $i of a text that says $((i * 7919 % 1009)) things"; done >text
small=(--seq-len 64 --batch-size 4 --layers 2 --dim 32 --heads 4 --d-k 8 --d-v 8 --nsa-l 8 --nsa-d 4
    --nsa-l-sel 16 --nsa-n-sel 4 --nsa-w 16 --accum-batches 1 --eval-every 3)

# expect CODE WORD SCRIPT [OPTION...]
expect() {
    local want=$1 word=$2 script=$3 code=0
    shift 3
    "$root/scripts/$script" --device cpu --build "$build" "$@" >output 2>&1 || code=$?
    if [ "$code" -ne "$want" ] || ! grep -q -e "$word" output; then
        echo "FAIL: $script $*: exit code $code, not $want, or no \"$word\" in:"
        cat output
        failures=$((failures + 1))
    fi
}

left() {
    local file
    for file in "$@"; do
        [ ! -s "$file" ] || continue
        echo "FAIL: there is no $file"
        failures=$((failures + 1))
    done
}

expect 0 '^GO' smoke_3090.sh --steps 6 --out-dir smoke -- "${small[@]}"
left smoke/smoke/metrics.json smoke/first/training.csv smoke/smoke.log
expect 2 'an earlier run is there' smoke_3090.sh --steps 6 --out-dir smoke -- "${small[@]}"
expect 2 'unknown option' smoke_3090.sh --stesp 6
expect 2 'must be a whole number' smoke_3090.sh --steps many
expect 2 'unknown option' smoke_3090.sh --steps 6 --out-dir bad -- --frobnicate

expect 2 '--data PATH is missing' production.sh --out-dir p0
expect 0 '^GO' production.sh --data text --steps 8 --phases '1 2 3' --out-dir p1 -- "${small[@]}"
left p1/phase_1/metrics.json p1/phase_2/metrics.json p1/phase_3/metrics.json p1/run/checkpoints
expect 0 'resumed after step 8' production.sh --data text --steps 12 --resume --out-dir p1 \
    -- "${small[@]}"
expect 2 'nowhere' production.sh --data nowhere --steps 8 --phases 1 --out-dir p2 -- "${small[@]}"
[ ! -e p2/run ] || {
    echo "FAIL: the run was started after a phase had failed"
    failures=$((failures + 1))
}
# Dense attention selects nothing; without statistics nothing is known of the selection.
NSA_DISABLE_AUX_STATS=1 expect 1 'NO-GO' production.sh --data text --steps 3 --phases 1 \
    --out-dir p3 -- "${small[@]}"
if [ "$mpi" = mpi ]; then
    expect 0 'processes: 2 over mpi' production.sh --data text --steps 6 --phases '1 2' \
        --processes 2 --out-dir p4 -- "${small[@]}" --threads 1
fi

expect 0 'memory: at most' soak.sh --steps 2000 --out-dir soak --data text -- --eval-every 100
expect 1 'says nothing' soak.sh --steps 2 --out-dir soak2 --data text

echo "test_scripts: $failures failures"
[ "$failures" -eq 0 ]
