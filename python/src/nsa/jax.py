"""Native Sparse Attention for JAX on the CPU: the functions of nsa.h under jit, grad and vmap.

    python -m nsa.build jax     once, after the package is installed: makes the handlers for XLA

Arrays are (B, T, H, D). With `first`, q holds rows first .. of each sequence's keys; it must be given if there are
fewer rows of q than tokens. Options are fields of nsa.Desc by name: window=512, gate="softmax", mask="none",
list_heads=8 (lists then have that many heads); sizes are what the arrays say, and no options. Block lists carry no
gradient. vmap runs the function once for each item. Where sequences differ in length, by arrays of int32:

    begins (B + 1)          packed: all arrays are (1, rows, H, D), sequence b is rows begins[b] .. begins[b + 1] - 1,
                            `longest` has the most tokens
    firsts (B), counts (B)  the query's side is packed, (1, rows, H, D): counts[b] rows of sequence b, which are its
                            queries from firsts[b] on; it has keys up to the last of them. k and v stay (B, T, Hk, D)
    pages (B, pages)        k and v are (page count, page tokens, Hk, D), compressed rows (page count, page tokens / d,
                            Hk, D): token s of sequence b lies in page pages[b, s // page tokens]. `longest` (0: what
                            the table has room for) bounds the tokens. No gradient

Without begins and pages the rows of k say how many tokens there are, and `longest`, if given, may not be less.

Rows of packed sequences that belong to none, and the last `first` of each, are 0 in outputs, -inf in lse and -1 in
lists. What shapes and options show is refused with nsa.Refused; what only the values of arrays show (begins, counts,
lists) in the error that XLA raises when the call runs, with the same words.

Twin: native/xla.c. Not here: CUDA.
"""
from __future__ import annotations

import ctypes
import functools
import inspect
import zlib
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import _abi
from ._library import FOLDER, check_dtype, check_key_stride, checked, is_logarithm, layout, library
from ._pack import (ARRAYS, PHI, Packer, axes, check_int, check_phi, cmp_count, desc_struct, first_of, in_pages, key_rows,
                    key_stride, list_heads, list_width, of_a_step, only_with, option, options as _options, parse, phi_of,
                    problem, rope_fields, scored_tokens, slc_count, tokens_of)
from ._refused import refused

__all__ = ["attend_cmp", "attend_dense", "attend_slc", "attend_win", "attention", "compress", "gate", "merge",
           "rank_queries", "rope", "score_blocks", "score_lists", "select_blocks"]

_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3, "int32": 4}
_ATTEND, _ATTENTION, _COMPRESS = Packer(_abi.Attend), Packer(_abi.Attention), Packer(_abi.Compress)
_SELECT, _GATE, _ROPE = Packer(_abi.Select), Packer(_abi.Gate), Packer(_abi.Rope)
_MERGE, _SCORE, _RANK = Packer(_abi.Merge), Packer(_abi.Score), Packer(_abi.Rank)


_HANDLERS = FOLDER / "libnsa_xla.so"
#: Of the structs whose bytes a program has that jax.export writes.
_LAYOUT = zlib.crc32(repr((_abi.VERSION, sorted(layout().items()))).encode())


@functools.lru_cache(None)
def _register() -> None:
    path = _HANDLERS
    if not path.exists():
        raise RuntimeError(f"{path} is not there: `python -m nsa.build jax` makes it, with a C compiler")
    handle = ctypes.CDLL(str(path))
    handle.nsa_xla_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    if not handle.nsa_xla_open(bytes(library(False).path), bytes(library(True).path), _LAYOUT):
        raise RuntimeError(f"{path} could not open the libraries beside it")
    jax.ffi.register_ffi_target("nsa", jax.ffi.pycapsule(handle.nsa_xla_call), platform="cpu")


if _HANDLERS.exists():
    _register()  # a program that jax.export has written calls them, though nothing here is called


# ---- Calls --------------------------------------------------------------------------------------

