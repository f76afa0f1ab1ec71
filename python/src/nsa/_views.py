"""Where an array lies in memory: torch tensors, numpy's array interface, DLPack.

Nothing is imported for it and nothing copied. Not here: what a field of the library demands of an array.
"""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from ._refused import refused

F32, BF16, F16, F64, I32 = range(5)
NAMES = {"float32": F32, "bfloat16": BF16, "float16": F16, "float64": F64, "int32": I32}

REALS = "float32, or float64 beside rows of float64"
_ALLOWED = {**dict.fromkeys(("blocks", "positions", "begins", "firsts", "counts", "pages"), "int32"),
            **dict.fromkeys(("frequencies", "short_factors", "long_factors"), "float64"),
            **dict.fromkeys(("lse", "lse_a", "lse_b", "lse_cmp", "lse_slc", "lse_win", "scores"), REALS)}


def allowed(field: str) -> str:
    """The dtypes that a field may have, in words."""
    return _ALLOWED.get(field.rpartition(".")[2], "float32, bfloat16, float16 or float64")


class Described(NamedTuple):
    """An array's memory; strides in elements. `owner` keeps the memory alive, `source` is the array itself."""
    address: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    readonly: bool
    owner: Any
    source: Any

    @property
    def dtype_name(self) -> str:
        return next(name for name, value in NAMES.items() if value == self.dtype)


def describe(array: Any, name: str) -> Described:
    """Where `array` lies. `name` is what an error calls it."""
    if isinstance(array, Described):
        return array
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _of_interface(array, interface, name)
    if hasattr(array, "data_ptr") and hasattr(array, "stride"):
        return _of_torch(array, name)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array, name)
    raise TypeError(f"{name}: {type(array).__name__} is no array: it has neither __array_interface__ nor __dlpack__")


def _dtype(spelled: str, name: str) -> int:
    if spelled not in NAMES:
        raise refused("DTYPE", name, f"the dtype {spelled}, must be {allowed(name)}")
    return NAMES[spelled]


def packed_strides(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Of an array whose last axis has that step."""
    steps: list[int] = []
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return tuple(steps[::-1])


def _of_torch(array: Any, name: str) -> Described:
    if array.device.type != "cpu":
        raise refused("NULL", name, f"lies on {array.device}; nsa.h computes on the CPU (nsa.torch has the operators for CUDA)")
    if getattr(array, "layout", None) is not None and str(array.layout) != "torch.strided":
        raise refused("STRIDE", name, f"{array.layout}, must have memory of its own: torch.strided")
    if getattr(array, "is_nested", False):
        raise refused("SIZE", name, "a nested tensor, must have one shape")
    dtype = _dtype(str(array.dtype).removeprefix("torch."), name)
    # The memory of a view that PyTorch has still to negate holds other values, and a ZeroTensor has none: a copy is read, and
    # none written.
    zeros = hasattr(array, "_is_zerotensor") and array._is_zerotensor()
    lazy = zeros or hasattr(array, "is_neg") and (array.is_neg() or array.is_conj())
    memory = array.new_zeros(array.shape) if zeros else array.resolve_conj().resolve_neg() if lazy else array
    return Described(memory.data_ptr(), dtype, tuple(memory.shape), tuple(memory.stride()), lazy, memory, array)


#: By the names that numpy gives at once; asking a dtype for its own takes microseconds.
_TYPES = {"<f4": F32, "<f2": F16, "<f8": F64, "<i4": I32}


def _of_interface(array: Any, interface: dict[str, Any], name: str) -> Described:
    kind, shape, steps = interface["typestr"], tuple(interface["shape"]), interface.get("strides")
    if kind[0] == ">":
        raise refused("DTYPE", name, f"the dtype {kind}, bytes of another order than the machine's, must be {allowed(name)}")
    dtype = _TYPES.get(kind)
    if dtype is None:
        dtype = _dtype(str(getattr(array, "dtype", kind)), name)
    size = int(kind[2:])
    if steps is None:
        strides = packed_strides(shape, 1)
    elif any([step % size for step in steps]):
        raise refused("STRIDE", name, f"strides of {tuple(steps)} bytes are no multiples of its elements'")
    else:
        strides = tuple([step // size for step in steps])
    if hasattr(type(array), "mask") and (array.mask is True or getattr(array.mask, "any", bool)()):
        raise refused("OPTION", name, "has masked elements, whose values would be read: must have none, as array.filled(0) has")
    if not isinstance(interface.get("data"), tuple):
        raise refused("NULL", name, "its __array_interface__ has no address: must have data, (address, read-only)")
    address, readonly = interface["data"]
    return Described(address, dtype, shape, strides, readonly, array, array)


# ---- DLPack -------------------------------------------------------------------------------------

class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_CPU, _INT, _FLOAT, _BFLOAT = 1, 0, 2, 4
_READ_ONLY, _COPIED = 1, 2
_DLPACK_DTYPES = {(_FLOAT, 32): F32, (_BFLOAT, 16): BF16, (_FLOAT, 16): F16, (_FLOAT, 64): F64, (_INT, 32): I32}


def _pointer(capsule: Any, kind: bytes, name: str) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        return int(pointer(capsule, kind))
    except ValueError:
        raise refused("NULL", name, f"its __dlpack__ gave {capsule!r}, must be a capsule of DLPack that nobody has taken") from None


def _of_dlpack(array: Any, name: str) -> Described:
    # A capsule that nobody renames is freed, with what it holds, by its own destructor: it is the owner.
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # the protocol of before 2024, which has no flag for arrays that must not be written
        capsule = array.__dlpack__()
    readonly = type(array).__module__.split(".")[0] in ("jax", "jaxlib")
    if "dltensor_versioned" in repr(capsule):
        managed = _Managed.from_address(_pointer(capsule, b"dltensor_versioned", name))
        if managed.major != 1:
            raise refused("DTYPE", name, f"DLPack {managed.major}.{managed.minor}, must be of version 1")
        # What is written to a copy nobody would see.
        tensor, readonly = managed.tensor, readonly or bool(managed.flags & (_READ_ONLY | _COPIED))
    else:
        tensor = _DLTensor.from_address(_pointer(capsule, b"dltensor", name))
    if tensor.device_type != _CPU:
        raise refused("NULL", name, f"lies on DLPack's device {tensor.device_type}; nsa.h computes on the CPU")
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise refused("DTYPE", name, f"DLPack's dtype {tensor.code}, {tensor.bits} bits x {tensor.lanes}, "
                                     f"must be {allowed(name)}")
    shape = tuple(tensor.shape[:tensor.ndim])
    if tensor.strides:
        strides = tuple(tensor.strides[:tensor.ndim])
    else:
        strides = packed_strides(shape, 1)
    return Described((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, readonly, capsule, array)
