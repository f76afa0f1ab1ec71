"""Reads a run's TensorBoard files and weights with TensorBoard's and safetensors' own readers.

usage: test_events.py PROGRAM FOLDER. The scalars are held against the CSVs. Twins: events.c, checkpoint.c.
"""
import csv
import pathlib
import shutil
import subprocess
import sys

from packages import need

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
need(folder, "absl", "google.protobuf", "numpy", "packaging", "safetensors", "tensorboard")

import numpy
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

out = folder / "events"
shutil.rmtree(out, ignore_errors=True)
small = "--dim 32 --heads 4 --d-k 8 --d-v 8 --seq-len 64 --batch-size 2 --threads 1 --eval-every 2 --log-every 1 --dataset synthetic"
for options in ("--steps 4", "--steps 6 --resume"):
    subprocess.run([program, *small.split(), *options.split(), "--out-dir", out], check=True,
                   stdout=subprocess.DEVNULL)

read, files = {}, sorted((out / "tb").iterdir(), key=lambda f: f.stat().st_mtime)
assert len(files) == 2, files
for file in files:
    events = list(EventFileLoader(str(file)).Load())
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
by_layer = {f"layer_00/{x}" for x in ("share_cmp", "share_slc", "share_win", "entropy", "sum")}
assert read.keys() == expected.keys() | gates | by_layer, read.keys() ^ (expected.keys() | gates | by_layer)
for tag, points in expected.items():
    assert read[tag].keys() == points.keys(), (tag, read[tag], points)
    for step, value in points.items():
        assert abs(read[tag][step] - value) <= 1e-6 * abs(value), (tag, step, read[tag][step], value)
for tag in gates | by_layer:
    assert read[tag].keys() == expected["train/loss"].keys(), (tag, read[tag])
# Of the one layer that there is, its own and all.
for step, share in read["gates/share_slc"].items():
    assert abs(read["layer_00/share_slc"][step] - share) < 1e-6, (step, share, read["layer_00/share_slc"])
    assert abs(sum(read[f"layer_00/share_{b}"][step] for b in ("cmp", "slc", "win")) - 1) < 1e-5, step
    assert abs(read["layer_00/entropy"][step] - read["gates/entropy_mean"][step]) < 1e-5, step

last = out / "checkpoints/latest"
weights, moments = load_file(last / "model.safetensors"), load_file(last / "optimizer.safetensors")
shapes = [line.split()[:2] for line in (out / "dtypes_report.txt").read_text().splitlines()[2:]]
assert {name: "x".join(map(str, w.shape)) for name, w in weights.items()} == dict(shapes), shapes
assert moments.keys() == {f"{m}.{name}" for m in "mv" for name in weights}, moments.keys()
for name, values in (weights | moments).items():
    assert values.dtype == numpy.float32 and numpy.isfinite(values).all(), name
    assert not name.startswith("v.") or (values >= 0).all() and values.any(), name
# A run that went back: what TensorBoard shows has each step once.
back = folder / "events_back"
shutil.rmtree(back, ignore_errors=True)
for options in (["--steps", "6", "--save-every", "2"], ["--steps", "5", "--resume", back / "checkpoints/step_00000002"]):
    subprocess.run([program, *small.split(), *options, "--out-dir", back], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    for file in (back / "tb").iterdir():  # the next start's clock is an hour behind: files are read in the order of names
        seconds = file.name.split(".")[3]
        file.rename(file.with_name(file.name.replace(seconds, f"{int(seconds) + 3600}", 1)))
shown = EventAccumulator(str(back / "tb"))
shown.Reload()
steps = [event.step for event in shown.Scalars("train/loss")]
assert steps == [1, 2, 3, 4, 5], steps
print(f"{sum(map(len, read.values()))} scalars passed, 0 failed")
