"""scripts/train: its phases, its exit codes, on the CPU with few steps.

usage: test_phases.py SCRIPT BIN FOLDER. Twin: scripts/train.
"""
import os
import pathlib
import shutil
import subprocess
import sys

from runs import PATIENCE, check, done

script, programs, root = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]) / "phases"
FEW = "--device cpu --seq-len 64 --batch-size 1 --accum-batches 1 --threads 1 --dataset synthetic".split()
TINY = FEW + "--dim 32 --layers 1 --d-k 16 --d-v 16".split()


def run(code, *words, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("NSA_")}
    ran = subprocess.run([script, *map(str, words)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         timeout=PATIENCE, env=env | {"NSA_BIN": programs} | environment)
    check(ran.returncode == code, words, ran.returncode, ran.stdout)
    return ran.stdout


shutil.rmtree(root, ignore_errors=True)
root.mkdir(parents=True)
for name, last, phases in (("smoke", 2, [1, 2]), ("production", 250, [1, 200, 250]), ("soak", 1, [1])):
    options = FEW if name == "smoke" else TINY
    said = run(0, name, f"--out={root / name}", f"--last={last}", *options)
    check([int(p.name) for p in sorted((root / name).iterdir(), key=lambda p: int(p.name))] == phases, said)
    check(said.count("\nGO\n") == len(phases), said)

# A phase that was ended goes on; one that is done stays done.
said = run(0, "smoke", "--out", root / "smoke", "--last", 2, *FEW)
check("resumed after step 2 of 2" in said, said)

shutil.rmtree(root / "smoke/2/checkpoints")  # killed before its first
said = run(0, "smoke", "--out", root / "smoke", "--last", 2, *FEW)
check("resumed after step 1 of 1" in said and "step 0002 | loss" in said, said)

# The trainer's exit code, and the verdict's.
run(2, "smoke", "--out", root / "bad", *FEW, "--frobnicate")
run(2, "smoke", "--out", root / "cuda", "--device", "cuda", "--dataset", "synthetic")
said = run(1, "smoke", "--out", root / "blind", "--last", 2, *FEW, NSA_DISABLE_AUX_STATS="1")
check("NO-GO" in said and not (root / "blind/2").exists(), "no second phase after a NO-GO", said)
for option in ("--steps=5", "--out-dir"):  # would be every phase's
    said = run(2, "smoke", "--out", root / "own", *FEW, option, "5")
    check(f"{option}: each phase has its own; --last STEPS" in said and not (root / "own").exists(), said)
said = run(2, "smoke", "--last", 1, "--last=2", "--ranks=0")
check("warning: --last: given twice, first as 1; the last one counts, 2\n" in said and said.count("given twice") == 1, said)
for words in ([], ["frobnicate"], ["smoke", "--last", "x"], ["smoke", "--ranks"], ["soak", "--ranks", "0"]):
    run(2, *words)
run(2, "smoke", NSA_BIN=str(root))
check("--ranks N" in run(0, "--help"), "help")
done()
