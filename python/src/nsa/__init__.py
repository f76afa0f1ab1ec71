"""Native Sparse Attention (arXiv 2502.11089): nsa.h from Python, over anything that has memory.

    d = nsa.desc(batch=1, tokens=256, heads=4, kv_heads=1, dim=32, window=64)
    x = nsa.Attend(q=q, k=k, v=v, out=out, lse=lse)     # numpy, torch, __dlpack__; strides, no copies
    nsa.attend_win_forward(x, d)

Structs and functions are the header's without their nsa_; each struct's docstring has the shapes of its
fields. Forward overwrites its outputs, rows of no query with zeros, lse with -inf and lists with -1; backward
adds to its gradients. A call that is refused, by the library or by this package, raises Refused, a ValueError,
and has touched nothing. float64 arrays are computed in double. In a child of fork one thread computes if the
parent has computed.

nsa.torch and nsa.jax have differentiable operators. Not here: arithmetic.
"""
from __future__ import annotations

import ctypes
from typing import Any, Iterator, Sequence

from . import _abi, _functions
from ._abi import *  # noqa: F403
from ._abi import VERSION, Attention, BlockFault, Desc, Dtype, Error, Isa, PageFault, Reads, Rope, Select
from ._abi import Cache as _Cache
from ._functions import *  # noqa: F403
from . import _library
from ._library import (Library, Lock, call, check_arrays, check_shapes, check_writable, checked, frequencies_of, has_computed, integers_in,
                       is_logarithm, library, library_for, memory, views_of, was_written, written_of)
from ._refused import Refused, refused
from ._rope import rope_options
from ._struct import Array, Struct, check_int, check_kind
from ._views import describe

__version__ = VERSION


def desc(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, **fields: Any) -> Desc:
    """A problem's geometry: the paper's, with these fields changed. See Desc for what they mean."""
    made = library().nsa_desc_default(batch, tokens, heads, kv_heads, dim)
    made.__dict__["arrays"] = {}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def desc_check(desc: Desc) -> None:
    """Raises Refused for the first rule that the descriptor breaks. Every function checks it."""
    checked(library(), desc)


def isa_available(isa: Isa) -> bool:
    """Whether this machine, and this build, has the instruction set."""
    return bool(library().nsa_isa_available(isa))


def isa_name(isa: Isa) -> str:
    return library().nsa_isa_name(isa).decode()


def check_pages(desc: Desc) -> PageFault | None:
    """The first fault of firsts, counts or pages; None: every function takes them."""
    check_arrays(check_kind("desc", desc, Desc))
    fault = PageFault()
    status = library().nsa_check_pages(ctypes.byref(desc), ctypes.byref(fault))
    if library().nsa_status_kind(status) in (Error.RANGE, Error.PAGES) and fault.reason:
        return fault
    library().check(status)
    return None


# ---- Block index --------------------------------------------------------------------------------

def block_overlap_range(desc: Desc, tokens: int, slc: int) -> tuple[int, int]:
    """(begin, end) of the compressed blocks, of those of so many tokens, that overlap a selection block."""
    checked(library(), desc, "block_overlap_range")
    begin, end = ctypes.c_int(), ctypes.c_int()
    library().nsa_block_overlap_range(ctypes.byref(desc), tokens, slc, ctypes.byref(begin), ctypes.byref(end))
    return begin.value, end.value


def block_map(desc: Desc, tokens: int) -> tuple[list[int], list[int], list[float]]:
    """The map M of Eq. 9 as CSR, (indptr, indices, weights): a row for each selection block."""
    if check_int("tokens", tokens) < 0:
        raise refused("SIZE", "tokens", f"{tokens}, must be >= 0")
    rows, size = _functions.slc_count(desc, tokens), _functions.block_map_size(desc, tokens)
    indptr, indices = (ctypes.c_int32 * (rows + 1))(), (ctypes.c_int32 * max(1, size))()
    weights = (ctypes.c_float * max(1, size))()
    library().check(library().nsa_block_map(ctypes.byref(desc), tokens, indptr, indices, weights))
    return list(indptr), list(indices)[:size], list(weights)[:size]


