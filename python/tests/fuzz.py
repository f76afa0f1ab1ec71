"""Random calls of nsa, nsa.torch or nsa.jax, valid and not, with every array between two pages that nobody may touch.

    fuzz.py numpy|torch|jax [--seed N] [--calls N] [--results FILE]

What is read lies in pages that cannot be written, what is written has a mark everywhere before the call. A call either does
it, and no mark is left, or is refused with nsa.Refused, and every mark is there. Anything else, a signal above all, is a
failure, and the seed is printed. Workspace and what PyTorch's operators return lie between such pages too; for JAX a twin
of native/xla.c in Python puts its buffers there. Twin: tests/fuzz, for what the C library reads. Not here: right values.
"""
import argparse
import ctypes
import faulthandler
import gc
import mmap
import sys

import numpy as np

import hosts
import nsa
from nsa import _abi, _functions, _library, _pack

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes, libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], [ctypes.c_void_p, ctypes.c_size_t]
MARK = 0x5B  # of every byte: no value that a call would write
DESC_SIZES = ("batch", "tokens", "heads", "kv_heads", "dim", "dim_v", "first", "count", "gate_heads", "gate_stride", "rows",
              "table_width", "page_tokens", "page_count")
WORDS = dict(gate=("sigmoid", "softmax", "none"), mask=("causal", "none"), forced=("inside", "on_top", "tail"),
             score_map=("overlap_sum", "overlap_max"), window_rule=("counts_self", "before_self"))

STRIDES = (0, 1, 2, 3, 4)  # of keys that stand for several tokens


class Pages:
    """Memory of one call."""

    def __init__(self, rng):
        self.rng, self.mapped, self.count = rng, [], 0

    def bytes(self, size):
        """An address with so many bytes, at the end of its pages or at their beginning, and guards on both sides."""
        inner = -(-max(1, size) // PAGE) * PAGE
        base = libc.mmap(None, inner + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), "no memory"
        ctypes.memset(base + PAGE, MARK, inner)
        libc.mprotect(base, PAGE, 0), libc.mprotect(base + PAGE + inner, PAGE, 0)
        self.mapped.append((base, inner))
        self.count += 1
        return base + PAGE + (inner - size if self.rng.random() < 0.7 or size % 8 else 0)

    def array(self, shape, dtype, fill=None, written=False):
        """Of marks, to be written; or with `fill` in pages that can only be read, unless it is `written` too."""
        dtype, shape = np.dtype(dtype), tuple(max(0, int(n)) for n in shape)
        size = int(np.prod(shape)) * dtype.itemsize
        address = self.bytes(size)
        found = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, size)).from_address(address))[:size].view(dtype).reshape(shape)
        if fill is not None:
            found[...] = fill
            if not written:
                self.lock()
                found.flags.writeable = False
        return found

    def lock(self):
        base, inner = self.mapped[-1]
        libc.mprotect(base + PAGE, inner, mmap.PROT_READ)

    def free(self):
        gc.collect(0)
        for base, inner in self.mapped:
            libc.munmap(base, inner + 2 * PAGE)
        self.mapped = []


def marks(x):
    """How many elements of an array hold the mark in all their bytes."""
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(-1, x.itemsize) if x.size else np.zeros((0, 1), np.uint8)
    return int((raw == MARK).all(1).sum())


