"""What the structs of nsa.h share in Python: arrays become views, and stay alive as long as the struct.

Twin: _abi.py, which bindings.py writes from the header. Not here: anything that calls the library.
"""
from __future__ import annotations

import ctypes
import functools
import operator
import struct
from typing import Any, Callable, Iterator, Union

from ._refused import refused
from ._views import F64, I32, NAMES, Described, describe, packed_strides

#: Views whose last axis may have a stride, desc.gate_stride.
GATES = ("logits", "gates")

Address = Union[int, None]
#: numpy.ndarray, torch.Tensor, and whatever else has __array_interface__ or __dlpack__.
Array = Any


class Struct(ctypes.Structure):
    """A struct of nsa.h. Fields that are not given are 0; an enum's value may be given by its name.

    A field that is a view takes an array (numpy, torch, anything with __dlpack__) and refers to its
    memory: nothing is copied. Axes are those of the field's shape below, or None.
    """
    _shapes_: dict[str, dict[str, tuple[str, ...]]] = {}
    _outputs_: tuple[str, ...] = ()
    _doubles_: tuple[str, ...] = ()
    _enums_: dict[str, Any] = {}
    _kinds: dict[str, Any]

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """The C type of each field."""
        found = cls.__dict__.get("_kinds")
        if found is None:
            found = cls._kinds = {field[0]: field[1] for field in cls._fields_}
        return found

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.__dict__["arrays"] = {}
        for name, value in fields.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self.kinds().get(name)
        if kind is None:
            raise TypeError(f"{type(self).__name__} has no field {name}; it has "
                            + ", ".join(self.kinds()))
        if isinstance(value, str):
            value = self._member(name, value)
        elif isinstance(kind, type) and issubclass(kind, Struct) and not isinstance(value, kind):
            value = self._view(name, kind, value)
        elif isinstance(value, Struct):
            self._keep()[name] = value
        elif kind in _BITS:
            value = check_int(name, value, _BITS[kind])
        elif kind is ctypes.c_double:
            try:
                value = float(value)
            except TypeError:
                raise TypeError(f"{name}: {value!r}, must be a number") from None
            except OverflowError:
                raise refused("OPTION", name, "an integer that no double can hold") from None
        elif kind is ctypes.c_void_p and value is not None and not (isinstance(value, int) and name == "data"):
            dtype = F64 if name in self._doubles_ else I32
            array = _of_numbers(value, name, dtype) if isinstance(value, (list, tuple)) else describe(value, name)
            self._keep()[name] = _packed(array, name, dtype)
            value = array.address
        elif kind is ctypes.c_void_p:
            self.__dict__.get("arrays", {}).pop(name, None)
        super().__setattr__(name, value)

    def _keep(self) -> dict[str, Any]:
        if "arrays" not in self.__dict__:
            raise TypeError("this struct lies inside another, which would not keep the array alive: "
                            "make it first, then set it as a whole")
        return self.__dict__["arrays"]

    def _member(self, name: str, value: str) -> int:
        members = self._enums_.get(name)
        if members is None:
            raise TypeError(f"{name} is a number, not {value!r}")
        try:
            return int(members[value.upper()])
        except KeyError:
            allowed = ", ".join(member.name.lower() for member in members)
            raise refused("OPTION", name, f"{value!r} is none of {allowed}") from None

    def _view(self, name: str, kind: type[Struct], value: Any) -> Any:
        """A view of an array: its axes are batch, token, head and the packed one, or head, token and
        the packed one for parameters."""
        if value is None:
            self._keep().pop(name, None)
            return kind()
        array = describe(value, name)
        axes, packed = axes_of(type(self), name, len(array.shape))
        if packed and array.shape[-1] > 1 and array.strides[-1] != 1 and name not in GATES:
            raise refused("STRIDE", name, f"the last axis must be packed, its stride is {array.strides[-1]} elements")
        strides = [0, 0, 0]
        for axis, extent, stride in zip(axes, array.shape, array.strides):
            if extent > 1:
                strides[axis] = stride
        self._keep()[name] = array
        # By its bytes: fields set one by one would take most of the time of a call.
        return kind.from_buffer_copy(_packer(kind)(array.address, array.dtype, *strides))

    def views(self, prefix: str = "") -> Iterator[tuple[str, "Struct", str, Described]]:
        """(path, the struct that holds it, field, array) of every view, those of inner structs too."""
        for name, value in self.__dict__.get("arrays", {}).items():
            if self.kinds()[name] is ctypes.c_void_p:
                continue
            if isinstance(value, Struct):
                yield from value.views(prefix + name + ".")
            else:
                yield prefix + name, self, name, value

    def __reduce__(self) -> Any:
        """For copy and pickle: its bytes, and the arrays, whose copies have addresses of their own."""
        arrays = self.__dict__.get("arrays", {})
        return _again, (type(self), bytes(self), {name: x if isinstance(x, Struct) else x.source
                                                  for name, x in arrays.items()})

    def __repr__(self) -> str:
        values = []
        for name in self.kinds():
            array = self.__dict__.get("arrays", {}).get(name)
            value = f"{array.dtype_name}{list(array.shape)}" if isinstance(array, Described) else getattr(self, name)
            values.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(values)})"


