"""Reads a run's TensorBoard files with TensorBoard's own reader, and holds them against its CSVs.

usage: test_events.py PROGRAM FOLDER. The packages of python-packages.txt are fetched into FOLDER where
this Python lacks them. Exit code 77 where they cannot be had, except on CI. Twin: events.c.
"""
import csv
import importlib
import os
import pathlib
import shutil
import subprocess
import sys

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
packages, out = folder / "python-packages", folder / "events"


def load():
    from tensorboard.backend.event_processing import event_file_loader
    return event_file_loader.EventFileLoader


sys.path.insert(0, str(packages))
try:
    loader = load()
except ImportError:
    wanted = pathlib.Path(__file__).with_name("python-packages.txt")
    fetched = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                              packages, "--requirement", wanted], stderr=subprocess.DEVNULL)
    importlib.invalidate_caches()
    try:
        loader = load()
    except ImportError as missing:
        print(f"skipped: no package {missing.name}, and pip ended with {fetched.returncode}")
        sys.exit(1 if os.environ.get("CI") else 77)

shutil.rmtree(out, ignore_errors=True)
small = "--dim 32 --heads 4 --d-k 8 --d-v 8 --seq-len 64 --batch-size 2 --threads 1 --eval-every 2"
for options in ("--steps 4", "--steps 6 --resume"):
    subprocess.run([program, *small.split(), *options.split(), "--out-dir", out], check=True,
                   stdout=subprocess.DEVNULL)

read, files = {}, sorted((out / "tb").iterdir(), key=lambda f: f.stat().st_mtime)
assert len(files) == 2, files
for file in files:
    events = list(loader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2", events[0]
    for event in events[1:]:
        assert abs(event.wall_time - file.stat().st_mtime) < 3600, event
        for value in event.summary.value:
            read.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]

expected = {}
tags = {"training.csv": {"loss": "train/loss", "lr": "train/lr", "toks_per_s": "train/toks_per_s",
                         "grad_norm": "train/grad_norm"},
        "val.csv": {"val_loss": "val/loss", "ppl": "val/ppl"},
        "k_stats.csv": {"k_mean": "selection/k_mean", "k_max": "selection/k_max",
                        "pct_at_max": "selection/pct_at_max"}}
for name, columns in tags.items():
    with open(out / name, newline="") as table:
        for row in csv.DictReader(table):
            for column, tag in columns.items():
                expected.setdefault(tag, {})[int(row["step"])] = float(row[column])
gates = {f"gates/{x}" for x in ("entropy_mean", "max_gate", "collapse_frac", "share_cmp", "share_slc", "share_win")}
assert read.keys() == expected.keys() | gates, read.keys() ^ (expected.keys() | gates)
for tag, points in expected.items():
    assert read[tag].keys() == points.keys(), (tag, read[tag], points)
    for step, value in points.items():
        assert abs(read[tag][step] - value) <= 1e-6 * abs(value), (tag, step, read[tag][step], value)
for tag in gates:
    assert read[tag].keys() == expected["train/loss"].keys(), (tag, read[tag])
print(f"{sum(map(len, read.values()))} scalars passed, 0 failed")
