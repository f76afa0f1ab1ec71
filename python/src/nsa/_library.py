"""The shared libraries of nsa.h: found, held against _abi.py, called; what they refuse is a ValueError.

libnsa_f32.so adds up in float and libnsa_f64.so in double; a call goes to the second where a view of it is
float64. Twins: native/library.c, _abi.py. Not here: the functions by name (_functions.py, __init__.py).
"""
from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
import threading
import warnings
import weakref
from typing import Any, Sequence

from . import _abi
from ._abi import Desc, Error
from ._refused import Refused, refused
from ._struct import GATES, Array, Struct, check_int, check_kind
from ._views import F64, I32, NAMES, REALS, Described, allowed, describe

_PHIS = {int(member): member.name.lower() for member in _abi.Phi}
FOLDER = pathlib.Path(__file__).resolve().parent


class _Function:
    """A function of the library whose integers are held against the bits that they have there."""

    def __init__(self, function: Any, names: Sequence[str]):
        self._function, self.argtypes, self.names = function, function.argtypes, names
        self._integers = [(i, name, ctypes.sizeof(kind) * 8, kind is ctypes.c_uint16)
                          for i, (name, kind) in enumerate(zip(names, self.argtypes))
                          if kind in (ctypes.c_int, ctypes.c_int64, ctypes.c_uint16)]

    def __call__(self, *arguments: Any) -> Any:
        for i, name, bits, unsigned in self._integers:
            value = check_int(name, arguments[i], 64 if unsigned else bits)
            if unsigned and not 0 <= value < 1 << bits:
                raise refused("SIZE", name, f"{value}, must be 0 .. {(1 << bits) - 1}")
        return self._function(*arguments)


def layout() -> dict[str, tuple[int, int]]:
    """(size, offset) of each field of _abi.py's structs, (size, -1) of each struct, (value, -2) of each enum's member."""
    here = {member: (value, -2) for member, value in _abi.MEMBERS.items()}
    for struct, kind in _abi.STRUCTS.items():
        here[struct] = (ctypes.sizeof(kind), -1)
        for field in kind.kinds():
            at = getattr(kind, field)
            here[f"{struct}.{field}"] = (at.size, at.offset)
    return here


class Library:
    """A shared library of nsa.h, its functions as attributes."""

    def __init__(self, path: pathlib.Path, real: Any):
        self.path, self.real = path, real
        self._handle = ctypes.CDLL(str(path))
        self._check_layout()
        for name, (result, arguments, names, _) in _abi.prototypes(real).items():
            function = getattr(self._handle, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, _Function(function, names))
        if not hasattr(self._handle, "nsa_python_clear"):
            return  # the library of a device, whose rows are filled before a call
        sizes = [*[ctypes.c_int64] * 3, ctypes.c_int]
        self.clear, self.fill = self._handle.nsa_python_clear, self._handle.nsa_python_fill
        self.clear.argtypes, self.clear.restype = [ctypes.c_void_p, ctypes.c_void_p, *sizes], None
        self.fill.argtypes, self.fill.restype = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *sizes], None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.path.name} has no function {name}")

    def _check_layout(self) -> None:
        """Every struct and every enum is the same here and there, or the import ends."""
        entry = self._handle.nsa_python_layout
        name, size, offset = ctypes.c_char_p(), ctypes.c_long(), ctypes.c_long()
        there, i = {}, 0
        while entry(i, ctypes.byref(name), ctypes.byref(size), ctypes.byref(offset)):
            there[(name.value or b"").decode()] = (size.value, offset.value)
            i += 1
        here = layout()
        if here != there:
            differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            raise ImportError(f"{self.path} and nsa/_abi.py were built from different headers; they differ in "
                              + ", ".join(differ))

    def check(self, status: int, *structs: Struct) -> None:
        if status:
            raise refusal(self, status, *structs)


