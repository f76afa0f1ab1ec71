"""From tensors to calls of the shared libraries, for the CPU and for CUDA. Not here: autograd, shapes.

A call's structs depend on the forms of its tensors, shapes, strides and dtypes, and on the addresses alone they do
not share. So the first call of a form makes a Plan, which has everything but the addresses, and the others use it.
What a call needs for itself alone, workspace and outputs that nobody asked for, and what its backward will read, lies
in memory that is kept for the next (_memory.py).
"""
from __future__ import annotations

import ctypes
import functools
import math
import os
import pathlib
import struct
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import empty, get_num_threads  # by themselves: in a call their module's names would be cold memory

from .. import _abi
from .._library import FOLDER, Library, has_computed, library, refusal
from .._pack import ARRAYS, NULL, Packer, desc_struct
from .._refused import refused
from . import _call, _memory
from ._memory import POOL, Scratch, in_large_pages, keep, scratch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4}
_BYTES = {torch.uint8: 1, torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8, torch.int32: 4}
PLANS_MAX = 4096  # of packed sequences each step has a form of its own



def _one() -> int:
    return 1


def _in_a_child() -> None:
    """The threads were the parent's: see _library.threads_most."""
    global get_num_threads
    get_num_threads = _one
    _call.count_threads_by(_one)


has_computed()  # PyTorch has, or will have, with the same runtime
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_child)


# ---- Views --------------------------------------------------------------------------------------

ALIGNED = 64


class Room(NamedTuple):
    """A tensor that a call returns; if `pooled`, a large one lies in the pool on the CPU. `rest`: what rows hold that are
    no query of any sequence, where sequences are packed."""
    shape: tuple[Any, ...]
    dtype: torch.dtype
    zeroed: bool = False
    pooled: bool = False
    rest: float | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        return empty(self.shape, dtype=self.dtype, device=device)

    @property
    def bytes(self) -> Any:
        """To the next multiple of ALIGNED. The shape may be symbolic."""
        size = _BYTES[self.dtype]
        for extent in self.shape:
            size = size * extent
        return (size + ALIGNED - 1) // ALIGNED * ALIGNED


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
            raise refused("DTYPE", name, f"{self.dtype}, must be int32")
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
         count: int, arrays: Sequence[View | None], **sizes: int) -> tuple[Packer, dict[str, tuple[Any, ...]]]:
    """A descriptor with PyTorch's number of threads, as a struct of a plan. arrays: those of ARRAYS."""
    made = desc_struct(text, batch, tokens, heads, kv_heads, dim, dim_v, first, count, get_num_threads(), **sizes)
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
            plain_types = [ctypes.c_void_p if hasattr(a, "contents") else a for a in arguments]
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

    def has_workspace(self, name: str) -> bool:
        return name + "_workspace_size" in self._functions

    def workspace_size(self, name: str, structs: Sequence[int]) -> int:
        size_of = self._functions[name + "_workspace_size"]
        return size_of(*structs[-len(size_of.argtypes):])


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
        raise refused("NULL", "tensors", f"on {device}, must be on the CPU or on CUDA")
    return _cpu(f64)


# ---- Plans --------------------------------------------------------------------------------------

