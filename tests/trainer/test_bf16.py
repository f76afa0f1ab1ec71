"""Whole runs in bf16, their linear maps multiplied as f32 and, with bf16_units.c, as bf16: repeated, resumed, computed
again and shared between ranks, to the bit; accumulated, to rounding. And scripts/precision.py, which compares.

usage: test_bf16.py TRAIN_TINY FOLDER UNITS [TRAIN_125M LAUNCHER...]; UNITS is bf16_units.c's library, or none. Twins:
ops_half.c, gemm_bf16.c.
"""
import json
import os
import pathlib
import re
import subprocess
import sys

from runs import SMALL, Runs, check, done

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
SKIPPED = 77  # by bf16_units.c, where oneDNN emulates nothing
program, folder, units, *ranks = sys.argv[1:]
runs = Runs(program, folder, "bf16")
TEXT = ("--data", runs.text())
BF16 = (*TEXT, "--precision", "bf16", "--steps", 8, "--save-every", 4)


def losses(out):
    return [float(line.split(",")[1]) for line in (out / "training.csv").read_text().splitlines()[1:]]


def same_bits(one, two):
    for file in ("model.safetensors", "optimizer.safetensors"):
        paths = [out / "checkpoints/latest" / file for out in (one, two)]
        check(paths[0].read_bytes() == paths[1].read_bytes(), *paths)


def test_promises(kind, words, environment):
    runs.launcher, runs.program = (), program
    whole, said, _ = runs.train(kind, *BF16, **environment)
    check(f"runtime.precision: linear maps of bf16 are {words}" in said, said)
    check(losses(whole)[-1] < 0.95 * losses(whole)[0], losses(whole))
    part, _, _ = runs.train(f"{kind}-part", "--resume", whole / "checkpoints/step_00000004", "--steps", 8,
                            "--precision", "bf16", small=False, **environment)
    same_bits(whole, part)
    for name, options in (("threads", ("--threads", 2)), ("again", ("--gc=true",)), ("selective", ("--gc=selective",))):
        out, _, _ = runs.train(f"{kind}-{name}", *BF16, *options, **environment)
        same_bits(whole, out)
    halves, _, _ = runs.train(f"{kind}-halves", *BF16, "--batch-size", 2, "--accum-batches", 2, **environment)
    check(all(abs(a - b) < 2e-2 * a for a, b in zip(losses(whole), losses(halves))), losses(whole), losses(halves))
    return losses(whole)


def test_ranks(environment, alone):
    runs.program, *runs.launcher = ranks
    one, two = [runs.train(name, *BF16, **environment)[0] for name in ("ranks", "ranks-again")]
    same_bits(one, two)
    check(all(abs(a - b) < 2e-2 * a for a, b in zip(alone, losses(one))), alone, losses(one))


def test_packed(environment):
    """--check counts the copies of weights: two for each matrix but the embedding, which is only looked up."""
    def megabytes(*options):
        ran = subprocess.run([program, *SMALL, *TEXT, "--check", *options], env=CLEAN | environment,
                             capture_output=True, text=True)
        parameters = int(re.search(r"parameters: (\d+)", ran.stdout)[1])
        return parameters, {name: float(size) for name, size in re.findall(r"^  (\w+) +([\d.]+)$", ran.stdout, re.M)}

    options = ("--precision", "bf16", "--dim", "256")
    parameters, narrow = megabytes(*options)
    check(abs(narrow["weights"] - 6 * parameters / 2**20) < 0.1, narrow)
    matrices = parameters - 256 * 256  # and some vectors
    check(abs(4 * matrices / 2**20 - narrow["packed"]) < 0.1 if environment else narrow["packed"] == 0, narrow)
    check(abs(sum(narrow.values()) - 2 * narrow["all"]) < 1, narrow)
    _, wide = megabytes("--dim", "256")
    check(wide["packed"] == 0, wide)


def test_comparison():
    script = [sys.executable, pathlib.Path(__file__).parents[2] / "scripts/precision.py"]
    options = ["--seeds", 1, *SMALL, "--steps", 6, "--warmup-steps", 2, "--eval-every", 6, "--eval-batches", 1]
    command = [str(x) for x in (*script, "train", program, TEXT[1], runs.root / "compared", *options)]
    ran = subprocess.run(command, capture_output=True, text=True, env=CLEAN)
    losses = [line for line in ran.stderr.splitlines() if not line.startswith("warning: ")]  # options given twice
    check(ran.returncode == 0 and len(losses) == 4, ran)
    again = subprocess.run(command, capture_output=True, text=True, env=CLEAN)
    check(again.stderr.splitlines() == losses, again)
    wrote = subprocess.run([*script, "write", runs.root / "compared"], capture_output=True, text=True,
                           env=os.environ | {"PATH": "/nowhere"})  # a bare machine has no git
    report = json.loads(wrote.stdout)
    rows = report["rows"]
    check(report["commit"] == "", report["commit"])
    check([(row["model"], row["precision"]) for row in rows] ==
          [(model, precision) for model in ("quickstart", "12 layers") for precision in ("fp32", "bf16")], rows)
    check(all(row["steps"] == 6 and 0.98 < row["over_fp32"] < 1.02 for row in rows), rows)
    check([row["over_fp32"] == 1 for row in rows] == [True, False] * 2, rows)


def units_are_there():
    ran = subprocess.run([program, *TEXT, "--precision", "bf16", "--check"], env=os.environ | {"LD_PRELOAD": units},
                         capture_output=True)
    return ran.returncode != SKIPPED


os.environ["ONEDNN_MAX_CPU_ISA"] = CLEAN["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # no units, whatever this processor has
as_f32 = test_promises("f32", "computed as f32, so fp32 is faster here: ", {})
environment = {"LD_PRELOAD": units} if units != "none" and units_are_there() else {}
if environment:
    as_bf16 = test_promises("units", "multiplied by this processor's units for bf16", environment)
    check(all(abs(a - b) < 2e-2 * a for a, b in zip(as_f32, as_bf16)), as_f32, as_bf16)
test_packed(environment)
test_comparison()
if ranks:
    test_ranks(environment, as_f32)
done()