#: The rule that a field has broken. The library's own words for a kind of error name the rules of all fields that can.
_HEADS, _COUNT = "1 .. 2^30 - 1", "0 .. 2^29 - 1"
_RULES = {
    "SIZE": {"batch": ">= 1", "tokens": ">= 0", "heads": _HEADS, "kv_heads": _HEADS, "gate_heads": _HEADS, "dim": "1 .. 576",
             "dim_v": "1 .. 576", "cmp_block": _HEADS, "cmp_stride": ">= 1", "slc_block": _HEADS,
             "slc_count": "1 .. 2^29 - 1", "slc_init": _COUNT, "slc_local": _COUNT, "window": ">= 1",
             "threads": "0 .. 65536", "list_heads": "0 or more", "rows": ">= 0", "table_width": ">= 0",
             "page_tokens": ">= 1", "page_count": ">= 0", "max_rewind": ">= 0", "hidden": ">= 1"},
    "HEADS": {"heads": "a multiple of kv_heads, which is {kv_heads}",
              "gate_heads": "heads or kv_heads: {heads} or {kv_heads}",
              "list_heads": "0, or a multiple of kv_heads that divides heads: of {kv_heads}, dividing {heads}"},
    "CMP_STRIDE": {"cmp_stride": "a divisor of cmp_block, which is {cmp_block}",
                   "page_tokens": "a multiple of cmp_stride, which is {cmp_stride}"},
    "SLC_BLOCK": {"slc_block": "a multiple of cmp_stride, {cmp_stride}, and at least cmp_block, {cmp_block}"},
    "SLC_COUNT": {"slc_count": "at least slc_init + slc_local, {slc_init} + {slc_local}, or forced \"on_top\""},
    "SLC_LOCAL": {"slc_local": ">= 1, or forced \"on_top\" (>= 0) or \"tail\" (0 or 1)"},
    "RANGE": {"first": "0 .. tokens, which is {tokens}", "count": "0 .. tokens - first, {tokens} - {first}"},
    "STRIDE": {"gate_stride": ">= 0"},
}
#: Of nsa.Rope, whose fields are of kind SIZE.
_ROPE_RULES = {"heads": ">= 1", "dim": "even, 2 .. 576", "base": "above 1, or 0 for 10000", "factor": ">= 1",
               "trained_context": ">= 1, of longrope >= 2", "context": ">= 0", "magnitude": ">= 0",
               "fast": "above slow, and that above 0: {fast} and {slow}, of which 0 means 32 (llama3: 4) and 1",
               "mscale": ">= 0, and so mscale_all_dim: {mscale} and {mscale_all_dim}", "frequencies": "finite numbers",
               "short_factors": "numbers above 0", "long_factors": "numbers above 0"}
#: Of a descriptor that others would take.
_CACHE_RULES = {"mask": "causal in a cache", "list_heads": "0 or kv_heads in a cache, which is {kv_heads}",
                "firsts": "None in a cache, which has each sequence for itself", "pages": "None in a cache, which has its own memory"}


def _rule(owner: Any, value: Any, kind: str, where: str, structs: Sequence[Struct]) -> str | None:
    """What is allowed in a field of this struct, where the library's own words are those of all fields."""
    field = where.rpartition(".")[2]
    if isinstance(owner, _abi.Rope):
        return _ROPE_RULES.get(field) if kind == "SIZE" else None
    if isinstance(owner, Desc) and any(isinstance(x, _abi.Cache) for x in structs) and field in _CACHE_RULES:
        return _CACHE_RULES[field]
    if isinstance(owner, _abi.Compress) and field == "dim" and isinstance(value, int) and 1 <= value <= 576:
        whole = "dim" if where.startswith("k") else "dim_v"
        return f"the descriptor's {whole}, which is {_field(structs, whole)[1]}"
    return _RULES.get(kind, {}).get(field) if isinstance(owner, (Desc, _abi.Compress, _abi.Cache)) else None


def _field(structs: Sequence[Struct], where: str) -> tuple[Any, Any]:
    """(struct, value) of the field that a status names, "dx.k" or "k_cmp.dim"; None where nobody has it."""
    first, _, rest = where.partition(".")
    if first == "dx":
        return _field(structs[:1], rest)
    for x in structs:
        if first in x.kinds():
            kept = x.__dict__.get("arrays", {}).get(first)
            return _field([getattr(x, first) if kept is None else kept], rest) if rest else (
                x, kept if kept is not None else getattr(x, first))
    return None, None


