#!/usr/bin/env bash
# Does a 24 GB card train: 1 step, then 200, in fp16 with the model of m7c_3090_smoke.yaml, and a verdict.
#
#   scripts/smoke_3090.sh [--device cuda|cpu] [--steps 200] [--data PATH] [--out-dir DIR]
#                         [--build DIR] [-- OPTION of the trainer...]
#
# Without --data the data are synthetic. --device cpu computes in fp32, in fp16 with `-- --precision fp16`.
# Exit code: 0 GO, 1 NO-GO, else the trainer's. A folder that is used is refused.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=run_lib.sh disable=SC2034
source "$(dirname "$0")/run_lib.sh"

steps=200
out=artifacts/3090_smoke
config=$root/configs/m7c_3090_smoke.yaml
options "$@"
phase first 1
phase smoke "$steps"
verdict smoke
