"""From tensors to calls of the shared libraries, for the CPU and for CUDA. Not here: autograd, shapes.

A call's structs depend on the forms of its tensors, shapes, strides and dtypes, and on the addresses alone they do
not share. So the first call of a form makes a Plan, which has everything but the addresses, and the others use it.
"""
from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any, Callable, NamedTuple, Sequence

import torch

from .. import _abi
from .._library import FOLDER, Library, library, refusal
from .._pack import ARRAYS, NULL, Packer, desc_struct

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4}
PLANS_MAX = 4096  # of packed sequences each step has a form of its own


# ---- Views --------------------------------------------------------------------------------------

class Room(NamedTuple):
    """A tensor that a call returns."""
    shape: tuple[Any, ...]
    dtype: torch.dtype
    zeroed: bool = False

    def empty(self, device: torch.device) -> torch.Tensor:
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.shape, dtype=self.dtype, device=device)


class Slot(NamedTuple):
    """The address of the tensor in this place of a call, and so many bytes on."""
    place: int
    offset: int = 0


class Unpacked(Exception):
    """The tensor in this place must be copied, for its last axis is not packed."""

    def __init__(self, place: int):
        super().__init__()
        self.place = place


class View:
    """A tensor's form, without its memory."""
    __slots__ = ("slot", "shape", "strides", "dtype", "device")

    def __init__(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype, device: torch.device,
                 strides: Sequence[int] | None = None):
        self.slot, self.shape, self.dtype, self.device = slot, tuple(shape), dtype, device
        if strides is None:
            steps = [1]
            for extent in reversed(self.shape[1:]):
                steps.insert(0, steps[0] * max(1, extent))
            strides = steps
        self.strides = tuple(strides)

    def packed(self) -> "View":
        if self.shape[-1] > 1 and self.strides[-1] != 1:
            raise Unpacked(self.slot.place)
        return self

    def integers(self, name: str) -> "View":
        """One piece of int32."""
        if self.dtype != torch.int32:
            raise ValueError(f"{name}: {self.dtype}, must be int32")
        if self.strides != View(self.slot, self.shape, self.dtype, self.device).strides:
            raise Unpacked(self.slot.place)
        return self


def rows(x: View | None) -> tuple[Any, ...]:
    """The view of (B, T, H, D), (B, T, H) or (B, T)."""
    if x is None:
        return NULL
    strides = (*x.strides[:3], 0) if len(x.shape) < 4 else x.packed().strides
    return (x.slot, DTYPES[x.dtype], *strides[:3])


def parameters(x: View | None) -> tuple[Any, ...]:
    """The view of (Hk, rows, columns), or (1, rows, columns) that all heads share."""
    if x is None:
        return NULL
    head, token, _ = x.packed().strides
    return x.slot, DTYPES[x.dtype], 0, token, 0 if x.shape[0] == 1 else head


_DESC = Packer(_abi.Desc)


def desc(text: str, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, first: int,
         count: int, arrays: Sequence[View | None]) -> tuple[Packer, dict[str, tuple[Any, ...]]]:
    """A descriptor with PyTorch's number of threads, as a struct of a plan. arrays: those of ARRAYS."""
    made = desc_struct(text, batch, tokens, heads, kv_heads, dim, dim_v, first, count, torch.get_num_threads())
    fields: dict[str, tuple[Any, ...]] = {name: (getattr(made, name) or 0,) for name in _abi.Desc.kinds()}
    for name, array in zip(ARRAYS, arrays):
        if array is not None:
            fields[name] = (array.integers(name).slot,)
    return _DESC, fields


# ---- Libraries ----------------------------------------------------------------------------------

class Native:
    """A library's functions for packed structs."""

    def __init__(self, handle: Any, prefix: str, words: Library, real: Any, stream: bool):
        self.words, self.stream, self._functions = words, stream, {}
        prototypes = _abi.prototypes(real)
        for name, (result, arguments, _, _) in prototypes.items():
            plain = name.removeprefix("nsa_")
            if not hasattr(handle, prefix + plain):
                continue
            function = getattr(handle, prefix + plain)
            plain_types = [ctypes.c_char_p if hasattr(a, "contents") else a for a in arguments]
            sized = "_workspace_size"
            if name + sized in prototypes and not hasattr(handle, prefix + plain + sized):
                del plain_types[-2:]  # a kernel needs no workspace everywhere that nsa.h does
            if stream and not plain.endswith("_size"):
                plain_types.append(ctypes.c_void_p)
            function.restype, function.argtypes = result, plain_types
            self._functions[plain] = function

    def __getitem__(self, name: str) -> Any:
        if name not in self._functions:
            raise NotImplementedError(f"{self.words.path.name} has no nsa_{name}")
        return self._functions[name]

    def workspace_size(self, name: str, structs: Sequence[bytes]) -> int | None:
        size_of = self._functions.get(name + "_workspace_size")
        return None if size_of is None else size_of(*structs[-len(size_of.argtypes):])