def is_lazy(x: torch.Tensor) -> bool:
    """Whether the memory of x holds other values than x: their negatives, or nothing, where all of them are 0."""
    return x.is_neg() or x._is_zerotensor()


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """x, packed, as its memory says."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x._is_zerotensor() else x.resolve_neg().contiguous()


#: From the views of a call's tensors in the places of its arguments, and of what it returns, to its structs.
Structs = Callable[[Sequence[Any], Sequence[View]], Sequence[tuple[Packer, dict[str, tuple[Any, ...]]]]]


class Plan:
    """All calls of one function with tensors of one form. It returns the first `returned` rooms."""

    def __init__(self, name: str, arguments: Sequence[Any], places: Sequence[int],
                 rooms: Callable[..., Sequence[Room]], structs: Structs, returned: int):
        tensors = [(place, arguments[place]) for place in places if arguments[place] is not None]
        self.device: torch.device = tensors[0][1].device
        for _, x in tensors:
            if x.device != self.device:
                raise refused("NULL", "tensors", f"on {self.device} and on {x.device}, must be on one device")
            if x.layout is not torch.strided:
                raise refused("STRIDE", "tensors", f"one of layout {x.layout}, must be torch.strided: x.to_dense()")
        if self.device.type == "meta":  # tensors without memory: what the fake kernels do
            self._form, shaped = None, [room for room in rooms(*arguments)][:returned]
            self.run = lambda _: [room.empty(self.device) for room in shaped]  # type: ignore[method-assign]
            return
        self.native = native(self.device, any(x.dtype == torch.float64 for _, x in tensors))
        self.function = self.native[name]
        self.places = [place for place, _ in tensors]
        self.copied = [place for place, x in tensors if is_lazy(x)]
        while True:
            views = list(arguments)
            for i, (place, x) in enumerate(tensors):
                strides = None if place in self.copied else x.stride()
                views[place] = View(Slot(i), x.shape, x.dtype, self.device, strides)
            try:
                every = list(rooms(*views))
                written = [View(Slot(len(tensors) + i), room.shape, room.dtype, self.device)
                           for i, room in enumerate(every)]
                made = [(packer, packer.values(fields)) for packer, fields in structs(views, written)]
                break
            except Unpacked as copied:
                self.copied.append(self.places[copied.place])
        rooms, large = every[:returned], []
        if self.device.type == "cpu":
            large = [i for i, room in enumerate(rooms) if room.bytes >= _memory.LARGE]
        pooled = {i: rooms[i] for i in large if rooms[i].pooled}
        self._pooled, self._large = list(pooled.items()), [i for i in large if i not in pooled]
        self._fresh = [(room.shape, room.dtype) for i, room in enumerate(rooms) if i not in pooled]
        self._zeroed = [i for i, room in enumerate(rooms) if room.zeroed]
        within = [0]  # scratch: the other rooms, and behind them the workspace
        for room in every[returned:]:
            within.append(within[-1] + room.bytes)
        self._workspace_at, self._name = within[-1], name
        self._size: int | None = 0 if self.native.has_workspace(name) else None
        # How many compressed rows there are is what the descriptor's arrays say, not their form.
        of_desc = {field: made[-1][1][_DESC.place(field)] for field in (*ARRAYS, "batch")}
        self._varies = any(isinstance(of_desc[field], Slot) for field in ARRAYS)
        # Counts are held against the rows where they can be read.
        packed = isinstance(of_desc["begins"], Slot) or self.native.stream and isinstance(of_desc["counts"], Slot)
        self._nothing = of_desc["batch"] == 0  # which nsa.h refuses: nobody asks it for tensors without a sequence
        self._rest = [(i, room) for i, room in enumerate(rooms) if room.rest is not None and (packed or self._nothing)]
        self._kinds = [packer.kind for packer, _ in made]
        self._template = b""  # all structs
        self._begins: list[int] = []  # where each begins in it
        self._slots: list[tuple[int, int, int]] = []  # word, place of a tensor or of an output, bytes on
        self._scratch_slots: list[tuple[int, int]] = []  # word, bytes on
        for packer, values in made:
            begin = len(self._template)
            self._begins.append(begin)
            self._template += packer.bytes(*[0 if isinstance(value, Slot) else value for value in values])
            for at, value in zip(packer.at, values):
                if isinstance(value, Slot):
                    word, other = (begin + at) // 8, value.place - len(tensors) - returned
                    if other < 0:
                        self._slots.append((word, *value))
                    else:
                        self._scratch_slots.append((word, within[other] + value.offset))
        self._frames: list[Frame] = []
        self._zeroes = [math.prod(room.shape) * _BYTES[room.dtype] * room.zeroed for room in rooms]
        self._form: Any = _UNKNOWN

    @property
    def form(self) -> Any:
        """What native/call.c needs to do such calls, once one was done; None if it cannot."""
        if self._form is _UNKNOWN:
            plain = self.device.type == "cpu" and not (self.copied or self._varies or self._pooled or self._large
                                                       or self._nothing)
            self._form = _call.form(self.function, self._template, self._begins, self._slots, self._scratch_slots,
                                    self._workspace_at, self._size, self._fresh, self._zeroes) if plain else None
        return self._form

    def call_instead(self, function: Any) -> None:
        """To measure what a call takes without the library's."""
        self.function, self._form = function, _UNKNOWN

    def _place(self, frame: "Frame", memory: Scratch) -> None:
        """Puts what lies in scratch, and the workspace, there."""
        for word, offset in self._scratch_slots:
            frame.words[word] = memory.address + offset
        if self._size is not None:
            frame.given[-2:] = memory.address + self._workspace_at, memory.size - self._workspace_at
        frame.scratch = memory.number

    def _sized(self, frame: "Frame", memory: Scratch) -> Scratch:
        """Scratch that is large enough. Gradients never share memory here, so what a first call needs is what all
        calls need, if it does not vary."""
        size = self.native.workspace_size(self._name, frame.given[:len(self._begins)])
        self._size = max(size, self._size or 0)
        if frame.given[-1] < size:
            memory = scratch(self._workspace_at + size, self.device)
            self._place(frame, memory)
        frame.sized = not self._varies
        return memory

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.copied:
            tensors = [_in_memory(x) if i in self.copied else x for i, x in zip(self.places, tensors)]
        outputs = [empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._fresh]
        for i, room in self._pooled:
            outputs.insert(i, POOL.tensor(room.shape, room.dtype))
        for i in self._large:
            in_large_pages(outputs[i])
        if self._zeroed:
            torch._foreach_zero_([outputs[i] for i in self._zeroed])
        if self._nothing or self.native.stream:
            for i, room in self._rest:
                outputs[i].fill_(room.rest)
        if self._nothing:
            return outputs
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self._template, self._begins, self._size is not None)
        words, addresses = frame.words, [x.data_ptr() for x in (*tensors, *outputs)]
        for word, place, offset in self._slots:
            words[word] = addresses[place] + offset
        memory = scratch(self._workspace_at + (self._size or 0), self.device)
        if frame.scratch != memory.number:
            self._place(frame, memory)
        if not frame.sized:
            memory = self._sized(frame, memory)
        if self.native.stream:
            with torch.cuda.device(self.device):
                status = self.function(*frame.given, torch.cuda.current_stream(self.device).cuda_stream)
        else:
            status = self.function(*frame.given)
            keep(memory)
        if status:
            memory_of = frame.words.cast("B")
            found = [kind.from_buffer_copy(memory_of[begin:]) for kind, begin in zip(self._kinds, self._begins)]
            raise refusal(self.native.words, status, *found, on_host=self.device.type == "cpu")
        if self._rest and not self.native.stream:
            self._clear(frame, outputs)
        self._frames.append(frame)
        return outputs

    def _clear(self, frame: "Frame", outputs: Sequence[torch.Tensor]) -> None:
        """Rows of packed sequences that no query has written."""
        for i, room in self._rest:
            shape, x = (*room.shape, 1)[:4], outputs[i]
            view = _abi.Tensor.from_buffer_copy(_TENSOR.pack(x.data_ptr(), DTYPES[x.dtype], *(*x.stride(), 1)[:3]))
            self.native.words.clear(frame.given[len(self._begins) - 1], ctypes.byref(view), *shape[1:], room.rest < -1)


