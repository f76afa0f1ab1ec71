"""What the structs of nsa.h share in Python: arrays become views, and stay alive as long as the struct.

Twin: _abi.py, which bindings.py writes from the header. Not here: anything that calls the library.
"""
from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, Callable, Iterator, Union

from ._views import I32, Described, describe, packed_strides

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
        elif kind is ctypes.c_int and isinstance(value, int):
            check_int(name, value)
        elif kind is ctypes.c_void_p and value is not None and not isinstance(value, int):
            array = describe(value, name)
            packed = len(array.shape) in (1, 2) and all(
                extent < 2 or step == wanted
                for extent, step, wanted in zip(array.shape, array.strides, packed_strides(array.shape, 1)))
            if array.dtype != I32 or not packed:
                raise ValueError(f"{name}: {array.dtype_name}{list(array.shape)}, must be packed int32 of one axis or two")
            self._keep()[name] = array
            value = array.address
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
            raise ValueError(f"{name}: {value!r} is none of {allowed}") from None

    def _view(self, name: str, kind: type[Struct], value: Any) -> Any:
        """A view of an array: its axes are batch, token, head and the packed one, or head, token and
        the packed one for parameters."""
        if value is None:
            self._keep().pop(name, None)
            return kind()
        array = describe(value, name)
        axes, packed = axes_of(type(self), name, len(array.shape))
        if packed and array.shape[-1] > 1 and array.strides[-1] != 1 and name not in GATES:
            raise ValueError(f"{name}: the last axis must be packed, its stride is {array.strides[-1]} elements")
        strides = [0, 0, 0]
        for axis, extent, stride in zip(axes, array.shape, array.strides):
            if extent > 1:
                strides[axis] = stride
        self._keep()[name] = array
        # By its bytes: fields set one by one would take most of the time of a call.
        return kind.from_buffer_copy(_packer(kind)(array.address, array.dtype, *strides))

    def views(self, prefix: str = "") -> Iterator[tuple[str, "Struct", str, Described]]:
        """(path, the struct that holds it, field, array) of every array, those of inner structs too."""
        for name, value in self.__dict__.get("arrays", {}).items():
            if isinstance(value, Struct):
                yield from value.views(prefix + name + ".")
            else:
                yield prefix + name, self, name, value

    def __repr__(self) -> str:
        values = []
        for name in self.kinds():
            array = self.__dict__.get("arrays", {}).get(name)
            value = f"{array.dtype_name}{list(array.shape)}" if isinstance(array, Described) else getattr(self, name)
            values.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(values)})"


def check_int(name: str, value: int) -> None:
    """C's int has 32 bits; ctypes would take the lowest 32 of a larger number."""
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{name}: {value}, must be of 32 bits")


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
        raise ValueError(f"{name}: {rank} axes, must be {allowed}")
    if any(shape[0] == "Hk" for shape in shapes.values()):
        return (2, 1), True
    return (0, 1, 2)[:min(rank, 3)], rank == 4
