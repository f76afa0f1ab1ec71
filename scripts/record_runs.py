#!/usr/bin/env python3
"""Turns finished training runs into a file that write_numbers.py makes tables of.

  record_runs.py OUT_DIR... > bench/results/quickstart.json

Each OUT_DIR is what a trainer wrote: metrics.json, val.csv and a checkpoint, from which the settings
are read. A run that did not end well, or whose settings differ from those of the others in more than
model.attention, is refused: a table compares only what is comparable.
"""
import csv
import datetime
import json
import math
import os
import pathlib
import subprocess
import sys


def machine():
    """The processor's name and how many of it there are."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"unknown processor, {os.cpu_count()} cores"


def commit():
    """Of this tree; "" where it is no checkout, or where there is no git."""
    root = pathlib.Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=root, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def whole_run(folder):
    """The metrics of a run that came to its end; None of one that did not."""
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text()) if path.exists() else {"verdict": None}
    return metrics if metrics["verdict"] == "completed" and metrics["steps_done"] == metrics["steps"] else None


def open_run(folder, *tables):
    """A run's metrics and settings; a folder that lacks them, or one of the tables, is refused."""
    states = sorted(folder.glob("checkpoints/step_*/state.json"))
    missing = [name for name in ("metrics.json", *tables) if not (folder / name).is_file()]
    if missing or not states:
        raise SystemExit(f"{folder} is no folder of a finished run: it has no "
                         f"{', no '.join(missing + ['checkpoint'] * (not states))}")
    return json.loads((folder / "metrics.json").read_text()), json.loads(states[-1].read_text())["content"]["config"]


def read_run(folder):
    """One run: its settings, and its row of the table."""
    metrics, config = open_run(folder, "val.csv")
    if metrics["verdict"] != "completed" or metrics["steps_done"] != metrics["steps"]:
        raise SystemExit(f"{folder}: this run is {metrics['verdict']} after {metrics['steps_done']} of "
                         f"{metrics['steps']} steps; only completed runs are recorded")
    with open(folder / "val.csv", newline="") as file:
        last = ([{"step": 0}] + list(csv.DictReader(file)))[-1]
    if int(last["step"]) != metrics["steps_done"]:
        raise SystemExit(f"{folder}: no evaluation of the last step, {metrics['steps_done']}")
    if config["data.tokenizer"] != "byte":
        raise SystemExit(f"{folder}: bits per byte are known for the byte tokenizer only")
    return config, {
        "attention": config["model.attention"],
        "steps": metrics["steps_done"],
        "tokens_of_a_row": metrics["seq_len"],
        "validation_loss": float(last["val_loss"]),
        "bits_per_byte": float(last["val_loss"]) / math.log(2),
        "seconds": round(metrics["seconds"]),
        "tokens_per_second": round(metrics["toks_per_s_p50"]),
    }


def main(folders):
    if folders[:1] in (["-h"], ["--help"]):
        return print(__doc__)
    if not folders:
        raise SystemExit("usage: record_runs.py OUT_DIR...")
    runs = [read_run(pathlib.Path(folder)) for folder in folders]
    for config, _ in runs[1:]:
        differing = {key for key in config | runs[0][0] if config.get(key) != runs[0][0].get(key)}
        if differing - {"model.attention"}:
            raise SystemExit(f"the runs differ in {', '.join(sorted(differing))}")
    rows = [row for _, row in runs]
    for row in rows:
        row["over_dense"] = next((row["bits_per_byte"] / other["bits_per_byte"] for other in rows
                                  if other["attention"] == "full"), None)
    print(json.dumps({"machine": machine(), "date": datetime.date.today().isoformat(),
                      "commit": commit(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
