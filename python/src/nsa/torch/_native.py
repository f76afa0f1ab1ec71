"""From tensors to calls of the shared libraries, for the CPU and for CUDA. Not here: autograd, shapes."""
from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
from typing import Any, Sequence

import torch

from .. import _abi
from .._library import FOLDER, Library, library, refusal
from .._pack import BEGINS, NULL, desc_bytes

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4}


def rows(x: Any) -> tuple[int, ...]:
    """The view of (B, T, H, D) or (B, T, H)."""
    if x is None:
        return NULL
    batch, token, head = x.stride()[:3]
    return x.data_ptr(), DTYPES[x.dtype], batch, token, head


def parameters(x: Any) -> tuple[int, ...]:
    """The view of (Hk, rows, columns), or (1, rows, columns) that all heads share."""
    if x is None:
        return NULL
    head, token, _ = x.stride()
    return x.data_ptr(), DTYPES[x.dtype], 0, token, 0 if x.shape[0] == 1 else head


# ---- Descriptors --------------------------------------------------------------------------------

def desc(text: str, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, first: int,
         count: int, begins: Any) -> bytes:
    """A descriptor's bytes, with PyTorch's number of threads."""
    made = desc_bytes(text, batch, tokens, heads, kv_heads, dim, dim_v, first, count, torch.get_num_threads())
    if begins is None:
        return made
    return made[:BEGINS] + struct.pack("=Q", begins.data_ptr()) + made[BEGINS + 8:]


# ---- Libraries ----------------------------------------------------------------------------------

class Native:
    """A library's functions for packed structs, and how to run them."""

    def __init__(self, handle: Any, prefix: str, words: Library, real: Any, stream: bool):
        self._words, self._stream, self._functions = words, stream, {}
        for name, (result, arguments, _, _) in _abi.prototypes(real).items():
            plain = name.removeprefix("nsa_")
            if not hasattr(handle, prefix + plain):
                continue
            function = getattr(handle, prefix + plain)
            plain_types = [ctypes.c_char_p if hasattr(a, "contents") else a for a in arguments]
            if stream and not plain.endswith("_size"):
                plain_types.append(ctypes.c_void_p)
            function.restype, function.argtypes = result, plain_types
            self._functions[plain] = function

    def run(self, name: str, like: torch.Tensor, structs: Sequence[bytes], d: bytes) -> None:
        """Runs a function that returns a status, with a workspace of PyTorch's."""
        functions = self._functions
        if name not in functions:
            raise NotImplementedError(f"nsa_{name} is not there on {like.device.type}")
        size_of = functions.get(name + "_workspace_size")
        arguments: list[Any] = [*structs, d]
        if size_of is not None:
            bytes_needed = size_of(*arguments[-len(size_of.argtypes):])
            workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=like.device)
            arguments += (workspace.data_ptr(), bytes_needed)
        if self._stream:
            with torch.cuda.device(like.device):
                status = functions[name](*arguments, torch.cuda.current_stream(like.device).cuda_stream)
        else:
            status = functions[name](*arguments)
        if status:
            raise refusal(self._words, status)


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


def native(x: torch.Tensor) -> Native:
    """The library for a tensor's device and dtype."""
    if x.is_cuda:
        return _cuda()
    if x.device.type != "cpu":
        raise ValueError(f"a tensor on {x.device}: must be on the CPU or on CUDA")
    return _cpu(x.dtype == torch.float64)
