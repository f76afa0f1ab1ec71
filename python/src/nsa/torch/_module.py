"""NativeSparseAttention, an nn.Module, and its cache for decoding.

Its parameters have the names and shapes of the layers of examples/train_tiny, so that a checkpoint of the C
trainer loads. Not here: arithmetic (_operators.py), other parts of a model.
"""
from __future__ import annotations

import copy
from typing import Any, Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import nsa

from . import _operators as _o
from .._library import Lock
from .._pack import PHI, check_int, options, parse, rope_fields
from .._refused import refused
from ._native import DTYPES

_BRANCHES = ("cmp", "slc", "win")
_ROWS_LEAST = 16


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x). For few rows of float32 PyTorch has other products, which add up in another order: a token decoded alone
    would not have the bits that it has among others. So it never stands among fewer than 16."""
    if torch.compiler.is_compiling() if hasattr(torch, "compiler") else False:
        return layer(x)
    count = x.shape[:-1].numel()
    if not 0 < count < _ROWS_LEAST:
        return layer(x)
    return layer(functional.pad(x.reshape(count, -1), (0, 0, 0, _ROWS_LEAST - count)))[:count].view(*x.shape[:-1], -1)


class _Phi(nn.Module):
    """Parameters of one phi; `bias` of what it returns, which changes no softmax if added to every key."""

    def __init__(self, kind: str, heads: int, block: int, width: int, bias: bool):
        super().__init__()
        self.kind = kind
        shapes: dict[str, tuple[int, ...]] = {}
        if kind == "conv":
            shapes = {"w1": (heads, block, width), **({"b1": (heads, width)} if bias else {})}
        elif kind == "mlp":
            shapes = {"pos": (heads, block, width), "w1": (heads, width, block * width), "b1": (heads, width),
                      "w2": (heads, width, width), **({"b2": (heads, width)} if bias else {})}
        elif kind != "mean":
            raise refused("OPTION", "phi", f"{kind!r} is none of mean, conv, mlp")
        for name in PHI:
            self.register_parameter(name, nn.Parameter(torch.empty(shapes[name])) if name in shapes else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As of PyTorch's layers: FSDP, and who makes a model without memory, calls it once there is some."""
        for name, x in self.named_parameters(recurse=False):
            if name in ("b1", "b2"):
                nn.init.zeros_(x)
            elif self.kind == "conv":
                nn.init.constant_(x, 1 / x.shape[1])
            else:
                nn.init.normal_(x, std=0.02 if name == "pos" else x.shape[-1] ** -0.5)

    def given(self) -> list[Tensor | None]:
        """In the order and with the axes that the operators take."""
        return [self.pos, self.w1, None if self.b1 is None else self.b1[:, None], self.w2,
                None if self.b2 is None else self.b2[:, None]]