def _again(kind: type[Struct], memory: bytes, arrays: dict[str, Any]) -> Struct:
    made = kind.from_buffer_copy(memory)
    made.__dict__["arrays"] = {}
    for name, value in arrays.items():
        setattr(made, name, value)
    return made


#: Integers of C, by their bits; ctypes would take the lowest of a larger number.
_BITS = {ctypes.c_int: 32, ctypes.c_int64: 64}


def check_kind(name: str, value: Any, kind: Any) -> Any:
    """value, which must be such a struct."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {type(value).__name__}, must be nsa.{kind.__name__}")
    return value


def check_int(name: str, value: Any, bits: int = 32) -> int:
    """value, if C's integer of so many bits can hold it. A tensor or an array of one integer is one too; True is none, for who
    writes window=True means no window of 1."""
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}, must be an integer") from None
    if not -(1 << bits - 1) <= whole < 1 << bits - 1:
        raise refused("SIZE", name, f"{whole}, must be of {bits} bits: -2^{bits - 1} .. 2^{bits - 1} - 1")
    return whole


def _of_numbers(values: Any, name: str, dtype: int) -> Described:
    """Memory of its own for a list of Python's numbers."""
    if dtype == F64:
        memory: Any = (ctypes.c_double * len(values))(*values)
    else:
        memory = (ctypes.c_int32 * len(values))(*[check_int(name, value) for value in values])
    return Described(ctypes.addressof(memory), dtype, (len(values),), (1,), False, memory, list(values))


def _packed(array: Described, name: str, dtype: int) -> Described:
    packed = len(array.shape) in (1, 2) and all(
        extent < 2 or step == wanted
        for extent, step, wanted in zip(array.shape, array.strides, packed_strides(array.shape, 1)))
    if array.dtype != dtype or not packed:
        allowed = next(word for word, number in NAMES.items() if number == dtype)
        raise refused("DTYPE", name, f"{array.dtype_name}{list(array.shape)}, must be packed {allowed} of one axis or two")
    return array


class Words(property):
    """A field that points to a text of C, as a str. `of`: what ctypes made of it, whose size and offset these are."""

    def __init__(self, of: Any):
        super().__init__(lambda struct: (of.__get__(struct) or b"").decode(),
                         lambda struct, text: of.__set__(struct, text))
        self.size, self.offset = of.size, of.offset


@functools.lru_cache(None)
def _packer(kind: type[Struct]) -> Callable[..., bytes]:
    """Of nsa_tensor, as this machine's C compilers lay it out."""
    made = struct.Struct("@Piqqq")
    assert tuple(kind.kinds()) == ("data", "dtype", "batch", "token", "head") and made.size == ctypes.sizeof(kind)
    return made.pack


@functools.lru_cache(None)
def axes_of(of: type[Struct], name: str, rank: int) -> tuple[tuple[int, ...], bool]:
    """The places among batch, token and head of an array's strides, and whether its last axis is the packed one."""
    shapes = of._shapes_.get(name, {})
    ranks = {len(shape) for shape in shapes.values()} or {2, 3, 4}
    if rank not in ranks:
        allowed = "; ".join("(" + ", ".join(shape) + ")" for shape in shapes.values()) or "2 to 4 axes"
        raise refused("SIZE", name, f"{rank} axes, must be {allowed}")
    if any(shape[0] == "Hk" for shape in shapes.values()):
        return (2, 1), True
    return (0, 1, 2)[:min(rank, 3)], rank == 4