def cmp_begins(desc: Desc) -> list[int]:
    """Where each sequence's compressed rows begin: batch + 1 entries."""
    checked(library(), desc, "cmp_begins")
    begins = (ctypes.c_int32 * (desc.batch + 1))()
    library().check(library().nsa_cmp_begins(ctypes.byref(desc), begins))
    return list(begins)


# ---- RoPE ---------------------------------------------------------------------------------------

def rope_frequencies(rope: Rope) -> tuple[list[float], float]:
    """(radians from one position to the next of each pair, what rows are multiplied by)."""
    found, magnitude = frequencies_of(rope)
    return list(found)[:rope.dim // 2], magnitude.value


# ---- Block lists --------------------------------------------------------------------------------

def rank_blocks(scores: Sequence[float], query: int, desc: Desc) -> list[int]:
    """The ranking alone: the list of a query for scores of its candidates, blocks 0 .. query // l'."""
    checked(library(), desc, "rank_blocks")
    if not 0 <= check_int("query", query) < max(1, desc.tokens) and (query < 0 or desc.mask == 0):
        raise refused("RANGE", "query", f"{query}, must be 0 .. {desc.tokens - 1}, a query of {desc.tokens} tokens")
    try:
        values = (ctypes.c_float * len(scores))(*scores)
    except TypeError:
        raise TypeError(f"scores: {type(scores).__name__}, must be numbers in one axis") from None
    if len(scores) != _functions.slc_candidates(desc, query):
        raise refused("SIZE", "scores", f"{len(scores)} of them, must be one for each of the "
                                        f"{_functions.slc_candidates(desc, query)} candidates of query {query}")
    found = (ctypes.c_int32 * _functions.block_list_width(desc))()
    library().check(library().nsa_rank_blocks(values, query, ctypes.byref(desc), found))
    return list(found)


def _lists(blocks: Array, desc: Desc) -> Select:
    x = Select(blocks=blocks)
    checked(library(), desc, "check_blocks")
    check_shapes(views_of([x]), desc, ())
    return x


def check_blocks(blocks: Array, desc: Desc) -> BlockFault | None:
    """The first fault of lists (B, count, Hk, block_list_width) in int32; None: slc takes them."""
    x, fault = _lists(blocks, desc), BlockFault()
    lib = library()
    status = lib.nsa_check_blocks(ctypes.byref(x.blocks), ctypes.byref(desc), ctypes.byref(fault))
    if lib.nsa_status_kind(status) == Error.BLOCKS:
        return fault
    lib.check(status)
    return None


def normalize_blocks(blocks: Array, desc: Desc) -> None:
    """Brings any lists into the form: sorted, no duplicates, candidates only, -1 behind the last."""
    x = _lists(blocks, desc)
    written = [("blocks", describe(blocks, "blocks"))]
    check_writable(written)
    library().check(library().nsa_normalize_blocks(ctypes.byref(x.blocks), ctypes.byref(desc)))
    was_written(written)


# ---- Decoding -----------------------------------------------------------------------------------

class Cache:
    """One layer's cache for desc.batch sequences of at most desc.tokens tokens each.

    dtype: of the rows that it holds; max_rewind: how far a sequence can be taken back, and max_rewind + 1
    tokens at once at most. The work for a token is that of its own keys. Threads may share one: its calls wait for
    each other. A child of fork refuses it if another thread was in a call of it just then. copy and deepcopy make one
    with memory of its own, and the same tokens.
    """

    def __init__(self, desc: Desc, dtype: Dtype | str = Dtype.F32, max_rewind: int = 0):
        checked(library(), desc)
        try:
            kind = Dtype[dtype.upper()] if isinstance(dtype, str) else Dtype(dtype)
        except (KeyError, ValueError):
            raise refused("DTYPE", "dtype", f"{dtype!r}, must be of f32, bf16, f16, f64, i8, f8") from None
        self._lib: Library = library(kind == Dtype.F64)
        self.struct = _Cache()
        size = self._lib.nsa_cache_size(ctypes.byref(desc), kind, max_rewind)
        self._memory = memory(max(1, size))
        status = self._lib.nsa_cache_init(ctypes.byref(self.struct), ctypes.byref(desc), kind, max_rewind,
                                          ctypes.addressof(self._memory), len(self._memory))
        self._lib.check(status, desc, _Cache(max_rewind=max_rewind))
        self._lock, self._dtype = Lock(), kind
        self.desc = type(desc).from_buffer_copy(desc)
        self.desc.__dict__["arrays"] = {}

    def __copy__(self) -> "Cache":
        with self._lock:
            made = Cache(self.desc, self._dtype, self.struct.max_rewind)
            for sequence, length in enumerate(self.lengths):
                made.fork(sequence, self, sequence, length)
            return made

    def __deepcopy__(self, memo: Any) -> "Cache":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError("a Cache is memory of this process, and cannot be pickled: copy and fork make others here")

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence holds."""
        return list((ctypes.c_int32 * self.desc.batch).from_address(self.struct.lengths or 0))

    def rewind(self, sequence: int, length: int) -> None:
        """Takes a sequence back to so many tokens; to 0 it may always go."""
        with self._lock:
            self._sequence("sequence", sequence)
            status = self._lib.nsa_cache_rewind(ctypes.byref(self.struct), sequence, length)
            self._held(status, "length", length, sequence)

    def fork(self, sequence: int, source: "Cache", source_sequence: int, length: int) -> None:
        """Makes a sequence the copy of another's first tokens, of this or another cache."""
        if not isinstance(source, Cache):
            raise TypeError(f"source: {type(source).__name__}, must be a Cache")
        if source._lib is not self._lib:
            raise refused("CACHE", "source", "a cache of float64, and this one is not, or the other way round")
        first, second = sorted((self, source), key=id)  # two threads that copy both ways take them in one order
        with first._lock, second._lock:
            self._sequence("sequence", sequence)
            source._sequence("source_sequence", source_sequence)
            status = self._lib.nsa_cache_fork(ctypes.byref(self.struct), sequence, ctypes.byref(source.struct),
                                              source_sequence, length)
            if self._lib.nsa_status_kind(status) == Error.CACHE:
                raise self._differs_from(source, length)
            source._held(status, "length", length, source_sequence)

    def _differs_from(self, source: "Cache", length: int) -> Refused:
        if length > self.desc.tokens:
            return refused("CACHE", "length", f"{length}, and this cache has room for {self.desc.tokens}")
        here, there = ({"max_rewind": cache.struct.max_rewind, "dtype": cache._dtype.name.lower(), **{
            name: getattr(cache.desc, name) for name in ("window", "window_rule", "kv_heads", "dim", "dim_v", "cmp_block",
                                                         "cmp_stride", "tokens")}} for cache in (self, source))
        name = next(name for name in here if here[name] != there[name])
        return refused("CACHE", "source", f"of {name} {there[name]}, and this cache of {here[name]}: must be the same")

    def decode(self, x: Attention, count: int, counts: Array = None) -> list[Reads]:
        """Appends `count` rows to every sequence, or counts[b] <= count to sequence b, and attends from them.

        The views of x hold the new rows, (B, count, ...); of outputs the rows behind counts[b] become zeros, of lse -inf,
        of lists -1. Returns the keys that each sequence's step read.
        """
        check_int("count", count), check_kind("x", x, Attention)
        rows = type(self.desc).from_buffer_copy(self.desc)
        rows.first, rows.count, rows.tokens, rows.begins = 0, count, count, None
        views = views_of([x])
        check_shapes(views, rows, ())
        written = written_of([view for view in views if view[1] not in ("k_cmp.out", "v_cmp.out")], ("decode",))
        check_writable(written)
        if library_for(views) is not self._lib:
            raise refused("DTYPE", "x", "arrays of float64 go with a cache of float64, and no others do")
        each = None if counts is None else integers_in(counts, "counts", self.desc.batch)
        reads = (Reads * self.desc.batch)()
        with self._lock:
            self._decode(x, count, each, reads)
        was_written(written)
        if each is not None:
            self._fill(views, count, list((ctypes.c_int32 * self.desc.batch).from_address(each)))
        return list(reads)

    def _decode(self, x: Attention, count: int, each: int | None, reads: Any) -> None:
        lib, cache = self._lib, ctypes.byref(self.struct)
        if _library.threads_most is not None:
            self.struct.desc.threads = _library.threads_most
        has_computed()
        room = memory(max(1, lib.nsa_decode_workspace_size(ctypes.byref(x), cache, count)))
        status = lib.nsa_decode(ctypes.byref(x), cache, count, each, reads, ctypes.addressof(room), len(room))
        if lib.nsa_status_kind(status) == Error.CACHE:
            raise refused("CACHE", "count", f"{count} tokens more, and sequences hold {self.lengths}: of at most "
                                            f"{self.desc.tokens}, {self.struct.max_rewind + 1} at once")
        lib.check(status, x, self.desc)

    def _fill(self, views: Any, count: int, counts: list[int]) -> None:
        for _, _, struct, field, array in views:
            if field in struct._outputs_ and isinstance(struct, Attention):
                heads, width = (*array.shape[2:], 1)[:2]
                for b, written in enumerate(counts):
                    self._lib.fill(ctypes.byref(getattr(struct, field)), b, written, count, heads, width,
                                   is_logarithm(field))

    def _sequence(self, name: str, sequence: int) -> None:
        if not 0 <= check_int(name, sequence) < self.desc.batch:
            raise refused("RANGE", name, f"{sequence}, must be 0 .. {self.desc.batch - 1}")

    def _held(self, status: int, name: str, length: int, sequence: int) -> None:
        if self._lib.nsa_status_kind(status) == Error.REWIND:
            newest = (ctypes.c_int32 * self.desc.batch).from_address(self.struct.newest or 0)[sequence]
            least = max(0, newest - self.struct.max_rewind)
            raise refused("REWIND", name, f"{length}, must be 0 or {least} .. {self.lengths[sequence]}: sequence {sequence} "
                                          f"has had {newest} tokens and max_rewind is {self.struct.max_rewind}")
        self._lib.check(status, self.desc)


# ---- Numbers ------------------------------------------------------------------------------------

def bf16_to_f32(x: int) -> float:
    return library().nsa_bf16_to_f32(x)


def f32_to_bf16(x: float) -> int:
    """The bits, to nearest, ties to even; NaN stays NaN."""
    return library().nsa_f32_to_bf16(x)


def f16_to_f32(x: int) -> float:
    return library().nsa_f16_to_f32(x)


def f32_to_f16(x: float) -> int:
    """The bits, to nearest, ties to even; NaN stays NaN."""
    return library().nsa_f32_to_f16(x)


# ---- Documentation ------------------------------------------------------------------------------

def _documented() -> Iterator[tuple[str, Any]]:
    """The functions of the header that are written by hand, here."""
    yield from ((name, globals()[name]) for name in (
        "desc_check", "isa_available", "isa_name", "check_pages", "block_overlap_range", "block_map", "cmp_begins",
        "rank_blocks", "check_blocks", "normalize_blocks", "rope_frequencies", "bf16_to_f32", "f32_to_bf16", "f16_to_f32", "f32_to_f16"))
    yield from (("desc_default", desc), ("cache_rewind", Cache.rewind), ("cache_fork", Cache.fork), ("decode", Cache.decode))


for _name, _function in _documented():
    _function.__doc__ = "\n\n".join(filter(None, (
        _function.__doc__, "The header: " + _abi.prototypes(ctypes.c_float)["nsa_" + _name][3])))


__all__ = [
    "Refused", "bf16_to_f32", "block_map", "block_overlap_range", "check_blocks", "check_pages", "cmp_begins", "desc",
    "desc_check", "f16_to_f32", "f32_to_bf16", "f32_to_f16", "isa_available", "isa_name", "normalize_blocks",
    "rank_blocks", "rope_frequencies", "rope_options",
    *_abi.__all__, *_functions.__all__,
]