class Problem:
    """A geometry, and arrays of the descriptor that belong to it."""

    def __init__(self, rng, pages):
        self.rng, self.pages = rng, pages
        pick = lambda *of: of[int(rng.integers(len(of)))]  # noqa: E731
        self.kv = pick(1, 2, 3)
        self.heads, self.dim, self.dim_v = self.kv * pick(1, 2, 4), pick(1, 8, 16, 33), pick(1, 8, 16, 40)
        stride = pick(1, 2, 4)
        block = stride * pick(1, 2, 4)
        slc = block * pick(1, 2, 3)
        self.options = dict(cmp_block=block, cmp_stride=stride, slc_block=slc, slc_count=pick(1, 3, 5), slc_init=0, slc_local=1,
                            window=pick(1, 5, 24, 200), **{name: pick(*words) for name, words in WORDS.items()})
        self.batch, self.tokens = pick(1, 2, 3), pick(0, 1, 7, 31, 64, 65)
        self.kind = pick("plain", "plain", "begins", "counts", "pages")
        self.first = pick(0, 0, int(rng.integers(self.tokens + 1)))
        self.count = self.tokens - self.first
        self.begins = self.firsts = self.counts = self.table = None
        self.page_tokens = self.page_count = 0
        getattr(self, "_" + self.kind)()

    def rows_of(self, stride):
        """Of keys that stand for so many tokens each, as numpy holds them; the layers' packed ones have those of all rows."""
        if self.begins is not None:
            return int(sum((b - a) // stride for a, b in zip(self.begins, self.begins[1:])))
        return (self.tokens if self.table is None else self.page_tokens) // stride

    def integers(self, values, shape=None):
        values = np.array(values, np.int32)
        return self.pages.array(values.shape if shape is None else shape, np.int32, values)

    def _plain(self):
        self.rows = self.count

    def _begins(self):
        lengths = self.rng.integers(0, self.tokens + 1, self.batch)
        gap = int(self.rng.integers(3))
        self.begins = self.integers(np.concatenate([[gap], gap + np.cumsum(lengths)]))
        self.rows, self.first = int(self.begins[-1]), min(self.first, self.tokens)

    def _counts(self):
        counts = self.rng.integers(0, max(1, self.tokens // 2) + 1, self.batch)
        self.counts = self.integers(np.minimum(counts, self.tokens))
        self.firsts = self.integers([self.rng.integers(self.tokens - n + 1) for n in self.counts])
        self.first, self.count, self.rows = 0, int(max(self.counts)), int(sum(self.counts))

    def _pages(self):
        self._counts()
        self.page_tokens = self.options["cmp_stride"] * int(self.rng.integers(1, 5))
        width = -(-max(1, self.tokens) // self.page_tokens)
        self.page_count = width * self.batch + 1
        self.table = self.integers(self.rng.permutation(self.page_count)[:self.batch * width].reshape(self.batch, width))

    def spoil(self):
        """One thing that does not belong."""
        wrong = [-1, 0, 1, 3, 7, 65, 200, 4096, 2**31 - 1, -2**31]
        value = wrong[int(self.rng.integers(len(wrong)))]
        of = [name for name in ("begins", "firsts", "counts", "table") if getattr(self, name) is not None]
        if of and self.rng.random() < 0.7:
            name = of[int(self.rng.integers(len(of)))]
            x = np.array(getattr(self, name))
            if self.rng.random() < 0.3:
                x = x[:-1]
            else:
                x.flat[int(self.rng.integers(x.size))] = value
            setattr(self, name, self.integers(x))
            return None
        names = [*self.options, *DESC_SIZES, "windows"]
        return names[int(self.rng.integers(len(names)))], value


class Tally(dict):
    def add(self, what):
        self[what] = self.get(what, 0) + 1


def attempt(tally, call, written):
    """written: the arrays that the call writes; by a function, for those that it makes."""
    try:
        call()
    except nsa.Refused:
        tally.add("refused")
        return False
    except TypeError as error:  # a name that a struct does not have, an argument given twice
        if "no field" not in str(error) and "multiple values" not in str(error):
            raise
        tally.add("refused")
        return False
    tally.add("computed")
    for name, x in written():
        assert not marks(x), f"{name}: {marks(x)} of {x.size} elements were not written"
    return True


# ---- numpy --------------------------------------------------------------------------------------

FUNCTIONS = [name for name in _functions.__all__ if name.endswith("_forward") or name in (
    "select_blocks", "score_blocks", "rank_queries", "attend_win_backward", "attend_dense_backward", "compress_backward",
    "gate_backward", "merge_backward", "rope_backward")]
STRUCTS = {"attend": nsa.Attend, "compress": nsa.Compress, "gate": nsa.Gate, "merge": nsa.Merge, "rope": nsa.Rope,
           "attention": nsa.Attention, "select": nsa.Select, "score": nsa.Score, "rank": nsa.Rank}


def filled(p, struct, words, d, dtype, x, backward=False):
    """Arrays for the views of x, of the shapes that the header gives."""
    real, written = np.float64 if dtype == np.float64 else np.float32, []
    kind = _library._PHIS.get(int(x.phi), "") if struct is nsa.Compress else ""
    for field, of in struct.kinds().items():
        shape = _library.shape_for(struct, field, (*words, kind))
        if isinstance(of, type) and issubclass(of, nsa.Compress):
            inner = nsa.Compress(phi=int(p.rng.integers(3)), dim=d.dim if field[0] == "k" else d.dim_v, hidden=3)
            written += filled(p, nsa.Compress, words, d, dtype, inner)
            setattr(x, field, inner)
            continue
        if of is not nsa.Tensor or shape is None:
            continue
        if struct is nsa.Compress and field in ("pos", "w1", "b1", "w2", "b2") and (
                kind == "mean" or kind == "conv" and field not in ("w1", "b1")):
            continue
        known = _library.extents(d, "count" in shape)
        shape = tuple(known[axis] if axis in known else _library._extent(axis, known, x) for axis in shape)
        if struct is nsa.Score and field == "k" and x.stride > 1:
            shape = (shape[0], p.rows_of(x.stride), *shape[2:])
        kind_of = np.int32 if field in ("blocks", "positions") else real if field[:3] == "lse" or field == "scores" else dtype
        output = field in _library.outputs_of(struct, words) and not backward or backward == "dx" and field not in ("out", "lse", "blocks", "positions")
        if backward == "dx" and field in ("blocks", "positions"):
            continue
        if output and struct is nsa.Compress and p.counts is not None:  # rows of earlier steps, which are read too
            array = p.pages.array(shape, kind_of, p.rng.standard_normal(tuple(max(0, n) for n in shape)), written=True)
        elif output:
            array = p.pages.array(shape, kind_of)
            if backward == "dx":
                array[...] = 0
            elif "count" in _library.shape_for(struct, field, (*words, kind)):
                written.append((field, array))
        elif kind_of == np.int32:
            array = p.pages.array(shape, np.int32, -1 if field == "blocks" else p.rng.integers(0, 90, tuple(max(0, n) for n in shape)))
        else:
            array = p.pages.array(shape, kind_of, p.rng.standard_normal(tuple(max(0, n) for n in shape)))
        setattr(x, field, array)
    return written


def numpy_desc(p):
    d = nsa.desc(p.batch, p.tokens, p.heads, p.kv, p.dim, dim_v=p.dim_v, first=p.first, count=p.count, **p.options)
    for name, array in (("begins", p.begins), ("firsts", p.firsts), ("counts", p.counts), ("pages", p.table)):
        if array is not None:
            setattr(d, name, array)
    if p.table is not None:
        d.table_width, d.page_tokens, d.page_count = p.table.shape[1], p.page_tokens, p.page_count
    return d


def numpy_call(rng, pages, tally):
    p, name = Problem(rng, pages), FUNCTIONS[int(rng.integers(len(FUNCTIONS)))]
    words, backward = tuple(name.split("_")), name.endswith("_backward")
    struct, d, dtype = STRUCTS[words[0]], numpy_desc(p), (np.float32, np.float16, np.float64)[int(rng.integers(3))]
    sizes = dict(heads=p.heads, dim=max(2, p.dim // 2 * 2)) if struct is nsa.Rope else dict(
        phi=int(rng.integers(3)), dim=p.dim, hidden=3) if struct is nsa.Compress else dict(
        act=int(rng.integers(2)), pool=int(rng.integers(2)), stride=int(rng.choice(STRIDES))) if struct is nsa.Score else {}
    x = struct(**sizes)
    try:
        written = filled(p, struct, words, d, dtype, x, "x" if backward else False)
        dx = struct(**sizes)
        if backward:
            filled(p, struct, words, d, dtype, dx, "dx")
    except nsa.Refused:
        return tally.add("refused")
    if rng.random() < 0.5:
        wrong = p.spoil()
        try:
            for field, array in (("begins", p.begins), ("firsts", p.firsts), ("counts", p.counts), ("pages", p.table)):
                if array is not None:
                    setattr(d, field, array)
            if wrong is not None and not isinstance(wrong[1], str):
                setattr(d, *wrong)
        except (nsa.Refused, TypeError):
            return tally.add("refused")
    arguments = (dx, x, d) if backward else (x, d)
    attempt(tally, lambda: getattr(nsa, name)(*arguments), lambda: [] if backward else written)


def cache_call(rng, pages, tally):
    """A cache that is appended to, taken back, copied; with counts, and outputs that may not be written."""
    p = Problem(rng, pages)
    options = dict(p.options, mask="causal")
    d = nsa.desc(p.batch, p.tokens, p.heads, p.kv, p.dim, dim_v=p.dim_v, **options)
    dtype = (np.float32, np.float64)[int(rng.integers(2))]
    try:
        cache = nsa.Cache(d, "f64" if dtype == np.float64 else ("f32", "f16", "bf16")[int(rng.integers(3))], int(rng.integers(-1, 20)))
    except nsa.Refused:
        return tally.add("refused")
    for _ in range(4):
        count = int(rng.integers(0, 9))
        own = nsa.desc(p.batch, count, p.heads, p.kv, p.dim, dim_v=p.dim_v, **options)
        x = nsa.Attention()
        written = filled(p, nsa.Attention, (), own, dtype, x)
        counts = p.integers(rng.integers(-1 if rng.random() < 0.2 else 0, count + 1, p.batch)) if rng.random() < 0.5 else None
        if rng.random() < 0.2 and written:
            field, array = written[int(rng.integers(len(written)))]
            locked = pages.array(array.shape, array.dtype, 0)
            setattr(x, field, locked)
        attempt(tally, lambda: cache.decode(x, count, counts), lambda: written)
        attempt(tally, lambda: cache.rewind(int(rng.integers(-1, p.batch + 1)), int(rng.integers(-1, 70))), list)
        attempt(tally, lambda: cache.fork(int(rng.integers(p.batch)), cache, int(rng.integers(-1, p.batch)), int(rng.integers(9))), list)


def run_numpy(rng, pages, tally):
    _library.memory = lambda size: (ctypes.c_char * size).from_address(pages.bytes(size))
    nsa.memory = lambda size: (ctypes.c_char * size).from_address(pages.bytes(size)) if size < 1 << 20 else _plain_memory(size)
    (cache_call if rng.random() < 0.2 else numpy_call)(rng, pages, tally)


_plain_memory = _library.memory


# ---- PyTorch and JAX ----------------------------------------------------------------------------

def layer_call(module, make, p, rng, tally, results):
    """A function of nsa.torch or nsa.jax; `make` makes its tensors, and `results` the arrays of what it returned."""
    shape_q = (1, p.rows) if p.kind != "plain" else (p.batch, p.rows)
    shape_k = ((p.page_count, p.page_tokens) if p.table is not None else (1, p.rows) if p.begins is not None
               else (p.batch, p.tokens))
    n = _pack.cmp_count(f"cmp_block={p.options['cmp_block']},cmp_stride={p.options['cmp_stride']}", shape_k[1])
    shape_c = (shape_k[0], p.page_tokens // p.options["cmp_stride"] if p.table is not None else n)
    dtype = ("float32", "float16", "bfloat16", "float64")[int(rng.integers(4))]
    q, k, v = make((*shape_q, p.heads, p.dim), dtype), make((*shape_k, p.kv, p.dim), dtype), make((*shape_k, p.kv, p.dim_v), dtype)
    kc, vc = (make((*shape_c, p.kv, width), dtype, written=True) for width in (p.dim, p.dim_v))
    options = dict(p.options)
    at, spoiled = dict(first=p.first), None
    if rng.random() < 0.5:
        spoiled = p.spoil()
    for name, array in (("begins", p.begins), ("firsts", p.firsts), ("counts", p.counts), ("pages", p.table)):
        if array is not None:
            at[name] = make(None, None, array)
    longest = p.tokens if p.begins is not None or p.table is not None else 0
    if spoiled is not None:
        options[spoiled[0]] = spoiled[1]
    if rng.random() < 0.1:
        del at["first"]
    lists = p.options["slc_count"] + (p.options["forced"] != "inside")
    blocks = make(None, None, p.integers(np.full((*shape_q, p.kv, lists), -1)))
    stride = int(rng.choice(STRIDES))
    rows_k = shape_k[1] // stride if stride > 1 else shape_k[1]
    scored, most = make((shape_k[0], rows_k, p.kv, p.dim), dtype), p.tokens if stride > 1 else longest
    rope_at = {name: value for name, value in at.items() if name != "pages"}
    gates = make((*shape_q, p.kv, 3), dtype)
    calls = {
        "attend_win": lambda: module.attend_win(q, k, v, longest=longest, **{**at, **options}),
        "attend_dense": lambda: module.attend_dense(q, k, v, longest=longest, **{**at, **options}),
        "attend_slc": lambda: module.attend_slc(q, k, v, blocks, longest=longest, **{**at, **options}),
        "attend_cmp": lambda: module.attend_cmp(q, kc, vc, **{"tokens": p.tokens, **at, **options}),
        "score_blocks": lambda: module.score_blocks(q, scored, stride=stride, longest=most, scores=True, **{
            **at, **options}),
        "rope": lambda: module.rope(q, longest=p.tokens, **rope_at),
        "attention": lambda: module.attention(q, k, v[..., :], k, v, k, v, gates, longest=longest, **{
            **at, **options, **({"compressed": (kc, vc)} if "counts" in at or "pages" in at else {})}),
    }
    name = list(calls)[int(rng.integers(len(calls)))]
    found = []
    attempt(tally, lambda: found.append(calls[name]()), lambda: results(found[0]))


def run_torch(rng, pages, tally):
    import torch
    from nsa.torch import _native as native
    import nsa.torch as nt
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

    def over(array, dtype=None):
        array.flags.writeable = True  # torch has no such flag; the pages have
        x = torch.from_numpy(array)
        return x if dtype is None else x.view(dtype)

    def make(shape, dtype, array=None, written=False):
        if array is not None:
            return over(array)
        values = torch.from_numpy(rng.standard_normal(shape)).to(names[dtype])
        raw = values.view(torch.int16 if values.element_size() == 2 else torch.int32 if values.element_size() == 4 else torch.int64)
        return over(pages.array(raw.shape, raw.numpy().dtype, raw.numpy(), written), names[dtype])

    def empty(shape, dtype, device=None):
        size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
        return over(pages.array((size,), np.uint8)).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)

    def results(found):
        flat = found if isinstance(found, tuple) else (found,)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return [(f"result {i}", x.contiguous().view(kinds[x.element_size()]).numpy()) for i, x in enumerate(flat) if x.numel()]

    # What operators return and need for themselves; and no call in one step, which has PyTorch's own memory.
    native.empty, native.keep = empty, lambda memory: None
    native.scratch = lambda size, device: ScratchOf(pages, size)
    native.Plan.form = property(lambda self: None)
    native._plans.clear()
    with torch.no_grad():
        layer_call(nt, make, Problem(rng, pages), rng, tally, results)


class ScratchOf:
    """As _memory.Scratch, a piece for each call."""
    last = 0

    def __init__(self, pages, size):
        ScratchOf.last -= 1
        self.address, self.size, self.number = pages.bytes(size), size, ScratchOf.last


def run_jax(rng, pages, tally):
    import jax
    import jax.numpy as jnp
    import nsa.jax as nj
    jax.config.update("jax_enable_x64", True)
    for name in ("_rope", "_compress", "_attend", "_merge", "_gate", "_attention"):
        setattr(nj, name, getattr(getattr(nj, name), "fun", getattr(nj, name)))
    nj._register = lambda: None

    def make(shape, dtype, array=None, written=False):
        values = array if array is not None else np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
        return pages.array(values.shape, values.dtype, values)

    def ffi_call(_, outputs, vmap_method=None, input_output_aliases=None):
        """native/xla.c, over buffers between guards."""
        def call(*inputs, function, f64, structs, sizes, counted, places, items, zero, nothing, cleared, counted_by, rows):
            lib = _library.library(bool(f64))
            buffers = [pages.array(np.shape(x), np.asarray(x).dtype, np.asarray(x)) for x in inputs]
            made = [pages.array(x.shape, x.dtype, None) for x in outputs]
            for at, to in (input_output_aliases or {}).items():
                made[to][...] = buffers[at]
            address = pages.bytes(len(structs))
            ctypes.memmove(address, structs.ctypes.data, len(structs))
            if counted_by >= 0 and (int(buffers[counted_by].sum()) != rows or (buffers[counted_by] < 0).any()):
                raise nsa.Refused("counts", "SIZE", "counts")
            for x, place in zip((*buffers, *made), places):
                if place >= 0:
                    ctypes.c_uint64.from_address(address + int(place)).value = x.ctypes.data
            for x in made if zero else ():
                x[...] = 0
            at = [address + int(sum(sizes[:i])) for i in range(len(sizes))]
            if nothing:
                return made
            f = ctypes.CDLL(str(lib.path))["nsa_" + function]
            given = [ctypes.c_void_p(a) for a in at]
            if counted >= 0:
                size_of = ctypes.CDLL(str(lib.path))[f"nsa_{function}_workspace_size"]
                size_of.restype = ctypes.c_size_t
                size = size_of(*given[len(given) - int(counted):])
                given += [ctypes.c_void_p(pages.bytes(size)), ctypes.c_size_t(size)]
            lib.check(f(*given))
            for offset, *shape, infinite in np.reshape(cleared[1:], (-1, 5)).tolist():
                lib.clear(at[-1], address + offset, *shape, infinite)
            return made
        return call

    def results(found):
        flat = jax.tree.leaves(found)
        kinds = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
        return [(f"result {i}", np.asarray(x).view(kinds[x.dtype.itemsize])) for i, x in enumerate(flat[:2]) if x.size]

    was, nj.jax.ffi.ffi_call = nj.jax.ffi.ffi_call, ffi_call
    stop, nj.jax.lax.stop_gradient = nj.jax.lax.stop_gradient, lambda x: x
    try:
        layer_call(nj, make, Problem(rng, pages), rng, tally, results)
    finally:
        nj.jax.ffi.ffi_call, nj.jax.lax.stop_gradient = was, stop


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=("numpy", "torch", "jax"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--begin", type=int, default=0, help="the first call's number")
    parser.add_argument("--say", action="store_true", help="the number of each call before it, to find the one of a signal")
    parser.add_argument("--results", help="the counts are written there, as bench/results/fuzz_python.json has them")
    a = parser.parse_args()
    faulthandler.enable()
    tally, arrays = Tally(), 0
    for i in range(a.begin, a.begin + a.calls):
        rng = np.random.default_rng([a.seed, i])
        pages = Pages(rng)
        try:
            if a.say:
                print(i, flush=True)
            {"numpy": run_numpy, "torch": run_torch, "jax": run_jax}[a.host](rng, pages, tally)
        except BaseException:
            print(f"fuzz.py {a.host}: call {i} of seed {a.seed}", flush=True)
            raise
        arrays += pages.count
        pages.free()
    print(f"{a.host}: {a.calls} problems, {tally.get('computed', 0)} calls computed, {tally.get('refused', 0)} refused, "
          f"{arrays} arrays between guards, no fault")
    if a.results:
        hosts.write_row(a.results, dict(host=a.host, version=hosts.version(a.host), problems=a.calls, seed=a.seed, **tally,
                                        arrays_between_guards=arrays), hosts.commit())
    return 0


if __name__ == "__main__":
    sys.exit(main())