def check_dtype(field: str, name: str) -> None:
    """What the header looks at, for who can say it before the call."""
    if name not in allowed(field).replace(",", " ").split():
        raise refused("DTYPE", field, f"{name}, must be {allowed(field)}")


def _of_sequences(desc: Desc, kind: str, where: str) -> str | None:
    """Which sequence breaks a rule of begins, firsts and counts, and how."""
    begins = _integers(desc.begins, desc.batch + 1)
    if kind == "BEGINS" and begins:
        if where == "rows":
            return f"{desc.rows}, must be at least begins' last, which is {begins[-1]}"
        for b, (start, end) in enumerate(zip(begins, begins[1:])):
            if start < 0 or end < start:
                return f"{start} and {end} of sequence {b}, must ascend from 0 or more"
            if end - start > desc.tokens:
                return f"sequence {b} has {end - start} tokens, must be at most the longest, which is {desc.tokens}"
    if kind == "RANGE" and desc.firsts and desc.counts:
        for b, (first, count) in enumerate(zip(_integers(desc.firsts, desc.batch), _integers(desc.counts, desc.batch))):
            there = min(desc.tokens, begins[b + 1] - begins[b]) if begins else desc.tokens
            if first < 0 or first > there:
                return f"first {first} of sequence {b}, must be 0 .. {there}"
            if not 0 <= count <= min(desc.count, there - first):
                return f"count {count} of sequence {b}, must be 0 .. {min(desc.count, there - first)}"
    return None


def _dtype_name(view: Any) -> str:
    number = int(view.dtype)
    return next((name for name, value in NAMES.items() if value == number), str(number))


def refusal(library: Any, status: int, *structs: Struct, on_host: bool = True) -> Refused:
    """The library's words for a status, and of one of these structs' fields the value, and the rule that it breaks.
    on_host: whether the descriptor's arrays can be read here."""
    where = library.nsa_status_where(status).decode()
    kind, text = Error(library.nsa_status_kind(status)), library.nsa_status_text(status).decode()
    owner, value = _field(structs, where)
    desc = next((x for x in structs if isinstance(x, Desc)), None)
    found = _of_sequences(desc, kind.name, where) if desc is not None and on_host else None
    rule, is_view = _rule(owner, value, kind.name, where, structs), isinstance(value, (Described, _abi.Tensor))
    if found is not None:
        text = found
    elif kind == Error.DTYPE:
        text = (f"{_dtype_name(value)}, " if is_view else "") + "must be " + (
            "float64, because other arrays of this call are" if allowed(where) == REALS and library.real is ctypes.c_double
            else allowed(where))
    elif kind == Error.NULL and owner is not None and (value is None or isinstance(value, _abi.Tensor) and not value.data):
        text = "not given, must be an array"
    elif rule is not None:
        shown = list(value.shape) if isinstance(value, Described) else value
        text = f"{shown}, must be " + rule.format_map({name: getattr(owner, name) for name in owner.kinds()})
    elif isinstance(value, Described):
        text = f"{value.dtype_name}{list(value.shape)} of strides {list(value.strides)}: {text}"
    elif kind == Error.OPTION and owner is not None and where in owner._enums_ and value not in list(owner._enums_[where]):
        text = f"{value}, must be of " + ", ".join(f"{member.name.lower()} ({int(member)})" for member in owner._enums_[where])
    elif isinstance(value, (int, float)) and owner.kinds().get(where) is not ctypes.c_void_p:
        text = f"{value}: {text}"
    words = f"NSA_ERROR_{kind.name}: {text}"
    return Refused(f"{where}: {words}" if where else words, kind.name, where)


