#!/usr/bin/env python3
"""AdamW against Muon: steps and wall time to the same validation loss, over seeds.

  optimizers.py train TRAINER TEXT FOLDER [--steps N] [--seeds N] [--rates X,X,X] [OPTION]...
  optimizers.py time TRAINER TEXT FOLDER
  optimizers.py write FOLDER > bench/results/optimizers.json

`train` makes the runs: configs/quickstart.yaml's model, a constant rate after 20 steps of warm-up, so that a
run's curve does not depend on its length. Each optimizer first takes every rate with the first seed; with the
best of them it trains the other seeds. OPTIONs go to the trainer. Runs that are whole are kept: a second call
goes on. `time` measures steps of both in turn. `write` says, for
each seed, after how many steps each optimizer was first at or below the last validation loss of AdamW's run
with that seed. Seconds are steps times the measured seconds of one, so that evaluation and whatever else the
machine did are not in them. Twins: bench/results/optimizers.json, docs/training.md.
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
OPTIMIZERS = ("adamw", "muon")
FIRST_SEED = 1337
EVERY = 10  # steps between two evaluations
TIMED, SKIPPED, TURNS = 24, 4, 8  # steps of a measurement, its first ones not counted, and how often


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    """Validation loss by step of a run that is whole; None of one that is not."""
    if not whole_run(folder):
        return None
    return {int(row["step"]): float(row["val_loss"]) for row in table(folder / "val.csv")}


def command(trainer, text, out, optimizer, rate, seed, steps, options):
    return [str(x) for x in (trainer, "--config", CONFIG, "--data", text, "--out-dir", out, "--optimizer", optimizer,
                             "--lr", rate, "--seed", seed, "--steps", steps, "--warmup-steps", 20, "--lr-schedule",
                             "constant", "--eval-every", EVERY, "--eval-batches", 4, "--save-every", 0, "--sample",
                             0, *options)]


def train_one(parts, optimizer, rate, seed):
    trainer, text, folder, steps, options = parts
    out = folder / f"{optimizer}-{rate}-{seed}"
    known = losses(out)
    if known and max(known) == steps:
        return known
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run(command(trainer, text, out, optimizer, rate, seed, steps, options), check=True,
                   stdout=subprocess.DEVNULL)
    known = losses(out)
    print(f"{out.name}: {known[steps]:.4f} after {steps} steps", file=sys.stderr, flush=True)
    return known


def train(arguments):
    trainer, text, folder, *rest = arguments
    given = {"--steps": "200", "--seeds": "3", "--rates": "0.001,0.002,0.004"}
    options = []
    while rest:
        word = rest.pop(0)
        if word in given:
            given[word] = rest.pop(0)
        else:
            options.append(word)
    steps, rates = int(given["--steps"]), given["--rates"].split(",")
    parts = (pathlib.Path(trainer).resolve(), pathlib.Path(text).resolve(), pathlib.Path(folder), steps, options)
    best = {}
    for optimizer in OPTIMIZERS:
        ends = {rate: train_one(parts, optimizer, rate, FIRST_SEED)[steps] for rate in rates}
        best[optimizer] = min(ends, key=ends.get)
    for seed in range(FIRST_SEED + 1, FIRST_SEED + int(given["--seeds"])):
        for optimizer in OPTIMIZERS:
            train_one(parts, optimizer, best[optimizer], seed)
    plan = {"steps": steps, "rates": rates, "best": best, "options": options, "text": pathlib.Path(text).name,
            "seeds": [FIRST_SEED + i for i in range(int(given["--seeds"]))]}
    (pathlib.Path(folder) / "plan.json").write_text(json.dumps(plan))


def measure(arguments):
    """Seconds of a step of each optimizer, in turns so that both see the same machine: what a tenth of the steps
    stayed below, because others' work can only add to a step."""
    trainer, text, folder = (pathlib.Path(x).resolve() for x in arguments)
    plan = json.loads((folder / "plan.json").read_text())
    seconds = {optimizer: [] for optimizer in OPTIMIZERS}
    for _ in range(TURNS):
        for optimizer in OPTIMIZERS:
            out = folder / "timed"
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run([*command(trainer, text, out, optimizer, plan["best"][optimizer], FIRST_SEED, TIMED,
                                     plan["options"]), "--eval-every", "0", "--warmup-steps", "0"], check=True,
                           stdout=subprocess.DEVNULL)
            metrics = json.loads((out / "metrics.json").read_text())
            tokens = metrics["seq_len"] * metrics["batch_global"]
            rows = table(out / "training.csv")[SKIPPED:]
            seconds[optimizer] += [tokens / float(row["toks_per_s"]) for row in rows]
    (folder / "seconds.json").write_text(json.dumps({k: sorted(v)[len(v) // 10] for k, v in seconds.items()}))


def rows_of(folder, plan, seconds):
    rows = []
    for seed in plan["seeds"]:
        runs = {o: losses(folder / f"{o}-{plan['best'][o]}-{seed}") for o in OPTIMIZERS}
        goal = runs["adamw"][plan["steps"]]
        adamw = None
        for optimizer in OPTIMIZERS:
            reached = min((step for step, loss in runs[optimizer].items() if loss <= goal), default=None)
            adamw = adamw or reached
            rows.append({"optimizer": optimizer, "seed": seed, "rate": float(plan["best"][optimizer]), "goal": goal,
                         "steps_to_goal": reached, "seconds_to_goal": reached and reached * seconds[optimizer],
                         "steps_over_adamw": reached and reached / adamw,
                         "seconds_over_adamw": reached and reached * seconds[optimizer] / (adamw * seconds["adamw"]),
                         "last_loss": runs[optimizer][plan["steps"]]})
    return rows


def write(arguments):
    folder = pathlib.Path(arguments[0])
    plan = json.loads((folder / "plan.json").read_text())
    seconds = json.loads((folder / "seconds.json").read_text())
    searched = [{"optimizer": optimizer, "searched_rate": float(rate), "seed": FIRST_SEED,
                 "last_loss": losses(folder / f"{optimizer}-{rate}-{FIRST_SEED}")[plan["steps"]]}
                for optimizer in OPTIMIZERS for rate in plan["rates"]]
    print(json.dumps({"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(),
                      "text": plan["text"], "steps": plan["steps"], "options": plan["options"],
                      "seconds_of_a_step": seconds, "rows": rows_of(folder, plan, seconds) + searched}, indent=1))


COMMANDS = {"train": (train, 3), "time": (measure, 3), "write": (write, 1)}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS or len(sys.argv) - 2 < COMMANDS[sys.argv[1]][1]:
        sys.exit(__doc__)
    COMMANDS[sys.argv[1]][0](sys.argv[2:])
