#!/usr/bin/env python3
"""Two processes with one thread each against one process with two threads, on the same batches, in turns.

  bench_ranks.py [--bin FOLDER] [--rounds N] [--steps N] [--json FILE] [OPTION of train_125m]...

Prints the median tokens/s of each and their quotient: the median over the rounds of the quotient of a round's
two neighbours, so that a machine that slows down meanwhile slows both. The first two steps of a run are not
counted. Default: the production configuration, 6 steps, 3 rounds. It wants both cores for itself.
"""
import argparse
import csv
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from record_runs import commit, machine  # noqa: E402

WARM = 2  # steps
QUIET = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
         "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def measure(launcher, threads, given, more):
    """Tokens/s of each step of a run but the first ones, over all of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        command = [*launcher, given.bin / "train_125m", "--config", given.config, "--device", "cpu", "--threads",
                   threads, "--steps", given.steps, "--dataset", "synthetic", "--out-dir", out, *more]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        ran = subprocess.run([str(word) for word in command], env=environment | QUIET, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        if ran.returncode:
            raise SystemExit(f"exit code {ran.returncode} of {' '.join(map(str, command))}\n{ran.stdout}")
        with open(out / "training.csv", newline="") as file:
            return [float(row["toks_per_s"]) for row in csv.DictReader(file)][WARM:]


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n")[2].strip())
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--config", default=ROOT / "configs/m7c_125m_2xa100_production.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path)
    given, more = parser.parse_known_args()
    if given.rounds < 1 or given.steps <= WARM:
        parser.error(f"--rounds: at least 1; --steps: at least {WARM + 1}")
    if not (given.bin / "train_125m").is_file():
        parser.error(f"--bin: {given.bin} has no train_125m; build it first")
    alone, ranks, quotients = [], [], []
    for turn in range(given.rounds):
        rates = {}
        for several in (turn % 2, 1 - turn % 2):  # the one that goes first changes
            launcher = ["mpirun", "--bind-to", "none", "-n", "2"] if several else []
            rates[several] = measure(launcher, 1 if several else 2, given, more)
        quotients.append(statistics.median(rates[1]) / statistics.median(rates[0]))
        alone += rates[0]
        ranks += rates[1]
        print(f"round {turn + 1}: {statistics.median(rates[0]):.1f} and {statistics.median(rates[1]):.1f} tokens/s, "
              f"{quotients[-1]:.3f}", flush=True)
    row = {"one_process": statistics.median(alone), "two_processes": statistics.median(ranks),
           "quotient": statistics.median(quotients), "lowest": min(quotients), "highest": max(quotients),
           "steps": given.steps - WARM, "rounds": given.rounds}
    print(f"two processes over one: {row['quotient']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})")
    if given.json:
        report = {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(), "rows": [row]}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