class NativeSparseAttention(nn.Module):
    """Causal self-attention that reads compressed blocks, selected blocks and a window.

        attention = NativeSparseAttention(dim=768, heads=12, kv_heads=2)
        y = attention(x)                                     # (B, T, dim)
        y = attention(x, begins=cu_seqlens, longest=n)       # (rows, dim) of packed sequences
        cache = attention.cache(batch=1, tokens=4096)        # for decoding
        y = attention(x, cache=cache)                        # appends x's tokens
        y = attention(x, cache=cache, counts=[1, 3])         # of sequence b the first counts[b] of them

    heads must be a multiple of kv_heads; head_dim and head_dim_v default to dim // heads. phi: mean, conv or mlp.
    gate: sigmoid or softmax of an MLP of the group's mean query. rope_base None leaves positions out. Options are
    fields of nsa.Desc, cmp_block, cmp_stride, slc_block, slc_count, window and others, and rope's as a dict.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int | None = None,
                 head_dim_v: int | None = None, *, phi: str = "mlp", gate: str = "sigmoid",
                 rope_base: float | None = 10000.0, rope: dict[str, Any] | None = None, **fields: Any):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.dim_k = head_dim or dim // max(1, heads)
        self.dim_v = head_dim_v or self.dim_k
        # The first rule that is broken, in the library's words, before any parameter is made.
        self._fields = dict(fields, gate=gate)
        self.options = options(**self._fields)
        parse(self.options, nsa.Desc)
        self.desc = self._desc()
        nsa.desc_check(self.desc)
        if rope_base is None and rope:
            raise refused("OPTION", "rope", f"{rope}, must be None: rope_base None leaves positions out")
        self.rope_options = None if rope_base is None else options(**{"base": float(rope_base), **(rope or {})})
        if self.rope_options is not None:
            rope_fields(self.rope_options, heads, self.dim_k)
        self.W_Q = nn.Linear(dim, heads * self.dim_k, bias=False)
        for branch in _BRANCHES:
            setattr(self, "W_K_" + branch, nn.Linear(dim, kv_heads * self.dim_k, bias=False))
            setattr(self, "W_V_" + branch, nn.Linear(dim, kv_heads * self.dim_v, bias=False))
        self.phi_k = _Phi(phi, kv_heads, self.desc.cmp_block, self.dim_k, bias=False)
        self.phi_v = _Phi(phi, kv_heads, self.desc.cmp_block, self.dim_v, bias=True)
        self.gate = nn.ModuleDict({"fc1": nn.Linear(self.dim_k, self.dim_k // 2), "fc2": nn.Linear(self.dim_k // 2, 3)})
        self.out = nn.Linear(heads * self.dim_v, dim, bias=False)

    def _desc(self) -> Any:
        return nsa.desc(1, 1, self.heads, self.kv_heads, self.dim_k, dim_v=self.dim_v, gate_heads=self.kv_heads,
                        **self._fields)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle, which know no structs."""
        state = self.__dict__.copy()
        del state["desc"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.desc = self._desc()

    def _projected(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
        """q, the branches' k and v, and the gates' logits, before positions turn q and k."""
        batch, tokens, _ = x.shape
        q = _linear(self.W_Q, x).view(batch, tokens, self.heads, self.dim_k)
        k = [_linear(getattr(self, "W_K_" + b), x).view(batch, tokens, self.kv_heads, self.dim_k) for b in _BRANCHES]
        v = [_linear(getattr(self, "W_V_" + b), x).view(batch, tokens, self.kv_heads, self.dim_v) for b in _BRANCHES]
        mean = q.view(batch, tokens, self.kv_heads, self.heads // self.kv_heads, self.dim_k).mean(3)
        # In double, then rounded: of float32 PyTorch has two exps, and which of them a number gets is a matter of its neighbours.
        gates = _linear(self.gate["fc2"], functional.silu(_linear(self.gate["fc1"], mean).double()).to(q.dtype))
        return q, k, v, gates

    def _turned(self, x: Tensor, positions: Tensor | None, begins: Tensor | None, longest: int) -> Tensor:
        if self.rope_options is None:
            return x
        return _o.rope(x, positions, begins, None, None, longest, 0, self.rope_options)

    def forward(self, x: Tensor, *, positions: Tensor | None = None, begins: Tensor | None = None, longest: int = 0,
                cache: "Cache | None" = None, counts: Sequence[int] | Tensor | None = None) -> Tensor:
        """x (B, T, dim), or (rows, dim) with begins; positions (B, T) int32, for RoPE, instead of a row's place. With a
        cache the tokens are appended to it, of sequence b the first counts[b]; rows behind them come back as zeros."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: {type(x).__name__}, must be a tensor")
        _o.check_nested("x", x)
        longest, packed = _o.integer("longest", longest), begins is not None and x.dim() == 2
        x = x[None] if packed else x
        if x.dim() != 3:
            raise refused("SIZE", "x", f"shape {tuple(x.shape)}, must be (B, T, dim), or with begins (rows, dim)")
        if cache is not None:
            if not isinstance(cache, Cache):
                raise TypeError(f"cache: {type(cache).__module__}.{type(cache).__name__}, must be what module.cache() makes")
            if begins is not None or longest:
                raise refused("OPTION", "begins" if begins is not None else "longest", "a cache has each sequence for itself: "
                              "must be None, and longest 0, with x (B, T, dim)")
            # What a cache does is no graph: torch.compile would go into all of the package, for every length anew.
            decoded = torch.compiler.disable(self._decoded) if _o.is_compiling() else self._decoded
            return decoded(x, positions, cache, counts)
        if counts is not None:
            raise refused("NULL", "cache", "None, and counts say how many tokens it gets")
        q, k, v, gates = self._projected(x)
        q, *k = (self._turned(t, positions, begins, longest) for t in (q, *k))
        out = _o.attention_of((q, k[0], v[0], k[1], v[1], k[2], v[2], gates, *self.phi_k.given(),
                               *self.phi_v.given(), begins, longest, 0, self.phi_k.kind, self.phi_v.kind,
                               self.options), 1)[0]
        y = _linear(self.out, out.flatten(2))
        return y[0] if packed else y

    def _decoded(self, x: Tensor, positions: Tensor | None, cache: "Cache", counts: Sequence[int] | Tensor | None) -> Tensor:
        with cache._lock:  # another thread must not append between the question for positions and the answer
            each = cache.counts(counts, x.shape[0], x.shape[1], self)
            q, k, v, gates = self._projected(x)
            places = cache.positions(x.shape[1]) if positions is None else positions
            q, *k = (self._turned(t, places, None, 0) for t in (q, *k))
            out = _o.without_gradients(lambda: cache.decode(q, k, v, gates, self, each), "attention from a cache",
                                       (q, *k, *v, gates, *self.phi_k.given(), *self.phi_v.given()))
        return _linear(self.out, out.flatten(2))

    def cache(self, batch: int, tokens: int, max_rewind: int = 127, dtype: torch.dtype | None = None) -> "Cache":
        """An empty cache for so many sequences of at most so many tokens, max_rewind + 1 of them at once. dtype: that of the
        tokens' rows unless given."""
        return Cache(self, batch, tokens, max_rewind, dtype)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, dim_k={self.dim_k}, dim_v={self.dim_v}, {self.options}"


#: The rows that a cache holds, with nsa.Dtype's numbers. Older torches have no 8 bits of floating point.
_KEPT = {**{dtype: number for dtype, number in DTYPES.items() if number < 4}, torch.int8: int(nsa.Dtype.I8),
         **({torch.float8_e4m3fn: int(nsa.Dtype.F8)} if hasattr(torch, "float8_e4m3fn") else {})}


class Cache:
    """What decoding keeps of one layer, on the CPU: see nsa.Cache, which this holds as `rows`.

    Its rows have the dtype of the tokens that are appended first, under autocast that of the projections, unless a dtype
    is given: only then do its outputs have the bits of the module without a cache. torch.int8 and float8_e4m3fn are rows
    of 8 bits with their scales, which float32, bfloat16 and float16 go into. What it returns has no gradients, and
    says so in a backward. Threads may share one, and wait for each other. copy and deepcopy make one of its own memory.
    """

    def __init__(self, module: NativeSparseAttention, batch: int, tokens: int, max_rewind: int,
                 dtype: torch.dtype | None = None):
        if dtype is not None and dtype not in _KEPT:
            raise refused("DTYPE", "dtype", f"{dtype}, must be " + ", ".join(map(str, _KEPT)))
        d = copy.copy(module.desc)
        for name, value in (("batch", batch), ("tokens", tokens), ("count", tokens), ("threads", torch.get_num_threads())):
            setattr(d, name, value)
        weight = getattr(module.W_K_slc.weight, "dtype", None)  # of a quantised layer a method
        self._desc, self._max_rewind, self._given = d, check_int("max_rewind", max_rewind), dtype is not None
        self._geometry, self._lock = bytes(module.desc), Lock()
        self._lay_out(dtype or (weight if DTYPES.get(weight, 4) < 4 else torch.float32))
        self.chunk = max_rewind + 1

    def _lay_out(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows = nsa.Cache(self._desc, nsa.Dtype(_KEPT[dtype]), self._max_rewind)

    def __copy__(self) -> "Cache":
        made = object.__new__(Cache)
        with self._lock:
            made.__dict__.update(self.__dict__, rows=copy.copy(self.rows), _lock=Lock())
        return made

    def __deepcopy__(self, memo: Any) -> "Cache":
        return self.__copy__()

    def __reduce__(self) -> Any:
        return self.rows.__reduce__()  # which refuses

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence holds."""
        return self.rows.lengths

    def rewind(self, sequence: int, length: int) -> None:
        """Takes a sequence back to so many tokens, at most max_rewind below its newest length; to 0 it may always go."""
        with self._lock:
            self.rows.rewind(sequence, length)

    def fork(self, sequence: int, source: "Cache", source_sequence: int, length: int) -> None:
        """Makes a sequence the copy of another's first tokens, of this or another cache of the same module."""
        if not isinstance(source, Cache):
            raise TypeError(f"source: {type(source).__name__}, must be a Cache")
        first, second = sorted((self, source), key=id)
        with first._lock, second._lock:
            self._takes(source.dtype, "source")
            self.rows.fork(sequence, source.rows, source_sequence, length)

    def _takes(self, dtype: torch.dtype, name: str) -> None:
        """Rows of that dtype, which an empty cache may still become."""
        if dtype == self.dtype or self._given and (dtype == torch.float64) == (self.dtype == torch.float64):
            return
        if self._given or any(self.lengths):
            raise refused("DTYPE", name, f"rows of {dtype}, and the cache holds {self.dtype}: must be the same")
        self._lay_out(dtype)

    def positions(self, count: int) -> Tensor:
        """The places of the next `count` tokens of each sequence."""
        return (torch.tensor(self.lengths, dtype=torch.int32, device="cpu")[:, None]
                + torch.arange(count, dtype=torch.int32, device="cpu")).contiguous()

    def counts(self, counts: Any, batch: int, tokens: int, module: NativeSparseAttention) -> list[int]:
        """How many of its `tokens` rows each sequence gets, if the cache has room for them."""
        if bytes(module.desc) != self._geometry:
            raise refused("CACHE", "cache", "of another module, must be of this one's geometry: module.cache()")
        if batch != self._desc.batch:
            raise refused("SIZE", "x", f"{batch} sequences, and the cache holds {self._desc.batch}: must be as many")
        if counts is not None and not hasattr(counts, "__len__"):
            raise TypeError(f"counts: {counts!r}, must be {batch} numbers, 0 .. {tokens}")
        each = [tokens] * batch if counts is None else [check_int("counts", n) for n in counts]
        if len(each) != batch or any(not 0 <= n <= tokens for n in each):
            raise refused("RANGE", "counts", f"{each}, must be {batch} numbers, 0 .. {tokens}")
        room = [self._desc.tokens - length for length in self.lengths]
        if any(n > left for n, left in zip(each, room)):
            raise refused("CACHE", "x", f"{max(each)} tokens, and the cache has room for {min(room)}" if counts is None
                          else f"{each} tokens, and the cache has room for {room}")
        return each

    @torch.no_grad()
    def decode(self, q: Tensor, k: list[Tensor], v: list[Tensor], gates: Tensor, module: NativeSparseAttention,
               counts: list[int]) -> Tensor:
        """Appends the rows, a chunk at a time, and attends from them."""
        self._takes(k[1].dtype, "x")
        found = [q.new_zeros(*q.shape[:3], module.dim_v)] if q.shape[1] == 0 else []
        for i in range(0, q.shape[1], self.chunk):
            part = slice(i, i + self.chunk)
            found.append(self._chunk(q[:, part], [t[:, part] for t in k], [t[:, part] for t in v], gates[:, part], module,
                                     [min(max(0, n - i), self.chunk) for n in counts]))
        return torch.cat(found, 1)

    def _chunk(self, q: Tensor, k: list[Tensor], v: list[Tensor], gates: Tensor, module: NativeSparseAttention,
               counts: list[int]) -> Tensor:
        heads, real = q.shape[:3], torch.float64 if q.dtype == torch.float64 else torch.float32
        out, out_cmp, out_slc, out_win = (q.new_empty(*heads, module.dim_v) for _ in range(4))
        lses = [torch.empty(heads, dtype=real, device="cpu") for _ in range(3)]
        blocks = torch.empty(*q.shape[:2], module.kv_heads, nsa.block_list_width(self._desc), dtype=torch.int32, device="cpu")
        phis = [nsa.Compress(phi=phi.kind, dim=x.shape[3], hidden=x.shape[3], x=x,
                             **{n: None if p is None else p.detach().to(q.dtype) for n, p in zip(PHI, phi.given())})
                for phi, x in ((module.phi_k, k[0]), (module.phi_v, v[0]))]
        self.rows.decode(nsa.Attention(
            q=q, k_cmp=phis[0], v_cmp=phis[1], k_slc=k[1], v_slc=v[1], k_win=k[2], v_win=v[2], gates=gates,
            blocks=blocks, out_cmp=out_cmp, out_slc=out_slc, out_win=out_win, lse_cmp=lses[0], lse_slc=lses[1],
            lse_win=lses[2], out=out), q.shape[1], torch.tensor(counts, dtype=torch.int32, device="cpu"))
        return out