def _dtype(x: Any) -> int:
    name = jnp.dtype(x.dtype).name
    if name not in _DTYPES:
        raise refused("DTYPE", "arrays", f"the dtype {name}; allowed are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _strides(x: Any) -> tuple[int, ...]:
    steps = [1]
    for extent in reversed(x.shape[1:]):
        steps.insert(0, steps[0] * extent)
    return tuple(steps)


def _rows(x: Any) -> tuple[int, ...]:
    """The view of (B, T, H, D), (B, T, H) or (B, T), without its address."""
    steps = (*_strides(x)[:3], 0)[:3]
    return 0, _dtype(x), *steps


def _parameters(x: Any) -> tuple[int, ...]:
    """The view of (Hk, rows, columns), or (1, rows, columns) that all heads share."""
    head, token, _ = _strides(x)
    return 0, _dtype(x), 0, token, 0 if x.shape[0] == 1 else head


class _Call:
    """One call of a function: its structs, and where in them the buffers' addresses go."""

    def __init__(self, function: str, desc: _abi.Desc, arrays: Sequence[Any] = ()):
        self.function, self.desc, self.arrays = function, desc, dict(zip(ARRAYS, arrays))
        self.structs: list[bytes] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._input_places: list[int] = []
        self._output_places: list[int] = []
        self.constants: list[tuple[int, Any]] = []  # of int32, and where their addresses go
        self._cleared = [0]  # of each output on the queries' side: offset of its view, rows, heads, width, whether -inf

    def add(self, packer: Packer, fixed: dict[str, tuple[Any, ...]], inputs: dict[str, Any], outputs: dict[str, Any],
            parameters: Sequence[str] = ()) -> None:
        """A struct: constants, arrays that are read, shapes of what is returned."""
        base, fields = sum(map(len, self.structs)), dict(fixed)
        for arrays, list_, places in ((inputs, self.inputs, self._input_places),
                                      (outputs, self.outputs, self._output_places)):
            for name, x in arrays.items():
                if x is None:
                    continue
                check_dtype(name, jnp.dtype(x.dtype).name)
                fields[name] = (_parameters if name in parameters else _rows)(x)
                list_.append(x)
                places.append(base + packer.offsets[name])
                if list_ is self.outputs and self.arrays.get("begins") is not None and name in self._of_queries(packer):
                    self._cleared += [places[-1], *(*x.shape, 1)[1:4], is_logarithm(name)]
        self.structs.append(packer.pack(fields))

    def _of_queries(self, packer: Packer) -> set[str]:
        """Fields of a forward's struct that have a row for every query."""
        if packer is _COMPRESS or self.function.endswith("_backward"):
            return set()
        return {name for name in packer.offsets if name in ("out", "blocks", "scores") or name[:4] in ("out_", "lse", "lse_")}

    def run(self, zero: bool = False, rows: int = -1, updated: Sequence[Any] = ()) -> Sequence[Array]:
        """rows: how many queries counts must amount to. updated: inputs that the last results have written to."""
        _register()
        inputs, places, counted_by = list(self.inputs), list(self._input_places), -1
        for name, array in self.arrays.items():
            if array is None:
                continue
            if array.dtype != jnp.int32:
                raise refused("SIZE", name, f"{array.dtype}, must be int32")
            if name == "counts" and rows >= 0:
                counted_by = len(inputs)
            inputs.append(array)
            places.append(sum(map(len, self.structs)) + ARRAYS[name])
        for place, array in self.constants:
            inputs.append(jax.device_put(array))  # which jax.transfer_guard knows as meant
            places.append(place)
        aliases = {len(inputs) + i: len(self.outputs) - len(updated) + i for i in range(len(updated))}
        inputs += updated
        places += [-1] * len(updated)
        nothing = self.desc.batch == 0  # which nsa.h refuses: nobody asks it for arrays without a sequence
        if not nothing:
            checked(library(), self.desc, self.function)
        structs = [*self.structs, bytes(self.desc)]
        size = _abi.prototypes(ctypes.c_float).get(f"nsa_{self.function}_workspace_size")
        buffers = [*inputs, *self.outputs]
        call = jax.ffi.ffi_call("nsa", [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.outputs],
                                vmap_method="broadcast_all", input_output_aliases=aliases or None)
        attributes = dict(
            layout=np.int64(_LAYOUT), function=self.function, f64=np.int64(any(_dtype(x) == 3 for x in buffers)),
            structs=np.frombuffer(b"".join(structs), np.uint8), sizes=np.array([len(s) for s in structs], np.int64),
            counted=np.int64(-1 if size is None else len(size[1])), zero=np.int64(zero or nothing), nothing=np.int64(nothing),
            cleared=np.array(self._cleared, np.int64), counted_by=np.int64(counted_by), rows=np.int64(rows),
            places=np.array(places + self._output_places, np.int64),
            items=np.array([x.size * jnp.dtype(x.dtype).itemsize for x in buffers], np.int64))
        run = functools.partial(call, **attributes)
        found = (_once(lambda *x: run(*x)) if self.function.endswith("_backward") else run)(*inputs)
        # Without a word of it they would be taken for equal on all devices: the first's would be returned.
        axes = _axes(inputs)
        return [_varying(x, axes) for x in found] if axes else found


def _once(function: Any) -> Any:
    """The function, which says itself that it has no derivative: gradients are calls too, and have none."""
    once = jax.custom_jvp(function)

    @once.defjvp
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("nsa has first derivatives alone, by jax.grad, vjp and jacrev: what was computed has none here")
    return once


def _axes(arrays: Sequence[Any]) -> set[Any]:
    """Of the devices of a shard_map, those between which one of these differs."""
    types = [jax.typeof(x) for x in arrays] if hasattr(jax, "typeof") else []
    return {axis for of in types for axis in getattr(getattr(of, "manual_axis_type", None), "varying", getattr(of, "vma", ()))}


def _varying(x: Any, axes: set[Any]) -> Any:
    """x, which differs between these devices, or may. Of one that does not the gradient is the sum of theirs."""
    missing = tuple(axes - _axes([x]))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def _everywhere(x: Any) -> Any:
    """x, all of it on each device of a mesh with explicit axes, as what XLA calls there has it; the gradient is split again."""
    of = getattr(jax.typeof(x), "sharding", None) if hasattr(jax, "typeof") else None
    return jax.sharding.reshard(x, of.update(spec=())) if any(getattr(of, "spec", ())) else x


def _differentiable(function: Any, forward: Any, backward: Any) -> Any:
    """The function with its gradients. All its arrays differ between the devices of a shard_map as soon as one does, as those
    of JAX's own operations do."""
    function.defvjp(forward, backward)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        axes = _axes([x for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")])
        arguments = jax.tree.map(lambda x: _everywhere(_varying(x, axes)) if hasattr(x, "dtype") else x, arguments)
        return function(*arguments)
    return call


def _undifferentiable(name: str, function: Any) -> Any:
    """The function, whose last three arguments are no arrays, which refuses to be differentiated: what it keeps of earlier
    tokens has no graph, and gradients of 0 would be wrong in silence."""
    function = jax.custom_vjp(function, nondiff_argnums=(4, 5, 6))

    def forward(*arguments: Any) -> Any:
        return function(*arguments), None

    def backward(*_: Any) -> Any:
        raise NotImplementedError(f"{name} has no gradients; to train, call it for all tokens at once, or take jax.lax.stop_gradient "
                                  "of what goes into it")
    return _differentiable(function, forward, backward)


def _numpy_too(function: Any) -> Any:
    """The function, whose arrays may be numpy's. They are JAX's before anything looks at them, because without
    jax_enable_x64 what has 64 bits there has 32 here, and older versions make it so behind our backs. Options are not
    arrays, and keep their bits."""
    kinds = inspect.signature(function).parameters
    named = {name for name, of in kinds.items() if of.kind is not of.VAR_KEYWORD}

    def taken(x: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf, x)

    @functools.wraps(function)
    def call(*given: Any, **others: Any) -> Any:
        return function(*taken(given), **{name: taken(x) if name in named else x for name, x in others.items()})
    return call


def _like(x: Any, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype)


def _lists(q: Any, kv_heads: int, text: str) -> jax.ShapeDtypeStruct:
    return _like(q, *q.shape[:2], list_heads(text, kv_heads), list_width(text), dtype=jnp.int32)


def _real(x: Any) -> Any:
    return jnp.float64 if jnp.dtype(x.dtype) == jnp.float64 else jnp.float32


def _check_array(name: str, x: Any) -> None:
    if not hasattr(x, "shape"):
        raise refused("NULL", name, f"{type(x).__name__}, must be an array")


def _expect(name: str, x: Any, *shape: int) -> None:
    _check_array(name, x)
    if tuple(x.shape) != shape:
        raise refused("SIZE", name, f"shape {tuple(x.shape)}, must be {shape}")


def _packed(begins: Any, x: Any) -> dict[str, int]:
    """The sizes of packed rows."""
    return {} if begins is None else {"rows": x.shape[1]}


def _rows_of(arrays: Sequence[Any], q: Any) -> int:
    """What counts must amount to."""
    return -1 if arrays[2] is None else q.shape[1]


def _first_of(first: Any, shape: Sequence[int], tokens: int, arrays: Sequence[Any]) -> int:
    return first_of(None if first is None else check_int("first", first), shape, tokens, arrays)


def _scored_tokens(text: str, stride: int, *rest: Any) -> int:
    check_key_stride(stride, option(text, "slc_block"), 0)
    axes("q", rest[2]), axes("k", rest[3])
    return scored_tokens(stride, *rest)


# ---- RoPE ---------------------------------------------------------------------------------------

def _rope_call(function: str, x: Any, arrays: Sequence[Any], longest: int, first: int) -> _Call:
    axes("x", x)
    begins, _, counts, _ = arrays
    tokens = tokens_of(first + x.shape[1], counts if begins is None else begins, None, longest)
    batch, count = problem(x.shape, arrays, tokens, first)
    made = desc_struct("", batch, tokens, x.shape[2], x.shape[2], 1, 1, first, count, 0, **_packed(arrays[0], x))
    return _Call(function, made, arrays)


def _rope_fixed(x: Any, text: str) -> dict[str, tuple[Any, ...]]:
    return {name: value for name, value in rope_fields(text, x.shape[2], x.shape[3]).items()
            if name not in _abi.Rope._doubles_}


def _rope_numbers(call: _Call, text: str) -> None:
    """Lists of numbers of the options of the struct that was added last. They are constants of the graph: an address in
    it would mean nothing in another process."""
    base, given = sum(map(len, call.structs[:-1])), parse(text, _abi.Rope)
    for name in _abi.Rope._doubles_:
        if name in given:
            call.constants.append((base + _ROPE.offsets[name], np.asarray(given[name]).view(np.int32)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _rope(x, positions, arrays, longest, first, text):
    call = _rope_call("rope_forward", x, arrays, longest, first)
    call.add(_ROPE, _rope_fixed(x, text), dict(x=x, positions=positions), dict(out=_like(x)))
    _rope_numbers(call, text)
    return call.run(rows=_rows_of(arrays, x))[0]


def _rope_forward(x, positions, arrays, longest, first, text):
    return _rope(x, positions, arrays, longest, first, text), (positions, arrays)


def _rope_backward(longest, first, text, saved, dout):
    positions, arrays = saved
    call = _rope_call("rope_backward", dout, arrays, longest, first)
    call.add(_ROPE, {}, dict(out=dout), dict(x=_like(dout)))
    call.add(_ROPE, _rope_fixed(dout, text), dict(x=dout, out=dout, positions=positions), {})
    _rope_numbers(call, text)
    return call.run(zero=True, rows=_rows_of(arrays, dout))[0], None, None


_rope = _differentiable(_rope, _rope_forward, _rope_backward)


@_numpy_too
def rope(x: Array, positions: Array | None = None, *, begins: Array | None = None, firsts: Array | None = None,
         counts: Array | None = None, longest: int = 0, first: int = 0, **options: Any) -> Array:
    """x (B, T, H, D) turned by its positions (B, T), int32; without them a row's place, from `first` or firsts on.
    Options: those of nsa.Rope, as base=10000.0, frequencies=[...]; nsa.rope_options has those of a configuration."""
    if positions is not None:
        _expect("positions", positions, *x.shape[:2])
    return _rope(x, positions, (begins, firsts, counts, None), check_int("longest", longest), check_int("first", first), _options(**options))


# ---- Compression --------------------------------------------------------------------------------

def _phi_fixed(prefix: str, phi: str, x: Any, given: dict[str, Any], block: int) -> dict[str, tuple[Any, ...]]:
    check_phi(phi, sorted(given))
    for name, p in given.items():
        _check_array(prefix + name, p)
    width = x.shape[3]
    hidden = given["w1"].shape[1] if phi == "mlp" and "w1" in given else 0
    shapes = {"pos": (block, width), "w2": (width, hidden), "b2": (1, width),
              "w1": (hidden, block * width) if phi == "mlp" else (block, width),
              "b1": (1, hidden if phi == "mlp" else width)}
    for name, p in given.items():
        _expect(prefix + name, p, p.shape[0] if p.shape[0] == 1 else x.shape[2], *shapes[name])
    return {prefix + "phi": (int(_abi.Phi[phi.upper()]),), prefix + "dim": (width,), prefix + "hidden": (hidden,)}


def _compress_call(function: str, x: Any, begins: Any, longest: int, text: str) -> _Call:
    axes("x", x)
    arrays, tokens = (begins, None, None, None), tokens_of(x.shape[1], begins, None, longest)
    batch, count = problem(x.shape, arrays, tokens, 0)
    made = desc_struct(text, batch, tokens, x.shape[2], x.shape[2], 1, 1, 0, count, 0, **_packed(begins, x))
    return _Call(function, made, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _compress(x, given, begins, longest, phi, text):
    call = _compress_call("compress_forward", x, begins, longest, text)
    shape = (x.shape[0], cmp_count(text, x.shape[1]), *x.shape[2:])
    call.add(_COMPRESS, _phi_fixed("", phi, x, given, option(text, "cmp_block")), dict(x=x, **given),
             dict(out=_like(x, *shape)), PHI)
    # Packed sequences have at most as many blocks as one sequence of all rows; what is behind them is 0.
    return call.run(zero=begins is not None)[0]


def _compress_forward(x, given, begins, longest, phi, text):
    return _compress(x, given, begins, longest, phi, text), (x, given, begins)


def _compress_backward(longest, phi, text, saved, dout):
    x, given, begins = saved
    call = _compress_call("compress_backward", x, begins, longest, text)
    gradients = {"x": _like(x), **{name: _like(p) for name, p in given.items()}}
    call.add(_COMPRESS, {}, dict(out=dout), gradients, PHI)
    call.add(_COMPRESS, _phi_fixed("", phi, x, given, option(text, "cmp_block")), dict(x=x, out=dout, **given), {}, PHI)
    dx, *rest = call.run(zero=True)
    return dx, dict(zip(given, rest)), None


_compress = _differentiable(_compress, _compress_forward, _compress_backward)


def _new_rows(name: str, out: Any, x: Any, pages: Any, tokens: int, text: str) -> None:
    """The compressed rows of all steps, to which a step adds: in pages, or (B, N, Hk, D)."""
    step = option(text, "cmp_stride")
    count = cmp_count(text, tokens) if pages is None else x.shape[1] // step if step > 0 else 0
    _expect(name, out, x.shape[0], count, *x.shape[2:])


def _compress_step(x, given, out, arrays, longest, phi, text):
    pages, tokens = arrays[3], tokens_of(x.shape[1], None, arrays[3], longest)
    batch, _ = problem((1 if arrays[2] is not None else x.shape[0], tokens), arrays, tokens, 0)
    fixed = _phi_fixed("", phi, x, given, option(text, "cmp_block"))
    _new_rows("out", out, x, pages, tokens, text)
    sizes = {} if pages is None else in_pages(pages, x, 1)
    made = desc_struct(text, batch, tokens, x.shape[2], x.shape[2], 1, 1, 0, tokens, 0, **sizes)
    call = _Call("compress_forward", made, arrays)
    call.add(_COMPRESS, fixed, dict(x=x, **given), dict(out=_like(out)), PHI)
    return call.run(updated=[out])[0]


_compress_step = _undifferentiable("compress of a step", _compress_step)


@_numpy_too
def compress(x: Array, parameters: dict[str, Array] | None = None, *, phi: str = "mean", begins: Array | None = None,
             longest: int = 0, out: Array | None = None, firsts: Array | None = None, counts: Array | None = None,
             pages: Array | None = None, **options: Any) -> Array:
    """Eq. 7: (B, T, Hk, D) to (B, N, Hk, D), N = (T - l) / d + 1. phi: mean; conv with w1 (Hk, l, D) and b1
    (Hk, 1, D); mlp with pos (Hk, l, D), w1 (Hk, hidden, l D), b1 (Hk, 1, hidden), w2 (Hk, D, hidden), b2 (Hk, 1, D).
    Of packed sequences the rows lie packed too, then zeros. With firsts and counts, or pages, `out` has the rows of
    earlier steps: returned are these with those that the new tokens complete, and a gradient of them is refused."""
    longest = check_int("longest", longest)
    if out is None:
        only_with("out", firsts, counts, pages)
        return _compress(x, parameters or {}, begins, longest, phi, _options(**options))
    of_a_step(begins, None)
    return _compress_step(x, parameters or {}, out, (None, firsts, counts, pages), longest, phi, _options(**options))


# ---- Attention over few keys --------------------------------------------------------------------

def _attend_call(branch, function, q, k, v, blocks, arrays, tokens, first, text, stride=1):
    for name, x in ("q", q), ("k", k), ("v", v):
        axes(name, x)
    begins, _, _, pages = arrays
    batch, count = problem(q.shape, arrays, tokens, first)
    sizes = _packed(begins, q)
    if pages is not None:
        batches, rows = k.shape[:2]
        sizes = in_pages(pages, k, key_stride(text, branch, stride))
    elif begins is None:
        batches, rows = batch, key_rows(text, branch, stride, tokens)
    else:
        batches, rows = 1, key_rows(text, branch, stride, q.shape[1])
    _expect("k", k, batches, rows, k.shape[2], q.shape[3])
    _expect("v", v, batches, rows, k.shape[2], v.shape[3])
    if branch == "slc":
        _expect("blocks", blocks, *_lists(q, k.shape[2], text).shape)
    return _Call(function, desc_struct(text, batch, tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], first, count,
                                       0, **sizes), arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 6, 7, 8))
def _attend(branch, q, k, v, blocks, arrays, tokens, first, text):
    call = _attend_call(branch, f"attend_{branch}_forward", q, k, v, blocks, arrays, tokens, first, text)
    call.add(_ATTEND, {}, dict(q=q, k=k, v=v, blocks=blocks),
             dict(out=_like(q, *q.shape[:3], v.shape[3]), lse=_like(q, *q.shape[:3], dtype=_real(q))))
    return tuple(call.run(rows=_rows_of(arrays, q)))


def _attend_forward(branch, q, k, v, blocks, arrays, tokens, first, text):
    out, lse = _attend(branch, q, k, v, blocks, arrays, tokens, first, text)
    return (out, lse), (q, k, v, blocks, arrays, out, lse)


def _attend_backward(branch, tokens, first, text, saved, gradients):
    q, k, v, blocks, arrays, out, lse = saved
    call = _attend_call(branch, f"attend_{branch}_backward", q, k, v, blocks, arrays, tokens, first, text)
    call.add(_ATTEND, {}, dict(out=gradients[0], lse=gradients[1]), dict(q=_like(q), k=_like(k), v=_like(v)))
    call.add(_ATTEND, {}, dict(q=q, k=k, v=v, out=out, lse=lse, blocks=blocks), {})
    return *call.run(zero=True, rows=_rows_of(arrays, q)), None, None


_attend = _differentiable(_attend, _attend_forward, _attend_backward)


def _attend_public(branch, q, k, v, blocks, arrays, most, first, options):
    """most: `tokens` of cmp, whose rows do not say them, `longest` of the others."""
    if branch == "cmp":
        tokens = check_int("tokens", most)
    else:
        tokens = tokens_of(axes("k", k)[1], arrays[0], arrays[3], check_int("longest", most))
    first = _first_of(first, axes("q", q), tokens, arrays)
    return _attend(branch, q, k, v, blocks, arrays, tokens, first, _options(**options))


@_numpy_too
def attend_cmp(q: Array, k: Array, v: Array, *, tokens: int, begins: Array | None = None, first: int | None = None,
               firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
               **options: Any) -> tuple[Array, Array]:
    """(out (B, T, H, Dv), lse (B, T, H)) over compressed rows (B, N, Hk, D) of so many tokens (packed: of the
    longest sequence)."""
    return _attend_public("cmp", q, k, v, None, (begins, firsts, counts, pages), tokens, first, options)


@_numpy_too
def attend_slc(q: Array, k: Array, v: Array, blocks: Array, *, begins: Array | None = None, longest: int = 0,
               first: int | None = None, firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
               **options: Any) -> tuple[Array, Array]:
    """(out, lse) over the tokens of the blocks listed for each query and kv head: (B, T, Hk, n) int32."""
    return _attend_public("slc", q, k, v, blocks, (begins, firsts, counts, pages), longest, first, options)


@_numpy_too
def attend_win(q: Array, k: Array, v: Array, *, begins: Array | None = None, longest: int = 0, first: int | None = None,
               firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
               **options: Any) -> tuple[Array, Array]:
    """(out, lse) over the last `window` tokens."""
    return _attend_public("win", q, k, v, None, (begins, firsts, counts, pages), longest, first, options)


@_numpy_too
def attend_dense(q: Array, k: Array, v: Array, *, begins: Array | None = None, longest: int = 0, first: int | None = None,
                 firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
                 **options: Any) -> tuple[Array, Array]:
    """(out, lse) of causal attention."""
    return _attend_public("dense", q, k, v, None, (begins, firsts, counts, pages), longest, first, options)


# ---- Merge --------------------------------------------------------------------------------------

_PARTS = ("out_a", "out_b", "lse_a", "lse_b")


def _merge_call(function, parts):
    batch, tokens, heads, width = axes("out_a", parts[0])
    for name, x, shape in zip(_PARTS, parts, (parts[0].shape,) * 2 + (parts[0].shape[:3],) * 2):
        _expect(name, x, *shape)
    return _Call(function, desc_struct("", batch, tokens, heads, heads, 1, width, 0, tokens, 0))


@jax.custom_vjp
def _merge(*parts):
    call = _merge_call("merge_forward", parts)
    call.add(_MERGE, {}, dict(zip(_PARTS, parts)), dict(out=_like(parts[0]), lse=_like(parts[2])))
    return tuple(call.run())


def _merge_forward(*parts):
    return _merge(*parts), parts


def _merge_backward(parts, gradients):
    call = _merge_call("merge_backward", parts)
    call.add(_MERGE, {}, dict(out=gradients[0], lse=gradients[1]), {name: _like(x) for name, x in zip(_PARTS, parts)})
    call.add(_MERGE, {}, dict(zip(_PARTS, parts)), {})
    return tuple(call.run(zero=True))


_merge = _differentiable(_merge, _merge_forward, _merge_backward)


@_numpy_too
def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """(out, lse) of one softmax over the keys of two: outs (B, T, H, Dv), lses (B, T, H)."""
    return _merge(out_a, out_b, lse_a, lse_b)


# ---- Selection ----------------------------------------------------------------------------------

def _chosen(call: _Call, packer: Packer, fixed: dict[str, tuple[Any, ...]], inputs: dict[str, Any], lists: Any,
            tokens: int, scores: bool, text: str) -> Any:
    """The lists, and with `scores` what they were chosen by."""
    outputs = {"blocks": lists}
    if scores:
        outputs["scores"] = _like(inputs["q"], *lists.shape[:3], slc_count(text, tokens), dtype=_real(inputs["q"]))
    call.add(packer, fixed, inputs, outputs)
    found = call.run(rows=_rows_of(list(call.arrays.values()), inputs["q"]))
    return tuple(found) if scores else found[0]


@_numpy_too
def select_blocks(q: Array, k: Array, lse: Array, *, tokens: int, begins: Array | None = None, first: int | None = None,
                  firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
                  scores: bool = False, **options: Any) -> Any:
    """Eq. 8 to 11: the lists (B, T, Hk, n) int32 for compressed keys k and the lse of attend_cmp. With scores=True
    also what they were chosen by, (B, T, Hk, selection blocks), -inf behind a query's candidates. No gradient."""
    q, k, lse = map(jax.lax.stop_gradient, (q, k, lse))
    text, arrays, tokens = _options(**options), (begins, firsts, counts, pages), check_int("tokens", tokens)
    first = _first_of(first, axes("q", q), tokens, arrays)
    call = _attend_call("cmp", "select_blocks", q, k, k, None, arrays, tokens, first, text)
    _expect("lse", lse, *q.shape[:3])
    return _chosen(call, _SELECT, {}, dict(q=q, k=k, lse=lse), _lists(q, k.shape[2], text), tokens, scores, text)


@_numpy_too
def score_blocks(q: Array, k: Array, weights: Array | None = None, *, act: str = "linear", pool: str = "max",
                 stride: int = 1, begins: Array | None = None, longest: int = 0, first: int | None = None,
                 firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None,
                 scores: bool = False, **options: Any) -> Any:
    """The lists (B, T, Hk, n) int32 of the best blocks by the score of their tokens, sum over the heads of a group of
    weights (B, T, H) act(q . k), linear or relu; of a block the max or the mean. With scores=True also the scores of
    the blocks. No gradient.

    With `stride` row i of k, (B, T // stride, Hk, Dk), stands for tokens i stride .. (i + 1) stride - 1, and t sees it if all
    of them lie at or before t; packed and in pages rows lie as compress with cmp_block = cmp_stride = stride has them. If
    the rows of q are not all T tokens, T is `longest`, or without it k's rows times stride. forced="tail" (slc_local 0 or 1)
    scores whole blocks alone."""
    q, k = map(jax.lax.stop_gradient, (q, k))
    if weights is not None:
        _expect("weights", weights, *q.shape[:3])
        weights = jax.lax.stop_gradient(weights)
    text, kinds, stride = _options(**options), _abi.Score(act=act, pool=pool), check_int("stride", stride)
    arrays = begins, firsts, counts, pages
    tokens = _scored_tokens(text, stride, check_int("longest", longest), first, q, k, arrays)
    first = _first_of(first, axes("q", q), tokens, arrays)
    call = _attend_call("score", "score_blocks", q, k, k, None, arrays, tokens, first, text, stride)
    fixed = dict(act=(kinds.act,), pool=(kinds.pool,), stride=(stride,))
    return _chosen(call, _SCORE, fixed, dict(q=q, k=k, weights=weights), _lists(q, k.shape[2], text), tokens, scores, text)


def _listed_call(function, q, k, weights, blocks, arrays, tokens, first, act, pool, stride, text):
    """The call, and its struct's fields."""
    if weights is not None:
        _expect("weights", weights, *q.shape[:3])
    _expect("blocks", blocks, *_lists(q, k.shape[2], text).shape)
    kinds = _abi.Score(act=act, pool=pool)
    call = _attend_call("score", function, q, k, k, None, arrays, tokens, first, text, stride)
    return call, dict(act=(kinds.act,), pool=(kinds.pool,), stride=(stride,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9, 10))
def _score_lists(q, k, weights, blocks, arrays, *rest):
    call, fixed = _listed_call("score_blocks_forward", q, k, weights, blocks, arrays, *rest)
    call.add(_SCORE, fixed, dict(q=q, k=k, weights=weights, blocks=blocks), dict(scores=_like(q, *blocks.shape, dtype=_real(q))))
    return call.run(rows=_rows_of(arrays, q))[0]


def _score_lists_forward(*arguments):
    return _score_lists(*arguments), arguments[:5]


def _score_lists_backward(*arguments):
    *rest, (q, k, weights, blocks, arrays), dscores = arguments
    call, fixed = _listed_call("score_blocks_backward", q, k, weights, blocks, arrays, *rest)
    there = {name: x for name, x in (("q", q), ("k", k), ("weights", weights)) if x is not None}
    call.add(_SCORE, fixed, dict(scores=dscores), {name: _like(x) for name, x in there.items()})
    call.add(_SCORE, fixed, dict(**there, blocks=blocks), {})
    found = call.run(zero=True, rows=_rows_of(arrays, q))
    return *found, *[None] * (5 - len(found))


_score_lists = _differentiable(_score_lists, _score_lists_forward, _score_lists_backward)


@_numpy_too
def score_lists(q: Array, k: Array, blocks: Array, weights: Array | None = None, *, act: str = "linear", pool: str = "max",
                stride: int = 1, begins: Array | None = None, longest: int = 0, first: int | None = None,
                firsts: Array | None = None, counts: Array | None = None, pages: Array | None = None, **options: Any) -> Array:
    """The scores of score_blocks for blocks that are given, (B, T, Hk, n): what trains a scorer. -inf where an entry is -1
    or t sees no key of its block. With gradients of q, k and weights: a maximum's goes to its key, a mean's to all."""
    text, stride, arrays = _options(**options), check_int("stride", stride), (begins, firsts, counts, pages)
    tokens = _scored_tokens(text, stride, check_int("longest", longest), first, q, k, arrays)
    first = _first_of(first, axes("q", q), tokens, arrays)
    return _score_lists(q, k, weights, blocks, arrays, tokens, first, act, pool, stride, text)


@_numpy_too
def rank_queries(scores: Array, *, tokens: int, begins: Array | None = None, first: int | None = None,
                 firsts: Array | None = None, counts: Array | None = None, **options: Any) -> Array:
    """The lists (B, T, Hk, n) int32 of the best blocks by scores from elsewhere, (B, T, Hk, selection blocks of so many
    tokens), in float32 or, of doubles, float64."""
    scores, text = jax.lax.stop_gradient(scores), _options(**options)
    arrays, heads, tokens = (begins, firsts, counts, None), axes("scores", scores)[2], check_int("tokens", tokens)
    first = _first_of(first, scores.shape, tokens, arrays)
    batch, count = problem(scores.shape, arrays, tokens, first)
    _expect("scores", scores, *scores.shape[:3], slc_count(text, tokens))
    lists = _like(scores, *scores.shape[:3], list_width(text), dtype=jnp.int32)
    made = desc_struct(text, batch, tokens, heads, heads, 1, 1, first, count, 0, **_packed(begins, scores))
    call = _Call("rank_queries", made, arrays)
    call.add(_RANK, {}, dict(scores=scores), dict(blocks=lists))
    return call.run(rows=_rows_of(arrays, scores))[0]


# ---- Gate ---------------------------------------------------------------------------------------

def _gate_call(function, logits, cmp, slc, win, text):
    batch, tokens, heads, width = axes("cmp", cmp)
    _expect("slc", slc, *cmp.shape)
    _expect("win", win, *cmp.shape)
    _expect("logits", logits, batch, tokens, axes("logits", logits)[2], 3)
    return _Call(function, desc_struct(text, batch, tokens, heads, logits.shape[2], 1, width, 0, tokens, 0,
                                       gate_heads=logits.shape[2]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _gate(logits, cmp, slc, win, text):
    call = _gate_call("gate_forward", logits, cmp, slc, win, text)
    call.add(_GATE, {}, dict(logits=logits, cmp=cmp, slc=slc, win=win), dict(out=_like(cmp)))
    return call.run()[0]


def _gate_forward(logits, cmp, slc, win, text):
    return _gate(logits, cmp, slc, win, text), (logits, cmp, slc, win)


def _gate_backward(text, saved, dout):
    inputs = dict(zip(("logits", "cmp", "slc", "win"), saved))
    call = _gate_call("gate_backward", *saved, text)
    call.add(_GATE, {}, dict(out=dout), {name: _like(x) for name, x in inputs.items()})
    call.add(_GATE, {}, inputs, {})
    return tuple(call.run(zero=True))


_gate = _differentiable(_gate, _gate_forward, _gate_backward)


@_numpy_too
def gate(logits: Array, cmp: Array, slc: Array, win: Array, kind: str = "sigmoid") -> Array:
    """Eq. 5: the branches (B, T, H, Dv), gated by logits (B, T, H or Hk, 3) and added. Of three tensors they are
    jnp.stack((cmp, slc, win), -1)."""
    return _gate(logits, cmp, slc, win, _options(gate=kind))


# ---- The whole ----------------------------------------------------------------------------------

_WHOLE = ("q", "k_cmp.x", "v_cmp.x", "k_slc", "v_slc", "k_win", "v_win", "gates")
_PHIS = tuple(f"{which}_cmp.{name}" for which in "kv" for name in PHI)


def _whole_call(function, x, arrays, longest, first, text):
    q, k, v = x["q"], x["k_slc"], x["v_slc"]
    for name in _WHOLE:
        axes(name, x[name])
    begins, _, _, pages = arrays
    tokens = tokens_of(k.shape[1], begins, pages, longest)
    batch, count = problem(q.shape, arrays, tokens, first)
    for name in ("k_cmp.x", "k_win"):
        _expect(name, x[name], *k.shape)
    for name in ("v_cmp.x", "v_win"):
        _expect(name, x[name], *v.shape)
    batches, rows = (batch, k.shape[1]) if begins is None else (1, q.shape[1])
    _expect("k_slc", k, batches if pages is None else k.shape[0], rows, k.shape[2], q.shape[3])
    _expect("v_slc", v, *k.shape[:3], v.shape[3])
    _expect("gates", x["gates"], *q.shape[:2], x["gates"].shape[2], 3)
    sizes = dict(_packed(begins, q), gate_heads=x["gates"].shape[2], **({} if pages is None else in_pages(pages, k, 1)))
    return _Call(function, desc_struct(text, batch, tokens, q.shape[2], k.shape[2], q.shape[3], v.shape[3], first, count,
                                       0, **sizes), arrays)


def _whole_fixed(x, phis, kinds, text):
    fixed = {}
    for which, kind, given in zip("kv", kinds, phis):
        fixed.update(_phi_fixed(f"{which}_cmp.", kind, x[f"{which}_cmp.x"], given, option(text, "cmp_block")))
    return fixed


def _named(phis):
    return {f"{which}_cmp.{name}": p for which, given in zip("kv", phis) for name, p in given.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _attention(arrays, phis, begins, longest, first, kinds, text):
    x = dict(zip(_WHOLE, arrays))
    call = _whole_call("attention_forward", x, (begins, None, None, None), longest, first, text)
    q, v = x["q"], x["v_slc"]
    heads, n = q.shape[:3], cmp_count(text, x["k_slc"].shape[1])
    outputs = {"out": _like(q, *heads, v.shape[3]),
               "blocks": _lists(q, v.shape[2], text),
               "k_cmp.out": _like(q, q.shape[0], n, v.shape[2], q.shape[3]),
               "v_cmp.out": _like(q, q.shape[0], n, v.shape[2], v.shape[3]),
               **{"out_" + b: _like(q, *heads, v.shape[3]) for b in ("cmp", "slc", "win")},
               **{"lse_" + b: _like(q, *heads, dtype=_real(q)) for b in ("cmp", "slc", "win")}}
    call.add(_ATTENTION, _whole_fixed(x, phis, kinds, text), {**x, **_named(phis)}, outputs, _PHIS)
    return dict(zip(outputs, call.run()))


def _attention_forward(arrays, phis, begins, longest, first, kinds, text):
    found = _attention(arrays, phis, begins, longest, first, kinds, text)
    return found, (arrays, phis, begins, {name: a for name, a in found.items() if name != "out"})


def _attention_backward(longest, first, kinds, text, saved, gradients):
    arrays, phis, begins, outputs = saved
    x, named = dict(zip(_WHOLE, arrays)), _named(phis)
    call = _whole_call("attention_backward", x, (begins, None, None, None), longest, first, text)
    call.add(_ATTENTION, {}, dict(out=gradients["out"]), {name: _like(a) for name, a in {**x, **named}.items()}, _PHIS)
    # x.out is not read, but it is part of the struct: the incoming gradient has its shape.
    call.add(_ATTENTION, _whole_fixed(x, phis, kinds, text), {**x, **named, **outputs, "out": gradients["out"]}, {}, _PHIS)
    found = dict(zip([*x, *named], call.run(zero=True)))
    given = tuple({name: found[f"{which}_cmp.{name}"] for name in of} for which, of in zip("kv", phis))
    return tuple(found[name] for name in _WHOLE), given, None


_attention = _differentiable(_attention, _attention_forward, _attention_backward)


def _attention_step(arrays, phis, compressed, places, longest, kinds, text):
    """As _attention, with compressed rows of earlier steps: out, lists, those rows and the new ones."""
    x = dict(zip(_WHOLE, arrays))
    call, pages = _whole_call("attention_forward", x, places, longest, 0, text), places[3]
    q, k, v = x["q"], x["k_slc"], x["v_slc"]
    for which, out in zip("kv", compressed):
        _new_rows(f"{which}_cmp.out", out, x[f"{which}_cmp.x"], pages, tokens_of(k.shape[1], None, pages, longest), text)
    outputs = {"out": _like(q, *q.shape[:3], v.shape[3]), "blocks": _lists(q, k.shape[2], text),
               **{"out_" + b: _like(q, *q.shape[:3], v.shape[3]) for b in ("cmp", "slc", "win")},
               **{"lse_" + b: _like(q, *q.shape[:3], dtype=_real(q)) for b in ("cmp", "slc", "win")},
               "k_cmp.out": _like(compressed[0]), "v_cmp.out": _like(compressed[1])}
    call.add(_ATTENTION, _whole_fixed(x, phis, kinds, text), {**x, **_named(phis)}, outputs, _PHIS)
    return dict(zip(outputs, call.run(rows=_rows_of(places, q), updated=compressed)))


_attention_step = _undifferentiable("attention of a step", _attention_step)


@_numpy_too
def attention(q: Array, k_cmp: Array, v_cmp: Array, k_slc: Array, v_slc: Array, k_win: Array, v_win: Array, gates: Array,
              *, phi_k: tuple[str, dict[str, Array]] | str = "mean", phi_v: tuple[str, dict[str, Array]] | str = "mean",
              begins: Array | None = None, longest: int = 0, first: int | None = None,
              compressed: tuple[Array, Array] | None = None, firsts: Array | None = None, counts: Array | None = None,
              pages: Array | None = None, blocks: bool = False, **options: Any) -> Any:
    """The whole: out (B, T, H, Dv), and with blocks=True also the lists that were selected.

    k_* (B, T, Hk, Dk) and v_* (B, T, Hk, Dv) of each branch may be one array. gates (B, T, H or Hk, 3),
    as gate takes them.
    phi_k, phi_v: "mean", or a kind and its parameters by name as compress takes them: ("mlp", {"w1": ...}).

    With firsts and counts, or pages, it is a step of a serving engine, whose gradients are refused: k_* and v_* already hold the
    new tokens; compressed = (of k, of v) holds the compressed rows of earlier steps, and what is returned ends with the
    same pair once more, those of this step in it (a jit that donates the pair copies nothing)."""
    phis = phi_of("phi_k", phi_k), phi_of("phi_v", phi_v)
    longest = check_int("longest", longest)
    if compressed is not None:
        of_a_step(begins, first)
        tensors = q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates
        step = _attention_step(tensors, tuple(given for _, given in phis), tuple(compressed), (None, firsts, counts, pages),
                               longest, tuple(kind for kind, _ in phis), _options(**options))
        rows = step["k_cmp.out"], step["v_cmp.out"]
        return (step["out"], step["blocks"], rows) if blocks else (step["out"], rows)
    only_with("compressed", firsts, counts, pages)
    first = _first_of(first, axes("q", q), axes("k_slc", k_slc)[1], (begins, firsts, counts))
    found = _attention((q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates), tuple(given for _, given in phis), begins,
                       longest, first, tuple(kind for kind, _ in phis), _options(**options))
    return (found["out"], found["blocks"]) if blocks else found["out"]
