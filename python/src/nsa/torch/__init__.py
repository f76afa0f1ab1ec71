"""Native Sparse Attention for PyTorch: differentiable operators, and a module that drops into a model.

Tensors are (B, T, H, D) with any strides whose last is 1; a head-first tensor is passed as x.transpose(1, 2).
With `first`, q holds rows first .. of each sequence's keys; it must be given if there are fewer rows of q than
tokens. Options are fields of nsa.Desc, by name: window=512, gate="softmax", mask="none", list_heads=8 (lists then have
that many heads); sizes are what the tensors say, and no options. float64 is computed in double, bfloat16
and float16 with sums in float32. Where sequences differ in length, by tensors of int32:

    begins (B + 1)          packed: all tensors are (1, rows, H, D), sequence b is rows begins[b] .. begins[b + 1] - 1
                            (cu_seqlens), `longest` has the most tokens
    firsts (B), counts (B)  the query's side is packed, (1, rows, H, D): counts[b] rows of sequence b, which are its
                            queries from firsts[b] on; it has keys up to the last of them. k and v stay (B, T, Hk, D)
    pages (B, pages)        k and v are (page count, page tokens, Hk, D), compressed rows (page count, page tokens / d,
                            Hk, D): token s of sequence b lies in page pages[b, s // page tokens]. `longest` (0: what
                            the table has room for) bounds the tokens. No gradient

Without begins and pages the rows of k say how many tokens there are, and `longest`, if given, may not be less.

On CUDA counts must add up to the rows; on the CPU that is checked. Rows of packed sequences that belong to none, and
the last `first` of each, are 0 in outputs, -inf in lse and -1 in lists.

The operators are torch.ops.nsa.*: they have fake kernels, gradients, and autocast as
scaled_dot_product_attention has it. Block lists carry no gradient.
"""
from __future__ import annotations

from typing import Any

import torch as _torch

from .. import _pack
from .._library import check_key_stride as _check_key_stride
from .._pack import (PHI as _PHI, first_of as _first_of, of_a_step as _of_a_step, only_with as _only_with, options as _options,
                     phi_of as _phi_of)
from .._refused import refused as _refused
from . import _operators as _o
from ._memory import release_memory
from ._module import Cache, NativeSparseAttention
from ._native import cuda_library

Tensor = _torch.Tensor

__all__ = ["Cache", "NativeSparseAttention", "attend_cmp", "attend_dense", "attend_slc", "attend_win", "attention",
           "compress", "cuda_library", "gate", "merge", "rank_queries", "release_memory", "rope", "score_blocks",
           "score_lists", "select_blocks"]


def _axes(name: str, x: Any) -> Any:
    """The shape of what must have rows of heads."""
    _o.check_nested(name, x)
    return _pack.axes(name, x)


def _tokens_of(rows: Any, begins: Tensor | None, pages: Tensor | None, longest: Any) -> Any:
    _o.check_nested("pages", pages)
    return _pack.tokens_of(rows, begins, pages, longest)


def _scored_tokens(text: str, stride: int, longest: int, first: int | None, q: Tensor, k: Tensor, arrays: Any) -> Any:
    _axes("q", q), _axes("k", k)
    if not _o.is_compiling():  # the library refuses it too, and is no code that PyTorch compiles
        _check_key_stride(stride, _pack.option(text, "slc_block"), 0)
    return _pack.scored_tokens(stride, longest, first, q, k, arrays)


def rope(x: Tensor, positions: Tensor | None = None, *, begins: Tensor | None = None, firsts: Tensor | None = None,
         counts: Tensor | None = None, longest: int = 0, first: int = 0, **options: Any) -> Tensor:
    """x (B, T, H, D) turned by its positions (B, T), int32; without them a row's place, from `first` or firsts on.
    Options: those of nsa.Rope, as base=10000.0, pairs="halves", frequencies=[...]; nsa.rope_options has those of a
    configuration."""
    return _o.rope(x, positions, begins, firsts, counts, _o.integer("longest", longest), first, _options(**options))


def compress(x: Tensor, pos: Tensor | None = None, w1: Tensor | None = None, b1: Tensor | None = None,
             w2: Tensor | None = None, b2: Tensor | None = None, *, phi: str = "mean", begins: Tensor | None = None,
             longest: int = 0, out: Tensor | None = None, firsts: Tensor | None = None,
             counts: Tensor | None = None, pages: Tensor | None = None, **options: Any) -> Tensor:
    """Eq. 7: (B, T, Hk, D) to (B, N, Hk, D), N = (T - l) / d + 1. phi: mean; conv with w1 (Hk, l, D) and b1
    (Hk, 1, D); mlp with pos (Hk, l, D), w1 (Hk, hidden, l D), b1 (Hk, 1, hidden), w2 (Hk, D, hidden), b2 (Hk, 1, D).
    A first axis of 1 is one parameter for all heads. Of packed sequences the rows lie packed too, then zeros.
    With firsts and counts, or pages, `out` has the rows of earlier steps: it gets those that the new tokens complete,
    and is returned."""
    if out is None:
        _only_with("out", firsts, counts, pages)
        return _o.compress(x, pos, w1, b1, w2, b2, begins, _o.integer("longest", longest), phi, _options(**options))
    _of_a_step(begins, None)
    _axes("x", x)
    with _torch.no_grad():
        _o.compress_step(x, out, pos, w1, b1, w2, b2, firsts, counts, pages,
                         _tokens_of(x.shape[1], None, pages, _o.integer("longest", longest)), phi, _options(**options))
    return out


