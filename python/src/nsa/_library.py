"""The shared libraries of nsa.h: found, held against _abi.py, called; what they refuse is a ValueError.

libnsa_f32.so adds up in float and libnsa_f64.so in double; a call goes to the second where a view of it is
float64. Twins: native/library.c, _abi.py. Not here: the functions by name (_functions.py, __init__.py).
"""
from __future__ import annotations

import ctypes
import functools
import pathlib
import warnings
from typing import Any, Sequence

from . import _abi
from ._abi import Desc, Error
from ._struct import GATES, Array, Struct
from ._views import F64, I32, Described, describe

_PHIS = {int(member): member.name.lower() for member in _abi.Phi}
FOLDER = pathlib.Path(__file__).resolve().parent


class Refused(ValueError):
    """What the library refuses, in its own words. kind: a member of Error; where: the field."""

    def __init__(self, text: str, kind: Error, where: str):
        super().__init__(text)
        self.kind, self.where = kind, where


class Library:
    """A shared library of nsa.h, its functions as attributes."""

    def __init__(self, path: pathlib.Path, real: Any):
        self.path, self.real = path, real
        self._handle = ctypes.CDLL(str(path))
        self._check_layout()
        for name, (result, arguments, _, _) in _abi.prototypes(real).items():
            function = getattr(self._handle, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

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
        here = {member: (value, -2) for member, value in _abi.MEMBERS.items()}
        for struct, kind in _abi.STRUCTS.items():
            here[struct] = (ctypes.sizeof(kind), -1)
            for field in kind.kinds():
                at = getattr(kind, field)
                here[f"{struct}.{field}"] = (at.size, at.offset)
        if here != there:
            differ = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            raise ImportError(f"{self.path} and nsa/_abi.py were built from different headers; they differ in "
                              + ", ".join(differ))

    def check(self, status: int) -> None:
        if status:
            raise refusal(self, status)


def refusal(library: Any, status: int) -> Refused:
    """The library's own words for a status."""
    where = library.nsa_status_where(status).decode()
    words = f"{library.nsa_status_name(status).decode()}: {library.nsa_status_text(status).decode()}"
    return Refused(f"{where}: {words}" if where else words, Error(library.nsa_status_kind(status)), where)


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
            raise ValueError(f"{name}: shape {array.shape}, must be {shape}")


def _integers(address: int | None, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if address else []


def extents(desc: Desc, of_queries: bool) -> dict[str, int]:
    """What the letters of the fields' shapes amount to, on the queries' side or the keys'. Rows of packed
    sequences lie in one batch, those of pages in one for each page."""
    cmp_count, begins = library().nsa_cmp_count, _integers(desc.begins, desc.batch + 1)
    counts = _integers(desc.counts, desc.batch)
    if desc.pages:
        batch, tokens, rows = desc.page_count, desc.page_tokens, desc.page_tokens // desc.cmp_stride
    elif begins:
        batch, tokens = 1, begins[-1]
        rows = sum(cmp_count(ctypes.byref(desc), b - a) for a, b in zip(begins, begins[1:]))
    else:
        batch, tokens, rows = desc.batch, desc.tokens, cmp_count(ctypes.byref(desc), desc.tokens)
    count = sum(counts) if counts else begins[-1] if begins else desc.count
    if of_queries:
        batch = 1 if counts or begins else desc.batch
    return {"B": batch, "T": tokens, "count": count, "N": rows, "H": desc.heads,
             "Hk": desc.kv_heads, "Dk": desc.dim, "Dv": desc.dim_v, "l": desc.cmp_block,
             "gate_heads": desc.gate_heads, "list heads": desc.list_heads or desc.kv_heads,
             "nsa_slc_count(T)": library().nsa_slc_count(ctypes.byref(desc), desc.tokens),
             "nsa_block_list_width": library().nsa_block_list_width(ctypes.byref(desc))}


@functools.lru_cache(None)
def shape_for(struct: type[Struct], field: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The shape that the header gives for the first of these words, or for none."""
    shapes = struct._shapes_.get(field, {})
    return next((shapes[word] for word in (*words, "") if word in shapes), None)


def check_shapes(views: Views, desc: Desc, words: tuple[str, ...]) -> None:
    """An array that is smaller than the descriptor says would be read beyond its end."""
    sides: dict[bool, dict[str, int]] = {}
    for _, path, struct, field, array in views:
        tag = (*words, _PHIS.get(int(struct.phi), "")) if isinstance(struct, _abi.Compress) else words
        shape = shape_for(type(struct), field, tag)
        if shape is None:
            continue
        of_queries = "count" in shape
        if of_queries not in sides:
            sides[of_queries] = extents(desc, of_queries)
        known = sides[of_queries]
        wanted = tuple([known[axis] if axis in known else _extent(axis, known, struct) for axis in shape])
        if shape[0] == "Hk" and array.shape[:1] == (1,):
            wanted = (1, *wanted[1:])
        if array.shape != wanted:
            raise ValueError(f"{path}: shape {array.shape}, must be ({', '.join(shape)}) = {wanted}")
        if field in GATES and array.strides[-1] != (desc.gate_stride or 1):
            raise ValueError(f"{path}: its gates lie {array.strides[-1]} elements apart, "
                             f"desc.gate_stride is {desc.gate_stride}")


def _extent(axis: str, known: dict[str, int], struct: Struct) -> int:
    """"3", "l D", and what is a field of the struct: "dim", as "D" is, "hidden", "heads"."""
    product = 1
    for part in axis.split():
        of_struct = "dim" if part == "D" else part
        product *= int(part) if part.isdigit() else known[part] if part in known else getattr(struct, of_struct)
    return product


def check_writable(views: Views, backward: bool) -> None:
    """Outputs of a forward; gradients of a backward: its first struct, but for those that come in."""
    for i, path, struct, field, array in views:
        if not array.readonly:
            continue
        if (i == 0 and field not in ("out", "lse")) if backward else field in struct._outputs_:
            raise ValueError(f"{path}: is read-only, and would be written")


def checked(lib: Library, desc: Desc) -> Any:
    """The descriptor's address, once its rules hold."""
    check_arrays(desc)
    lib.check(lib.nsa_desc_check(ctypes.byref(desc)))
    return ctypes.byref(desc)


def call(name: str, structs: Sequence[Struct], desc: Desc, workspace: Array = None) -> None:
    """A function of the header that returns a status; it takes its workspace itself unless given one."""
    views = views_of(structs)
    lib = library_for(views)
    d = checked(lib, desc)  # first, because what follows is computed from it
    check_shapes(views, desc, tuple(name.split("_")))
    check_writable(views, name.endswith("_backward"))
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
    lib.check(getattr(lib, name)(*arguments))


def describe_bytes(workspace: Any) -> tuple[int, int]:
    """(address, bytes) of a writable buffer."""
    view = (ctypes.c_char * memoryview(workspace).nbytes).from_buffer(workspace)
    return ctypes.addressof(view), len(view)


def number(name: str, structs: Sequence[Struct], desc: Desc, *integers: int) -> int:
    """A function of the header that returns a number."""
    lib = library_for(views_of(structs))
    return int(getattr(lib, name)(*[ctypes.byref(x) for x in structs], checked(lib, desc), *integers))


def integers_in(array: Any, name: str, count: int) -> int:
    """The address of so many packed int32."""
    found = describe(array, name)
    if found.dtype != I32 or found.shape != (count,) or (count > 1 and found.strides != (1,)):
        raise ValueError(f"{name}: {found.dtype_name}{list(found.shape)}, must be {count} packed int32")
    return found.address
