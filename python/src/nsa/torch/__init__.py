"""Native Sparse Attention for PyTorch: differentiable operators, and a module that drops into a model.

Tensors are (B, T, H, D) with any strides whose last is 1; a head-first tensor is passed as x.transpose(1, 2).
Packed sequences: tensors of (1, rows, H, D), `begins` (B + 1 offsets, int32, also called cu_seqlens) and
`longest`. With `first`, q holds rows first .. of each sequence's keys. Options are fields of nsa.Desc, by name:
window=512, gate="softmax". float64 is computed in double, bfloat16 and float16 with sums in float32.

The operators are torch.ops.nsa.*: they have fake kernels, gradients, and autocast as
scaled_dot_product_attention has it. Block lists carry no gradient.
"""
from __future__ import annotations

from typing import Any

import torch as _torch

from .._pack import PHI as _PHI, options as _options
from . import _operators as _o
from ._module import Cache, NativeSparseAttention
from ._native import cuda_library

Tensor = _torch.Tensor

__all__ = ["Cache", "NativeSparseAttention", "attend_cmp", "attend_dense", "attend_slc", "attend_win", "attention",
           "compress", "cuda_library", "gate", "merge", "rank_queries", "rope", "score_blocks", "select_blocks"]


def rope(x: Tensor, positions: Tensor | None = None, *, begins: Tensor | None = None, longest: int = 0,
         first: int = 0, **options: Any) -> Tensor:
    """x (B, T, H, D) turned by its positions (B, T), int32; without them a row's place, from `first` on.
    Options: those of nsa.Rope, as base=10000.0, pairs="halves"."""
    return _o.rope(x, positions, begins, longest, first, _options(**options))


def compress(x: Tensor, pos: Tensor | None = None, w1: Tensor | None = None, b1: Tensor | None = None,
             w2: Tensor | None = None, b2: Tensor | None = None, *, phi: str = "mean", begins: Tensor | None = None,
             longest: int = 0, **options: Any) -> Tensor:
    """Eq. 7: (B, T, Hk, D) to (B, N, Hk, D), N = (T - l) / d + 1. phi: mean; conv with w1 (Hk, l, D) and b1
    (Hk, 1, D); mlp with pos (Hk, l, D), w1 (Hk, hidden, l D), b1 (Hk, 1, hidden), w2 (Hk, D, hidden), b2 (Hk, 1, D).
    A first axis of 1 is one parameter for all heads. Of packed sequences the rows lie packed too, then zeros."""
    return _o.compress(x, pos, w1, b1, w2, b2, begins, longest, phi, _options(**options))


def attend_cmp(q: Tensor, k: Tensor, v: Tensor, *, tokens: int, begins: Tensor | None = None, first: int = 0,
               **options: Any) -> tuple[Tensor, Tensor]:
    """(out (B, T, H, Dv), lse (B, T, H)) over compressed rows k (B, N, Hk, Dk), v (B, N, Hk, Dv) of so many tokens
    (packed: of the longest sequence)."""
    return _o.attend["cmp"](q, k, v, None, begins, tokens, first, _options(**options))


def attend_slc(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, begins: Tensor | None = None, longest: int = 0,
               first: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) over the tokens of the blocks listed for each query and kv head: (B, T, Hk, n) int32, in the form
    of select_blocks."""
    return _o.attend["slc"](q, k, v, blocks, begins, _tokens(k, begins, longest), first, _options(**options))


def attend_win(q: Tensor, k: Tensor, v: Tensor, *, begins: Tensor | None = None, longest: int = 0, first: int = 0,
               **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) over the last `window` tokens."""
    return _o.attend["win"](q, k, v, None, begins, _tokens(k, begins, longest), first, _options(**options))


def attend_dense(q: Tensor, k: Tensor, v: Tensor, *, begins: Tensor | None = None, longest: int = 0, first: int = 0,
                 **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of causal attention."""
    return _o.attend["dense"](q, k, v, None, begins, _tokens(k, begins, longest), first, _options(**options))


def select_blocks(q: Tensor, k: Tensor, lse: Tensor, *, tokens: int, begins: Tensor | None = None, first: int = 0,
                  scores: bool = False, **options: Any) -> Any:
    """Eq. 8 to 11: the lists (B, T, Hk, n) int32 for compressed keys k and the lse of attend_cmp. With scores=True
    also what they were chosen by, (B, T, Hk, selection blocks), -inf behind a query's candidates. No gradient."""
    return _selected(_o.select_blocks(q, k, lse, begins, tokens, first, scores, _options(**options)), scores)


def score_blocks(q: Tensor, k: Tensor, weights: Tensor | None = None, *, act: str = "linear", pool: str = "max",
                 begins: Tensor | None = None, longest: int = 0, first: int = 0, scores: bool = False,
                 **options: Any) -> Any:
    """The lists (B, T, Hk, n) int32 of the best blocks by the score of their tokens, sum over the heads of a group of
    weights (B, T, H) act(q . k), linear or relu; of a block the max or the mean. With scores=True also the scores of
    the blocks. No gradient."""
    return _selected(_o.score_blocks(q, k, weights, begins, _tokens(k, begins, longest), first, act, pool, scores,
                                     _options(**options)), scores)


def rank_queries(scores: Tensor, *, tokens: int, begins: Tensor | None = None, first: int = 0, **options: Any) -> Tensor:
    """The lists (B, T, Hk, n) int32 of the best blocks by scores from elsewhere, (B, T, Hk, selection blocks of so many
    tokens), in float32 or, of doubles, float64."""
    return _o.rank_queries(scores, begins, tokens, first, _options(**options))


def _selected(found: tuple[Tensor, Tensor], scores: bool) -> Any:
    return tuple(found) if scores else found[0]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one softmax over the keys of two: outs (B, T, H, Dv), lses (B, T, H)."""
    return _o.merge(out_a, out_b, lse_a, lse_b)


def gate(logits: Tensor, cmp: Tensor, slc: Tensor, win: Tensor, kind: str = "sigmoid") -> Tensor:
    """Eq. 5: the branches (B, T, H, Dv), gated by logits (B, T, H or Hk, 3) and added."""
    return _o.gate(logits, cmp, slc, win, _options(gate=kind))


def attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor,
              gates: Tensor, *, phi_k: tuple[str, dict[str, Tensor]] | str = "mean",
              phi_v: tuple[str, dict[str, Tensor]] | str = "mean", begins: Tensor | None = None, longest: int = 0,
              first: int = 0, blocks: bool = False, **options: Any) -> Any:
    """The whole: out (B, T, H, Dv), and with blocks=True also the lists that were selected.

    k_* (B, T, Hk, Dk) and v_* (B, T, Hk, Dv) of each branch may be one tensor. gates (B, T, H or Hk, 3).
    phi_k, phi_v: "mean", or a kind and its parameters by name as compress takes them: ("mlp", {"w1": ...})."""
    kinds, given = [], []
    for phi in (phi_k, phi_v):
        kind, parameters = (phi, {}) if isinstance(phi, str) else phi
        kinds.append(kind)
        given += [parameters.get(name) for name in _PHI]
    found = _o.attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, *given, begins, longest, first, *kinds,
                         _options(**options))
    return found[:2] if blocks else found[0]


def _tokens(k: Tensor, begins: Tensor | None, longest: int) -> int:
    return k.shape[1] if begins is None else longest
