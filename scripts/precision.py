#!/usr/bin/env python3
"""fp32 against bf16: validation loss after equal steps, over seeds, for two models.

  precision.py train TRAINER TEXT FOLDER [--seeds N] [OPTION]...
  precision.py write FOLDER > bench/results/precision.json

`train` makes the runs: configs/quickstart.yaml as it is, and the same with 12 layers. Both precisions of a
seed see the same rows. OPTIONs go to the trainer. Runs that are whole are kept: a second call goes on, and
`write` leaves out seeds that lack one.
bf16 is what a processor with units for it computes only if the trainer was built so: where there are none,
-DNSA__BF16_BY_HAND (tests/harness/bf16_by_hand.h) rounds p and ds as they do, and linear maps round what
goes in and comes out. Twins: bench/results/precision.json, docs/training.md.
"""
import csv
import datetime
import json
import pathlib
import shutil
import subprocess
import sys

from record_runs import commit, machine, whole_run

CONFIG = pathlib.Path(__file__).resolve().parent.parent / "configs/quickstart.yaml"
MODELS = {"quickstart": (400, []), "12 layers": (120, ["--layers", 12, "--batch-size", 4])}
PRECISIONS = ("fp32", "bf16")
FIRST_SEED = 1337


def end_of(folder):
    """Steps and validation loss of a run that is whole; None of one that is not."""
    metrics = whole_run(folder)
    if not metrics:
        return None
    with open(folder / "val.csv", newline="") as file:
        return metrics["steps"], float(list(csv.DictReader(file))[-1]["val_loss"])


def folder_of(folder, model, precision, seed):
    return pathlib.Path(folder) / f"{model.replace(' ', '-')}-{precision}-{seed}"


def train_one(trainer, text, out, model, precision, seed, options):
    steps, sizes = MODELS[model]
    if end_of(out) is None:
        shutil.rmtree(out, ignore_errors=True)
        command = [trainer, "--config", CONFIG, "--data", text, "--out-dir", out, "--steps", steps, "--seed", seed,
                   "--precision", precision, "--eval-every", steps, "--eval-batches", 32, "--save-every", 0,
                   "--sample", 0, *sizes, *options]
        subprocess.run([str(x) for x in command], check=True, stdout=subprocess.DEVNULL)
    print(f"{out.name}: {end_of(out)[1]:.4f}", file=sys.stderr, flush=True)


def train(arguments):
    trainer, text, folder, *options = arguments
    seeds = 3
    if "--seeds" in options:
        at = options.index("--seeds")
        seeds = int(options[at + 1])
        del options[at:at + 2]
    trainer, text = pathlib.Path(trainer).resolve(), pathlib.Path(text).resolve()
    plan = {"text": text.name, "options": options, "seeds": list(range(FIRST_SEED, FIRST_SEED + seeds))}
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    (pathlib.Path(folder) / "plan.json").write_text(json.dumps(plan))
    for model in MODELS:
        for seed in plan["seeds"]:
            for precision in PRECISIONS:
                train_one(trainer, text, folder_of(folder, model, precision, seed), model, precision, seed, options)


def write(arguments):
    folder = pathlib.Path(arguments[0])
    plan = json.loads((folder / "plan.json").read_text())
    rows = []
    for model in MODELS:
        for seed in plan["seeds"]:
            ends = {p: end_of(folder_of(folder, model, p, seed)) for p in PRECISIONS}
            if None in ends.values():
                print(f"{model}, {seed}: not whole", file=sys.stderr)
                continue
            rows += [{"model": model, "seed": seed, "precision": p, "steps": steps, "val_loss": loss,
                      "over_fp32": loss / ends["fp32"][1]} for p, (steps, loss) in ends.items()]
    print(json.dumps({"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(),
                      "text": plan["text"], "options": plan["options"], "rows": rows}, indent=1))


COMMANDS = {"train": (train, 3), "write": (write, 1)}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS or len(sys.argv) - 2 < COMMANDS[sys.argv[1]][1]:
        sys.exit(__doc__)
    COMMANDS[sys.argv[1]][0](sys.argv[2:])