def _load(name: str, real: Any) -> Library:
    """The build with OpenMP, or, on a machine without its runtime, the one for a single thread."""
    parallel = FOLDER / f"lib{name}.so"
    serial = FOLDER / f"lib{name}_serial.so"
    if not parallel.exists():
        return Library(serial, real)
    try:
        return Library(parallel, real)
    except OSError as error:
        if "libgomp" not in str(error) and "libomp" not in str(error):
            raise
        warnings.warn(f"nsa uses one thread: {error} (Debian, Ubuntu: libgomp1)", RuntimeWarning, stacklevel=3)
        return Library(serial, real)


@functools.lru_cache(None)
def library(f64: bool = False) -> Library:
    return _load("nsa_f64", ctypes.c_double) if f64 else _load("nsa_f32", ctypes.c_float)


#: Of every array of a call's structs: the struct's place among them, and what Struct.views has.
Views = Sequence[tuple[int, str, Struct, str, Described]]


def views_of(structs: Sequence[Struct]) -> Views:
    return [(i, *view) for i, x in enumerate(structs) for view in x.views()]


def library_for(views: Views) -> Library:
    for *_, array in views:
        if array.dtype == F64:
            return library(True)
    return library(False)


# ---- Calls --------------------------------------------------------------------------------------

def memory(size: int) -> Any:
    """So many bytes, which the system gives as they are touched."""
    return (ctypes.c_char * size).from_buffer(bytearray(size))


def check_arrays(desc: Desc) -> None:
    """begins, firsts, counts and pages that are shorter than the descriptor says would be read beyond their end."""
    for name, array in desc.__dict__.get("arrays", {}).items():
        shape = {"begins": (desc.batch + 1,), "pages": (desc.batch, desc.table_width)}.get(name, (desc.batch,))
        if array.shape != shape:
            raise refused("SIZE", name, f"shape {array.shape}, must be {shape}")


