#!/usr/bin/env python3
"""What others take on the same shapes as bench_gpu.c: PyTorch's flash and cuDNN attention (dense,
causal), flash-linear-attention's NSA where it is installed, and the rate of a large matrix product.
What is missing or fails is a row with its reason, never left out silently.

usage: peers.py [--json FILE] [--quick] [--dry-run]
"""
import argparse
import json
import pathlib
import statistics
import sys

SHAPES = [(64, 4, 128, 128), (64, 4, 192, 128), (16, 1, 64, 64), (12, 2, 64, 64), (32, 32, 128, 128)]
TOKENS = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
QUICK_TOKENS = [8192, 65536]


def milliseconds(torch, call):
    """As bench_gpu.c: the median of up to 50 runs, or as many as half a second holds, three at least,
    after up to three more, one if it takes long."""
    times, warm = [], 3
    while len(times) < 50 and (len(times) < 3 or sum(times) < 500):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        one = begin.elapsed_time(end)
        if warm:
            warm = warm - 1 if one < 100 else 0
        else:
            times.append(one)
    return statistics.median(times)


def product_tflops(torch):
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2e-9 * n**3 / milliseconds(torch, lambda: a @ b)


def dense_calls(torch, backend, shape, tokens):
    """Forward, backward and a step of decoding by one backend of PyTorch's attention."""
    heads, kv_heads, dim, dim_v = shape
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, dim_v)]
    q, k, v = (torch.randn(1, h, tokens, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h, d in sizes)

    def attend(queries, causal):
        with torch.nn.attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                queries, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    out = attend(q, True)
    dout, last = torch.randn_like(out), q[:, :, -1:].detach()
    return {"fwd": lambda: attend(q, True),
            "bwd": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
            "step": lambda: attend(last, False)}


def fla_calls(torch, shape, tokens):
    """flash-linear-attention's NSA: its own compression, selection and three branches."""
    from fla.ops.nsa.parallel import parallel_nsa
    heads, kv_heads, dim, dim_v = shape
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, dim_v)]
    q, k, v = (torch.randn(1, tokens, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h, d in sizes)
    gates = [torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16, requires_grad=True)
             for _ in range(3)]

    def forward():
        out = parallel_nsa(q, k, v, *gates, block_counts=16, block_size=64, window_size=512)
        return out[0] if isinstance(out, tuple) else out

    out = forward()
    dout = torch.randn_like(out)
    return {"fwd": forward,
            "bwd": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)}


def peers_of(torch):
    backends = torch.nn.attention.SDPBackend
    return {"torch flash": lambda s, t: dense_calls(torch, backends.FLASH_ATTENTION, s, t),
            "torch cudnn": lambda s, t: dense_calls(torch, backends.CUDNN_ATTENTION, s, t),
            "fla nsa": lambda s, t: fla_calls(torch, s, t)}


def row_of(peer, shape, tokens, which, ms, reason):
    return {"peer": peer, "pass": which, "heads": shape[0], "kv_heads": shape[1], "dim": shape[2],
            "dim_v": shape[3], "tokens": tokens, "ms": ms, "reason": reason}


def measure(torch, peer, make, shape, tokens):
    """A row for each pass, or one that says why there are none. A pass that fails says why in its own row:
    others keep their times."""
    rows, calls = [], {}

    def add(name, ms, error):
        reason = error and f"{type(error).__name__}: {error}"[:300]
        rows.append(row_of(peer, shape, tokens, name, ms, reason))

    try:
        calls = make(shape, tokens)
    except Exception as error:  # any library may refuse a shape in its own way; the row says which
        add("fwd", None, error)
    for name, call in calls.items():
        try:
            add(name, milliseconds(torch, call), None)
        except Exception as error:
            add(name, None, error)
    torch.cuda.empty_cache()
    return rows


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--json", type=pathlib.Path)
    options.add_argument("--quick", action="store_true", help="one shape at two lengths")
    options.add_argument("--dry-run", action="store_true", help="rows without times; needs no GPU")
    given = options.parse_args()
    report = {"torch": None, "product_tflops": None, "rows": []}
    quick = [(SHAPES[0], t) for t in QUICK_TOKENS]
    every = [(s, t) for s in SHAPES for t in TOKENS]
    cases = quick if given.quick else quick + [case for case in every if case not in quick]

    def write():
        """After each row, so that a run which is cut short tells what it has measured."""
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n")

    torch, reason = None, "dry run"
    if not given.dry_run:
        try:
            import torch.nn.attention
            if not torch.cuda.is_available():
                torch, reason = None, f"torch {torch.__version__} finds no GPU"
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            torch, reason = None, str(error)
    if torch is None:
        report["rows"] = [row_of(peer, s, t, "fwd", None, reason) for s, t in cases
                          for peer in ("torch flash", "torch cudnn", "fla nsa")]
    else:
        report.update(torch=torch.__version__, product_tflops=product_tflops(torch))
        for shape, tokens in cases:
            for peer, make in peers_of(torch).items():
                report["rows"] += measure(torch, peer, make, shape, tokens)
                write()
    write()
    measured = sum(row["ms"] is not None for row in report["rows"])
    print(f"{len(report['rows'])} rows, {measured} measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
