#!/usr/bin/env python3
"""One long sequence, trained by four processes that divide it and by one process: losses, memory, shares of the work.

  bench_context.py [--bin FOLDER] [--tokens N] [--steps N] [--json FILE] [OPTION of train_125m]...

Prints for each run the loss and the gradient norm of its first and last step, what the model holds beside parameters
(activations, their gradients, workspace, exchanges) and its share of the one process's, and the largest memory that
rank 0 ever had. Also how many keys the busiest process reads over the mean of the four. Default: a narrow model with
the paper's blocks on the text of nsa/, 131,072 tokens, 2 steps, four threads in all. It measures no time, and
runs both at once.
"""
import argparse
import concurrent.futures
import csv
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from record_runs import commit, machine  # noqa: E402

PROCESSES = 4
BLOCK, STRIDE, SELECTED, CHOSEN, WINDOW = 32, 16, 64, 16, 512
MODEL = {"--dim": 64, "--layers": 4, "--heads": 4, "--kv-groups": 1, "--d-k": 16, "--d-v": 16, "--nsa-l": BLOCK,
         "--nsa-d": STRIDE, "--nsa-l-sel": SELECTED, "--nsa-n-sel": CHOSEN, "--nsa-w": WINDOW, "--batch-size": 1,
         "--lr": "1e-3", "--log-every": 1, "--eval-every": 0, "--data": ROOT / "nsa",
         "--device": "cpu", "--ddp-timeout": 3600, "--stall-timeout": 0}
QUIET = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
         "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
         "OMP_WAIT_POLICY": "passive"}
PARAMETERS = ("weights", "gradients", "moments", "snapshot")


def keys_read(first, count):
    """By the queries first .. first + count - 1 of a head, in the three branches."""
    return sum(max(0, (t + 1 - BLOCK) // STRIDE + 1) + (min(t // SELECTED + 1, CHOSEN) - 1) * SELECTED +
               t % SELECTED + 1 + min(WINDOW, t + 1) for t in range(first, first + count))


def balance(tokens):
    """Process r has chunks r and 2 N - 1 - r of 2 N."""
    chunk = tokens // (2 * PROCESSES)
    keys = [keys_read(r * chunk, chunk) + keys_read((2 * PROCESSES - 1 - r) * chunk, chunk) for r in range(PROCESSES)]
    return max(keys) * PROCESSES / sum(keys)


def train(processes, given, more):
    launcher = ["mpirun", "--bind-to", "none", "-n", processes] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        command = [*launcher, given.bin / "train_125m", *(word for pair in MODEL.items() for word in pair), "--seq-len",
                   given.tokens, "--steps", given.steps, "--out-dir", out, "--context-parallel", processes, "--threads",
                   PROCESSES // processes, *more]
        ran = subprocess.run([str(word) for word in command], env=os.environ | QUIET, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        if ran.returncode:
            raise SystemExit(f"exit code {ran.returncode} of {' '.join(map(str, command))}\n{ran.stdout}")
        with open(out / "training.csv", newline="") as file:
            steps = list(csv.DictReader(file))
        memory = json.loads((out / "mem_step1.json").read_text())
    held = sum(size for name, size in memory["bytes_by_purpose"].items() if name not in PARAMETERS)
    return {"processes": processes, "tokens": given.tokens, "steps": len(steps),
            "loss_first": float(steps[0]["loss"]), "loss_last": float(steps[-1]["loss"]),
            "norm_first": float(steps[0]["grad_norm"]), "norm_last": float(steps[-1]["grad_norm"]),
            "activations_mib": held / 2**20, "largest_mib": memory["reserved_bytes.all.peak"] / 2**20}


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n")[2].strip())
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    given, more = parser.parse_known_args()
    if not (given.bin / "train_125m").is_file():
        parser.error(f"--bin: {given.bin} has no train_125m; build it first")
    with concurrent.futures.ThreadPoolExecutor() as beside:  # it measures no time
        rows = [run.result() for run in [beside.submit(train, n, given, more) for n in (PROCESSES, 1)]]
    for row in rows:
        row["share"] = row["activations_mib"] / rows[-1]["activations_mib"]
        row["loss_apart"] = abs(row["loss_last"] - rows[-1]["loss_last"]) / rows[-1]["loss_last"]
        print(f"{row['processes']} processes: loss {row['loss_first']:.6f} .. {row['loss_last']:.6f}, gradient norm "
              f"{row['norm_first']:.6g} .. {row['norm_last']:.6g}, {row['activations_mib']:.0f} MiB beside parameters "
              f"({row['share']:.3f}), at most {row['largest_mib']:.0f} MiB", flush=True)
    busiest = balance(given.tokens)
    print(f"keys read by the busiest process over the mean: {busiest:.4f}")
    rows[0]["busiest"] = busiest
    if given.json:
        report = {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(), "rows": rows}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