@functools.lru_cache(None)
def _cpu(f64: bool) -> Native:
    lib = library(f64)
    return Native(ctypes.CDLL(str(lib.path)), "nsa_", lib, lib.real, False)


def cuda_library() -> pathlib.Path:
    """Where the library for CUDA lies: what `python -m nsa.build cuda` made, or $NSA_CUDA_LIBRARY."""
    return pathlib.Path(os.environ.get("NSA_CUDA_LIBRARY") or FOLDER / "libnsa_cuda.so")


@functools.lru_cache(None)
def _cuda() -> Native:
    path = cuda_library()
    if not path.exists():
        raise RuntimeError(f"{path} is not there: `python -m nsa.build cuda` makes it, with nvcc; or NSA_CUDA_LIBRARY "
                           "names it")
    lib = Library(path, ctypes.c_float)
    return Native(ctypes.CDLL(str(path)), "nsa_cuda_", lib, ctypes.c_float, True)


def native(device: torch.device, f64: bool) -> Native:
    """The library for a device."""
    if device.type == "cuda":
        return _cuda()
    if device.type != "cpu":
        raise ValueError(f"a tensor on {device}: must be on the CPU or on CUDA")
    return _cpu(f64)


# ---- Plans --------------------------------------------------------------------------------------

#: From the views of a call's tensors in the places of its arguments, and of what it returns, to its structs.
Structs = Callable[[Sequence[Any], Sequence[View]], Sequence[tuple[Packer, dict[str, tuple[Any, ...]]]]]


class Plan:
    """All calls of one function with tensors of one form."""

    def __init__(self, name: str, arguments: Sequence[Any], places: Sequence[int],
                 rooms: Callable[..., Sequence[Room]], structs: Structs):
        tensors = [(place, arguments[place]) for place in places if arguments[place] is not None]
        self.device: torch.device = tensors[0][1].device
        for _, x in tensors:
            if x.device != self.device:
                raise ValueError(f"tensors on {self.device} and on {x.device}: must be on one device")
        self.native = native(self.device, any(x.dtype == torch.float64 for _, x in tensors))
        self.function = self.native[name]
        self.places = [place for place, _ in tensors]
        self.copied: list[int] = []
        while True:
            views = list(arguments)
            for i, (place, x) in enumerate(tensors):
                strides = None if place in self.copied else x.stride()
                views[place] = View(Slot(i), x.shape, x.dtype, self.device, strides)
            try:
                self.rooms = list(rooms(*views))
                returned = [View(Slot(len(tensors) + i), room.shape, room.dtype, self.device)
                            for i, room in enumerate(self.rooms)]
                made = [(packer, packer.values(fields)) for packer, fields in structs(views, returned)]
                break
            except Unpacked as copied:
                self.copied.append(self.places[copied.place])
        # How many compressed rows there are is what the descriptor's arrays say, not their form.
        self._varies = any(isinstance(made[-1][1][_DESC.place(name)], Slot) for name in ARRAYS)
        self._structs = [(packer.bytes, values, [(i, *v) for i, v in enumerate(values) if isinstance(v, Slot)])
                         for packer, values in made]
        self._name = name
        self._size: int | None = -1  # not asked for yet; None: there is no workspace

    def run(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        if self.copied:
            arguments = [x.contiguous() if i in self.copied else x for i, x in enumerate(arguments)]
        outputs = [room.empty(self.device) for room in self.rooms]
        addresses = [arguments[place].data_ptr() for place in self.places]
        addresses += [x.data_ptr() for x in outputs]
        given: list[Any] = []
        for pack, template, slots in self._structs:
            values = template.copy()
            for i, place, offset in slots:
                values[i] = addresses[place] + offset
            given.append(pack(*values))
        size = self._size
        if size == -1 or self._varies:
            # Gradients never share memory here, so what a first call needs is what all calls need.
            self._size = size = self.native.workspace_size(self._name, given)
        if size is not None:
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            given += (workspace.data_ptr(), size)
        if self.native.stream:
            with torch.cuda.device(self.device):
                status = self.function(*given, torch.cuda.current_stream(self.device).cuda_stream)
        else:
            status = self.function(*given)
        if status:
            raise refusal(self.native.words, status)
        return outputs


_plans: dict[Any, Plan] = {}


def run(name: str, arguments: Sequence[Any], places: Sequence[int], rooms: Callable[..., Sequence[Room]],
        structs: Structs) -> list[torch.Tensor]:
    """Calls nsa_`name`: what it returns lies in `rooms` of the arguments, of which those in `places` are tensors."""
    key: list[Any] = [name, torch.get_num_threads(), *arguments]
    for place in places:
        x = arguments[place]
        if x is not None:
            key[place + 2] = x.shape
            key += (x.stride(), x.dtype, x.device)
    form = tuple(key)
    plan = _plans.get(form)
    if plan is None:
        plan = Plan(name, arguments, places, rooms, structs)
        if len(_plans) >= PLANS_MAX:
            _plans.clear()
        _plans[form] = plan
    return plan.run(arguments)
