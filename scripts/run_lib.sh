# shellcheck shell=bash
# run_lib.sh - what smoke_3090.sh, production.sh and soak.sh share: options, the program and its launcher,
# a phase of a run. Sourced by them, with `set -euo pipefail`. It judges nothing: that is nsa_verdict.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Before options(): a script's own values of these.
device=cuda
processes=1
steps=
phases=
data=
out=
build=$root/build/release
resume=no
config=
more=()

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit "${2:-2}"
}

# The comment at the top of the script that was started.
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }

number() {
    if ! [[ $2 =~ ^[0-9]+$ ]] || [ "$2" -eq 0 ]; then
        fail "$1 $2: must be a whole number above 0"
    fi
}

options() {
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --resume) resume=yes ;;
        --)
            shift
            more=("$@")
            break
            ;;
        --device | --processes | --steps | --phases | --data | --out-dir | --build)
            [ $# -gt 1 ] || fail "$1: its value is missing"
            case $1 in
            --device) device=$2 ;;
            --processes) processes=$2 ;;
            --steps) steps=$2 ;;
            --phases) phases=$2 ;;
            --data) data=$2 ;;
            --out-dir) out=$2 ;;
            --build) build=$2 ;;
            esac
            shift
            ;;
        *) fail "$1: unknown option (--help lists all; those of the trainer follow --)" ;;
        esac
        shift
    done
    number --steps "$steps"
    number --processes "$processes"
    for phase in $phases; do number --phases "$phase"; done
    case $device in
    cuda) program=$build/bin/train_125m_cuda ;;
    cpu) program=$build/bin/train_125m ;;
    *) fail "--device $device: must be cuda or cpu" ;;
    esac
    [ -x "$program" ] || fail "$program: not there; build it, or name the build folder with --build"
    [ "$data" != - ] || fail "--data -: each phase reads the data from the start; give a file or a folder"
    [ "$resume" = yes ] || [ ! -e "$out" ] || fail "$out: an earlier run is there; --resume, or another --out-dir"
    mkdir -p "$out"
}

# phase NAME STEPS [OPTION...]: one run into $out/NAME, its lines also in $out/NAME.log. The status is
# the trainer's.
phase() {
    local name=$1 count=$2 launcher=()
    shift 2
    if [ "$processes" -gt 1 ]; then
        launcher=(mpirun -n "$processes")
        # Each process gets a GPU of its own, which is then its first.
        # shellcheck disable=SC2016 # for the shell that each process is started with
        [ "$device" = cpu ] ||
            launcher+=(bash -c 'CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK exec "$@"' rank)
    fi
    [ -z "$data" ] || set -- --data "$data" "$@"
    printf '\n== %s: %s steps, %s, %s process(es)\n' "$name" "$count" "$device" "$processes"
    "${launcher[@]}" "$program" --config "$config" --device "$device" --steps "$count" \
        --out-dir "$out/$name" "$@" "${more[@]}" 2>&1 | tee -a "$out/$name.log"
}

verdict() {
    printf '\n== verdict of %s\n' "$out/$1"
    "$build/bin/nsa_verdict" "$out/$1"
}
