"""Memory of calls on the CPU that is kept for the next call: scratch, what backward reads, and gradients.

Memory that comes fresh from the system is zeroed as it is touched. Of 100 MiB, what a forward pass over 8192 tokens
leaves for its backward, that takes 20 ms and, where a virtual machine must ask its host for them first, 300; by
pages of 4 KiB 50. malloc gives each piece of more than 32 MiB back when it is freed. So large pieces come from a
Pool. Twin: _native.py, which calls it. Not here: memory on CUDA, for which PyTorch has an allocator; outputs,
which come from PyTorch's, because people may resize them.
"""
from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from typing import Sequence

import torch
from torch import empty

LARGE, _LARGE_PAGE = 8 << 20, 2 << 20
_madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None


def in_large_pages(x: torch.Tensor) -> None:
    """Large memory comes fresh from the system, which has large pages for who asks: they take half the time."""
    if _madvise is not None:
        begin, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        first = -(-begin // _LARGE_PAGE) * _LARGE_PAGE
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


# ---- Pool ---------------------------------------------------------------------------------------

class _Block:
    """Memory that one tensor after another has. `view` refers to what the storage of the newest holds of it."""
    __slots__ = ("memory", "size", "view")

    def __init__(self, size: int):
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if _madvise is not None:
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        view = memoryview(self.memory)
        self.view = weakref.ref(view)
        # resize_, because view() would leave a tensor with a base.
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).resize_(shape)

    @property
    def lent(self) -> bool:
        return self.view() is not None


class Pool:
    """Large memory for tensors. A block is free again once the last tensor that shares its storage is gone, be that
    in a graph or a user's own; nothing else decides.

    Blocks never have more bytes in all than were lent at once, of late: since none was lent for the last time but one.
    So with the pool no call needs more memory than without it, and one large problem is soon forgotten."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # lent last are the last
        # Bytes lent at once: since none was lent, and between the two last times that none was.
        self._most, self._most_before = 0, 0
        self.unlock()

    def unlock(self) -> None:
        """Also in a child, where the thread that would open the lock is not."""
        self._lock, self._inside = threading.RLock(), False

    def tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Of any content."""
        with self._lock:
            if self._inside:  # called by a signal's handler, or by what the garbage collector runs
                return empty(shape, dtype=dtype, device="cpu")
            self._inside = True
            try:
                return self._tensor(shape, dtype)
            finally:
                self._inside = False

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * empty(0, dtype=dtype).element_size()
        lent, free = self._sorted()
        if not lent:
            self._most, self._most_before = 0, self._most
        # The smallest that is large enough, unless more than half of it would lie idle.
        pages = -(-size // _LARGE_PAGE) * _LARGE_PAGE
        block = min([b for b in free if pages <= b.size <= 2 * pages], key=lambda b: b.size, default=None)
        if block is not None:
            free.remove(block)
        else:
            try:
                block = _Block(pages)
            except OSError:  # there is no memory
                self._blocks = lent
                return empty(shape, dtype=dtype, device="cpu")
        tensor = block.lend(shape, dtype)
        lent.append(block)
        used = sum([b.size for b in lent])
        self._most = max(self._most, used)
        over = used + sum([b.size for b in free]) - max(self._most, self._most_before)
        while over > 0:
            over -= free.pop(0).size
        self._blocks = free + lent
        return tensor

    def _sorted(self) -> tuple[list[_Block], list[_Block]]:
        lent: list[_Block] = []
        free: list[_Block] = []
        for block in self._blocks:
            (lent if block.lent else free).append(block)
        return lent, free

    def release(self) -> None:
        """Gives free blocks back to the system."""
        with self._lock:
            self._blocks, self._most_before = self._sorted()[0], 0

    def bytes(self) -> tuple[int, int]:
        """Of blocks that are lent, and of free ones."""
        lent, free = self._sorted()
        return sum([block.size for block in lent]), sum([block.size for block in free])


POOL = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.unlock)


# ---- Scratch ------------------------------------------------------------------------------------

class Scratch:
    """Memory of one call, which no other has meanwhile."""
    __slots__ = ("memory", "address", "size", "number")
    _numbers = itertools.count(1)

    def __init__(self, memory: torch.Tensor):
        self.memory = memory
        self.address, self.size, self.number = memory.data_ptr(), len(memory), next(self._numbers)


_small: list[Scratch] = []  # on the CPU


def scratch(size: int, device: torch.device) -> Scratch:
    """That of an earlier call, if there is one."""
    return cpu_scratch(size) if device.type == "cpu" else Scratch(empty(size, dtype=torch.uint8, device=device))


def cpu_scratch(size: int) -> Scratch:
    if size >= LARGE:
        return Scratch(POOL.tensor((size,)))
    try:
        found = _small.pop()  # in one step, so that no two threads have the same
        if found.size >= size:
            return found
    except IndexError:
        pass
    return Scratch(empty(size, dtype=torch.uint8, device="cpu"))


def keep(memory: Scratch) -> None:
    """For the next call on the CPU. Large memory goes back to the pool by itself."""
    if memory.size < LARGE:
        _small.append(memory)


def release_memory() -> None:
    """Gives back to the system what is kept on the CPU for later calls: no more than earlier ones had at once."""
    _small.clear()
    POOL.release()
