"""From tensors to calls of the shared libraries, in few microseconds: structs are packed as bytes.

Formats come from the structs of _abi.py, whose layout the import has checked. Not here: autograd, shapes.
"""
from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
from typing import Any, Sequence

import torch

from .. import _abi
from .._abi import Desc
from .._library import FOLDER, Library, library, refusal

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4}
_CODES = {ctypes.c_void_p: "Q", ctypes.c_int: "i", ctypes.c_int64: "q", ctypes.c_double: "d"}
NULL = (0, 0, 0, 0, 0)


class Packer:
    """The bytes of a struct from {"q": (address, dtype, batch, token, head), "k_cmp.phi": 0, ...}; a
    field that is not given is zeros."""

    def __init__(self, kind: Any):
        self.fields: list[tuple[str, tuple[Any, ...]]] = []
        codes: list[str] = []
        self._end = 0
        self._walk(kind, "", 0, codes)
        codes.append(f"{ctypes.sizeof(kind) - self._end}x")
        self._struct = struct.Struct("=" + "".join(codes))
        assert self._struct.size == ctypes.sizeof(kind)

    def _walk(self, kind: Any, prefix: str, base: int, codes: list[str]) -> None:
        for name, of in kind.kinds().items():
            at = base + getattr(kind, name).offset
            if of is _abi.Tensor or of in _CODES:
                parts = [(getattr(of, n).offset, _CODES[t]) for n, t in of.kinds().items()] if of is _abi.Tensor \
                    else [(0, _CODES[of])]
                for offset, code in parts:
                    codes.append(f"{at + offset - self._end}x{code}")
                    self._end = at + offset + struct.calcsize("=" + code)
                self.fields.append((prefix + name, (0,) * len(parts)))
            else:
                self._walk(of, prefix + name + ".", at, codes)

    def pack(self, given: dict[str, tuple[Any, ...]]) -> bytes:
        values: list[Any] = []
        for name, zeros in self.fields:
            values += given.get(name, zeros)
        return self._struct.pack(*values)


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

_BEGINS: int = getattr(Desc, "begins").offset


def parse(text: str, kind: Any) -> dict[str, Any]:
    """"window=512,gate=softmax" for a struct's fields."""
    found: dict[str, Any] = {}
    fields = kind.kinds()
    for item in text.split(",") if text else ():
        name, _, value = item.partition("=")
        if fields.get(name) not in (ctypes.c_int, ctypes.c_double):
            allowed = ", ".join(n for n, t in fields.items() if t in (ctypes.c_int, ctypes.c_double))
            raise ValueError(f"{name}: no option; there are {allowed}")
        try:
            found[name] = float(value) if fields[name] is ctypes.c_double else int(value)
        except ValueError:
            found[name] = value  # an enum's member, which the struct looks up
    return found


def options(**fields: Any) -> str:
    """Options in the form that the operators take: a string, for a graph holds nothing else."""
    return ",".join(f"{name}={value!r}" if isinstance(value, float) else f"{name}={getattr(value, 'value', value)}"
                    for name, value in fields.items() if value is not None)


@functools.lru_cache(4096)
def desc_struct(text: str, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, first: int,
                count: int, threads: int) -> Desc:
    made = library().nsa_desc_default(batch, tokens, heads, kv_heads, dim)
    made.__dict__["arrays"] = {}
    made.dim_v, made.first, made.count, made.threads = dim_v, first, count, threads
    for name, value in parse(text, Desc).items():
        setattr(made, name, value)
    return made


@functools.lru_cache(4096)
def _desc_bytes(*key: Any) -> bytes:
    return bytes(desc_struct(*key))


def desc(text: str, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dim_v: int, first: int,
         count: int, begins: Any) -> bytes:
    """A descriptor's bytes, with PyTorch's number of threads."""
    made = _desc_bytes(text, batch, tokens, heads, kv_heads, dim, dim_v, first, count, torch.get_num_threads())
    if begins is None:
        return made
    return made[:_BEGINS] + struct.pack("=Q", begins.data_ptr()) + made[_BEGINS + 8:]


@functools.lru_cache(1024)
def option(text: str, name: str) -> Any:
    """What an option comes to, given or not."""
    return getattr(desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1), name)


@functools.lru_cache(1024)
def list_width(text: str) -> int:
    return library().nsa_block_list_width(ctypes.byref(desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1)))


def cmp_count(text: str, tokens: Any) -> Any:
    """N(tokens); tokens may be symbolic."""
    block, stride = option(text, "cmp_block"), option(text, "cmp_stride")
    if stride < 1 or block < 1:
        library().check(library().nsa_desc_check(ctypes.byref(desc_struct(text, 1, 1, 1, 1, 1, 1, 0, 1, 1))))
    return 0 if tokens < block else (tokens - block) // stride + 1


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
