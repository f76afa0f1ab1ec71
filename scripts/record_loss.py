#!/usr/bin/env python3
"""Turns one training run into a file that write_numbers.py makes a table of, and keeps its picture.

  record_loss.py OUT_DIR bench/results/production_cpu.json docs/production_loss.svg

A row for the first step, for each evaluation and for the last step. The training loss of a row is the mean
over the steps since the row before. A run may have been ended by a signal; one that failed is refused.
"""
import csv
import datetime
import json
import math
import pathlib
import shutil
import statistics
import sys

from record_runs import commit, machine, open_run

SETTINGS = ("model.dim", "model.n_layers", "train.seq_len", "train.batch_size", "train.accumulate_grad_batches",
            "train.lr", "train.warmup_steps")


def read_table(path):
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def rows_of(steps, evaluations, tokens_each, bytes_known):
    val = {int(row["step"]): row["val_loss"] for row in evaluations}
    last, rows = int(steps[-1]["step"]), []
    for end in sorted({1, last, *(step for step in val if step <= last)}):
        part = [row for row in steps if (rows[-1]["step"] if rows else 0) < row["step"] <= end]
        rows.append({"step": end,
                     "tokens": end * tokens_each,
                     "loss": statistics.fmean(row["loss"] for row in part),
                     "validation_loss": val.get(end),
                     "bits_per_byte": val[end] / math.log(2) if bytes_known and end in val else None,
                     "tokens_per_second": round(statistics.median(row["toks_per_s"] for row in part))})
    return rows


def main(arguments):
    if len(arguments) != 3:
        raise SystemExit("usage: record_loss.py OUT_DIR FILE.json PICTURE.svg")
    folder = pathlib.Path(arguments[0])
    metrics, config = open_run(folder, "training.csv", "loss.svg")
    if metrics["verdict"] != "completed" and not metrics["verdict"].startswith("stopped by"):
        raise SystemExit(f"{folder}: this run {metrics['verdict']}; only runs that ended well are recorded")
    steps = read_table(folder / "training.csv")
    tokens = config["train.batch_size"] * config["train.accumulate_grad_batches"] * config["train.seq_len"]
    val = folder / "val.csv"
    rows = rows_of(steps, read_table(val) if val.exists() else [], tokens, config["data.tokenizer"] == "byte")
    pathlib.Path(arguments[1]).write_text(json.dumps(
        {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(),
         "settings": {name: config[name] for name in SETTINGS}, "verdict": metrics["verdict"],
         "peak_memory_mib": metrics["peak_memory_mib"], "rows": rows}, indent=1) + "\n")
    shutil.copyfile(folder / "loss.svg", arguments[2])


if __name__ == "__main__":
    main(sys.argv[1:])
