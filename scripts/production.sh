#!/usr/bin/env bash
# The production run of 12 layers and 2048 tokens: phases of 1, 200 and 300 steps, each of which must end
# well before the next begins, then the run itself, and a verdict.
#
#   scripts/production.sh --data PATH [--processes 1] [--device cuda|cpu] [--steps 50000]
#                         [--phases "1 200 300"] [--out-dir DIR] [--resume] [--build DIR]
#                         [-- OPTION of the trainer...]
#
# --processes 2 starts two processes with mpirun, one a GPU, or two that share the CPU (then give each
# its part of the cores: `-- --threads N`). --resume passes the phases over and goes on with the run.
# Exit code: 0 GO, 1 NO-GO, else the trainer's.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=run_lib.sh disable=SC2034
source "$(dirname "$0")/run_lib.sh"

steps=50000
phases="1 200 300"
out=artifacts/m7c_125m_2xa100_prod
config=$root/configs/m7c_125m_2xa100_production.yaml
options "$@"
[ -n "$data" ] || fail "--data PATH is missing: a text file, a folder, JSONL or .bin shards"
if [ "$resume" = yes ]; then
    phase run "$steps" --resume
else
    for count in $phases; do phase "phase_$count" "$count" --save-every 0; done
    phase run "$steps"
fi
verdict run
