#!/usr/bin/env python3
"""PyTorch on the CPU beside this library, in turns: attention forward and backward, and whole steps of training.

  compare_pytorch.py [--json FILE] [--bin FOLDER] [--threads N] [--rounds N] [--tokens N] [PART...]

  attention-f32, attention-bf16       scaled_dot_product_attention, and nsa.torch's dense attention and NSA
  tiny-f32, tiny-bf16                 steps of a model 128 wide, 2 layers, 8 rows of 256 tokens
  large-f32, large-bf16               steps of a model 768 wide, 12 layers, 1 row of 2048 tokens

PyTorch's model is that of python/examples/train.py, eager, with AdamW (fused) and clipping; in bf16 by autocast. Ours
is train_tiny or train_125m of FOLDER. Before anything is timed the results are held against each other: dense attention
and its gradients against PyTorch's, NSA against PyTorch where its three branches are dense, losses of both trainers
from one checkpoint. Of keys and values repeated for a group, as PyTorch takes them, neither the copy nor the sum of
their gradients is timed. FILE keeps the rows of parts that are not run, if they are of the same day, machine and commit.
Needs PyTorch and this package: pip install torch ./python.
"""
import argparse
import csv
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python" / "examples")]
from measure import BF16_UNITS  # noqa: E402
from record_runs import commit, machine  # noqa: E402

SHAPES = ((16, 1, 64), (16, 4, 128))
MODELS = {
    "tiny": dict(name="dim 128, 2 layers, S 256, B 8", program="train_tiny", rows=8, tokens=256, steps=30,
                 model=dict(dim=128, layers=2, heads=8, kv_heads=2, head_dim=16), nsa=(16, 8, 32, 8, 64)),
    "large": dict(name="dim 768, 12 layers, S 2048, B 1", program="train_125m", rows=1, tokens=2048, steps=2,
                  model=dict(dim=768, layers=12, heads=12, kv_heads=2, head_dim=64), nsa=(32, 16, 64, 16, 512)),
}
PARTS = [f"{what}-{kind}" for what in ("attention", *MODELS) for kind in ("f32", "bf16")]
SEED, RATE, DECAY, CLIP, CHECKED = 1337, 1e-4, 0.01, 1.0, 2
NEAR = {"f32": 2e-5, "bf16": 3e-2}  # of a norm, or of a loss


def differ(what, found, expected, dtype):
    """Exit, if two results are no rounding apart."""
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm() / expected.norm())
    if not error <= NEAR[dtype]:
        raise SystemExit(f"compare_pytorch.py: {what}: {error:.2e} apart, allowed {NEAR[dtype]}; nothing was timed")


def row_of(times, **about):
    ms = statistics.median(times) * 1e3
    return {**about, "ms": float(f"{ms:.4g}"), "spread": float(f"{(max(times) - min(times)) * 1e3 / ms:.2g}")}


# ---- Attention ----------------------------------------------------------------------------------