class Frame:
    """The structs of one call, which the next of the same form uses again. `words` are their memory, `given` what the
    library's function takes."""
    __slots__ = ("words", "given", "scratch", "sized")

    def __init__(self, template: bytes, begins: Sequence[int], workspace: bool):
        memory = bytearray(template)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.words, self.scratch, self.sized = memoryview(memory).cast("Q"), 0, not workspace
        self.given = [address + begin for begin in begins] + [0, 0] * workspace


_TENSOR = struct.Struct("@Piqqq")  # of nsa_tensor
_plans: dict[Any, Plan] = {}
_UNKNOWN = object()


def planned(name: str, arguments: Sequence[Any], places: Sequence[int], rooms: Callable[..., Sequence[Room]],
            structs: Structs, returned: int) -> tuple[Plan, list[torch.Tensor]]:
    """For a call of nsa_`name` its plan, and the tensors to run it with. What it writes are the `rooms` of the arguments,
    of which those in `places` are tensors. The first `returned` are returned."""
    key: list[Any] = [name, returned, get_num_threads(), *arguments]
    tensors = []
    for place in places:
        x = arguments[place]
        if x is not None:
            tensors.append(x)
            key[place + 3] = x.shape
            key += (x.stride(), x.dtype, x.device, is_lazy(x))
    form = tuple(key)
    plan = _plans.get(form)
    if plan is None:
        plan = Plan(name, arguments, places, rooms, structs, returned)
        if len(_plans) >= PLANS_MAX:
            _plans.clear()
        _plans[form] = plan
    return plan, tensors