def attend_cmp(q: Tensor, k: Tensor, v: Tensor, *, tokens: int, begins: Tensor | None = None, first: int | None = None,
               firsts: Tensor | None = None, counts: Tensor | None = None, pages: Tensor | None = None,
               **options: Any) -> tuple[Tensor, Tensor]:
    """(out (B, T, H, Dv), lse (B, T, H)) over compressed rows k (B, N, Hk, Dk), v (B, N, Hk, Dv) of so many tokens
    (packed: of the longest sequence)."""
    return _attended("cmp", q, k, v, None, begins, firsts, counts, pages, tokens, first, options)


def attend_slc(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, begins: Tensor | None = None, longest: int = 0,
               first: int | None = None, firsts: Tensor | None = None, counts: Tensor | None = None,
               pages: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) over the tokens of the blocks listed for each query and kv head: (B, T, Hk, n) int32, in the form
    of select_blocks."""
    return _attended("slc", q, k, v, blocks, begins, firsts, counts, pages, longest, first, options)


def attend_win(q: Tensor, k: Tensor, v: Tensor, *, begins: Tensor | None = None, longest: int = 0, first: int | None = None,
               firsts: Tensor | None = None, counts: Tensor | None = None, pages: Tensor | None = None,
               **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) over the last `window` tokens."""
    return _attended("win", q, k, v, None, begins, firsts, counts, pages, longest, first, options)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, *, begins: Tensor | None = None, longest: int = 0, first: int | None = None,
                 firsts: Tensor | None = None, counts: Tensor | None = None, pages: Tensor | None = None,
                 **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of causal attention."""
    return _attended("dense", q, k, v, None, begins, firsts, counts, pages, longest, first, options)


def _attended(branch: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None, begins: Tensor | None,
              firsts: Tensor | None, counts: Tensor | None, pages: Tensor | None, most: int, first: int | None,
              options: dict[str, Any]) -> Any:
    """most: `tokens` of cmp, whose rows do not say them, `longest` of the others."""
    if branch == "cmp":
        tokens = _o.integer("tokens", most)
    else:
        tokens = _tokens_of(_axes("k", k)[1], begins, pages, _o.integer("longest", most))
    first = _first_of(first, _axes("q", q), tokens, (begins, firsts, counts))
    return _o.attend[branch](q, k, v, blocks, begins, firsts, counts, pages, tokens, first,
                             _options(**options) if options else "")


def select_blocks(q: Tensor, k: Tensor, lse: Tensor, *, tokens: int, begins: Tensor | None = None, first: int | None = None,
                  firsts: Tensor | None = None, counts: Tensor | None = None, pages: Tensor | None = None,
                  scores: bool = False, **options: Any) -> Any:
    """Eq. 8 to 11: the lists (B, T, Hk, n) int32 for compressed keys k and the lse of attend_cmp. With scores=True
    also what they were chosen by, (B, T, Hk, selection blocks), -inf behind a query's candidates. No gradient."""
    tokens = _o.integer("tokens", tokens)
    first = _first_of(first, _axes("q", q), tokens, (begins, firsts, counts))
    return _selected(_o.select_blocks(q, k, lse, begins, firsts, counts, pages, tokens, first, scores,
                                      _options(**options)), scores)


def score_blocks(q: Tensor, k: Tensor, weights: Tensor | None = None, *, act: str = "linear", pool: str = "max",
                 stride: int = 1, begins: Tensor | None = None, longest: int = 0, first: int | None = None,
                 firsts: Tensor | None = None, counts: Tensor | None = None, pages: Tensor | None = None,
                 scores: bool = False, **options: Any) -> Any:
    """The lists (B, T, Hk, n) int32 of the best blocks by the score of their tokens, sum over the heads of a group of
    weights (B, T, H) act(q . k), linear or relu; of a block the max or the mean. With scores=True also the scores of
    the blocks. No gradient.

    With `stride` row i of k, (B, T // stride, Hk, Dk), stands for tokens i stride .. (i + 1) stride - 1, and t sees it if all
    of them lie at or before t; packed and in pages rows lie as compress with cmp_block = cmp_stride = stride has them. If
    the rows of q are not all T tokens, T is `longest`, or without it k's rows times stride. forced="tail" (slc_local 0 or 1)
    scores whole blocks alone."""
    text, arrays, stride = _options(**options), (begins, firsts, counts, pages), _o.check_int("stride", stride)
    tokens = _scored_tokens(text, stride, _o.integer("longest", longest), first, q, k, arrays)
    first = _first_of(first, _axes("q", q), tokens, arrays)
    return _selected(_o.score_blocks(q, k, weights, *arrays, tokens, first, act, pool, stride, scores, text), scores)


