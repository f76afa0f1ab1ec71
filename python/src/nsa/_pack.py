"""The structs of nsa.h as bytes, in few microseconds, and options as text: what operators are made of.

Formats come from the structs of _abi.py, whose layout the import has checked. Not here: torch, jax.
"""
from __future__ import annotations

import ctypes
import functools
import operator
import struct
from typing import Any, Sequence

from . import _abi
from ._abi import Desc
from ._library import frequencies_of, library
from ._refused import refused
from ._struct import check_int

#: phi's parameters, in the order of the header.
PHI = ("pos", "w1", "b1", "w2", "b2")
#: Those that each kind has.
_PHIS = {"mean": (), "conv": ("w1", "b1"), "mlp": PHI}
_NEEDED = {"mean": (), "conv": ("w1",), "mlp": ("w1", "w2")}
_CODES = {ctypes.c_void_p: "Q", ctypes.c_int: "i", ctypes.c_int64: "q", ctypes.c_double: "d"}
NULL = (0, 0, 0, 0, 0)


def check_phi(phi: str, given: Sequence[str]) -> None:
    """Parameters that a kind has not would be ignored, and get no gradient."""
    if phi not in _PHIS:
        raise refused("OPTION", "phi", f"{phi!r} is none of {', '.join(_PHIS)}")
    for name in given:
        if name not in _PHIS[phi]:
            raise refused("OPTION", "phi", f"{phi!r} has no {name}, must be of {', '.join(_PHIS[phi]) or 'no parameters'}")
    for name in _NEEDED[phi]:
        if name not in given:
            raise refused("NULL", "phi", f"{phi!r} without {name}, must have {' and '.join(_NEEDED[phi])}")


def phi_of(name: str, phi: Any) -> tuple[str, Any]:
    """A kind and its parameters by name."""
    if isinstance(phi, str):
        return phi, {}
    if not isinstance(phi, (tuple, list)) or len(phi) != 2 or not isinstance(phi[0], str) or not (
            isinstance(phi[1], dict) or hasattr(phi[1], "keys")):
        raise refused("OPTION", name, f"{phi!r}, must be a kind, or a kind and its parameters by name: ('conv', {{'w1': ...}})")
    return phi[0], phi[1]


class Packer:
    """The bytes of a struct from {"q": (address, dtype, batch, token, head), "k_cmp.phi": 0, ...}; a
    field that is not given is zeros."""

    def __init__(self, kind: Any):
        self.kind = kind
        self.fields: list[tuple[str, tuple[Any, ...]]] = []
        self.offsets: dict[str, int] = {}
        self.at: list[int] = []  #: each value's offset
        codes: list[str] = []
        self._end = 0
        self._walk(kind, "", 0, codes)
        codes.append(f"{ctypes.sizeof(kind) - self._end}x")
        made = struct.Struct("=" + "".join(codes))
        assert made.size == ctypes.sizeof(kind)
        self.bytes = made.pack  #: of values

    def _walk(self, kind: Any, prefix: str, base: int, codes: list[str]) -> None:
        for name, of in kind.kinds().items():
            at = base + getattr(kind, name).offset
            if of is _abi.Tensor or of in _CODES:
                parts = [(getattr(of, n).offset, _CODES[t]) for n, t in of.kinds().items()] if of is _abi.Tensor \
                    else [(0, _CODES[of])]
                for offset, code in parts:
                    codes.append(f"{at + offset - self._end}x{code}")
                    self.at.append(at + offset)
                    self._end = at + offset + struct.calcsize("=" + code)
                self.fields.append((prefix + name, (0,) * len(parts)))
                self.offsets[prefix + name] = at
            else:
                self._walk(of, prefix + name + ".", at, codes)

    def values(self, given: dict[str, tuple[Any, ...]]) -> list[Any]:
        found: list[Any] = []
        for name, zeros in self.fields:
            found += given.get(name, zeros)
        return found

    def place(self, field: str) -> int:
        """Of a field's first value among all."""
        names = [name for name, _ in self.fields]
        return sum(len(zeros) for _, zeros in self.fields[:names.index(field)])

    def pack(self, given: dict[str, tuple[Any, ...]]) -> bytes:
        return self.bytes(*self.values(given))