class Attention:
    """One problem in the forms that each side takes, with what each computes of it."""

    def __init__(self, torch, shape, tokens, dtype):
        import nsa.torch as nt
        torch.manual_seed(1)
        heads, kv_heads, dim = shape
        self.group = heads // kv_heads
        real = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.q, self.dout = (torch.randn(1, tokens, heads, dim, dtype=real) for _ in range(2))
        self.kv = [torch.randn(1, tokens, kv_heads, dim, dtype=real) for _ in range(6)]
        self.gates = torch.randn(1, tokens, heads, 3, dtype=real)
        repeated = [x.transpose(1, 2).repeat_interleave(self.group, 1) for x in self.kv[:2]]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        leaves = {"pytorch": [self.q.transpose(1, 2).contiguous(), *repeated], "dense": [self.q, *self.kv[:2]],
                  "nsa": [self.q, *self.kv, self.gates]}
        self.leaves = {name: [x.detach().clone().requires_grad_() for x in xs] for name, xs in leaves.items()}
        self.calls = {"pytorch": lambda q, k, v: sdpa(q, k, v, is_causal=True),
                      "dense": lambda q, k, v: nt.attend_dense(q, k, v)[0], "nsa": nt.attention}
        self.douts = {name: self.dout.transpose(1, 2).contiguous() if name == "pytorch" else self.dout
                      for name in leaves}
        # Of 512 tokens all blocks are selected, and the window has all keys: with the gates 0, 1/2, 1/2 NSA is dense.
        self.nsa_is_dense = lambda q, k, v: nt.attention(
            q, k, v, k, v, k, v, torch.tensor([0, 0.5, 0.5], dtype=real).expand(1, q.shape[1], heads, 3), gate="none")

    def run(self, name):
        """(seconds forward, seconds backward, out)"""
        for x in self.leaves[name]:
            x.grad = None
        begin = time.perf_counter()
        out = self.calls[name](*self.leaves[name])
        middle = time.perf_counter()
        out.backward(self.douts[name])
        return middle - begin, time.perf_counter() - middle, out

    def check(self, torch, dtype):
        out, expected = self.run("dense")[2], self.run("pytorch")[2].transpose(1, 2)
        differ("dense attention", out, expected, dtype)
        for name, mine, its in zip("qkv", self.leaves["dense"], self.leaves["pytorch"]):
            its = its.grad.transpose(1, 2)
            differ("d" + name, mine.grad, its if name == "q" else its.unflatten(2, (-1, self.group)).sum(3), dtype)
        with torch.no_grad():
            first = [x[:, :512] for x in (self.q, *self.kv[:2])]
            differ("NSA where it is dense", self.nsa_is_dense(*first), expected[:, :512], dtype)


def attention(torch, given, dtype, units):
    for shape in SHAPES:
        problem = Attention(torch, shape, given.tokens, dtype)
        problem.check(torch, dtype)
        times = {name: [] for name in problem.calls}
        problem.run("nsa")
        for _ in range(given.rounds):
            for name in times:
                times[name].append(problem.run(name)[:2])
        about = dict(zip(("heads", "kv_heads", "dim"), shape), tokens=given.tokens, dtype=dtype, units=units)
        for i, of_pass in enumerate(("fwd", "bwd")):
            rows = {name: row_of([t[i] for t in ts], what=name, **about, **{"pass": of_pass}) for name, ts in times.items()}
            for row in rows.values():
                yield {**row, "over_pytorch": float(f"{rows['pytorch']['ms'] / row['ms']:.4g}")}


# ---- Training -----------------------------------------------------------------------------------

def run_c(given, of, folder, attention, precision, steps, rate, *more):
    """Losses, and seconds of each step but the first."""
    names = ("--nsa-l", "--nsa-d", "--nsa-l-sel", "--nsa-n-sel", "--nsa-w")
    model = of["model"]
    program = of["program"] if precision == "fp32" else "train_125m"
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [given.bin / program, "--dim", model["dim"], "--layers", model["layers"], "--heads", model["heads"],
               "--kv-groups", model["kv_heads"], "--d-k", model["head_dim"], "--d-v", model["head_dim"],
               *(word for pair in zip(names, of["nsa"]) for word in pair), "--attention", attention, "--device", "cpu",
               "--precision", precision, "--threads", given.threads, "--dataset", "text", "--data", ROOT / "nsa/nsa.h",
               "--val-fraction", 0, "--seq-len", of["tokens"], "--batch-size", of["rows"], "--seed", SEED,
               "--lr-schedule", "constant", "--lr", rate, "--weight-decay", DECAY, "--grad-clip", CLIP, "--log-every", 1,
               "--eval-every", 0, "--save-every", 0, "--steps", steps, "--out-dir", folder / "run", *more]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    ran = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"exit code {ran.returncode} of {' '.join(map(str, command))}\n{ran.stderr}{ran.stdout}")
    with open(folder / "run" / "training.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [float(r["loss"]) for r in rows], [of["rows"] * of["tokens"] / float(r["toks_per_s"]) for r in rows][1:]


class Trainer:
    """PyTorch's model, from the C trainer's first weights, over the C trainer's rows."""

    def __init__(self, torch, of, checkpoint, autocast):
        import train as example
        self.torch, self.autocast = torch, autocast
        self.model = example.TinyLM("full", "mean", **of["model"])
        self.model.load_state_dict(example.read_safetensors(checkpoint))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY,
                                           fused=True)
        self.rows = example.windows((ROOT / "nsa/nsa.h").read_bytes(), 10 ** 6, of["rows"], of["tokens"])

    def steps(self, count):
        """Losses, and seconds of each step but the first."""
        torch, losses, times = self.torch, [], []
        for _ in range(count):
            rows = next(self.rows)
            begin = time.perf_counter()
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = self.model(rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - begin)
        return losses, times[1:]


