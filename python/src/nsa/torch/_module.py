"""NativeSparseAttention, an nn.Module, and its cache for decoding.

Its parameters have the names and shapes of the layers of examples/train_tiny, so that a checkpoint of the C
trainer loads. Not here: arithmetic (_operators.py), other parts of a model.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import nsa

from . import _operators as _o
from .._pack import PHI, options, parse
from ._native import DTYPES

_BRANCHES = ("cmp", "slc", "win")


class _Phi(nn.Module):
    """Parameters of one phi; `bias` of what it returns, which changes no softmax if added to every key."""

    def __init__(self, kind: str, heads: int, block: int, width: int, bias: bool):
        super().__init__()
        self.kind = kind
        for name in PHI:
            self.register_parameter(name, None)
        if kind == "conv":
            self.w1 = nn.Parameter(torch.full((heads, block, width), 1 / block))
            if bias:
                self.b1 = nn.Parameter(torch.zeros(heads, width))
        elif kind == "mlp":
            self.pos = nn.Parameter(torch.randn(heads, block, width) * 0.02)
            self.w1 = nn.Parameter(torch.randn(heads, width, block * width) / (block * width) ** 0.5)
            self.b1 = nn.Parameter(torch.zeros(heads, width))
            self.w2 = nn.Parameter(torch.randn(heads, width, width) / width ** 0.5)
            if bias:
                self.b2 = nn.Parameter(torch.zeros(heads, width))
        elif kind != "mean":
            raise ValueError(f"phi: {kind!r} is none of mean, conv, mlp")

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
        self.desc = self._desc()
        nsa.desc_check(self.desc)
        self.options = options(gate=gate, **fields)
        self.rope_options = None if rope_base is None else options(base=float(rope_base), **(rope or {}))
        nsa.Rope(**parse(self.rope_options or "", nsa.Rope))
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
        q = self.W_Q(x).view(batch, tokens, self.heads, self.dim_k)
        k = [getattr(self, "W_K_" + b)(x).view(batch, tokens, self.kv_heads, self.dim_k) for b in _BRANCHES]
        v = [getattr(self, "W_V_" + b)(x).view(batch, tokens, self.kv_heads, self.dim_v) for b in _BRANCHES]
        mean = q.view(batch, tokens, self.kv_heads, self.heads // self.kv_heads, self.dim_k).mean(3)
        gates = self.gate["fc2"](functional.silu(self.gate["fc1"](mean)))
        return q, k, v, gates

    def _turned(self, x: Tensor, positions: Tensor | None, begins: Tensor | None, longest: int) -> Tensor:
        if self.rope_options is None:
            return x
        return _o.rope(x, positions, begins, None, None, longest, 0, self.rope_options)

    def forward(self, x: Tensor, *, positions: Tensor | None = None, begins: Tensor | None = None, longest: int = 0,
                cache: "Cache | None" = None) -> Tensor:
        """x (B, T, dim), or (rows, dim) with begins; positions (B, T) int32, for RoPE, instead of a row's place."""
        packed = begins is not None and x.dim() == 2
        x = x[None] if packed else x
        if x.dim() != 3:
            raise ValueError(f"x: shape {tuple(x.shape)}, must be (B, T, dim), or with begins (rows, dim)")
        if cache is not None and positions is None:
            positions = cache.positions(x.shape[1])
        q, k, v, gates = self._projected(x)
        q, *k = (self._turned(t, positions, begins, longest) for t in (q, *k))
        if cache is not None:
            out = cache.decode(q, k, v, gates, self)
        else:
            out = _o.attention_of((q, k[0], v[0], k[1], v[1], k[2], v[2], gates, *self.phi_k.given(),
                                   *self.phi_v.given(), begins, longest, 0, self.phi_k.kind, self.phi_v.kind,
                                   self.options), 1)[0]
        y = self.out(out.flatten(2))
        return y[0] if packed else y

    def cache(self, batch: int, tokens: int, max_rewind: int = 127, dtype: torch.dtype = torch.float32) -> "Cache":
        """An empty cache for so many sequences of at most so many tokens, max_rewind + 1 of them at once."""
        return Cache(self, batch, tokens, max_rewind, dtype)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, dim_k={self.dim_k}, dim_v={self.dim_v}, {self.options}"


class Cache:
    """What decoding keeps of one layer, on the CPU: see nsa.Cache, which this holds as `rows`. No gradients."""

    def __init__(self, module: NativeSparseAttention, batch: int, tokens: int, max_rewind: int, dtype: torch.dtype):
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype}, must be " + ", ".join(map(str, DTYPES)))
        d = type(module.desc).from_buffer_copy(module.desc)
        d.__dict__["arrays"] = {}
        d.batch, d.tokens, d.count, d.threads = batch, tokens, tokens, torch.get_num_threads()
        self.rows = nsa.Cache(d, nsa.Dtype(DTYPES[dtype]), max_rewind)
        self.chunk = max_rewind + 1

    @property
    def lengths(self) -> list[int]:
        return self.rows.lengths

    def rewind(self, sequence: int, length: int) -> None:
        """Takes a sequence back to so many tokens, at most max_rewind below its newest length."""
        self.rows.rewind(sequence, length)

    def positions(self, count: int) -> Tensor:
        """The places of the next `count` tokens of each sequence."""
        return (torch.tensor(self.lengths, dtype=torch.int32)[:, None]
                + torch.arange(count, dtype=torch.int32)).contiguous()

    @torch.no_grad()
    def decode(self, q: Tensor, k: list[Tensor], v: list[Tensor], gates: Tensor, module: NativeSparseAttention) -> Tensor:
        """Appends the rows, a chunk at a time, and attends from them."""
        room = self.rows.desc.tokens - max(self.lengths)
        if q.shape[1] > room:
            raise ValueError(f"x: {q.shape[1]} tokens, and the cache has room for {room}")
        return torch.cat([self._chunk(q[:, i:i + self.chunk], [t[:, i:i + self.chunk] for t in k],
                                      [t[:, i:i + self.chunk] for t in v], gates[:, i:i + self.chunk], module)
                          for i in range(0, q.shape[1], self.chunk)], 1)

    def _chunk(self, q: Tensor, k: list[Tensor], v: list[Tensor], gates: Tensor, module: NativeSparseAttention) -> Tensor:
        heads, real = q.shape[:3], torch.float64 if q.dtype == torch.float64 else torch.float32
        out, out_cmp, out_slc, out_win = (q.new_empty(*heads, module.dim_v) for _ in range(4))
        lses = [torch.empty(heads, dtype=real) for _ in range(3)]
        blocks = torch.empty(*q.shape[:2], module.kv_heads, nsa.block_list_width(self.rows.desc), dtype=torch.int32)
        phis = [nsa.Compress(phi=phi.kind, dim=x.shape[3], hidden=x.shape[3], x=x,
                             **{n: None if p is None else p.detach().to(q.dtype) for n, p in zip(PHI, phi.given())})
                for phi, x in ((module.phi_k, k[0]), (module.phi_v, v[0]))]
        self.rows.decode(nsa.Attention(
            q=q, k_cmp=phis[0], v_cmp=phis[1], k_slc=k[1], v_slc=v[1], k_win=k[2], v_win=v[2], gates=gates,
            blocks=blocks, out_cmp=out_cmp, out_slc=out_slc, out_win=out_win, lse_cmp=lses[0], lse_slc=lses[1],
            lse_win=lses[2], out=out), q.shape[1])
        return out