# ---- Descriptors --------------------------------------------------------------------------------

#: The descriptor's arrays, in the order of the operators, and where in it their addresses lie.
ARRAYS = {name: int(getattr(Desc, name).offset) for name in ("begins", "firsts", "counts", "pages")}


#: What tensors say, and no option may: who gave it would have memory read and written that is not there.
_SIZES = {"Desc": {"batch", "tokens", "heads", "kv_heads", "dim", "dim_v", "first", "count", "gate_heads", "gate_stride",
                   "rows", "table_width", "page_tokens", "page_count"},
          "Rope": {"heads", "dim"}}


def parse(text: str, kind: Any) -> dict[str, Any]:
    """"window=512,gate=softmax" for a struct's fields that are options."""
    found: dict[str, Any] = {}
    fields = {name: of for name, of in kind.kinds().items() if name not in _SIZES[kind.__name__]
              and (of in (ctypes.c_int, ctypes.c_double) or name in kind._doubles_)}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in fields:
            raise refused("OPTION", name, f"no option; there are {', '.join(fields)}")
        try:
            if name in kind._doubles_:
                found[name] = tuple(float(x) for x in value.split("/"))
                continue
            found[name] = float(value) if fields[name] is ctypes.c_double else int(value)
        except ValueError:
            if name not in kind._enums_:
                number = {ctypes.c_int: "an integer", ctypes.c_double: "a number"}.get(fields[name], "numbers")
                raise refused("OPTION", name, f"{value}, must be {number}") from None
            found[name] = value  # an enum's member, which the struct looks up
    return found


def options(**fields: Any) -> str:
    """Options in the form that the operators take: a string, for a graph holds nothing else."""
    return ",".join([f"{name}={_text(name, value)}" for name, value in fields.items() if value is not None])


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        if "," in value or "=" in value:  # or it would be another option too
            raise refused("OPTION", name, f"{value!r}, must be one word")
        return value
    if isinstance(value, int):
        return str(getattr(value, "value", value))
    if isinstance(value, float):
        return repr(float(value))  # numpy 2 has a name in its numbers' own
    some = hasattr(value, "__len__") and getattr(value, "shape", None) != ()
    if any([getattr(x, "requires_grad", False) for x in (value, *(value if isinstance(value, (list, tuple)) else ()))]):
        raise refused("OPTION", name, "a tensor that asks for a gradient, and options give none: must be numbers, as "
                                      "x.detach() has them")
    try:
        return "/".join([repr(float(x)) for x in value]) if some else _number(value)
    except (TypeError, ValueError, RuntimeError):
        raise refused("OPTION", name, f"{type(value).__name__}, must be a number, a word, or numbers in a list") from None


def _number(value: Any) -> str:
    """Of an array without axes, or of another library."""
    try:
        return str(operator.index(value))
    except TypeError:
        return repr(float(value))


@functools.lru_cache(None)
def _kept(values: tuple[float, ...]) -> Any:
    """Memory that lives as long as the process, because plans and graphs have its address."""
    return (ctypes.c_double * len(values))(*values)


def rope_fields(text: str, heads: int, dim: int) -> dict[str, tuple[Any, ...]]:
    """nsa_rope without its views, for options as text."""
    given, kinds = parse(text, _abi.Rope), _abi.Rope.kinds()
    made = _abi.Rope(heads=heads, dim=dim, **given)
    frequencies_of(made)
    fields: dict[str, tuple[Any, ...]] = {name: (getattr(made, name) or 0,) for name, of in kinds.items()
                                          if of is not _abi.Tensor}
    fields.update({name: (ctypes.addressof(_kept(given[name])),) for name in made._doubles_ if name in given})
    return fields


