"""Native Sparse Attention (arXiv 2502.11089): nsa.h from Python, over anything that has memory.

    d = nsa.desc(batch=1, tokens=256, heads=4, kv_heads=1, dim=32, window=64)
    x = nsa.Attend(q=q, k=k, v=v, out=out, lse=lse)     # numpy, torch, __dlpack__; strides, no copies
    nsa.attend_win_forward(x, d)

Structs and functions are the header's without their nsa_; each struct's docstring has the shapes of its
fields. Forward overwrites its outputs and backward adds to its gradients. A call that the library refuses
raises Refused, a ValueError, and has touched nothing. float64 arrays are computed in double.

nsa.torch and nsa.jax have differentiable operators. Not here: arithmetic.
"""
from __future__ import annotations

import ctypes
from typing import Any, Sequence

from . import _abi, _functions
from ._abi import *  # noqa: F403
from ._abi import VERSION, Attention, BlockFault, Desc, Dtype, Error, Isa, PageFault, Reads, Select
from ._abi import Cache as _Cache
from ._functions import *  # noqa: F403
from ._library import (Library, Refused, call, check_arrays, check_shapes, checked, integers_in, library, library_for,
                       memory, views_of)
from ._struct import Array, Struct
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
    check_arrays(desc)
    fault = PageFault()
    status = library().nsa_check_pages(ctypes.byref(desc), ctypes.byref(fault))
    if library().nsa_status_kind(status) in (Error.RANGE, Error.PAGES) and fault.reason:
        return fault
    library().check(status)
    return None


# ---- Block index --------------------------------------------------------------------------------

def block_overlap_range(desc: Desc, tokens: int, slc: int) -> tuple[int, int]:
    """(begin, end) of the compressed blocks, of those of so many tokens, that overlap a selection block."""
    desc_check(desc)
    begin, end = ctypes.c_int(), ctypes.c_int()
    library().nsa_block_overlap_range(ctypes.byref(desc), tokens, slc, ctypes.byref(begin), ctypes.byref(end))
    return begin.value, end.value


def block_map(desc: Desc, tokens: int) -> tuple[list[int], list[int], list[float]]:
    """The map M of Eq. 9 as CSR, (indptr, indices, weights): a row for each selection block."""
    rows, size = _functions.slc_count(desc, tokens), _functions.block_map_size(desc, tokens)
    indptr, indices = (ctypes.c_int32 * (rows + 1))(), (ctypes.c_int32 * max(1, size))()
    weights = (ctypes.c_float * max(1, size))()
    library().check(library().nsa_block_map(ctypes.byref(desc), tokens, indptr, indices, weights))
    return list(indptr), list(indices)[:size], list(weights)[:size]


def cmp_begins(desc: Desc) -> list[int]:
    """Where each sequence's compressed rows begin: batch + 1 entries."""
    desc_check(desc)
    begins = (ctypes.c_int32 * (desc.batch + 1))()
    library().check(library().nsa_cmp_begins(ctypes.byref(desc), begins))
    return list(begins)


# ---- Block lists --------------------------------------------------------------------------------

def rank_blocks(scores: Sequence[float], query: int, desc: Desc) -> list[int]:
    """The ranking alone: the list of a query for scores of its candidates, blocks 0 .. query // l'."""
    desc_check(desc)
    if len(scores) != _functions.slc_candidates(desc, query):
        raise ValueError(f"scores: {len(scores)} of them, must be one for each of the "
                         f"{_functions.slc_candidates(desc, query)} candidates of query {query}")
    found = (ctypes.c_int32 * _functions.block_list_width(desc))()
    values = (ctypes.c_float * len(scores))(*scores)
    library().check(library().nsa_rank_blocks(values, query, ctypes.byref(desc), found))
    return list(found)


def _lists(blocks: Array, desc: Desc) -> Select:
    x = Select(blocks=blocks)
    desc_check(desc)
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
    if describe(blocks, "blocks").readonly:
        raise ValueError("blocks: is read-only, and would be written")
    library().check(library().nsa_normalize_blocks(ctypes.byref(x.blocks), ctypes.byref(desc)))


# ---- Decoding -----------------------------------------------------------------------------------

class Cache:
    """One layer's cache for desc.batch sequences of at most desc.tokens tokens each.

    dtype: of the rows that it holds; max_rewind: how far a sequence can be taken back, and max_rewind + 1
    tokens at once at most. The work for a token is that of its own keys.
    """

    def __init__(self, desc: Desc, dtype: Dtype | str = Dtype.F32, max_rewind: int = 0):
        desc_check(desc)
        kind = Dtype[dtype.upper()] if isinstance(dtype, str) else Dtype(dtype)
        self._lib: Library = library(kind == Dtype.F64)
        self.struct = _Cache()
        size = self._lib.nsa_cache_size(ctypes.byref(desc), kind, max_rewind)
        self._memory = memory(max(1, size))
        self._lib.check(self._lib.nsa_cache_init(ctypes.byref(self.struct), ctypes.byref(desc), kind, max_rewind,
                                                 ctypes.addressof(self._memory), len(self._memory)))
        self.desc = type(desc).from_buffer_copy(desc)
        self.desc.__dict__["arrays"] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence holds."""
        return list((ctypes.c_int32 * self.desc.batch).from_address(self.struct.lengths or 0))

    def rewind(self, sequence: int, length: int) -> None:
        """Takes a sequence back to so many tokens; to 0 it may always go."""
        self._lib.check(self._lib.nsa_cache_rewind(ctypes.byref(self.struct), sequence, length))

    def fork(self, sequence: int, source: "Cache", source_sequence: int, length: int) -> None:
        """Makes a sequence the copy of another's first tokens, of this or another cache."""
        if source._lib is not self._lib:
            raise ValueError("source: a cache of float64, and this one is not, or the other way round")
        self._lib.check(self._lib.nsa_cache_fork(ctypes.byref(self.struct), sequence, ctypes.byref(source.struct),
                                                 source_sequence, length))

    def decode(self, x: Attention, count: int, counts: Array = None) -> list[Reads]:
        """Appends `count` rows to every sequence, or counts[b] <= count to sequence b, and attends from them.

        The views of x hold the new rows, (B, count, ...). Returns the keys that each sequence's step read.
        """
        rows = type(self.desc).from_buffer_copy(self.desc)
        rows.first, rows.count, rows.tokens, rows.begins = 0, count, count, None
        views = views_of([x])
        check_shapes(views, rows, ())
        if library_for(views) is not self._lib:
            raise ValueError("x: arrays of float64 go with a cache of float64, and no others do")
        each = None if counts is None else integers_in(counts, "counts", self.desc.batch)
        reads = (Reads * self.desc.batch)()
        lib, cache = self._lib, ctypes.byref(self.struct)
        room = memory(max(1, lib.nsa_decode_workspace_size(ctypes.byref(x), cache, count)))
        lib.check(lib.nsa_decode(ctypes.byref(x), cache, count, each, reads, ctypes.addressof(room), len(room)))
        return list(reads)


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


__all__ = [
    "Refused", "bf16_to_f32", "block_map", "block_overlap_range", "check_blocks", "check_pages", "cmp_begins", "desc",
    "desc_check", "f16_to_f32", "f32_to_bf16", "f32_to_f16", "isa_available", "isa_name", "normalize_blocks",
    "rank_blocks",
    *_abi.__all__, *_functions.__all__,
]