def training(torch, given, size, dtype, units):
    of, precision = MODELS[size], {"f32": "fp32", "bf16": "bf16"}[dtype]
    count = of["rows"] * of["tokens"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        # A step whose rate is next to nothing leaves the first weights as they are, to the bit.
        run_c(given, of, folder, "full", "fp32", 1, 1e-30, "--save", folder / "first.safetensors")
        pytorch = Trainer(torch, of, folder / "first.safetensors", dtype == "bf16")
        times = {name: [] for name in ("pytorch", "dense", "nsa")}
        for turn in range(given.rounds):
            steps = of["steps"] + 1
            its, seconds = pytorch.steps(steps)
            times["pytorch"] += seconds
            for name, kind in (("dense", "full"), ("nsa", "nsa")):
                losses, seconds = run_c(given, of, folder, kind, precision, steps, RATE)
                times[name] += seconds
                if turn == 0 and name == "dense":
                    differ("losses of the trainers", *(torch.tensor(x[:CHECKED]) for x in (losses, its)), dtype)
    rows = {name: row_of(seconds, what=name, model=of["name"], dtype=dtype, units=units) for name, seconds in times.items()}
    for row in rows.values():
        yield {**row, "tokens_per_second": float(f"{count / row['ms'] * 1e3:.4g}"),
               "over_pytorch": float(f"{rows['pytorch']['ms'] / row['ms']:.4g}")}


# ---- The report ---------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    for name, value in (("threads", 2), ("rounds", 3), ("tokens", 8192)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    parts = given.parts or PARTS
    if set(parts) - set(PARTS) or given.tokens < 512:
        parser.error("PART: one of " + ", ".join(PARTS) + "; --tokens: at least 512")
    try:
        import torch
    except ImportError:
        raise SystemExit("compare_pytorch.py: PyTorch is not installed here: pip install torch")
    torch.set_num_threads(given.threads)
    has_units = BF16_UNITS & set(pathlib.Path("/proc/cpuinfo").read_text().split())
    report = {"machine": f"{machine()}, {given.threads} threads", "date": datetime.date.today().isoformat(),
              "commit": commit(), "pytorch": torch.__version__, "rows": []}
    if given.json and given.json.exists():
        old = json.loads(given.json.read_text())
        if all(old.get(name) == report[name] for name in report if name != "rows"):
            report["rows"] = [row for row in old["rows"] if row["part"] not in parts]
    for part in parts:
        what, dtype = part.split("-")
        units = "bf16 units" if has_units else "no bf16 units"
        units = units if dtype == "bf16" else ""
        rows = attention(torch, given, dtype, units) if what == "attention" else training(torch, given, what, dtype, units)
        for row in rows:
            report["rows"].append({"part": part, **row})
            print(", ".join(f"{name} {value}" for name, value in report["rows"][-1].items()), flush=True)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