def _check_integers(name: str, x: Any) -> None:
    """An array of the descriptor, or None."""
    if x is None:
        return
    try:
        x.shape  # not by hasattr, which PyTorch 2.4 does not compile
    except AttributeError:
        raise refused("NULL", name, f"{type(x).__name__}, must be an array of int32") from None


def problem(rows: tuple[Any, ...], arrays: Sequence[Any], tokens: Any, first: int) -> tuple[Any, Any]:
    """(sequences, query rows of each at most) of a view on the query's side, whose shape begins with `rows`."""
    begins, firsts, counts, pages = arrays
    of_each = {"begins": begins, "firsts": firsts, "counts": counts}
    for name, x in of_each.items():
        _check_integers(name, x)
        if x is not None and (len(x.shape) != 1 or rows[0] != 1):
            raise refused("SIZE", name, f"shape {tuple(x.shape)} for rows of {tuple(rows[:2])}, must be of one axis, "
                                        "with rows of (1, rows, heads, width)")
    if pages is not None and len(pages.shape) != 2:
        raise refused("SIZE", "pages", f"shape {tuple(pages.shape)}, must be (B, pages of a sequence)")
    if begins is not None:
        if any(x is not None for x in (firsts, counts, pages)):
            raise refused("OPTION", "begins", "packed keys lie in no pages, and their queries have neither firsts nor counts")
        if begins.shape[0] < 1:
            raise refused("SIZE", "begins", "shape (0,), must be (B + 1,)")
        return begins.shape[0] - 1, tokens - first
    if (firsts is None) != (counts is None):
        raise refused("NULL", "firsts, counts", "one of them alone, must be both or none")
    batch, count = rows[0], rows[1]
    if counts is not None:
        if first:
            raise refused("OPTION", "first", f"{first}, must be 0: firsts say which a sequence's queries are")
        batch, count = counts.shape[0], min(tokens, rows[1])
        if firsts.shape[0] != batch:
            raise refused("SIZE", "firsts", f"{firsts.shape[0]}, and counts {batch}: must be as many")
    if pages is not None and pages.shape[0] != batch:
        raise refused("SIZE", "pages", f"of {pages.shape[0]} sequences, must be of {batch}")
    return batch, count


def check_nested(name: str, x: Any) -> None:
    """PyTorch has tensors of several shapes, whose own errors say nothing of ours."""
    if getattr(x, "is_nested", False):
        raise refused("SIZE", name, "a nested tensor, must have one shape: of sequences that differ in length x.values() are "
                                    "the packed rows, and x.offsets() in int32 their begins")


def axes(name: str, x: Any) -> Any:
    """The shape of what must have rows of heads."""
    try:
        shape = x.shape  # not by getattr with a default, which PyTorch 2.4 does not compile
    except AttributeError:
        raise refused("NULL", name, f"{'None' if x is None else type(x).__name__}, must be a tensor") from None
    if len(shape) != 4:
        raise refused("SIZE", name, f"shape {tuple(shape)}, must have 4 axes: (B, T, heads, width)")
    return shape


def tokens_of(rows: Any, begins: Any, pages: Any, longest: Any) -> Any:
    """Of the longest sequence; rows: of each sequence, or page, of k."""
    if begins is not None:
        return longest
    if pages is not None:
        _check_integers("pages", pages)
        return longest or pages.shape[-1] * rows
    if longest and longest < rows:
        raise refused("SIZE", "longest", f"{longest}, and each sequence has {rows} tokens: must be at least as many, or 0; "
                                         "shorter ones need begins, firsts and counts, or pages")
    return rows


def only_with(name: str, *arrays: Any) -> None:
    """These arrays need that one, which is not there."""
    if any(x is not None for x in arrays):
        raise refused("NULL", name, "firsts, counts and pages need it, for compressed rows of earlier steps lie there")


def of_a_step(begins: Any, first: int | None) -> None:
    if begins is not None or first:
        raise refused("OPTION", "begins, first", "in a step firsts and counts say where each sequence is")


