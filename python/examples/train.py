"""The small model of train_tiny in PyTorch, beside the C trainer, from one checkpoint: the losses agree.

    python3 python/examples/train.py TRAIN_TINY TEXT [--steps 30] [--phi mlp] [--out FOLDER]

TRAIN_TINY is that program, TEXT a file. Twice, with NSA and with dense attention: the C trainer writes its first
weights and trains; a model of nn.Modules loads these weights, takes the same rows in the same order, and trains by
torch.optim.AdamW. Its attention is nsa.torch.NativeSparseAttention, and for dense scaled_dot_product_attention,
which shares nothing with nsa.h. Exit code 1 where a loss is further than --tolerance from the C trainer's.
"""
import argparse
import csv
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

import nsa.torch as nt

MODEL = dict(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16)
NSA = dict(cmp_block=16, cmp_stride=8, slc_block=16, slc_count=4, window=32)
ROWS, TOKENS, SEED, RATE = 4, 256, 1337, 1e-3
MASK = 2 ** 64 - 1


# ---- The rows, in the C trainer's order: examples/trainer/base/rng.c, data/source_corpus.c ---------------

def random_bits(seed, stream, index):
    """Philox 4x32-10, its first 64 bits."""
    key = [seed & 0xffffffff, seed >> 32]
    x = [index & 0xffffffff, index >> 32, stream & 0xffffffff, stream >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ key[0], b & 0xffffffff, a >> 32 ^ x[3] ^ key[1], a & 0xffffffff]
        key = [(key[0] + 0x9E3779B9) & 0xffffffff, (key[1] + 0xBB67AE85) & 0xffffffff]
    return x[1] << 32 | x[0]


def permuted(seed, stream, index, count):
    half = 1
    while half < 32 and 1 << 2 * half < count:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ random_bits(seed, stream, turn << 32 | right) & mask
        index = left << half | right
        if index < count:
            return index


def windows(text, steps, rows=ROWS, tokens=TOKENS):
    """(rows, tokens + 1) of bytes for each step."""
    shuffle, phase = 4, 5  # RNG_SHUFFLE, RNG_PHASE
    count = (len(text) - 1) // tokens
    count -= count > 8
    slack = min(len(text) - 1 - count * tokens, tokens - 1)
    for step in range(steps):
        found = []
        for sample in range(step * rows, (step + 1) * rows):
            epoch, place = divmod(sample, count)
            offset = random_bits(SEED, phase, epoch) * (slack + 1) >> 64
            begin = offset + permuted(SEED, shuffle | epoch << 8, place, count) * tokens
            found.append(list(text[begin:begin + tokens + 1]))
        yield torch.tensor(found)


# ---- The model ------------------------------------------------------------------------------------------

class RmsNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Dense(nn.Module):
    """Causal attention by scaled_dot_product_attention, with RoPE written out."""

    def __init__(self, dim, heads, kv_heads, head_dim):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.W_Q = nn.Linear(dim, heads * head_dim, bias=False)
        self.W_K = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.W_V = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def turned(self, x):
        tokens, pairs = x.shape[1], torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        angle = torch.arange(tokens)[:, None, None] * 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def forward(self, x):
        q = self.turned(self.W_Q(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.turned(self.W_K(x).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        v = self.W_V(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, attention):
        super().__init__()
        self.norm1, self.norm2, self.attn = RmsNorm(dim), RmsNorm(dim), attention
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim, bias=False), "fc2": nn.Linear(4 * dim, dim, bias=False)})

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](functional.silu(self.mlp["fc1"](self.norm2(x))))


class TinyLM(nn.Module):
    def __init__(self, attention, phi, dim, layers, heads, kv_heads, head_dim):
        super().__init__()

        def make():
            if attention == "full":
                return Dense(dim, heads, kv_heads, head_dim)
            return nt.NativeSparseAttention(dim, heads, kv_heads, head_dim, phi=phi, **NSA)
        self.embed, self.norm = nn.Embedding(256, dim), RmsNorm(dim)
        self.blocks = nn.ModuleList(Layer(dim, make()) for _ in range(layers))
        self.lm_head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    length, = struct.unpack_from("<Q", raw)
    found = {}
    for name, of in json.loads(raw[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = of["data_offsets"]
            values = torch.frombuffer(bytearray(raw[8 + length + begin:8 + length + end]), dtype=torch.float32)
            found[name] = values.reshape(of["shape"])
    return found


# ---- The runs -------------------------------------------------------------------------------------------

def run_c(program, text, folder, attention, phi, *more):
    command = [program, "--dim", MODEL["dim"], "--layers", MODEL["layers"], "--heads", MODEL["heads"], "--kv-groups",
               MODEL["kv_heads"], "--d-k", MODEL["head_dim"], "--d-v", MODEL["head_dim"], "--nsa-l", NSA["cmp_block"],
               "--nsa-d", NSA["cmp_stride"], "--nsa-l-sel", NSA["slc_block"], "--nsa-n-sel", NSA["slc_count"], "--nsa-w",
               NSA["window"], "--nsa-phi", "avg" if phi == "mean" else phi, "--attention", attention, "--dataset", "text",
               "--data", text, "--val-fraction", 0, "--seq-len", TOKENS, "--batch-size", ROWS, "--seed", SEED,
               "--lr-schedule", "constant", "--grad-clip", 0, "--weight-decay", 0, "--log-every", 1, "--out-dir", folder,
               *more]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{ran.stderr}{ran.stdout}")
    with open(folder / "training.csv", encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def train(model, text, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    for rows in windows(text, steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(a, folder, attention):
    """The largest difference of a step's losses."""
    # A step whose rate is next to nothing leaves the first weights as they are, to the bit.
    run_c(a.program, a.text, folder / f"{attention}_init", attention, a.phi, "--steps", 1, "--lr", 1e-30, "--save",
          folder / f"{attention}.safetensors")
    c = run_c(a.program, a.text, folder / attention, attention, a.phi, "--steps", a.steps, "--lr", RATE)
    model = TinyLM(attention, a.phi, **MODEL)
    model.load_state_dict(read_safetensors(folder / f"{attention}.safetensors"))
    found = train(model, a.text.read_bytes(), a.steps)
    print(f"{attention}, step, C trainer, PyTorch")
    for step in sorted({1, 2, 5, 10, 20, a.steps} & set(range(1, a.steps + 1))):
        print(f"{step:5} {c[step - 1]:.6f} {found[step - 1]:.6f}")
    return max(abs(x - y) for x, y in zip(c, found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="TRAIN_TINY")
    parser.add_argument("text", metavar="TEXT", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--phi", choices=["mean", "conv", "mlp"], default="mlp")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--out", type=pathlib.Path, help="keeps the C trainer's folders here")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = a.out or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        kinds = ["nsa"] + ["full"] * hasattr(functional, "scaled_dot_product_attention")
        apart = {kind: compare(a, folder, kind) for kind in kinds}
    for kind, most in apart.items():
        print(f"{kind}: at most {most:.2e} apart in {a.steps} steps; allowed {a.tolerance}")
    return any(not most <= a.tolerance for most in apart.values())


if __name__ == "__main__":
    sys.exit(main())