def _integers(address: int | None, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if address else []


def extents(desc: Desc, of_queries: bool) -> dict[str, int]:
    """What the letters of the fields' shapes amount to, on the queries' side or the keys'. Rows of packed
    sequences lie in one batch, those of pages in one for each page. What it takes of fields that the function does not
    use may be nonsense, and is not asked for then."""
    begins, counts = _integers(desc.begins, desc.batch + 1), _integers(desc.counts, desc.batch)
    stride, block = max(1, desc.cmp_stride), max(1, desc.slc_block)
    if desc.pages:
        batch, tokens, rows = desc.page_count, desc.page_tokens, desc.page_tokens // stride
    elif begins:
        batch, tokens = 1, begins[-1]
        rows = sum(_cmp_count(desc, stride, b - a) for a, b in zip(begins, begins[1:]))
    else:
        batch, tokens, rows = desc.batch, desc.tokens, _cmp_count(desc, stride, desc.tokens)
    count = sum(counts) if counts else begins[-1] if begins else desc.count
    if of_queries:
        batch = 1 if counts or begins else desc.batch
    return {"B": batch, "T": tokens, "count": count, "N": rows, "H": desc.heads,
            "Hk": desc.kv_heads, "Dk": desc.dim, "Dv": desc.dim_v, "l": desc.cmp_block,
            "gate_heads": desc.gate_heads, "list heads": desc.list_heads or desc.kv_heads,
            "nsa_slc_count(T)": -(-desc.tokens // block), "N(T)": _cmp_count(desc, stride, desc.tokens),
            "nsa_block_list_width": library().nsa_block_list_width(ctypes.byref(desc))}


def _cmp_count(desc: Desc, stride: int, tokens: int) -> int:
    return max(0, (tokens - desc.cmp_block) // stride + 1) if tokens >= desc.cmp_block else 0


#: Functions that read the lists which others of their struct write, and have scores of these blocks alone.
_OF_LISTS = {("score", "blocks", "forward"), ("score", "blocks", "backward")}


@functools.lru_cache(None)
def outputs_of(struct: type[Struct], words: tuple[str, ...]) -> set[str]:
    """The fields that a forward function writes, whose name is of these words."""
    return set(struct._outputs_) - ({"blocks"} if words[:3] in _OF_LISTS else set())


@functools.lru_cache(None)
def shape_for(struct: type[Struct], field: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The shape that the header gives for the first of these words, or for none."""
    if field == "scores" and words[:3] in _OF_LISTS:
        field = "blocks"
    shapes = struct._shapes_.get(field, {})
    return next((shapes[word] for word in (*words, "") if word in shapes), None)


def check_shapes(views: Views, desc: Desc, words: tuple[str, ...]) -> None:
    """An array that is smaller than the descriptor says would be read beyond its end."""
    sides: dict[bool, dict[str, int]] = {}
    for _, path, struct, field, array in views:
        if struct._doubles_:
            check_numbers(struct)
        if isinstance(struct, _abi.Score):
            check_key_stride(struct.stride, desc.slc_block, desc.page_tokens if desc.pages else 0)
        tag = (*words, _PHIS.get(int(struct.phi), "")) if isinstance(struct, _abi.Compress) else words
        shape = shape_for(type(struct), field, tag)
        if shape is None:
            continue
        of_queries = "count" in shape
        if of_queries not in sides:
            sides[of_queries] = extents(desc, of_queries)
        known = sides[of_queries]
        wanted = tuple([known[axis] if axis in known else _extent(axis, known, struct) for axis in shape])
        if field == "k" and isinstance(struct, _abi.Score) and struct.stride > 1:  # a key stands for so many tokens
            own = _with_uses(desc, _SLC)
            own.cmp_block = own.cmp_stride = struct.stride
            wanted = (wanted[0], extents(own, False)["N"], *wanted[2:])
        if shape[0] == "Hk" and array.shape[:1] == (1,):
            wanted = (1, *wanted[1:])
        if array.shape != wanted:
            raise refused("SIZE", path, f"shape {array.shape}, must be ({', '.join(shape)}) = {wanted}")
        if field in GATES and array.strides[-1] != (desc.gate_stride or 1):
            raise refused("STRIDE", path, f"its gates lie {array.strides[-1]} elements apart, "
                                          f"desc.gate_stride is {desc.gate_stride}")


def check_key_stride(stride: int, slc_block: int, page_tokens: int) -> None:
    """nsa_score.stride: in words of its own, for the header takes it for cmp_stride."""
    if stride < 0:
        raise refused("SIZE", "stride", f"{stride}, must be >= 0, of which 0 means 1")
    for kind, name, size in ("SLC_BLOCK", "slc_block", slc_block), ("CMP_STRIDE", "page_tokens", page_tokens):
        if stride and size % stride:
            raise refused(kind, "stride", f"{stride}, must be a divisor of {name}, which is {size}")


def check_numbers(rope: Any) -> None:
    """What is one number for each pair of nsa.Rope."""
    for name in rope._doubles_:
        array = rope.__dict__.get("arrays", {}).get(name)
        if array is not None and array.shape != (rope.dim // 2,):
            raise refused("SIZE", name, f"shape {array.shape}, must be (dim / 2) = ({rope.dim // 2},)")


def frequencies_of(rope: Any) -> tuple[Any, Any]:
    """What nsa_rope_frequencies finds; it holds the options against their rules."""
    check_numbers(check_kind("rope", rope, _abi.Rope))
    found, magnitude = (ctypes.c_double * max(1, rope.dim // 2))(), ctypes.c_double()
    library().check(library().nsa_rope_frequencies(ctypes.byref(rope), found, ctypes.byref(magnitude)), rope)
    return found, magnitude


def _extent(axis: str, known: dict[str, int], struct: Struct) -> int:
    """"3", "l D", and what is a field of the struct: "dim", as "D" is, "hidden", "heads"."""
    product = 1
    for part in axis.split():
        of_struct = "dim" if part == "D" else part
        product *= int(part) if part.isdigit() else known[part] if part in known else getattr(struct, of_struct)
    return product


def written_of(views: Views, words: tuple[str, ...]) -> list[tuple[str, Described]]:
    """Outputs of a forward; gradients of a backward: its first struct, but for those that come in."""
    backward = words[-1] == "backward"
    return [(path, array) for i, path, struct, field, array in views
            if (i == 0 and field not in ("out", "lse", "scores") if backward else field in outputs_of(type(struct), words))]


def check_writable(written: Sequence[tuple[str, Described]]) -> None:
    torch: Any = sys.modules.get("torch")
    for path, array in written:
        if array.readonly:
            raise refused("NULL", path, "is read-only, and would be written")
        if getattr(array.source, "requires_grad", False) and torch is not None and torch.is_grad_enabled():
            raise refused("OPTION", path, "a tensor that asks for a gradient, and what is written into it records none: must be "
                                          "x.detach(), or the call under torch.no_grad(); nsa.torch has gradients")


def was_written(written: Sequence[tuple[str, Described]]) -> None:
    """PyTorch's graphs that have saved a tensor must learn that it has other values now."""
    graph = getattr(getattr(sys.modules.get("torch"), "autograd", None), "graph", None)
    for _, array in written:
        x = array.source
        if graph is None or not hasattr(x, "data_ptr") or hasattr(x, "is_inference") and x.is_inference():
            continue
        if hasattr(graph, "increment_version"):
            graph.increment_version(x)
        else:  # an operation in place on none of its elements
            x.detach()[:0].zero_()


#: What of cmp_block .. slc_local a function has a use for, where that is not all; by the words that its name begins with.
_CMP, _SLC, _FORCED = 1, 2, 4
_USES = {"attend_cmp": _CMP, "attend_slc": _SLC, "attend_win": 0, "attend_dense": 0, "compress": _CMP, "rope": 0, "merge": 0,
         "gate": 0, "score_blocks": _SLC | _FORCED, "rank": _SLC | _FORCED, "check_blocks": _SLC, "normalize_blocks": _SLC,
         "cmp_count": _CMP, "cmp_visible": _CMP, "cmp_begins": _CMP, "slc_count": _SLC, "slc_candidates": _SLC,
         "window_begin": 0}


@functools.lru_cache(None)
def _uses(name: str) -> int:
    plain = name.removeprefix("nsa_")
    return next((uses for words, uses in _USES.items() if plain.startswith(words)), _CMP | _SLC | _FORCED)


def _with_uses(desc: Desc, uses: int) -> Desc:
    """The descriptor whose fields without use break no rule: what nsa.h's functions look at."""
    own = Desc.from_buffer_copy(desc)
    own.__dict__["arrays"] = {}
    if not uses & _CMP:
        own.cmp_block = own.cmp_stride = 1
    if not uses & _SLC:
        own.slc_block, own.slc_count = own.cmp_block, 1
    elif not uses & _CMP:
        own.cmp_block = own.cmp_stride = 1
    if not uses & _SLC or not uses & _FORCED and own.forced == 0:
        own.slc_init, own.slc_local = 0, 1
    return own


def checked(lib: Library, desc: Desc, name: str = "") -> Any:
    """The descriptor's address, once the rules hold that the function `name` looks at."""
    check_arrays(check_kind("desc", desc, Desc))
    desc = desc if threads_most is None else _alone(desc)
    status = lib.nsa_desc_check(ctypes.byref(desc))
    if status and _uses(name) != _CMP | _SLC | _FORCED:
        status = lib.nsa_desc_check(ctypes.byref(_with_uses(desc, _uses(name))))
    lib.check(status, desc)
    return ctypes.byref(desc)


# ---- Children -----------------------------------------------------------------------------------

#: None, or 1 in a child of a process that has computed: OpenMP's threads were the parent's, and GCC's runtime would
#: wait for them for ever.
threads_most: int | None = None
_has_computed = False


def has_computed() -> None:
    """From now on children compute with one thread."""
    global _has_computed
    _has_computed = True


def _in_a_child() -> None:
    global threads_most
    if _has_computed:
        threads_most = 1
    Lock.in_a_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


class Lock:
    """Of an object whose calls wait for each other; a thread that has it may take it again. In a child of fork it is open, but
    not if another thread was in a call of the object: what that has half done nobody will finish, and calls are refused."""
    _all: "weakref.WeakSet[Lock]" = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock, self._lost = threading.RLock(), False
        Lock._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._lost:
            self._lock.release()
            raise refused("CACHE", "cache", "another thread was in a call of it when this process was forked from its parent: "
                                            "must be a new one here, or fork while no thread computes")

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    @classmethod
    def in_a_child(cls) -> None:
        for lock in cls._all:
            if lock._lock.acquire(blocking=False):
                lock._lock.release()
            else:
                lock._lock, lock._lost = threading.RLock(), True


def _alone(desc: Desc) -> Desc:
    own = Desc.from_buffer_copy(desc)
    own.__dict__["arrays"] = {}
    own.threads = 1
    return own


def call(name: str, structs: Sequence[Struct], desc: Desc, workspace: Array = None) -> None:
    """A function of the header that returns a status; it takes its workspace itself unless given one."""
    function = getattr(library(), name)
    for field, pointer, x in zip((*function.names[:len(structs)], "desc"), function.argtypes, (*structs, desc)):
        check_kind(field, x, pointer._type_)
    views = views_of(structs)
    lib = library_for(views)
    d = checked(lib, desc, name)  # first, because what follows is computed from it
    backward = name.endswith("_backward")
    words = tuple(name.removeprefix("nsa_").split("_"))
    check_shapes(views, desc, words)
    written = written_of(views, words)
    check_writable(written)
    has_computed()
    arguments: list[Any] = [ctypes.byref(x) for x in structs] + [d]
    size = getattr(lib, name + "_workspace_size", None)
    if size is not None:
        taken = [ctypes.byref(x) for x in structs][-(len(size.argtypes) - 1):] if len(size.argtypes) > 1 else []
        if workspace is None:
            room = memory(max(1, size(*taken, d)))
            arguments += [ctypes.addressof(room), len(room)]
        else:
            given = describe_bytes(workspace)
            arguments += list(given)
    lib.check(getattr(lib, name)(*arguments), *structs, desc)
    was_written(written)
    if desc.begins and not backward:
        _clear(lib, views, desc, words)


def _clear(lib: Library, views: Views, desc: Desc, words: tuple[str, ...]) -> None:
    """Rows of packed sequences that are no query's: 0, lse and scores -inf, lists -1."""
    read = {array.address for *_, struct, field, array in views if field not in outputs_of(type(struct), words)}
    for *_, struct, field, array in views:
        shape = shape_for(type(struct), field, words)
        if field in outputs_of(type(struct), words) and shape and "count" in shape and array.address not in read:
            heads, width = (*array.shape[2:], 1)[:2]
            lib.clear(ctypes.byref(desc), ctypes.byref(getattr(struct, field)), array.shape[1], heads, width,
                      is_logarithm(field))


def is_logarithm(field: str) -> bool:
    """Whether nothing is -inf in it."""
    return field.startswith("lse") or field == "scores"


def describe_bytes(workspace: Any) -> tuple[int, int]:
    """(address, bytes) of a writable buffer."""
    try:
        given = memoryview(workspace)
    except TypeError:
        raise TypeError(f"workspace: {type(workspace).__name__}, must be a buffer of bytes, as bytearray is") from None
    if given.readonly:
        raise refused("WORKSPACE", "workspace", "is read-only, and would be written")
    if not given.c_contiguous:
        raise refused("WORKSPACE", "workspace", f"its bytes have strides of {given.strides}, must be in one piece")
    view = (ctypes.c_char * given.nbytes).from_buffer(workspace)
    return ctypes.addressof(view), len(view)


def number(name: str, structs: Sequence[Struct], desc: Desc, *integers: int) -> int:
    """A function of the header that returns a number."""
    lib = library_for(views_of(structs))
    return int(getattr(lib, name)(*[ctypes.byref(x) for x in structs], checked(lib, desc, name), *integers))


def integers_in(array: Any, name: str, count: int) -> int:
    """The address of so many packed int32."""
    found = describe(array, name)
    if found.dtype != I32 or found.shape != (count,) or (count > 1 and found.strides != (1,)):
        raise refused("SIZE", name, f"{found.dtype_name}{list(found.shape)}, must be {count} packed int32")
    return found.address