def first_of(first: int | None, shape: Sequence[Any], tokens: Any, arrays: Sequence[Any]) -> Any:
    """Of queries (B, rows, H, D) over so many tokens. Some libraries align fewer queries with the end, some with the
    beginning: here nobody guesses."""
    if first is not None or any(x is not None for x in arrays[:3]):
        return first or 0
    if len(shape) == 4 and shape[1] != tokens:
        raise refused("RANGE", "first", f"not given, and there are {shape[1]} rows of queries for {tokens} tokens: must be the "
                                        "place of the first of them, 0 for the first tokens, tokens - rows for the last")
    return 0


@functools.lru_cache(4096)
def desc_struct(text: str, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, first: int,
                count: int, threads: int, **sizes: int) -> Desc:
    """text: options. sizes: other fields, which tensors say."""
    for name, value in (("batch", batch), ("tokens", tokens), ("heads", heads), ("kv_heads", kv_heads), ("dim", dim)):
        check_int(name, value)
    made = library().nsa_desc_default(batch, tokens, heads, kv_heads, dim)
    made.__dict__["arrays"] = {}
    made.dim_v, made.first, made.count, made.threads = dim_v, first, count, threads
    for name, value in (*parse(text, Desc).items(), *sizes.items()):
        setattr(made, name, value)
    return made


def key_stride(text: str, branch: str, stride: int) -> int:
    """Tokens of a row of k: a compressed row begins every so many, and a key that is scored stands for so many."""
    return option(text, "cmp_stride") if branch == "cmp" else max(1, stride)


def key_rows(text: str, branch: str, stride: int, tokens: Any, most: Any = max) -> Any:
    """Rows of k for so many tokens, which may be symbolic."""
    return cmp_count(text, tokens, most) if branch == "cmp" else tokens // max(1, stride)


def scored_tokens(stride: int, longest: int, first: int | None, q: Any, k: Any, arrays: Sequence[Any]) -> Any:
    """Of the longest sequence, for score_blocks. How many tokens the last key lacks its rows do not say; those of all
    queries do, or `longest`."""
    begins, firsts, _, pages = arrays
    if stride > 1 and begins is None and pages is None and (longest or first is None and firsts is None):
        return longest or q.shape[1]
    return tokens_of(k.shape[1] * max(1, stride), begins, pages, longest)


def in_pages(pages: Any, k: Any, stride: int) -> dict[str, int]:
    """The sizes of k, (pages, rows of a page, ...), that has a row for every `stride` tokens."""
    return dict(table_width=pages.shape[1], page_tokens=k.shape[1] * stride, page_count=k.shape[0])


@functools.lru_cache(1024)
def option(text: str, name: str) -> Any:
    """What an option comes to, given or not."""
    return getattr(desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1), name)


@functools.lru_cache(1024)
def list_width(text: str) -> int:
    made = desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1)
    if not all(0 <= x < 1 << 29 for x in (made.slc_count, made.slc_init, made.slc_local)):
        check_options(text)  # their sum need not be a number of C's
    return library().nsa_block_list_width(ctypes.byref(made))


def check_options(text: str) -> None:
    """Raises for those that break a rule by themselves."""
    made = desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1)
    library().check(library().nsa_desc_check(ctypes.byref(made)), made)


def list_heads(text: str, kv_heads: Any) -> Any:
    """How many heads have lists of their own."""
    return option(text, "list_heads") or kv_heads


def slc_count(text: str, tokens: Any) -> Any:
    """Selection blocks of so many tokens, which may be symbolic."""
    block = option(text, "slc_block")
    if block < 1:
        check_options(text)
    return (tokens + block - 1) // block


def cmp_count(text: str, tokens: Any, most: Any = max) -> Any:
    """N(tokens); tokens may be symbolic, with a function `most` that asks nothing of them."""
    block, stride = option(text, "cmp_block"), option(text, "cmp_stride")
    if stride < 1 or block < 1:
        check_options(text)
    return most(0, (tokens - block + stride) // stride)
