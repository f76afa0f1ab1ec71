#!/usr/bin/env bash
# cuda_refuses.sh TRAINER CONFIG: without a GPU, --device cuda ends with exit code 2 and a message that
# says what is missing. Exit code 77: there is a GPU on this machine.
set -uo pipefail

message=$("$1" --config "$2" --device cuda --check 2>&1)
code=$?
[ "$code" -ne 0 ] || exit 77
echo "$message"
[ "$code" -eq 2 ] && [[ $message == *"no CUDA device"* ]]
