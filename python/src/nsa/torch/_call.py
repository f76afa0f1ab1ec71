"""Calls of operators on the CPU in one step, by native/call.c: for tensors of a form that a Plan has seen before.

What that needs are a PyTorch with DLPack's table for exchange (2.10) and CPython with its lock; without them, and for
all other tensors, the Plan does the same. Twin: native/call.c. Not here: what a call means.
"""
from __future__ import annotations

import ctypes
import sys
from typing import Any, Callable, Sequence

import torch
from torch.autograd import forward_ad

from .._library import FOLDER
from ._memory import cpu_scratch, keep

_STRUCTS, _STRUCT_BYTES = 3, 8192  # as call.c has them
RECORDED = object()  #: what `at_rest` returns if the call must be recorded for backward


class _Table(ctypes.Structure):
    """DLPackExchangeAPI."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
                ("allocator", ctypes.c_void_p), ("from_object", ctypes.c_void_p), ("to_object", ctypes.c_void_p),
                ("describe", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


class _World(ctypes.Structure):
    _fields_ = [("describe", ctypes.c_void_p)] + [(name, ctypes.py_object) for name in (
        "none", "no", "tensor", "parameter", "looks", "level_of", "level", "grad_enabled", "requires_grad", "is_neg",
        "threads", "empty_like", "contiguous", "scratch", "keep", "address", "recorded")]


class _Form(ctypes.Structure):
    """All that a call needs but its tensors. `arrays` has the memory of what it points to."""
    _fields_ = [("function", ctypes.c_void_p), ("structs", ctypes.c_char_p), ("bytes", ctypes.c_int64),
                ("count", ctypes.c_int64), ("begins", ctypes.c_int64 * _STRUCTS), ("slots", ctypes.c_void_p),
                ("scratch_slots", ctypes.c_void_p), ("slot_count", ctypes.c_int64),
                ("scratch_slot_count", ctypes.c_int64), ("workspace", ctypes.c_int64),
                ("workspace_at", ctypes.c_int64), ("workspace_bytes", ctypes.c_int64),
                ("scratch_arguments", ctypes.py_object), ("empty_arguments", ctypes.py_object),
                ("zeroed", ctypes.c_void_p), ("returned", ctypes.c_int64), ("threads", ctypes.c_int64),
                ("rest", ctypes.py_object)]
    arrays: Any


def _integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def form(function: Any, structs: bytes, begins: Sequence[int], slots: Sequence[tuple[int, int, int]],
         scratch_slots: Sequence[tuple[int, int]], workspace_at: int, workspace: int | None,
         rooms: Sequence[tuple[Sequence[int], torch.dtype]], zeroed: Sequence[int]) -> Callable[..., Any] | None:
    """What of a form does not depend on a call's arguments; they are what the result takes. workspace: its bytes, None
    for a function that takes none. zeroed: for each of the tensors that are returned, `rooms`, its bytes or 0."""
    if not 2 <= len(begins) <= _STRUCTS or len(structs) > _STRUCT_BYTES:
        return None
    patterns = tuple([(torch.empty((), dtype=dtype, device="cpu").expand(shape),) for shape, dtype in rooms])
    arrays = (_integers([x for slot in slots for x in slot]),
              _integers([x for word, offset in scratch_slots for x in (word, 0, offset)]), _integers(zeroed), structs)
    size = workspace_at + (workspace or 0)

    def of(given: Sequence[Any], is_tensor: bytes, threads: int) -> _Form:
        rest = tuple([None if tensor else x for tensor, x in zip(is_tensor, given)])
        made = _Form(ctypes.cast(function, ctypes.c_void_p), structs, len(structs), len(begins),
                     (ctypes.c_int64 * _STRUCTS)(*begins), ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1]),
                     len(slots), len(scratch_slots), workspace is not None, workspace_at, workspace or 0,
                     (size,), patterns, ctypes.addressof(arrays[2]), len(rooms), threads, rest)
        made.arrays = arrays, function
        return made
    return of


class _Library:
    """call.c's functions."""

    def __init__(self) -> None:
        # PyDLL: its functions are called with Python's lock held.
        handle = ctypes.PyDLL(str(FOLDER / "libnsa_call.so"))
        objects, pointer = ctypes.py_object, ctypes.c_void_p
        self.world, self.site, self.method = handle.nsa_call_world, handle.nsa_call_site, handle.nsa_call_method
        self.add, self.forget = handle.nsa_call_add, handle.nsa_call_forget
        self.world.argtypes, self.world.restype = [ctypes.POINTER(_World)], None
        self.site.argtypes, self.site.restype = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64], pointer
        self.method.argtypes, self.method.restype = [pointer, ctypes.c_int64], objects
        self.add.argtypes, self.add.restype = [pointer, objects, ctypes.POINTER(_Form), objects], None
        self.forget.argtypes, self.forget.restype = [pointer], None


def _describe() -> int | None:
    """The address of PyTorch's function that describes a tensor, if this PyTorch has one."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi))
    table = _Table.from_address(pointer(capsule, b"dlpack_exchange_api"))
    return table.describe if table.major == 1 else None


def load(looks: Sequence[Callable[[], Any]]) -> _Library | None:
    """looks: functions that return something other than 0 if an operator would do more than its kernel."""
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    describe = _describe() if sys.implementation.name == "cpython" and locked else None
    if describe is None:
        return None
    try:
        loaded = _Library()
    except OSError:  # for this Python, or for this machine, it was not built
        return None
    global _world, _loaded  # whose objects must live as long
    _loaded = loaded
    _world = _World(describe, None, False, torch.Tensor, torch.nn.Parameter, tuple(looks), forward_ad, "_current_level",
                    torch.is_grad_enabled, "requires_grad", torch.Tensor.is_neg, torch.get_num_threads, torch.empty_like,
                    {"memory_format": torch.contiguous_format}, cpu_scratch, keep, "address", RECORDED)
    loaded.world(_world)
    return loaded


class Site:
    """An operator's calls that return so many tensors. `at_rest` and `call` take the tuple of its arguments; they
    return None if the Plan must do it, and `at_rest` may return RECORDED."""

    def __init__(self, library: _Library, is_tensor: bytes, single: bool):
        self._library, self._is_tensor = library, is_tensor
        self._site = library.site(len(is_tensor), is_tensor, single)
        if self._site is None:
            raise MemoryError(f"a site of {len(is_tensor)} arguments")
        self.at_rest, self.call = (library.method(self._site, which) for which in (0, 1))
        _sites.append(self)

    def add(self, given: tuple[Any, ...], of: Callable[..., Any]) -> None:
        """A call like this one, which was done, will be done here from now on."""
        made = of(given, self._is_tensor, _world.threads())
        self._library.add(self._site, given, made, made)

    def forget(self) -> None:
        self._library.forget(self._site)


_sites: list[Site] = []
_loaded: _Library | None = None


def count_threads_by(function: Callable[[], int]) -> None:
    """What says how many threads a call has, instead of PyTorch."""
    if _loaded is not None:
        _world.threads = function
        _loaded.world(_world)


def forget() -> None:
    """Plans do all calls again, which add their forms again."""
    for site in _sites:
        site.forget()