def score_lists(q: Tensor, k: Tensor, blocks: Tensor, weights: Tensor | None = None, *, act: str = "linear",
                pool: str = "max", stride: int = 1, begins: Tensor | None = None, longest: int = 0,
                first: int | None = None, firsts: Tensor | None = None, counts: Tensor | None = None,
                pages: Tensor | None = None, **options: Any) -> Tensor:
    """The scores of score_blocks for blocks that are given, (B, T, Hk, n): what trains a scorer. -inf where an entry is -1
    or t sees no key of its block. With gradients of q, k and weights: a maximum's goes to its key, a mean's to all."""
    text, arrays, stride = _options(**options), (begins, firsts, counts, pages), _o.check_int("stride", stride)
    tokens = _scored_tokens(text, stride, _o.integer("longest", longest), first, q, k, arrays)
    first = _first_of(first, _axes("q", q), tokens, arrays)
    return _o.score_lists(q, k, weights, blocks, *arrays, tokens, first, act, pool, stride, text)


def rank_queries(scores: Tensor, *, tokens: int, begins: Tensor | None = None, first: int | None = None,
                 firsts: Tensor | None = None, counts: Tensor | None = None, **options: Any) -> Tensor:
    """The lists (B, T, Hk, n) int32 of the best blocks by scores from elsewhere, (B, T, Hk, selection blocks of so many
    tokens), in float32 or, of doubles, float64."""
    tokens = _o.integer("tokens", tokens)
    first = _first_of(first, _axes("scores", scores), tokens, (begins, firsts, counts))
    return _o.rank_queries(scores, begins, firsts, counts, tokens, first, _options(**options))


def _selected(found: tuple[Tensor, Tensor], scores: bool) -> Any:
    return tuple(found) if scores else found[0]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one softmax over the keys of two: outs (B, T, H, Dv), lses (B, T, H)."""
    return _o.merge(out_a, out_b, lse_a, lse_b)


def gate(logits: Tensor, cmp: Tensor, slc: Tensor, win: Tensor, kind: str = "sigmoid") -> Tensor:
    """Eq. 5: the branches (B, T, H, Dv), gated by logits (B, T, H or Hk, 3) and added. Of three tensors they are
    torch.stack((cmp, slc, win), -1)."""
    return _o.gate(logits, cmp, slc, win, _options(gate=kind))


def attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor,
              gates: Tensor, *, phi_k: tuple[str, dict[str, Tensor]] | str = "mean",
              phi_v: tuple[str, dict[str, Tensor]] | str = "mean", begins: Tensor | None = None, longest: int = 0,
              first: int | None = None, compressed: tuple[Tensor, Tensor] | None = None, firsts: Tensor | None = None,
              counts: Tensor | None = None, pages: Tensor | None = None, blocks: bool = False, **options: Any) -> Any:
    """The whole: out (B, T, H, Dv), and with blocks=True also the lists that were selected.

    k_* (B, T, Hk, Dk) and v_* (B, T, Hk, Dv) of each branch may be one tensor. gates (B, T, H or Hk, 3),
    as gate takes them.
    phi_k, phi_v: "mean", or a kind and its parameters by name as compress takes them: ("mlp", {"w1": ...}).

    With firsts and counts, or pages, it is a step of a serving engine, whose gradients are refused: k_* and v_* already hold the
    new tokens; compressed = (of k, of v) holds the compressed rows of earlier steps and gets those of this one."""
    kind_k, given_k = (phi_k, _NO_PARAMETERS) if isinstance(phi_k, str) else _phi("phi_k", phi_k)
    kind_v, given_v = (phi_v, _NO_PARAMETERS) if isinstance(phi_v, str) else _phi("phi_v", phi_v)
    tensors = q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, *given_k, *given_v
    longest = _o.integer("longest", longest)
    if compressed is not None:
        _of_a_step(begins, first)
        tokens, text = _tokens_of(_axes("k_slc", k_slc)[1], None, pages, longest), _options(**options)
        found = _o.without_gradients(lambda: _o.attention_step(*tensors, *compressed, firsts, counts, pages, tokens, kind_k,
                                                               kind_v, text), "attention of a step", tensors)
        return found if blocks else found[0]
    if not (firsts is counts is pages is None):
        _only_with("compressed", firsts, counts, pages)
    first = _first_of(first, _axes("q", q), _axes("k_slc", k_slc)[1], (begins, firsts, counts))
    found = _o.attention_of((*tensors, begins, longest, first, kind_k, kind_v, _options(**options) if options else ""),
                            2 if blocks else 1)
    return found[:2] if blocks else found[0]


_NO_PARAMETERS = (None,) * len(_PHI)


def _phi(name: str, phi: tuple[str, dict[str, Tensor]]) -> tuple[str, list[Tensor | None]]:
    """Its kind, and its parameters as the operators take them."""
    kind, parameters = _phi_of(name, phi)
    if not parameters.keys() <= set(_PHI):
        raise _refused("OPTION", "phi", f"parameters {', '.join(parameters)}, must be of {', '.join(_PHI)}")
    return kind, [parameters.get(name) for name in _PHI]
