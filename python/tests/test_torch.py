"""nsa.torch: gradcheck in float64 for every operator, and with a torch that has operators opcheck, compile.

References are plain torch in float64, which share nothing with the library. The same file runs with the torch of
Debian 12, 1.13, whose autograd Functions take the operators' place; what only newer ones have is skipped there.
"""
import contextlib
import copy
import fractions
import gc
import io
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

import numpy as np
import torch

import nsa
import nsa.torch as nt
from nsa.torch import _call as one_step, _memory as memory, _native as native, _operators as operators
from nsa._pack import PHI, options
from test_core import SCORED, run_pages, scored_blocks

DEVICE = os.environ.get("NSA_TEST_DEVICE", "cpu")
GEOMETRY = dict(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, window=24)
NEW = unittest.skipUnless(operators.HAS_OPERATORS, f"torch {torch.__version__} has no operators of this kind")
CPU = unittest.skipIf(DEVICE != "cpu", "what lies on a device is not checked")
F64 = unittest.skipIf(DEVICE != "cpu", "the kernels for CUDA have no float64")
B, T, H, HK, D, DV = 2, 52, 4, 2, 16, 8


def rows(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_(grad)


def reference(q, k, v, sees):
    """out of (B, T, H, D) over keys (B, S, Hk, D) that sees (B, T, H, S) or what broadcasts to it."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    score = torch.einsum("bthd,bshd->bths", q, k) / math.sqrt(q.shape[3])
    score = score.masked_fill(~sees, -math.inf)
    some = sees.any(-1, keepdim=True)
    p = torch.softmax(score.masked_fill(~some, 0), -1) * some
    return torch.einsum("bths,bshd->bthd", p, v)


def reference_lse(q, k, v, sees):
    score = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / math.sqrt(q.shape[3])
    return score.masked_fill(~sees, -math.inf).logsumexp(-1) + 0 * v.sum()


def reference_merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    out = (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b
    return torch.cat([out.flatten(), lse.flatten()])


def sees_window(tokens, width):
    t, s = torch.arange(tokens)[:, None], torch.arange(tokens)
    return ((s <= t) & (s > t - width))[None, :, None].to(DEVICE)


def sees_blocks(blocks, group, tokens, length):
    """(B, T, H, S) from lists (B, T, Hk, n)."""
    s = torch.arange(tokens, device=blocks.device)
    inside = ((s // length) == blocks[..., None]).any(-2)
    causal = s <= torch.arange(tokens, device=blocks.device)[:, None, None]
    return (inside & causal).repeat_interleave(group, 2)


def sees_compressed(tokens, count):
    t, i = torch.arange(tokens)[:, None], torch.arange(count)
    return (i * 4 + 7 <= t)[None, :, None].to(DEVICE)


def parameters(kind, width, heads=HK, dtype=torch.float64):
    if kind == "conv":
        return dict(w1=rows(heads, 8, width, dtype=dtype), b1=rows(heads, 1, width, dtype=dtype))
    if kind == "mlp":
        return dict(pos=rows(heads, 8, width, dtype=dtype), w1=rows(heads, 24, 8 * width, dtype=dtype),
                    b1=rows(heads, 1, 24, dtype=dtype), w2=rows(heads, width, 24, dtype=dtype),
                    b2=rows(heads, 1, width, dtype=dtype))
    return {}


def reference_phi(x, kind, p):
    """(B, N, Hk, D) of (B, T, Hk, D)."""
    blocks = x.unfold(1, 8, 4).permute(0, 1, 2, 4, 3)  # (B, N, Hk, l, D)
    if kind == "mean":
        return blocks.mean(3)
    if kind == "conv":
        return (blocks * p["w1"]).sum(3) + p["b1"][:, 0]
    flat = (blocks + p["pos"]).flatten(3)
    hidden = torch.nn.functional.silu(torch.einsum("bnhi,hoi->bnho", flat, p["w1"]) + p["b1"][:, 0])
    return torch.einsum("bnho,hdo->bnhd", hidden, p["w2"]) + p["b2"][:, 0]


def lists(dtype=torch.float64):
    """Lists that the library itself selects."""
    q, k = rows(B, T, H, D, dtype=dtype, grad=False), rows(B, 12, HK, D, dtype=dtype, grad=False)
    _, lse = nt.attend_cmp(q, k, k, tokens=T, **GEOMETRY)
    return nt.select_blocks(q, k, lse, tokens=T, **GEOMETRY)


def cases():
    """name: (function of tensors, the tensors, the reference of the same tensors)"""
    torch.manual_seed(5)
    q, k, v = rows(B, T, H, D), rows(B, T, HK, D), rows(B, T, HK, DV)
    compressed = rows(B, 12, HK, D), rows(B, 12, HK, DV)
    blocks = lists()
    found = {
        "win": (lambda *x: nt.attend_win(*x, **GEOMETRY)[0], (q, k, v), lambda *x: reference(*x, sees_window(T, 24))),
        "dense": (lambda *x: nt.attend_dense(*x)[0], (q, k, v), lambda *x: reference(*x, sees_window(T, T))),
        "cmp": (lambda *x: nt.attend_cmp(*x, tokens=T, **GEOMETRY)[0], (q, *compressed),
                lambda *x: reference(*x, sees_compressed(T, 12))),
        "slc": (lambda *x: nt.attend_slc(*x, blocks, **GEOMETRY)[0], (q, k, v),
                lambda *x: reference(*x, sees_blocks(blocks, H // HK, T, 16))),
        "lse": (lambda *x: nt.attend_win(*x, **GEOMETRY)[1], (q, k, v), lambda *x: reference_lse(*x, sees_window(T, 24))),
        "merge": (lambda oa, la, ob, lb: torch.cat([a.flatten() for a in nt.merge(oa, la, ob, lb)]),
                  (rows(B, T, H, DV), rows(B, T, H), rows(B, T, H, DV), rows(B, T, H)), reference_merge),
        "gate": (nt.gate, (rows(B, T, HK, 3), *(rows(B, T, H, DV) for _ in range(3))),
                 lambda g, *x: sum(torch.sigmoid(g[..., i:i + 1]).repeat_interleave(H // HK, 2) * y
                                   for i, y in enumerate(x))),
        "rope": (lambda x: nt.rope(x, pairs="halves", base=100.0), (q,), reference_rope),
    }
    for kind in ("mean", "conv", "mlp"):
        p = parameters(kind, D)
        found["compress " + kind] = (
            lambda x, *given, kind=kind, names=tuple(p): nt.compress(x, **dict(zip(names, given)), phi=kind, cmp_block=8,
                                                                     cmp_stride=4),
            (k, *p.values()),
            lambda x, *given, kind=kind, names=tuple(p): reference_phi(x, kind, dict(zip(names, given))))
    return found


def reference_rope(x):
    half = x.shape[3] // 2
    angle = torch.arange(T, dtype=x.dtype)[:, None, None] * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def whole_tensors(kind="mlp", dtype=torch.float64, tokens=T):
    """q, k and v of each branch, gates, phi's parameters."""
    q, gates = rows(B, tokens, H, D, dtype=dtype), rows(B, tokens, HK, 3, dtype=dtype)
    k, v = ([rows(B, tokens, HK, w, dtype=dtype) for _ in range(3)] for w in (D, DV))
    return q, k, v, gates, parameters(kind, D, dtype=dtype), parameters(kind, DV, dtype=dtype)


def whole(q, k, v, gates, phi_k, phi_v, kind="mlp", **more):
    return nt.attention(q, k[0], v[0], k[1], v[1], k[2], v[2], gates, phi_k=(kind, phi_k), phi_v=(kind, phi_v),
                        **{**GEOMETRY, **more})


def reference_whole(q, k, v, gates, phi_k, phi_v, blocks, kind="mlp"):
    k_cmp, v_cmp = reference_phi(k[0], kind, phi_k), reference_phi(v[0], kind, phi_v)
    branches = (reference(q, k_cmp, v_cmp, sees_compressed(q.shape[1], k_cmp.shape[1])),
                reference(q, k[1], v[1], sees_blocks(blocks, H // HK, q.shape[1], 16)),
                reference(q, k[2], v[2], sees_window(q.shape[1], 24)))
    g = torch.sigmoid(gates).repeat_interleave(H // HK, 2)
    return sum(g[..., i:i + 1] * branch for i, branch in enumerate(branches))


def leaves(q, k, v, gates, phi_k, phi_v):
    return [q, *k, *v, gates, *phi_k.values(), *phi_v.values()]


@F64
@CPU
class Pages(unittest.TestCase):
    def test_page(self):
        class config:
            rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
            max_position_embeddings = 64
        def f32(*shape):
            return torch.randn(*shape)
        def i32(*numbers):
            return torch.tensor(numbers, dtype=torch.int32)
        one_page = dict(q=f32(1, 64, 4, 16), k=f32(1, 64, 2, 16), v=f32(1, 64, 2, 16), gates=f32(1, 64, 4, 3),
                        k_rows=f32(1, 4, 2, 16), v_rows=f32(1, 4, 2, 16), firsts=i32(0), counts=i32(64), table=i32([0]))
        for said in run_pages(self, "test_torch", x=f32(96, 768), cu_seqlens=i32(0, 32, 96), longest=64, config=config,
                              **one_page):
            if "out" not in said:  # README's first lines
                self.assertEqual(said["y"].shape, (1, 2048, 768))
                continue
            self.assertEqual(said["y"].shape, (96, 768))
            self.assertEqual(said["turned"].shape, said["q"].shape)
            with torch.no_grad():
                self.assertEqual(said["attention"](f32(1, 1, 768), cache=said["cache"]).shape, (1, 1, 768))
            whole = nt.attention(*(said[name] for name in "qkvkvkv"), said["gates"])
            self.assertTrue(torch.equal(said["out"], whole))


class Gradients(unittest.TestCase):
    def test_each_operator_is_its_reference(self):
        for name, (function, tensors, plain) in cases().items():
            with self.subTest(name):
                out, expected = function(*tensors), plain(*tensors)
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
                weight = torch.randn_like(out)
                found = torch.autograd.grad((out * weight).sum(), tensors)
                for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), tensors)):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def test_gradcheck(self):
        for name, (function, tensors, _) in cases().items():
            with self.subTest(name):
                short = [t.detach()[:1].clone().requires_grad_() if t.shape[0] == B and name != "slc" else t
                         for t in tensors] if "compress" not in name else tensors
                self.assertTrue(torch.autograd.gradcheck(function, tuple(short), fast_mode=True))

    def test_the_whole(self):
        for kind in ("mean", "conv", "mlp"):
            with self.subTest(kind):
                torch.manual_seed(3)
                tensors = whole_tensors(kind)
                out, blocks = whole(*tensors, kind=kind, blocks=True)
                expected = reference_whole(*tensors, blocks, kind=kind)
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
                weight, asked = torch.randn_like(out), leaves(*tensors)
                found = torch.autograd.grad((out * weight).sum(), asked)
                for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), asked)):
                    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)

    def test_only_what_is_asked_for(self):
        q, k, v = rows(B, T, H, D), rows(B, T, HK, D, grad=False), rows(B, T, HK, DV)
        nt.attend_win(q, k, v, **GEOMETRY)[0].sum().backward()
        self.assertIsNone(k.grad)
        expected = torch.autograd.grad(reference(q, k, v, sees_window(T, 24)).sum(), (q, v))
        torch.testing.assert_close((q.grad, v.grad), expected)

    def test_window_and_the_rest_merged_are_dense(self):
        q, k, v = rows(1, T, H, D), rows(1, T, HK, D), rows(1, T, HK, DV)
        win = nt.attend_win(q, k, v, window=T // 2)
        # Keys before the window, which the last half of the queries has: dense attention over these alone.
        first = T // 2
        parts = [nt.attend_dense(q[:, t:t + 1], k[:, :t - first + 1], v[:, :t - first + 1], first=t - first)
                 for t in range(first, T)]
        out, lse = nt.merge(win[0][:, first:], win[1][:, first:], torch.cat([p[0] for p in parts], 1),
                            torch.cat([p[1] for p in parts], 1))
        expected, its = nt.attend_dense(q, k, v)
        torch.testing.assert_close((out, lse), (expected[:, first:], its[:, first:]))
        weight = torch.randn_like(out)
        found = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v))
        plain = torch.autograd.grad((expected[:, first:] * weight).sum() + its[:, first:].sum(), (q, k, v))
        torch.testing.assert_close(found, plain)

    def test_lists_by_scores(self):
        q, k, w = rows(B, T, H, D, grad=False), rows(B, T, HK, D, grad=False), rows(B, T, H, grad=False)
        blocks = nt.score_blocks(q, k, w, act="relu", pool="mean", cmp_block=8, cmp_stride=4, slc_block=16, slc_count=2,
                                 slc_init=0, slc_local=1)
        group = H // HK
        score = torch.einsum("bthgd,bshd->bthgs", q.view(B, T, HK, group, D), k).relu()
        score = (score * w.view(B, T, HK, group, 1)).sum(3)
        for t in (15, 40, T - 1):
            means = torch.stack([score[:, t, :, 16 * j:min(16 * j + 16, t + 1)].mean(-1) for j in range(t // 16 + 1)], -1)
            means[..., t // 16] = math.inf  # the query's own block is forced
            best = means.topk(min(2, t // 16 + 1), -1).indices.sort(-1).values.int()
            self.assertTrue(torch.equal(blocks[:, t, :, :best.shape[-1]], best))

    def test_keys_that_stand_for_several_tokens(self):
        for stride, act, pool, weighs, forced, init, local in SCORED:
            q, k = rows(B, T, H, D, grad=False), rows(B, T // stride, HK, D, grad=False)
            w = rows(B, T, H, grad=False) if weighs else None
            how = dict(act=act, pool=pool, stride=stride, scores=True, slc_block=16, slc_count=2, forced=forced, slc_init=init,
                       slc_local=local)
            if forced == "inside" and init + local > 2 or forced == "tail" and local > 1:
                continue
            lists, scores = nt.score_blocks(q, k, w, **how)
            late = nt.score_blocks(q[:, 30:], k, None if w is None else w[:, 30:], first=30, longest=T, **how)
            for b in range(B):
                expected, its = scored_blocks(*(None if x is None else x[b].cpu().numpy() for x in (q, k, w)), T, stride, 16, 2,
                                              act, pool, forced, init, local)
                with self.subTest(stride=stride, forced=forced):
                    torch.testing.assert_close(scores[b].cpu(), torch.tensor(its))
                    self.assertTrue(torch.equal(lists[b].cpu(), torch.tensor(expected)))
            self.assertTrue(torch.equal(late[0], lists[:, 30:]))
            self.assertTrue(torch.equal(late[1], scores[:, 30:]))

    def test_scores_of_lists_have_gradients(self):
        for stride, act, pool, weighs, forced, init, local in SCORED:
            q, k = rows(B, T, H, D), rows(B, T // stride, HK, D)
            w = rows(B, T, H) if weighs else None
            how = dict(stride=stride, act=act, pool=pool, slc_block=16, slc_count=2)
            taken = dict(how, forced=forced, slc_init=init, slc_local=local)
            if forced == "inside" and init + local > 2 or forced == "tail" and local > 1:
                continue
            with torch.no_grad():
                lists, all_scores = nt.score_blocks(q, k, w, scores=True, **taken)
            scores = nt.score_lists(q, k, lists, w, **taken)
            value = torch.einsum("bthgd,bshd->bthgs", q.view(B, T, HK, H // HK, D), k)
            value = value.relu() if act == "relu" else value
            value = (value if w is None else value * w.view(B, T, HK, H // HK, 1)).sum(3)
            seen = (torch.arange(value.shape[-1], device=DEVICE) + 1) * stride - 1 <= torch.arange(T, device=DEVICE)[:, None]
            of_block = torch.arange(value.shape[-1], device=DEVICE) * stride // 16
            expected = []
            for entry in range(lists.shape[-1]):
                there = (of_block == lists[..., entry, None]) & seen[None, :, None]
                best = value.masked_fill(~there, -math.inf).amax(-1)
                mean = (value * there).sum(-1) / there.sum(-1).clamp(min=1)
                expected.append(torch.where(there.any(-1), best if pool == "max" else mean, -math.inf))
            expected = torch.stack(expected, -1)
            incoming = torch.randn_like(scores)
            inputs = [x for x in (q, k, w) if x is not None]
            with self.subTest(stride=stride, act=act, pool=pool, forced=forced):
                torch.testing.assert_close(scores, expected)
                found, plain = (torch.autograd.grad((x.masked_fill(expected == -math.inf, 0) * incoming).sum(), inputs)
                                for x in (scores, expected))
                torch.testing.assert_close(found, plain)
        with self.assertRaisesRegex(nsa.Refused, "blocks: shape .*must be"):
            nt.score_lists(q, k, lists[..., :-1], w, **taken)

    def test_packed_keys_that_stand_for_several_tokens(self):
        begins, lengths = int32(0, 21, 21, 52), (21, 0, 31)
        q, k = rows(1, 52, H, D, grad=False), rows(1, 52, HK, D, grad=False)
        means = nt.compress(k, begins=begins, longest=31, cmp_block=4, cmp_stride=4)
        how = dict(stride=4, slc_block=16, slc_count=2, forced="tail", slc_init=0, slc_local=1)
        lists, at = nt.score_blocks(q, means, begins=begins, longest=31, **how), 0
        for length in lengths:
            part = slice(at, at + length)
            alone = nt.score_blocks(q[:, part], nt.compress(k[:, part], cmp_block=4, cmp_stride=4), **how)
            self.assertTrue(torch.equal(lists[:, part], alone))
            at += length

    @CPU
    def test_a_refusal_says_which_sequence_and_what_of_it(self):
        q, k, v = (rows(1, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        for begins, longest, words in (
                ((0, 20, T), 0, "begins: .*sequence 0 has 20 tokens, must be at most the longest, which is 0"),
                ((0, 40, 20, T), T, "begins: .*40 and 20 of sequence 1, must ascend from 0 or more"),
                ((0, 60), 60, "rows: .*52, must be at least begins' last, which is 60")):
            with self.subTest(begins), self.assertRaisesRegex(nsa.Refused, words):
                nt.attend_win(q, k, v, begins=int32(*begins), longest=longest)
        two = torch.cat([k, k])
        for firsts, counts, words in (((60, 0), (1, 1), "first 60 of sequence 0, must be 0 .. 52"),
                                      ((0, 51), (1, 2), "count 2 of sequence 1, must be 0 .. 1")):
            with self.subTest(firsts), self.assertRaisesRegex(nsa.Refused, words):
                nt.attend_win(q[:, :sum(counts)], two, two, firsts=int32(*firsts), counts=int32(*counts))
        with self.assertRaisesRegex(nsa.Refused, "q: NSA_ERROR_DTYPE: int32, must be float32, bfloat16, float16 or float64$"):
            nt.attend_win(q.int(), k, v)
        for i in range(3):
            with self.subTest(i), self.assertRaisesRegex(nsa.Refused, "layout torch.sparse_coo, must be torch.strided"):
                nt.attend_win(*(x.to_sparse() if i == j else x for j, x in enumerate((q, k, v))), first=0)

    def test_a_stride_that_does_not_fit_is_named(self):
        q, k = rows(B, T, H, D, grad=False), rows(B, T, HK, D, grad=False)
        for stride, words in ((4, "k: .*52 rows, must be 13 for 52 tokens"), (3, "stride: .*3, must be a divisor of slc_block"),
                              (-1, "stride: .*-1, must be >= 0"), (2**32, "stride: 4294967296, must be of 32 bits")):
            with self.subTest(stride), self.assertRaisesRegex(nsa.Refused, words):
                nt.score_blocks(q, k, stride=stride, slc_block=16, slc_count=2)
        with self.assertRaisesRegex(nsa.Refused, 'slc_local: .*2, must be .*"tail" \\(0 or 1\\)'):
            nt.score_blocks(q, k, slc_block=16, forced="tail", slc_init=0, slc_local=2)

    def test_scores_and_the_ranking_of_them(self):
        q, k = rows(B, T, H, D, grad=False), rows(B, T, HK, D, grad=False)
        blocks, scores = nt.score_blocks(q, k, scores=True, **GEOMETRY)
        self.assertTrue(torch.equal(nt.rank_queries(scores, tokens=T, **GEOMETRY), blocks))
        best = torch.einsum("bthd,bshd->bths", q, k.repeat_interleave(H // HK, 2)).view(B, T, HK, H // HK, T).sum(3)
        torch.testing.assert_close(scores[:, T - 1, :, 1], best[:, T - 1, :, 16:32].amax(-1))
        self.assertTrue((scores[:, 15, :, 1:] == -math.inf).all())
        k_cmp = nt.compress(k, cmp_block=8, cmp_stride=4)
        lse = nt.attend_cmp(q, k_cmp, k_cmp, tokens=T, **GEOMETRY)[1]
        blocks, scores = nt.select_blocks(q, k_cmp, lse, tokens=T, scores=True, **GEOMETRY)
        self.assertTrue(torch.equal(nt.rank_queries(scores, tokens=T, **GEOMETRY), blocks))
        total = torch.full((B, HK), 4 * H / HK)  # each of 12 blocks, 8 tokens in steps of 4: twice the sum of p but at ends
        self.assertTrue((scores[:, T - 1].sum(-1).cpu() <= total).all())

    def test_every_key_is_seen(self):
        q, k, v = rows(B, T, H, D), rows(B, T, HK, D), rows(B, T, HK, DV)
        t, s = torch.arange(T)[:, None], torch.arange(T)
        near = ((t - s).abs() < 24)[None, :, None]
        found, plain = nt.attend_win(q, k, v, mask="none", **GEOMETRY)[0], reference(q, k, v, near)
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)
        weight = torch.randn_like(found)
        for a, b in zip(torch.autograd.grad((found * weight).sum(), (q, k, v)),
                        torch.autograd.grad((plain * weight).sum(), (q, k, v))):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    def test_lists_of_each_head(self):
        torch.manual_seed(6)
        q, k, v, gates, phi_k, phi_v = whole_tensors("mean")
        out, blocks = whole(q, k, v, gates, phi_k, phi_v, "mean", blocks=True, list_heads=H, slc_local=1)
        self.assertEqual(tuple(blocks.shape), (B, T, H, 3))
        self.assertFalse(torch.equal(blocks[:, :, 0], blocks[:, :, 1]))
        compressed = [reference_phi(x, "mean", {}) for x in (k[0], v[0])]
        expected = sum(torch.sigmoid(gates[..., i:i + 1]).repeat_interleave(H // HK, 2) * branch for i, branch in enumerate((
            reference(q, *compressed, sees_compressed(T, 12)), reference(q, k[1], v[1], sees_blocks(blocks, 1, T, 16)),
            reference(q, k[2], v[2], sees_window(T, 24)))))
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        weight, asked = torch.randn_like(out), leaves(q, k, v, gates, {}, {})
        for a, b in zip(torch.autograd.grad((out * weight).sum(), asked),
                        torch.autograd.grad((expected * weight).sum(), asked)):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        given = nt.attend_slc(q, k[1], v[1], blocks, list_heads=H, slc_local=1, **GEOMETRY)[0]
        torch.testing.assert_close(given, reference(q, k[1], v[1], sees_blocks(blocks, 1, T, 16)), rtol=1e-10, atol=1e-10)

    def test_what_is_saved(self):
        q, k, v = rows(B, T, H, D), rows(B, T, HK, D), rows(B, T, HK, DV)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            nt.attend_win(q, k, v, **GEOMETRY)
        self.assertEqual(sum(t.numel() for t in saved), sum(t.numel() for t in (q, k, v)) + B * T * H * (DV + 1))
        saved.clear()
        tensors = whole_tensors()
        n = 12
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            whole(*tensors)
        # Its inputs, three branches with their lse, the lists, the compressed rows: not what it returned. What
        # forward wrote are bytes of one tensor, in which each of eight begins at a multiple of 64.
        outputs = 8 * (3 * B * T * H * (DV + 1) + B * n * HK * (D + DV)) + 4 * B * T * HK * 3
        more = sum(t.numel() * t.element_size() for t in saved) - 8 * sum(t.numel() for t in leaves(*tensors)) - outputs
        self.assertTrue(0 <= more < 8 * 64, more)


class Layouts(unittest.TestCase):
    def test_any_strides_without_a_copy(self):
        q, k, v = (rows(B, h, T, D, dtype=torch.float32) for h in (H, HK, HK))
        a, _ = nt.attend_win(*(t.transpose(1, 2) for t in (q, k, v)), **GEOMETRY)
        b, _ = nt.attend_win(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), **GEOMETRY)
        self.assertTrue(torch.equal(a, b))
        fused = rows(B, T, H + 2 * HK, D, dtype=torch.float32)
        c, _ = nt.attend_win(fused[:, :, :H], fused[:, :, H:H + HK], fused[:, :, H + HK:], **GEOMETRY)
        d, _ = nt.attend_win(*(t.contiguous() for t in (fused[:, :, :H], fused[:, :, H:H + HK], fused[:, :, H + HK:])),
                             **GEOMETRY)
        self.assertTrue(torch.equal(c, d))
        c.sum().backward()  # a gradient whose strides are all 0
        self.assertTrue(fused.grad.abs().sum() > 0)

    def test_rows_of_a_longer_sequence(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        all_rows, _ = nt.attend_win(q, k, v, **GEOMETRY)
        last, _ = nt.attend_win(q[:, 40:], k, v, first=40, **GEOMETRY)
        self.assertTrue(torch.equal(all_rows[:, 40:], last))

    def test_packed_sequences_have_the_bits_of_each_alone(self):
        lengths = (31, 5, 40)
        begins = torch.tensor([0, 31, 36, 76], dtype=torch.int32, device=DEVICE)
        torch.manual_seed(2)
        q, gates = rows(1, 76, H, D, dtype=torch.float32), rows(1, 76, HK, 3, dtype=torch.float32)
        k, v = rows(1, 76, HK, D, dtype=torch.float32), rows(1, 76, HK, D, dtype=torch.float32)
        packed = nt.attention(q, k, v, k, v, k, v, gates, begins=begins, longest=40, **GEOMETRY)
        weight = torch.randn_like(packed)
        gradients = torch.autograd.grad((packed * weight).sum(), (q, k, v, gates))
        for a, n in zip((0, 31, 36), lengths):
            alone = [t.detach()[:, a:a + n].clone().requires_grad_() for t in (q, k, v, gates)]
            out = nt.attention(alone[0], alone[1], alone[2], alone[1], alone[2], alone[1], alone[2], alone[3], **GEOMETRY)
            self.assertTrue(torch.equal(packed[:, a:a + n], out))
            found = torch.autograd.grad((out * weight[:, a:a + n]).sum(), alone)
            for whole_gradient, its in zip(gradients, found):
                torch.testing.assert_close(whole_gradient[:, a:a + n], its)
        compressed = nt.compress(k, begins=begins, longest=40, cmp_block=8, cmp_stride=4)
        expected = torch.cat([nt.compress(k[:, a:a + n], cmp_block=8, cmp_stride=4) for a, n in zip((0, 31, 36), lengths)], 1)
        self.assertTrue(torch.equal(compressed[:, :expected.shape[1]], expected))
        self.assertEqual(compressed[:, expected.shape[1]:].abs().sum(), 0)

    def test_refusals(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        for words, call in (
                ("CMP_STRIDE", lambda: nt.attention(q, k, v, k, v, k, v, rows(B, T, H, 3, dtype=torch.float32),
                                                    cmp_block=8, cmp_stride=3)),
                ("windows: no option; there are .*window", lambda: nt.attend_win(q, k, v, windows=3)),
                ("window: NSA_ERROR_SIZE", lambda: nt.attend_win(q, k, v, window=0)),
                ("gate: 'relu' is none of", lambda: nt.attend_win(q, k, v, gate="relu")),
                ("v: shape", lambda: nt.attend_win(q, k, v[:1], **GEOMETRY)),
                ("k: 52 rows, must be 12", lambda: nt.attend_cmp(q, k, v, tokens=T, **GEOMETRY)),
                ("heads: NSA_ERROR_HEADS", lambda: nt.attend_win(q[:, :, :3], k, v)),
                ("begins: torch.int64, must be int32", lambda: nt.attend_win(
                    q[:1], k[:1], v[:1], begins=torch.tensor([0, 52]), longest=52))):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                call()

    @CPU
    def test_rows_that_are_not_there(self):
        q, k, v = (rows(1, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        begins, gates = torch.tensor([0, 99], dtype=torch.int32), rows(1, T, HK, 3, dtype=torch.float32)
        for call in (lambda: nt.attend_win(q, k, v, begins=begins, longest=99),
                     lambda: nt.attention(q, k, v, k, v, k, v, gates, begins=begins, longest=99),
                     lambda: nt.rope(q, begins=begins, longest=99), lambda: nt.compress(k, begins=begins, longest=99),
                     lambda: nt.rank_queries(gates[..., :2].expand(1, T, 2, 2), tokens=99, begins=begins)):
            with self.assertRaisesRegex(ValueError, "rows: NSA_ERROR_BEGINS"):
                call()

    def test_a_longest_that_nobody_asks_for(self):
        """What the rows of k say is not overruled in silence."""
        q, k, v = (rows(1, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        gates, x, each = rows(1, T, HK, 3, dtype=torch.float32, grad=False), rows(1, T, 32, dtype=torch.float32, grad=False), int32(T)
        module, pair = nt.NativeSparseAttention(32, 4, 2, **GEOMETRY).to(DEVICE), (torch.zeros(1, 12, HK, D, device=DEVICE),) * 2
        for call in (lambda n: nt.attend_win(q, k, v, longest=n), lambda n: nt.rope(q, longest=n), lambda n: module(x, longest=n),
                     lambda n: nt.compress(k, longest=n, **GEOMETRY), lambda n: nt.score_blocks(q, k, longest=n),
                     lambda n: nt.attention(q, k, v, k, v, k, v, gates, longest=n, **GEOMETRY),
                     lambda n: nt.compress(k, out=pair[0], firsts=int32(0), counts=each, longest=n, cmp_block=8, cmp_stride=4),
                     lambda n: nt.attend_win(q, k, v, firsts=int32(0), counts=each, longest=n)):
            call(T), call(T + 2)
            with self.assertRaisesRegex(nsa.Refused, "^longest: 50, and each sequence has 52 tokens: must be at least as many, or 0"):
                call(T - 2)
        for call in (lambda: nt.attend_win(q, k, v, firsts=int32(0), counts=each, first=3),
                     lambda: nt.rope(q, firsts=int32(0), counts=each, longest=T, first=3)):
            with self.assertRaisesRegex(nsa.Refused, "^first: 3, must be 0: firsts say"):
                call()
        if DEVICE == "cpu":
            with self.assertRaisesRegex(nsa.Refused, "^longest: a cache has each sequence for itself"):
                module(x, cache=module.cache(1, T), longest=T)

    @CPU
    def test_memory_that_has_the_negatives(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        lazy = torch.conj(torch.complex(torch.zeros_like(q), q)).imag  # -q, in the memory of q
        self.assertTrue(lazy.is_neg())
        found = nt.attend_win(lazy, k, v, **GEOMETRY)
        self.assertTrue(all(map(torch.equal, found, nt.attend_win(-q, k, v, **GEOMETRY))))
        gradients = []
        for dout in (lazy, -q):
            learning = k.clone().requires_grad_()
            nt.attend_win(q, learning, v, **GEOMETRY)[0].backward(dout)
            gradients.append(learning.grad)
        self.assertTrue(torch.equal(*gradients))
        with self.assertRaisesRegex(ValueError, "out: its memory would have the negatives"):
            nt.compress(k, out=torch.conj(torch.zeros(B, 12, HK, D, dtype=torch.complex64)).imag, firsts=int32(0, 0),
                        counts=int32(T, T), cmp_block=8, cmp_stride=4)

    def test_zeros_without_memory(self):
        """A ZeroTensor, as some of PyTorch's gradients are, is no tensor that was not given."""
        zeros = lambda *shape, **of: torch._efficientzerotensor(shape, device=DEVICE, **of)
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        learning = k.clone().requires_grad_()
        out, lse = nt.attend_win(q, learning, v, **GEOMETRY)

        def derived(dout):
            return torch.autograd.grad((out, lse), learning, (dout, torch.ones_like(lse)), retain_graph=True)[0]
        w1, scored = parameters("conv", D, dtype=torch.float32)["w1"].detach(), dict(slc_block=16, slc_count=3)
        for name, call, x in (
                ("q", lambda x: nt.attend_win(x, k, v, **GEOMETRY)[0], zeros(B, T, H, D)),
                ("v", lambda x: nt.attend_dense(q, k, x)[0], zeros(B, T, HK, D)),
                ("positions", lambda x: nt.rope(q, x), zeros(B, T, dtype=torch.int32)),
                ("weights", lambda x: nt.score_blocks(q, k, x, scores=True, **scored)[1], zeros(B, T, H)),
                ("b1", lambda x: nt.compress(k, w1=w1, b1=x, phi="conv", cmp_block=8, cmp_stride=4), zeros(HK, 1, D)),
                ("dout", derived, zeros(*out.shape))):
            with self.subTest(name):
                plain = torch.zeros(x.shape, dtype=x.dtype, device=DEVICE)
                for first, second in ((x, plain), (plain, x)):  # of one form
                    self.assertTrue(torch.equal(call(first), call(second)))
        with self.assertRaisesRegex(ValueError, "out: its memory .* or it has none"):
            nt.compress(k, out=zeros(B, 12, HK, D), firsts=int32(0, 0), counts=int32(T, T), cmp_block=8, cmp_stride=4)

    def test_recorded_or_not(self):
        tensors = whole_tensors(dtype=torch.float32)
        recorded = whole(*tensors, blocks=True)
        self.assertTrue(recorded[0].requires_grad)
        with torch.no_grad():
            self.assertTrue(all(map(torch.equal, recorded, whole(*tensors, blocks=True))))
            self.assertTrue(torch.equal(recorded[0], whole(*tensors)))

    @CPU
    def test_threads_that_call_at_once(self):
        samples = [whole_tensors(dtype=torch.float32, tokens=tokens) for tokens in (20, 40, T, 90)]
        alone, wrong = [whole(*sample).detach() for sample in samples], []

        def call(first):
            for i in range(first, first + 24):
                found = whole(*samples[i % 4])
                found.sum().backward()
                if not torch.allclose(found, alone[i % 4], rtol=1e-5, atol=1e-6):
                    wrong.append(i)
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_halves(self):
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(1)
            tensors = whole_tensors(dtype=torch.float32)
            exact, blocks = whole(*tensors, blocks=True)
            q, k, v, gates, phi_k, phi_v = tensors
            def half(t):
                return t.detach().to(dtype).requires_grad_()
            low = (half(q), [half(t) for t in k], [half(t) for t in v], half(gates),
                   {n: half(t) for n, t in phi_k.items()}, {n: half(t) for n, t in phi_v.items()})
            out = whole(*low)
            self.assertEqual(out.dtype, dtype)
            error = (out.double() - exact.double()).norm() / exact.double().norm()
            self.assertLess(error, 0.25)  # a list may differ; what is held to less is in the library's own tests
            out.sum().backward()
            self.assertEqual({t.grad.dtype for t in leaves(*low)}, {dtype})


@CPU
@unittest.skipIf(operators._calls is None, f"torch {torch.__version__} has no table of functions for exchange")
class OneStep(unittest.TestCase):
    """Calls of a form that a Plan has done: native/call.c must return the same bits, or leave the call to the Plan."""

    def setUp(self):
        torch.manual_seed(11)
        self.q, self.k, self.v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))

    def plan(self, call):
        one_step.forget()
        return call()

    def once(self, call):
        with unittest.mock.patch.object(native.Plan, "run", side_effect=AssertionError("the Plan did it")):
            return call()

    def with_other_threads(self, call):
        threads = torch.get_num_threads()
        torch.set_num_threads(threads % 2 + 1)
        try:
            return call()
        finally:
            torch.set_num_threads(threads)

    def window(self, q=None, **more):
        return nt.attend_win(self.q if q is None else q, self.k, self.v, **{**GEOMETRY, **more})

    def test_the_same_bits(self):
        for name, (function, tensors, _) in cases().items():
            for dtype in (torch.float32, torch.float64):
                given = [t.detach().to(dtype).requires_grad_() for t in tensors]
                with self.subTest(name, dtype=dtype):
                    expected = self.plan(lambda: function(*given))
                    weight = torch.randn_like(expected)
                    gradients = torch.autograd.grad(expected, given, weight)
                    found = self.once(lambda: function(*given))
                    self.assertTrue(torch.equal(found, expected))
                    self.assertTrue(all(map(torch.equal, self.once(lambda: torch.autograd.grad(found, given, weight)),
                                            gradients)))
                    with torch.no_grad():
                        self.assertTrue(torch.equal(function(*given), expected))

    def test_the_same_bits_of_the_whole(self):
        for kind in ("mean", "conv", "mlp"):
            tensors = whole_tensors(kind, torch.float32)
            asked = leaves(*tensors)
            out, blocks = self.plan(lambda: whole(*tensors, kind=kind, blocks=True))
            gradients = torch.autograd.grad(out.sin().sum(), asked)
            again, lists = self.once(lambda: whole(*tensors, kind=kind, blocks=True))
            self.assertTrue(torch.equal(again, out) and torch.equal(lists, blocks) and again.requires_grad)
            self.assertFalse(lists.requires_grad)
            self.assertTrue(all(map(torch.equal, torch.autograd.grad(again.sin().sum(), asked), gradients)))
            some = torch.autograd.grad(whole(*tensors, kind=kind).sin().sum(), asked[:2])
            self.assertTrue(all(map(torch.equal, some, gradients)))
            with torch.no_grad():
                for _ in range(2):
                    self.assertTrue(torch.equal(whole(*tensors, kind=kind), out))

    def test_more_forms_than_are_kept(self):
        lengths = [t % 40 + 9 for t in range(0, 400, 13)]
        alone = {t: self.plan(lambda: nt.attend_dense(self.q[:, :t], self.k[:, :t], self.v[:, :t])) for t in lengths}
        for t in lengths * 2:
            for _ in range(2):
                found = nt.attend_dense(self.q[:, :t], self.k[:, :t], self.v[:, :t])
                self.assertTrue(all(map(torch.equal, found, alone[t])))

    def test_another_form_is_another_call(self):
        def check(call):
            expected = self.plan(call)
            self.plan(self.window)
            with self.assertRaisesRegex(AssertionError, "the Plan did it"):
                self.once(call)
            for _ in range(2):
                self.assertTrue(all(map(torch.equal, call(), expected)))
        self.plan(self.window)
        check(lambda: self.window(self.q.transpose(1, 2).contiguous().transpose(1, 2)))
        check(lambda: self.window(torch.cat([self.q, self.q], -1)[..., :D]))
        check(lambda: self.window(torch.stack([self.q, self.q], -1)[..., 0]))
        check(lambda: self.window(window=7))
        check(lambda: self.window(scale=0.25))
        check(lambda: self.window(self.q.bfloat16()))
        check(lambda: self.with_other_threads(self.window))
        with self.assertRaisesRegex(ValueError, "shape"):
            self.window(self.q[..., :8])

    def test_what_it_leaves_to_others(self):
        expected = self.plan(self.window)[0]
        lazy = torch._neg_view(-self.q)
        self.assertEqual((lazy.is_neg(), lazy.stride()), (True, self.q.stride()))
        self.assertTrue(torch.equal(self.window(lazy)[0], expected))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertEqual(self.window()[0].dtype, torch.bfloat16)
        self.assertEqual(nt.rope(nt.rope(self.q).to("meta")).device.type, "meta")
        each = torch.func.vmap(lambda x: self.window(x)[0])(torch.stack([self.q, self.q]))
        self.assertTrue(torch.equal(each[1], expected))
        with torch.profiler.profile() as profile:
            self.window()
        self.assertIn("nsa::attend_win", [event.key for event in profile.key_averages()])
        seen = []

        class Other(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return super().__torch_function__(function, types, args, kwargs or {})
        self.assertTrue(torch.equal(self.window(self.q.as_subclass(Other))[0], expected))
        self.assertIn("nsa.attend_win.default", seen)
        self.assertTrue(torch.equal(self.once(lambda: self.window(torch.nn.Parameter(self.q, False)))[0], expected))
        with self.assertRaisesRegex(NotImplementedError, "forward mode"), torch.autograd.forward_ad.dual_level():
            self.window(torch.autograd.forward_ad.make_dual(self.q, self.q))
        with torch.inference_mode():
            self.assertTrue(self.once(self.window)[0].is_inference())

    def test_a_refusal(self):
        blocks = lists(torch.float32)
        call = lambda b: nt.attend_slc(self.q, self.k, self.v, b, **GEOMETRY)[0]  # noqa: E731
        expected = self.plan(lambda: call(blocks))
        wrong = blocks.clone()
        wrong[1, 7, 0, 0] = 99
        for _ in range(2):
            with self.assertRaisesRegex(nsa.Refused, "blocks"):
                call(wrong)
            self.assertTrue(torch.equal(self.once(lambda: call(blocks)), expected))

    def test_it_holds_nothing(self):
        learning = [t.clone().requires_grad_() for t in (self.q, self.k, self.v)]
        counted = [self.q, self.k, self.v, *learning, one_step.RECORDED, torch.Tensor, memory.keep, native._plans]

        def calls(count):
            for _ in range(count):
                self.window()
                nt.attend_win(*learning, **GEOMETRY)[0].sum().backward()
            gc.collect()
            return [sys.getrefcount(x) for x in (*counted, memory._small[-1])], len(gc.get_objects())
        (before, objects), (after, more) = calls(3), calls(50)
        self.assertEqual(before, after)
        self.assertLess(more - objects, 20)

    def test_a_torch_without_the_table(self):
        with unittest.mock.patch.object(torch.Tensor, "__dlpack_c_exchange_api__", None):
            self.assertIsNone(one_step.load(()))
        program = ("import sys, torch; torch.Tensor.__dlpack_c_exchange_api__ = None\n"
                   "import nsa.torch as nt; from nsa.torch import _operators; assert _operators._calls is None\n"
                   "q, k, v, options = torch.load(sys.argv[1])\n"
                   "torch.save([nt.attend_win(q, k, v, **options) for _ in range(2)], sys.argv[1])")
        with tempfile.NamedTemporaryFile() as file:
            torch.save((self.q, self.k, self.v, GEOMETRY), file.name)
            subprocess.run([sys.executable, "-c", program, file.name], check=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            for found in torch.load(file.name):
                self.assertTrue(all(map(torch.equal, found, self.window())))


@CPU
class Memory(unittest.TestCase):
    """What backward reads, and large scratch, lie in a pool's memory. Here all sizes are large."""

    def setUp(self):
        torch.manual_seed(8)
        self.samples = [whole_tensors("mean", torch.float32) for _ in range(5)]
        self.alone = [self.gradients(i) for i in range(5)]
        for module, name, value in ((memory, "LARGE", 1), (native, "_plans", {})):
            patch = unittest.mock.patch.object(module, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        one_step.forget()
        gc.collect()
        nt.release_memory()
        self.lent = memory.POOL.bytes()[0]

    def loss(self, i):
        return whole(*self.samples[i], kind="mean").square().sum()

    def gradients(self, i, loss=None, **more):
        return torch.autograd.grad(self.loss(i) if loss is None else loss, leaves(*self.samples[i]), **more)

    def assert_all_back(self):
        self.assertEqual(memory.POOL.bytes()[0], self.lent)

    def test_graphs_at_once(self):
        losses = [self.loss(i) for i in range(5)]
        dropped = [self.loss(i) for i in range(5)]
        for i in (3, 0, 4):
            torch.testing.assert_close(self.gradients(i, losses[i], retain_graph=True), self.alone[i])
            torch.testing.assert_close(self.gradients(i, losses[i]), self.alone[i])
        del dropped
        more = self.loss(0)
        for i in (1, 2):
            torch.testing.assert_close(self.gradients(i, losses[i]), self.alone[i])
        torch.testing.assert_close(self.gradients(0, more), self.alone[0])
        self.assert_all_back()

    def test_memory_does_not_grow(self):
        held, mapped = [], []
        for i in range(12):
            losses = [self.loss(i % 5) for i in range(i, i + 3)]
            for j, loss in enumerate(losses):
                self.gradients((i + j) % 5, loss)
            del losses, loss
            self.assert_all_back()
            held.append(sum(memory.POOL.bytes()) - self.lent)
            if os.path.exists("/proc/self/statm"):
                with open("/proc/self/statm", encoding="ascii") as statm:
                    mapped.append(int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE"))
        self.assertEqual(set(held[1:]), {max(held[1:])})  # the first call of a form asks for workspace twice
        self.assertGreater(held[-1], 0)
        self.assertLess(mapped and mapped[-1] - mapped[1], held[-1])
        nt.release_memory()
        self.assertEqual(memory.POOL.bytes(), (self.lent, 0))

    def test_what_a_user_holds_stays(self):
        with torch.no_grad():
            q, k, v, gates, _, _ = self.samples[0]
            call = lambda: operators.attention(q, k[0], v[0], k[1], v[1], k[2], v[2], gates, *[None] * 11, 0, 0, "mean",
                                               "mean", options(**GEOMETRY))[2]
            expected = call().clone()
            self.assert_all_back()
            held = [call(), call()[64:], call().numpy(), memoryview(call().numpy())[64:]]
            file = io.BytesIO()
            torch.save(call(), file)
        for i in range(5):
            self.gradients(i)
        where = torch.from_numpy(held[2]), torch.frombuffer(held[3], dtype=torch.uint8)
        for found in (held[0], where[0], torch.load(io.BytesIO(file.getvalue()))):
            self.assertTrue(torch.equal(found, expected))
        for found in (held[1], where[1]):
            self.assertTrue(torch.equal(found, expected[64:]))
        del held, where, found
        self.assert_all_back()

    def test_gradients(self):
        q, k, v, gates, _, _ = self.samples[0]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            def step():
                x, g, *rows_of = (t.detach().to(dtype).requires_grad_() for t in (q, gates, *k, *v))
                out = whole(x, rows_of[:3], rows_of[3:], g, {}, {}, "mean")
                return torch.autograd.grad(out.square().sum(), (x, g))
            with self.subTest(dtype):
                first, (lent, _) = step(), memory.POOL.bytes()
                self.assertGreater(lent, self.lent)
                self.assertEqual([(t._base, t.is_contiguous()) for t in first], [(None, True)] * 2)
                kept = [t.clone() for t in first]
                self.assertTrue(all(map(torch.equal, step(), kept)))
                self.assertTrue(all(map(torch.equal, first, kept)))
                self.assertEqual(memory.POOL.bytes()[0], lent)
                del first
                self.assertTrue(all(map(torch.equal, step(), kept)))
                self.assert_all_back()
        x = torch.randn(B, T, H, D, requires_grad=True)
        for _ in range(2):
            nt.rope(x).sum().backward()  # into the sum of both
        self.assertTrue(torch.equal(x.grad, 2 * torch.autograd.grad(nt.rope(x).sum(), x)[0]))
        x.grad.share_memory_()
        self.assert_all_back()

    def test_a_refusal_gives_it_back(self):
        q, k, v = (rows(1, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        for _ in range(3):
            with self.assertRaisesRegex(ValueError, "rows: NSA_ERROR_BEGINS"):
                nt.attention(q, k, v, k, v, k, v, rows(1, T, HK, 3, dtype=torch.float32), begins=int32(0, 99), longest=99)
        self.assert_all_back()
        self.assertLess(memory.POOL.bytes()[1], 16 << 20)

    def test_checkpointing(self):
        from torch.utils.checkpoint import checkpoint
        sample = self.samples[1]
        loss = sum(checkpoint(lambda *x: whole(x[0], x[1:4], x[4:7], x[7], {}, {}, "mean"), *leaves(*sample),
                              use_reentrant=False).square().sum() for _ in range(3))
        for found, its in zip(self.gradients(1, loss), self.alone[1]):
            torch.testing.assert_close(found, 3 * its)
        del loss, found
        self.assert_all_back()

    def test_threads(self):
        wrong = []

        def work(first):
            for i in range(first, first + 20):
                losses = [self.loss((i + j) % 5) for j in range(2)]
                for j, loss in enumerate(losses):
                    if not all(map(torch.allclose, self.gradients((i + j) % 5, loss), self.alone[(i + j) % 5],
                                   itertools.repeat(1e-4), itertools.repeat(1e-5))):
                        wrong.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        self.assert_all_back()

    def test_a_child(self):
        """Forked while another thread was in the pool. It has one thread, as OpenMP's runtime has none in a child."""
        entered, leave = threading.Event(), threading.Event()

        def inside():
            with memory.POOL._lock:
                memory.POOL._inside = True
                entered.set()
                leave.wait()
                memory.POOL._inside = False
        thread, loss = threading.Thread(target=inside), self.loss(2)
        thread.start()
        entered.wait()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(300)
                torch.set_num_threads(1)
                del loss  # its block is the parent's still
                for _ in range(2):
                    torch.testing.assert_close(self.gradients(3), self.alone[3])
                os._exit(0 if memory.POOL.bytes()[0] == self.lent else 3)
            finally:
                os._exit(4)
        leave.set()
        thread.join()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        torch.testing.assert_close(self.gradients(2, loss), self.alone[2])

    @NEW
    def test_another_default_device(self):
        with torch.device("meta"):
            torch.testing.assert_close(self.gradients(1), self.alone[1])
            pool = memory.Pool()
            pool._inside = True
            self.assertTrue(pool.tensor((1,)).is_cpu)

    @NEW
    def test_compiled(self):
        compiled = torch.compile(lambda *x: whole(x[0], x[1:4], x[4:7], x[7], {}, {}, "mean").square().sum(),
                                 fullgraph=True, backend="aot_eager")
        losses = [compiled(*leaves(*sample)) for sample in self.samples]
        for i in (4, 2, 0, 1, 3):
            torch.testing.assert_close(self.gradients(i, losses[i]), self.alone[i])
        del losses
        self.assert_all_back()

    def test_the_pool(self):
        pool, mib = memory.Pool(), 1 << 20
        def lend(*sizes):
            return [pool.tensor((size * mib,)) for size in sizes]
        a = lend(10, 20, 30)
        self.assertEqual([len(x) for x in a], [10 * mib, 20 * mib, 30 * mib])
        addresses = [x.data_ptr() for x in a]
        self.assertEqual(pool.bytes(), (60 * mib, 0))
        del a
        self.assertEqual(pool.bytes(), (0, 60 * mib))
        a = lend(29)[0]
        self.assertEqual((a.data_ptr(), len(a)), (addresses[2], 29 * mib))
        self.assertEqual(pool.bytes(), (30 * mib, 30 * mib))
        b = lend(8, 11)
        self.assertEqual([x.data_ptr() for x in b], addresses[:2])
        c = lend(8)[0]  # none is left
        self.assertEqual(pool.bytes(), (68 * mib, 0))
        del a, b
        a = lend(10, 14)  # the smallest that is large enough
        self.assertEqual(([x.data_ptr() for x in a], pool.bytes()), (addresses[:2], (38 * mib, 30 * mib)))
        held = a[0].view(-1)[3:]
        held[:] = 7
        b = lend(14)[0]  # of the largest more than half would be idle, and there are never more than 68
        self.assertEqual(pool.bytes(), (52 * mib, 0))
        del a
        self.assertEqual(pool.bytes(), (32 * mib, 20 * mib))
        a = lend(12)[0]
        self.assertEqual(a.data_ptr(), addresses[1])
        self.assertTrue((held == 7).all())
        del a, b, c, held
        for left in (52, 8, 8):  # none was lent, twice: 68 are forgotten
            d = lend(8)
            self.assertEqual(sum(pool.bytes()), left * mib)
            del d
        pool.release()
        self.assertEqual(pool.bytes(), (0, 0))
        pool._inside = True
        a = lend(8)  # a signal's handler, while its thread is in the pool
        self.assertEqual((len(a[0]), pool.bytes()), (8 * mib, (0, 0)))
        pool._inside = False
        with self.assertRaises((RuntimeError, MemoryError)):
            pool.tensor((1 << 60,))


class Misuse(unittest.TestCase):
    def test_tensors_of_another_form(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        gates, lists_of = rows(B, T, HK, 3, dtype=torch.float32), torch.zeros(B, T, HK, 3, dtype=torch.int64, device=DEVICE)
        at = dict(cmp_block=8, cmp_stride=4)
        for words, call in (
                ("q: shape .52, 4, 16., must have 4 axes", lambda: nt.attend_win(q[0], k, v)),
                ("v: shape .52, 2, 16., must have 4 axes", lambda: nt.attend_win(q, k, v[0])),
                ("gates: shape .* must have 4 axes", lambda: nt.attention(q, k, v, k, v, k, v, gates[..., 0], **GEOMETRY)),
                ("x: shape .* must have 4 axes", lambda: nt.rope(q[0])),
                ("lse_b: shape .* must have 3 axes", lambda: nt.merge(q, q[..., 0], q, q)),
                ("w1: shape .* must have 3 axes", lambda: nt.compress(k, w1=k[0, 0], phi="conv", **at)),
                ("k: torch.int64, must be float32", lambda: nt.attend_win(q, k.long(), v)),
                ("q: torch.complex64, must be float32", lambda: nt.attend_win(q.to(torch.complex64), k, v)),
                ("blocks: torch.int64, must be int32", lambda: nt.attend_slc(q, k, v, lists_of, **GEOMETRY)),
                ("blocks: None, must be the lists", lambda: nt.attend_slc(q, k, v, None, **GEOMETRY)),
                ("positions: torch.int64, must be int32", lambda: nt.rope(q, lists_of[:, :, 0, 0])),
                ("phi: 'max' is none of mean, conv, mlp", lambda: nt.compress(k, phi="max", **at)),
                ("phi: parameters W1, must be of pos, w1", lambda: nt.attention(
                    q, k, v, k, v, k, v, gates, phi_k=("conv", {"W1": k}), **GEOMETRY)),
                ("phi: 'mean' has no w1, must be of no parameters", lambda: nt.compress(k, w1=k[0, :1], **at)),
                ("phi: 'conv' has no pos, must be of w1, b1", lambda: nt.attention(
                    q, k, v, k, v, k, v, gates, phi_v=("conv", {"w1": k[0, :8], "pos": k[0, :8]}), **GEOMETRY)),
                ("rope: {'base': 5.0}, must be None", lambda: nt.NativeSparseAttention(
                    32, H, HK, rope_base=None, rope={"base": 5.0})),
                ("first: 4294967297, must be of 32 bits", lambda: nt.attend_win(q, k, v, first=2 ** 32 + 1)),
                ("window: 4294967301, must be of 32 bits", lambda: nt.attend_win(q, k, v, window=2 ** 32 + 5)),
                ("x: shape .52, 32., must be .B, T, dim.", lambda: nt.NativeSparseAttention(32, H, HK)(q.view(-1, 32)[:T])),
                ("foo: no option; there are .*scaling", lambda: nt.NativeSparseAttention(32, H, HK, rope={"foo": 1})),
                ("heads: NSA_ERROR_SIZE", lambda: nt.NativeSparseAttention(32, 0, 1)),
                ("dtype: torch.int16, must be torch.float32.* torch.int8", lambda: nt.NativeSparseAttention(32, H, HK).cache(
                    1, 8, dtype=torch.int16))):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                call()
        with self.assertRaisesRegex(ValueError, "q: None, must be a tensor"):
            nt.attend_win(None, k, v)

    def test_nested_tensors(self):
        """PyTorch's errors about them are internal ones, which name neither the tensor nor what is allowed."""
        module, plain = nt.NativeSparseAttention(32, H, HK, **GEOMETRY), torch.zeros(2, 5, H, 8)
        numbers = torch.zeros(1, dtype=torch.int32)
        for layout in (torch.strided, getattr(torch, "jagged", None)):
            if layout is None:
                continue
            kind = {} if layout is torch.strided else {"layout": layout}
            make = lambda *widths, **more: torch.nested.nested_tensor([torch.zeros(n, *widths) for n in (3, 5)], **kind, **more)
            x, ints = make(H, 8, requires_grad=True), make(H, 3, dtype=torch.int32)
            packed = lambda **arrays: nt.attend_dense(plain[:1], plain[:1], plain[:1], **arrays)
            for name, call in (
                    ("x", lambda: module(make(32))), ("x", lambda: module(make(32), cache=module.cache(2, 9))),
                    ("x", lambda: nt.rope(x)), ("x", lambda: nt.compress(x, cmp_block=8, cmp_stride=4)),
                    ("x", lambda: nt.compress(x, out=x, **GEOMETRY)), ("k", lambda: nt.attend_dense(plain, x, x)),
                    ("v", lambda: nt.attend_dense(plain, plain, x)), ("v", lambda: nt.attend_dense(plain, plain, x.detach())),
                    ("blocks", lambda: nt.attend_slc(plain, plain, plain, ints)), ("q", lambda: nt.select_blocks(x, x, x, tokens=5)),
                    ("q", lambda: nt.score_blocks(x, x)), ("blocks", lambda: nt.score_lists(plain, plain, ints)),
                    ("scores", lambda: nt.rank_queries(x, tokens=5)), ("out_a", lambda: nt.merge(x, x, x, x)),
                    ("logits", lambda: nt.gate(x, x, x, x)), ("q", lambda: nt.attention(*[x] * 8)),
                    ("k_rows", lambda: nt.attention(*[plain] * 8, compressed=(x, x))), ("begins", lambda: packed(begins=ints)),
                    ("firsts", lambda: packed(firsts=ints, counts=ints)),
                    ("pages", lambda: packed(firsts=numbers, counts=numbers, pages=ints)), ("q", lambda: nsa.Attend(q=x))):
                with self.subTest(name, layout=layout), self.assertRaisesRegex(nsa.Refused, "^[a-z_]*: .*(nested|jagged)") as caught:
                    call()
                self.assertEqual(caught.exception.where, name)

    def test_a_refusal_names_the_rule_that_is_broken(self):
        """And no value that the rule allows, nor one of another struct."""
        q, k, v = (rows(1, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        gates, lse = rows(1, T, HK, 3, dtype=torch.float32, grad=False), torch.zeros(1, T, H, device=DEVICE)
        whole = lambda **more: nt.attention(q, k, v, k, v, k, v, gates, **more)
        make = lambda **more: nt.NativeSparseAttention(32, H, HK, **more)
        for words, call in (
                ("k: list, must be a tensor", lambda: nt.attend_win(q, k.tolist(), v)),
                ("q: ndarray, must be a tensor", lambda: nt.attend_win(q.cpu().numpy(), k, v)),
                ("positions: list, must be a tensor", lambda: nt.rope(q, [[0] * T])),
                ("begins: list, must be a tensor", lambda: nt.attend_win(q, k, v, begins=[0, T], longest=T)),
                ("pages: list, must be an array", lambda: nt.attend_win(q, k, v, pages=[[0]])),
                ("k_w1: list, must be a tensor", lambda: whole(phi_k=("conv", {"w1": [1.0]}))),
                ("k_rows: None, must be a tensor", lambda: whole(compressed=(None, None))),
                (r"k: shape \(52, 2, 16\), must have 4 axes", lambda: nt.attend_win(q, k[0], v)),
                ("dim: NSA_ERROR_SIZE: 15, must be even, 2 .. 576", lambda: nt.rope(q[..., :15])),
                ("base: NSA_ERROR_SIZE: -1.0, must be above 1, or 0", lambda: nt.rope(q, base=-1.0)),
                ("factor: NSA_ERROR_SIZE: 0.5, must be >= 1", lambda: nt.rope(q, scaling="linear", factor=0.5)),
                ("fast: NSA_ERROR_SIZE: 1.0, must be above slow, .*: 1.0 and 2.0", lambda: nt.rope(
                    q, scaling="yarn", factor=2.0, trained_context=9, fast=1.0, slow=2.0)),
                ("phi: 'mlp' without w1, must have w1 and w2", lambda: whole(phi_k=("mlp", {}))),
                ("phi_v: None, must be a kind, or a kind and its parameters", lambda: whole(phi_v=None)),
                ("lse_b: NSA_ERROR_DTYPE: float32, must be float64, because other arrays", lambda: nt.merge(
                    q, lse.double(), q, lse)),
                ("factor: NSA_ERROR_SIZE: -1.0, must be >= 1", lambda: make(rope=dict(scaling="ntk", factor=-1.0))),
                ("dim: NSA_ERROR_SIZE: 15, must be even", lambda: make(head_dim=15)),
                ("mask: NSA_ERROR_OPTION: 1, must be causal in a cache", lambda: make(mask="none").cache(1, 8)),
                ("list_heads: NSA_ERROR_HEADS: 4, must be 0 or kv_heads in a cache, which is 2", lambda: make(list_heads=4).cache(1, 8)),
                ("max_rewind: NSA_ERROR_SIZE: -1, must be >= 0$", lambda: make().cache(1, 8, max_rewind=-1))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, "^" + words):
                call()
        cache = make(**GEOMETRY).cache(1, 8)
        x = torch.zeros(1, 1, 32)
        for words, call in (("cache: builtins.dict, must be what module.cache", lambda: make()(x, cache={})),
                            ("counts: 1, must be 1 numbers, 0 .. 1", lambda: make(**GEOMETRY)(x, cache=cache, counts=1)),
                            ("a Cache is memory of this process", lambda: pickle.dumps(cache)),
                            ("a Cache is memory of this process", lambda: pickle.dumps(cache.rows))):
            with self.subTest(words), self.assertRaisesRegex(TypeError, "^" + words):
                call()

    def test_sizes_are_no_options(self):
        """An option that is a size would have the library read and write what the tensors do not have."""
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        gates = rows(B, T, HK, 3, dtype=torch.float32)
        for name in ("batch", "tokens", "heads", "kv_heads", "dim", "dim_v", "first", "count", "gate_heads", "gate_stride", "rows",
                     "table_width", "page_tokens", "page_count"):
            calls = [lambda: operators.attend["dense"](q, k, v, None, None, None, None, None, T, 0, f"window=3,{name}=200000"),
                     lambda: nt.NativeSparseAttention(32, H, HK, **{name: 7})]
            if name not in ("tokens", "first"):
                calls += [lambda: nt.attend_dense(q, k, v, **{name: 200000}), lambda: nt.compress(k, **{name: 3}),
                          lambda: nt.attention(q, k, v, k, v, k, v, gates, **{name: 3})]
            for call in calls:
                with self.subTest(name), self.assertRaises((nsa.Refused, TypeError)) as caught:
                    call()
                self.assertRegex(str(caught.exception), f"{name}: no option; there are|multiple values|unexpected|takes")
        for name in ("heads", "dim"):
            with self.assertRaisesRegex(nsa.Refused, f"{name}: no option"):
                nt.rope(q, **{name: 200})
        with self.assertRaisesRegex(nsa.Refused, "forced: 'inside,window=9', must be one word"):
            nt.attend_win(q, k, v, forced="inside,window=9")

    def test_fewer_queries_than_tokens(self):
        """Nobody guesses whether they are the first tokens or the last."""
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        few, gates = q[:, 40:], rows(B, T, HK, 3, dtype=torch.float32)
        kc = nt.compress(k, **{name: GEOMETRY[name] for name in ("cmp_block", "cmp_stride")})
        for call in (lambda **at: nt.attend_win(few, k, v, **at, **GEOMETRY), lambda **at: nt.attend_dense(few, k, v, **at),
                     lambda **at: nt.attend_cmp(few, kc, kc, tokens=T, **at, **GEOMETRY),
                     lambda **at: nt.score_blocks(few, k, **at, **GEOMETRY),
                     lambda **at: nt.attention(few, k, v, k, v, k, v, gates[:, 40:], **at, **GEOMETRY)):
            with self.assertRaisesRegex(nsa.Refused, "first: not given, and there are 12 rows of queries for 52 tokens"):
                call()
            call(first=40), call(first=0)
        self.assertTrue(torch.equal(nt.attend_dense(few, k, v, first=40)[0], nt.attend_dense(q, k, v)[0][:, 40:]))

    def test_rows_of_no_sequence(self):
        """They are zeros, -inf and -1, in front, behind and the last `first` of each; and no gradient is NaN."""
        q, k, v = (rows(1, 37, h, D, dtype=torch.float32) for h in (H, HK, HK))
        gates = rows(1, 37, HK, 3, dtype=torch.float32)
        for begins, first in (([0, 20, 30], 0), ([5, 20, 37], 0), ([0, 20, 37], 4), ([0], 0)):
            at = dict(begins=torch.tensor(begins, dtype=torch.int32, device=DEVICE), longest=20)
            rest = torch.ones(37, dtype=torch.bool)
            for a, b in zip(begins, begins[1:]):
                rest[a:b - first] = False
            for _ in range(3):  # memory that others have left
                junk = [torch.full((1, 37, H, D), math.nan) for _ in range(20)]
                del junk
                out, lse = nt.attend_win(q, k, v, first=first, **at, **GEOMETRY)
                whole_out, lists = nt.attention(q, k, v, k, v, k, v, gates, first=first, blocks=True, **at, **GEOMETRY)
                turned = nt.rope(q, first=first, **at)
                scored, scores = nt.score_blocks(q, k, first=first, scores=True, **at, **GEOMETRY)
                for x, value in ((out, 0), (lse, -math.inf), (whole_out, 0), (lists, -1), (turned, 0), (scored, -1),
                                 (scores, -math.inf)):
                    self.assertTrue(bool((x[0, rest] == value).all()), begins)
                    self.assertFalse(bool((x[0, ~rest] == value).all()) and not rest.all())
                weight = torch.ones(H * D, 3, requires_grad=True)
                (whole_out.flatten(2) @ weight).sum().backward()
                self.assertTrue(bool(weight.grad.isfinite().all() and q.grad.isfinite().all()))

    def test_a_batch_of_none(self):
        q, k, v = (rows(0, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        w1 = rows(HK, 8, D, dtype=torch.float32)
        y = nt.attention(q, k, v, k, v, k, v, rows(0, T, HK, 3, dtype=torch.float32), phi_k=("conv", dict(w1=w1)), **GEOMETRY)
        y.sum().backward()
        self.assertEqual((tuple(y.shape), tuple(q.grad.shape), int(w1.grad.abs().sum())), ((0, T, H, D), (0, T, H, D), 0))
        self.assertEqual(nt.rope(q).shape[0] + nt.attend_win(q, k, v)[1].shape[0] + nt.merge(q, q[..., 0], q, q[..., 0])[0].shape[0]
                         + nt.compress(k).shape[0] + len(nt.gate(rows(0, T, H, 3, dtype=torch.float32), q, q, q)), 0)
        module = nt.NativeSparseAttention(32, H, HK, **GEOMETRY).to(DEVICE)
        module(torch.randn(0, T, 32, device=DEVICE)).sum().backward()
        self.assertEqual(float(module.W_Q.weight.grad.abs().sum()), 0)

    @CPU
    def test_what_is_written_to_has_another_version(self):
        k, v, at = rows(B, T, HK, D, dtype=torch.float32, grad=False), rows(B, T, HK, D, dtype=torch.float32, grad=False), dict(
            cmp_block=8, cmp_stride=4)
        pair = torch.zeros(B, 12, HK, D), torch.zeros(B, 12, HK, D)
        places = dict(firsts=int32(0, 0), counts=int32(T, T))
        before = [x._version for x in pair]
        nt.compress(k, out=pair[0], **places, **at)
        self.assertEqual([x._version - n for x, n in zip(pair, before)], [1, 0])
        q = rows(1, B * T, H, D, dtype=torch.float32, grad=False)
        nt.attention(q, k, v, k, v, k, v, rows(1, B * T, HK, 3, dtype=torch.float32, grad=False), compressed=pair, **places,
                     **GEOMETRY)
        self.assertEqual([x._version - n for x, n in zip(pair, before)], [2, 1])

    @CPU
    def test_what_nsa_writes_to_has_another_version(self):
        """Who has saved it for a backward is told so: else its gradients would be wrong in silence."""
        q, k = torch.randn(1, T, H, D), torch.randn(1, T, HK, D)
        d = nsa.desc(1, T, H, HK, D, **GEOMETRY)
        out, lse, dq = torch.zeros(1, T, H, D), torch.zeros(1, T, H), torch.zeros(1, T, H, D)
        x = nsa.Attend(q=q, k=k, v=k, out=out, lse=lse)
        y = (out * torch.ones(D, requires_grad=True)).sum()
        nsa.attend_win_forward(x, d)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.backward()
        nsa.attend_win_backward(nsa.Attend(q=dq, out=out), x, d)
        lists = torch.zeros(1, T, HK, 3, dtype=torch.int32)
        nsa.normalize_blocks(lists, d)
        self.assertEqual([z._version for z in (q, k, out, lse, dq, lists)], [0, 0, 1, 1, 1, 1])
        for of_a_graph in torch.zeros(1, T, H, D, requires_grad=True), out * torch.ones(D, requires_grad=True):
            with self.assertRaisesRegex(nsa.Refused, r"^out: a tensor that asks for a gradient, .* x.detach\(\)"):
                nsa.attend_win_forward(nsa.Attend(q=q, k=k, v=k, out=of_a_graph, lse=lse), d)
            with torch.no_grad():
                nsa.attend_win_forward(nsa.Attend(q=q, k=k, v=k, out=of_a_graph, lse=lse), d)
            nsa.attend_win_forward(nsa.Attend(q=of_a_graph, k=k, v=k, out=out, lse=lse), d)
        with torch.inference_mode():
            nsa.attend_win_forward(nsa.Attend(q=q, k=k, v=k, out=torch.empty(1, T, H, D), lse=lse), d)
        module = nt.NativeSparseAttention(32, H, HK, **GEOMETRY)
        with torch.no_grad():
            module(torch.randn(1, 5, 32), cache=module.cache(1, 8))

    def test_numbers_as_others_give_them(self):
        q, k, v = (rows(1, 50, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        begins = torch.tensor([0, 20, 50], dtype=torch.int32, device=DEVICE)
        found = nt.attend_win(q, k, v, begins=begins, longest=torch.tensor(30))
        self.assertTrue(torch.equal(found[0], nt.attend_win(q, k, v, begins=begins, longest=30)[0]))
        want = nt.attend_win(q, k, v, window=7, scale=0.25)[0]
        for window, scale in ((np.int64(7), 1 / np.sqrt(16)), (np.array(7), np.float32(0.25)), (7, fractions.Fraction(1, 4)),
                              (7, np.longdouble(1) / 4), (torch.tensor(7), torch.tensor(0.25)),
                              (7, torch.nn.Parameter(torch.tensor(0.25), False))):
            self.assertTrue(torch.equal(nt.attend_win(q, k, v, window=window, scale=scale)[0], want), repr(scale))

    def test_options_that_ask_for_a_gradient(self):
        """They are numbers, and have none: zeros would be wrong in silence."""
        q, k = (rows(1, 20, h, D, dtype=torch.float32, grad=False) for h in (H, HK))
        number, numbers = torch.tensor(0.25, requires_grad=True), torch.ones(D // 2, requires_grad=True)
        for name, call in (("scale", lambda: nt.attend_dense(q, k, k, scale=number)),
                           ("base", lambda: nt.rope(q, base=number + 9)),
                           ("scale", lambda: nt.NativeSparseAttention(32, H, HK, scale=torch.nn.Parameter(number.detach()))),
                           ("frequencies", lambda: nt.rope(q, frequencies=numbers)),
                           ("frequencies", lambda: nt.rope(q, frequencies=[number] * (D // 2)))):
            with self.subTest(name), self.assertRaisesRegex(nsa.Refused, f"^{name}: a tensor that asks for a gradient"):
                call()
        nt.rope(q, frequencies=numbers.detach())

    @CPU
    def test_memory_of_lazy_views_through_the_structs(self):
        """nsa over torch's tensors reads what they mean, not what lies there, and writes to no copy."""
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        lazy, outs = torch.conj(torch.complex(torch.zeros_like(q), q)).imag, []
        d = nsa.desc(B, T, H, HK, D, window=24)
        for x in (lazy, -q):
            outs.append((torch.empty_like(q), torch.empty(B, T, H)))
            nsa.attend_win_forward(nsa.Attend(q=x, k=k, v=v, out=outs[-1][0], lse=outs[-1][1]), d)
        self.assertTrue(torch.equal(outs[0][0], outs[1][0]))
        zeros = torch._efficientzerotensor(q.shape)
        for out in lazy, zeros:
            with self.assertRaisesRegex(nsa.Refused, "out: is read-only"):
                nsa.attend_win_forward(nsa.Attend(q=q, k=k, v=v, out=out, lse=outs[0][1]), d)
        nsa.attend_win_forward(nsa.Attend(q=zeros, k=k, v=v, out=outs[0][0], lse=outs[0][1]), d)
        self.assertTrue(torch.equal(outs[0][0], nt.attend_win(torch.zeros_like(q), k, v, window=24)[0]))

    def test_tensors_without_memory(self):
        q, k, v = (torch.empty(B, T, h, D, device="meta", requires_grad=True) for h in (H, HK, HK))
        if not operators.HAS_OPERATORS:
            self.skipTest("this torch has no fake kernels")
        out, lse = nt.attend_win(q, k, v, **GEOMETRY)
        out.sum().backward()
        self.assertEqual((out.shape, out.requires_grad, q.grad.shape, q.grad.is_meta), (q.shape, True, q.shape, True))
        module = nt.NativeSparseAttention(32, H, HK, **GEOMETRY).to("meta")
        module(torch.empty(B, T, 32, device="meta", requires_grad=True)).sum().backward()
        self.assertTrue(module.W_Q.weight.grad.is_meta)

    def test_memory_that_comes_later(self):
        """As FSDP fills a module that was made without memory: each that has parameters of its own says how they begin."""
        for kind in ("mean", "conv", "mlp"):
            torch.manual_seed(3)
            want = nt.NativeSparseAttention(32, H, HK, phi=kind, **GEOMETRY)
            module = copy.deepcopy(want).to("meta").to_empty(device="cpu")
            torch.manual_seed(3)
            for part in module.modules():
                if next(part.parameters(recurse=False), None) is not None:
                    part.reset_parameters()
            for name, x in module.named_parameters():
                like = want.get_parameter(name)
                self.assertLessEqual(abs(x.std() - like.std()).item(), 0.4 * like.std().item(), (kind, name))

    @NEW
    def test_gradients_in_a_batch(self):
        """torch.autograd.grad(is_grads_batched=True): one backward for each."""
        q, k, v = (rows(B, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        out = nt.attend_win(q, k, v, **GEOMETRY)[0]
        douts = rows(3, *out.shape, dtype=torch.float32, grad=False)
        found = torch.autograd.grad(out, (q, k), douts, is_grads_batched=True, retain_graph=True)
        recorded = torch.autograd.grad(out, (q, k), douts, is_grads_batched=True, create_graph=True)
        for i, dout in enumerate(douts):
            expected = torch.autograd.grad(out, (q, k), dout, retain_graph=True)
            for a, again, b in zip(found, recorded, expected):
                torch.testing.assert_close(a[i], b)
                torch.testing.assert_close(again[i], b)

    @NEW
    def test_exported_for_any_length(self):
        if not hasattr(torch, "export") or not hasattr(torch.export, "Dim"):
            self.skipTest("this torch exports nothing")
        module = nt.NativeSparseAttention(32, H, HK, **GEOMETRY).to(DEVICE).eval()
        # PyTorch 2.4 settles sym_max by a guard: there a graph is for lengths that have a compressed row.
        least = 2 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5) else GEOMETRY["cmp_block"]
        tokens = torch.export.Dim("tokens", min=least, max=4096)
        exported = torch.export.export(module, (torch.randn(B, T, 32),), dynamic_shapes=({1: tokens},))
        for length in (n for n in (3, 7, 8, 52, 100) if n >= least):
            x = torch.randn(B, length, 32)
            torch.testing.assert_close(exported.module()(x), module(x))

    def test_derivatives_that_are_not_there(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        for name, call in (("win", lambda x: nt.attend_win(x, k, v, **GEOMETRY)[0]), ("rope", nt.rope),
                           ("compress", lambda x: nt.compress(x, cmp_block=8, cmp_stride=4))):
            with self.subTest(name):
                first, = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
                with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
                    first.sum().backward()
                first, = torch.autograd.grad(call(q).sum(), q, create_graph=True)  # its gradient asks for nothing
                with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
                    (q.sum() + first.norm()).backward()
                def second():  # nobody goes backward through all of the graph
                    first, = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
                    return torch.autograd.grad(first.sum(), q, allow_unused=True)
                for asked in second, lambda: torch.autograd.functional.hvp(lambda x: call(x).square().sum(), q, q):
                    with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
                        asked()
                with torch.autograd.forward_ad.dual_level():
                    with self.assertRaisesRegex(NotImplementedError, "forward mode"):
                        call(torch.autograd.forward_ad.make_dual(q.detach(), q.detach()))
                    call(q)
                if operators.HAS_OPERATORS:
                    with self.assertRaisesRegex(NotImplementedError, "torch.func"):
                        torch.func.grad(lambda x: call(x).sum())(q.detach())
                    with self.assertRaisesRegex(NotImplementedError, "forward mode"):
                        torch.func.jvp(call, (q.detach(),), (q.detach(),))

    def test_a_module_is_copied_and_pickled(self):
        module, x = nt.NativeSparseAttention(32, H, HK, phi="conv", gate="softmax", **GEOMETRY), torch.randn(1, T, 32)
        y, copies = module(x), [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for other in copies:
            self.assertTrue(torch.equal(other(x), y))
            self.assertEqual(bytes(other.desc), bytes(module.desc))
            with torch.no_grad():
                torch.testing.assert_close(other(x, cache=other.cache(1, 64)), y)
                other.W_Q.weight.zero_()
        self.assertTrue(torch.equal(module(x), y))


class Autocast(unittest.TestCase):
    def test_as_scaled_dot_product_attention(self):
        q, k, v = (rows(B, T, h, D, dtype=torch.float32) for h in (H, HK, HK))
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out, lse = nt.attend_win(q, k, v, **GEOMETRY)
            y = whole(*whole_tensors(dtype=torch.float32))
            turned = nt.rope(q)
        self.assertEqual((out.dtype, lse.dtype, y.dtype, turned.dtype),
                         (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32))
        expected, _ = nt.attend_win(q.bfloat16(), k.bfloat16(), v.bfloat16(), **GEOMETRY)
        self.assertTrue(torch.equal(out, expected))
        out.sum().backward()
        self.assertEqual(q.grad.dtype, torch.float32)

    @F64
    def test_doubles_stay(self):
        q, k, v = (rows(B, T, h, D) for h in (H, HK, HK))
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            self.assertEqual(nt.attend_win(q, k, v, **GEOMETRY)[0].dtype, torch.float64)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Steps(unittest.TestCase):
    """Sequences at positions of their own, whose rows are straight or in pages, as a serving engine has them."""
    LENGTHS, STEPS, PAGE, PAGES = (41, T), (((0, 0), (30, 9)), ((30, 9), (10, 42)), ((40, 51), (1, 1))), 16, 9

    def setUp(self):
        torch.manual_seed(7)
        self.q, self.gates = rows(2, T, H, D, dtype=torch.float32, grad=False), rows(2, T, HK, 3, dtype=torch.float32)
        self.k, self.v = (rows(2, T, HK, w, dtype=torch.float32, grad=False) for w in (D, DV))
        self.table = torch.randperm(self.PAGES).int()[:8].view(2, 4).to(DEVICE)

    def paged(self, x, each):
        """The rows of a (B, rows, Hk, D) tensor in pages of `each`; nan where none lies."""
        found = x.new_full((self.PAGES, each, *x.shape[2:]), math.nan)
        for b in range(2):
            for s in range(x.shape[1]):
                found[self.table[b, s // each], s % each] = x[b, s]
        return found

    def ragged(self, x, firsts, counts):
        return torch.cat([x[b, f:f + n] for b, (f, n) in enumerate(zip(firsts, counts))])[None]

    def split(self, x, counts):
        return [part[None] for part in x[0].split(list(counts))]

    def forms(self):
        """(name, what k becomes, compressed rows of nothing, arguments)"""
        for paged in (False, True):
            place = (lambda x: self.paged(x, self.PAGE)) if paged else (lambda x: x)
            rows_there = (self.PAGES, self.PAGE // 4) if paged else (2, 12)
            yield "pages" if paged else "straight", place, lambda w: torch.zeros(*rows_there, HK, w, device=DEVICE), (
                dict(pages=self.table) if paged else {})

    def test_steps_have_the_bits_of_each_sequence_alone(self):
        phi_k, phi_v = (("mlp", parameters("mlp", w, dtype=torch.float32)) for w in (D, DV))
        for name, place, nothing, where in self.forms():
            k, v, compressed, found = place(self.k), place(self.v), (nothing(D), nothing(DV)), ([], [])
            for firsts, counts in self.STEPS:
                out, blocks = nt.attention(
                    self.ragged(self.q, firsts, counts), k, v, k, v, k, v, self.ragged(self.gates, firsts, counts),
                    phi_k=phi_k, phi_v=phi_v, compressed=compressed, firsts=int32(*firsts), counts=int32(*counts),
                    blocks=True, **where, **GEOMETRY)
                with self.assertRaisesRegex(NotImplementedError, "attention of a step has no gradients"):
                    (out * rows(D).sum()).sum().backward()  # part of which has some
                for b, parts in enumerate(zip(self.split(out, counts), self.split(blocks, counts))):
                    found[b].append(parts)
            for b, n in enumerate(self.LENGTHS):
                q, k, v, gates = (x[b:b + 1, :n] for x in (self.q, self.k, self.v, self.gates))
                alone = nt.attention(q, k, v, k, v, k, v, gates, phi_k=phi_k, phi_v=phi_v, blocks=True, **GEOMETRY)
                for i, expected in enumerate(alone):
                    with self.subTest(name, sequence=b, output=i):
                        self.assertTrue(torch.equal(torch.cat([parts[i] for parts in found[b]], 1), expected))

    def test_each_operator_has_the_bits_of_each_sequence_alone(self):
        firsts, counts = (30, 9), (11, 43)
        for name, place, nothing, where in self.forms():
            q, k, v, at = self.ragged(self.q, firsts, counts), place(self.k), place(self.v), dict(
                firsts=int32(*firsts), counts=int32(*counts))
            small = {n: GEOMETRY[n] for n in ("cmp_block", "cmp_stride")}
            k_cmp, v_cmp = (nt.compress(x, out=nothing(x.shape[3]), firsts=int32(0, 0), counts=int32(*self.LENGTHS),
                                        **where, **small) for x in (k, v))
            at.update(where)
            weights = self.ragged(self.gates[..., :1].expand(2, T, HK, H // HK).reshape(2, T, H), firsts, counts).detach()
            tail = dict(slc_block=16, slc_count=2, forced="tail", slc_init=0, slc_local=1)
            means = nt.compress(k, out=nothing(D) if where else torch.zeros(2, 13, HK, D, device=DEVICE), firsts=int32(0, 0),
                                counts=int32(*self.LENGTHS), cmp_block=4, cmp_stride=4, **where)
            cmp = nt.attend_cmp(q, k_cmp, v_cmp, tokens=T, **at, **GEOMETRY)
            blocks, scores = nt.select_blocks(q, k_cmp, cmp[1], tokens=T, scores=True, **at, **GEOMETRY)
            found = dict(cmp=cmp, select=(blocks, scores), slc=nt.attend_slc(q, k, v, blocks, **at, **GEOMETRY),
                         win=nt.attend_win(q, k, v, **at, **GEOMETRY), dense=nt.attend_dense(q, k, v, **at),
                         score=nt.score_blocks(q, k, weights, **at, **GEOMETRY),
                         means=nt.score_blocks(q, means, weights, stride=4, longest=T, **at, **tail),
                         rank=nt.rank_queries(scores, tokens=T, firsts=at["firsts"], counts=at["counts"], **GEOMETRY),
                         rope=nt.rope(q, firsts=at["firsts"], counts=at["counts"], longest=T))
            for b, (n, first) in enumerate(zip(self.LENGTHS, firsts)):
                k1, v1 = self.k[b:b + 1, :n], self.v[b:b + 1, :n]
                q1, w1 = (self.split(x, counts)[b] for x in (q, weights))
                c1, d1 = (nt.compress(x, **small) for x in (k1, v1))
                alone = dict(first=first, **GEOMETRY)
                cmp = nt.attend_cmp(q1, c1, d1, tokens=n, **alone)
                blocks, scores = nt.select_blocks(q1, c1, cmp[1], tokens=n, scores=True, **alone)
                expected = dict(cmp=cmp, select=(blocks, scores), slc=nt.attend_slc(q1, k1, v1, blocks, **alone),
                                win=nt.attend_win(q1, k1, v1, **alone), dense=nt.attend_dense(q1, k1, v1, first=first),
                                score=nt.score_blocks(q1, k1, w1, **alone),
                                means=nt.score_blocks(q1, nt.compress(k1, cmp_block=4, cmp_stride=4), w1, stride=4,
                                                      longest=n, first=first, **tail),
                                rank=nt.rank_queries(scores, tokens=n, **alone), rope=nt.rope(q1, first=first))
                for what, its in expected.items():
                    for i, (x, y) in enumerate(zip(*(r if isinstance(r, tuple) else (r,) for r in (found[what], its)))):
                        with self.subTest(name, sequence=b, what=what, output=i):
                            x = self.split(x, counts)[b]
                            self.assertTrue(torch.equal(x[..., :y.shape[-1]], y))

    @F64
    def test_gradients(self):
        firsts, counts = (30, 9), (11, 43)
        q = self.ragged(self.q, firsts, counts).double().requires_grad_()
        k, v = (x.double().requires_grad_() for x in (self.k, self.v))
        at = dict(firsts=int32(*firsts), counts=int32(*counts))
        for name, function in (("win", lambda q, k, v, **more: nt.attend_win(q, k, v, **more, **GEOMETRY)),
                               ("dense", nt.attend_dense)):
            with self.subTest(name):
                out, lse = function(q, k, v, **at)
                alone = [function(self.split(q, counts)[b], k[b:b + 1, :n], v[b:b + 1, :n], first=firsts[b])
                         for b, n in enumerate(self.LENGTHS)]
                weight, other = torch.randn_like(out), torch.randn_like(lse)
                found = torch.autograd.grad((out * weight).sum() + (lse * other).sum(), (q, k, v))
                plain = sum((x * w).sum() for one, parts in zip(alone, zip(*(self.split(w, counts) for w in (weight, other))))
                            for x, w in zip(one, parts))
                torch.testing.assert_close(found, torch.autograd.grad(plain, (q, k, v)), rtol=1e-10, atol=1e-10)
                self.assertTrue(torch.autograd.gradcheck(lambda *x: function(*x, **at), (q, k, v), fast_mode=True))
        turned, plain = nt.rope(q, longest=T, **at), [nt.rope(x, first=f) for x, f in zip(self.split(q, counts), firsts)]
        weight = torch.randn_like(turned)
        torch.testing.assert_close(torch.autograd.grad((turned * weight).sum(), q),
                                   torch.autograd.grad((torch.cat(plain, 1) * weight).sum(), q))

    @CPU
    def test_what_is_no_step(self):
        q, k, v = self.ragged(self.q, (0, 0), (8, 8)), self.k, self.v
        at, paged = dict(firsts=int32(0, 0), counts=int32(8, 8)), self.paged(self.k, self.PAGE)
        outside = self.table.clone()
        outside[1, 0] = self.PAGES
        learning = self.q.clone().requires_grad_()
        for words, call in (
                ("counts: 16 queries in all, there are 15 rows", lambda: nt.attend_win(q[:, :15], k, v, **at)),
                ("firsts, counts: one of them alone", lambda: nt.attend_win(q, k, v, counts=int32(8, 8))),
                ("begins: packed keys lie in no pages", lambda: nt.attend_win(q, k, v, begins=int32(0, 8, 16), **at)),
                ("firsts: torch.int64, must be int32", lambda: nt.attend_win(
                    q, k, v, firsts=torch.tensor([0, 0]), counts=int32(8, 8))),
                ("firsts: NSA_ERROR_RANGE", lambda: nt.attend_win(q, k, v, firsts=int32(-1, 0), counts=int32(8, 8))),
                ("pages: NSA_ERROR_PAGES", lambda: nt.attend_win(q, paged, paged, pages=outside, **at)),
                ("pages: of 1 sequences, must be of 2", lambda: nt.attend_win(q, paged, paged, pages=self.table[:1], **at)),
                ("pages: NSA_ERROR_OPTION", lambda: nt.attend_win(
                    learning, paged, paged, pages=self.table, longest=T)[0].sum().backward()),
                ("out: firsts, counts and pages need it", lambda: nt.compress(k, **at)),
                ("compressed: firsts, counts", lambda: nt.attention(q, k, v, k, v, k, v, self.gates, **at)),
                ("out: shape", lambda: nt.compress(k, out=torch.zeros(2, 11, HK, D), cmp_block=8, cmp_stride=4, **at)),
                ("out: the last axis must be packed", lambda: nt.compress(
                    k, out=torch.zeros(2, 12, HK, 2 * D)[..., ::2], cmp_block=8, cmp_stride=4, **at))):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                call()
        self.assertTrue(torch.equal(nt.attend_win(self.q, paged, paged, pages=self.table, longest=T)[0],
                                    nt.attend_win(self.q, k, k)[0]))

    @NEW
    def test_compiled(self):
        def step(q, k, v, gates, k_rows, v_rows, firsts, counts, pages):
            return nt.attention(q, k, v, k, v, k, v, gates, compressed=(k_rows, v_rows), firsts=firsts, counts=counts,
                                pages=pages, **GEOMETRY) * 2
        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            compressed = [torch.zeros(self.PAGES, self.PAGE // 4, HK, w, device=DEVICE) for w in (D, DV)]
            out = function(self.ragged(self.q, (0, 0), self.LENGTHS), self.paged(self.k, self.PAGE),
                           self.paged(self.v, self.PAGE), self.ragged(self.gates, (0, 0), self.LENGTHS).detach(),
                           *compressed, int32(0, 0), int32(*self.LENGTHS), self.table)
            results.append((out, *compressed))
        self.assertTrue(all(map(torch.equal, *results)))


@NEW
class Operators(unittest.TestCase):
    def samples(self, dtype):
        text, straight = options(**GEOMETRY), (None,) * 4
        q, k, v = (rows(B, T, h, D, dtype=dtype) for h in (H, HK, HK))
        blocks = lists(dtype)
        yield torch.ops.nsa.rope.default, (q, None, None, None, None, 0, 0, "")
        at = (None, int32(20, 0), int32(32, 20), None)
        ragged = rows(1, T, H, D, dtype=dtype)
        yield torch.ops.nsa.rope.default, (ragged, None, *at[:3], T, 0, "")
        yield torch.ops.nsa.attend_win.default, (ragged, k, v, None, *at, T, 0, text)
        for kind in ("mean", "mlp"):
            p = parameters(kind, D, dtype=dtype)
            given = [p.get(name) for name in PHI]
            yield torch.ops.nsa.compress.default, (k, *given, None, 0, kind, text)
        for branch in ("win", "dense"):
            yield getattr(torch.ops.nsa, "attend_" + branch).default, (q, k, v, None, *straight, T, 0, text)
        yield torch.ops.nsa.attend_slc.default, (q, k, v, blocks, *straight, T, 0, text)
        compressed = [rows(B, 12, HK, D, dtype=dtype) for _ in range(2)]
        yield torch.ops.nsa.attend_cmp.default, (q, *compressed, None, *straight, T, 0, text)
        lse = nt.attend_cmp(q, *compressed, tokens=T, **GEOMETRY)[1]
        for scores in (False, True):
            yield torch.ops.nsa.select_blocks.default, (q.detach(), compressed[0].detach(), lse.detach(), *straight, T,
                                                        0, scores, text)
            for stride, rows_of_k in (1, k), (4, k[:, :T // 4]):
                yield torch.ops.nsa.score_blocks.default, (q.detach(), rows_of_k.detach(), None, *straight, T, 0, "relu", "max",
                                                           stride, scores, text)
        for pool, weights in ("max", None), ("mean", rows(B, T, H, dtype=dtype)):
            yield torch.ops.nsa.score_lists.default, (q, k, weights, blocks, *straight, T, 0, "relu", pool, 1, text)
        scores = rows(B, T, HK, 4, dtype=dtype, grad=False)
        yield torch.ops.nsa.rank_queries.default, (scores, None, None, None, T, 0, text)
        yield torch.ops.nsa.merge.default, tuple(rows(*shape, dtype=dtype) for shape in
                                                 ((B, T, H, DV), (B, T, H, DV), (B, T, H), (B, T, H)))
        yield torch.ops.nsa.gate.default, (rows(B, T, HK, 3, dtype=dtype), *(rows(B, T, H, D, dtype=dtype) for _ in "abc"),
                                           "")
        q, k, v, gates, phi_k, phi_v = whole_tensors(dtype=dtype)
        given = [p[name] for p in (phi_k, phi_v) for name in PHI]
        yield torch.ops.nsa.attention.default, (q, k[0], v[0], k[1], v[1], k[2], v[2], gates, *given, None, 0, 0, "mlp",
                                                "mlp", text)
        pages, at = int32(*range(8)).view(2, 4), (int32(20, 0), int32(32, 20))
        q, gates = rows(1, T, H, D, dtype=dtype, grad=False), rows(1, T, HK, 3, dtype=dtype, grad=False)
        k, v, k_rows, v_rows = (rows(8, n, HK, w, dtype=dtype, grad=False) for n in (16, 4) for w in (D, DV))
        given = [None if p is None else p.detach() for p in given]
        yield torch.ops.nsa.compress_step.default, (k, k_rows, *given[:5], *at, pages, 64, "mlp", text)
        yield torch.ops.nsa.attention_step.default, (q, k, v, k, v, k, v, gates, *given, k_rows, v_rows, *at, pages, 64,
                                                     "mlp", "mlp", text)

    def test_what_looks_at_operators_sees_them(self):
        class Names(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))
        q, k, v = (rows(B, T, h, D, dtype=torch.float32, grad=False) for h in (H, HK, HK))
        seen = []
        with Names():
            nt.attend_win(q, k, v, **GEOMETRY)
        self.assertIn("nsa.attend_win.default", seen)
        with torch.profiler.profile() as profile:
            nt.attend_win(q, k, v, **GEOMETRY)
        self.assertIn("nsa::attend_win", [event.key for event in profile.key_averages()])
        shape, _ = nt.attend_win(*(x.to("meta") for x in (q, k, v)), **GEOMETRY)
        self.assertEqual((shape.device.type, shape.shape), ("meta", q.shape))
        each = torch.func.vmap(lambda x: nt.attend_win(x, k, v, **GEOMETRY)[0])(torch.stack([q, q]))
        self.assertTrue(torch.equal(each[1], nt.attend_win(q, k, v, **GEOMETRY)[0]))

    def test_opcheck(self):
        for operator, arguments in self.samples(torch.float32):
            with self.subTest(str(operator)):
                torch.library.opcheck(operator, arguments)

    def test_no_operator_was_left_out(self):
        checked = {str(operator).split(".")[1] for operator, _ in self.samples(torch.float32)}
        there = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nsa::")}
        self.assertEqual({name for name in there if not name.endswith("_backward")}, checked)

    def test_compiled_without_a_break(self):
        module = nt.NativeSparseAttention(32, H, HK, phi="conv", **GEOMETRY).to(DEVICE)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for tokens in (T, 60, 61):
            x, y = (torch.randn(B, tokens, 32, device=DEVICE, requires_grad=True) for _ in range(2))
            y.data = x.data
            a, b = module(x), compiled(y)
            torch.testing.assert_close(a, b)
            a.square().sum().backward()
            b.square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            self.assertEqual(compiled(x).dtype, torch.bfloat16)

    def test_a_length_that_a_tensor_has_compiled(self):
        """max_seqlen of what begins say, in the graph."""
        q, k = torch.randn(1, T, H, D, device=DEVICE), torch.randn(1, T, HK, D, device=DEVICE)
        call = lambda begins: nt.attend_win(q, k, k, begins=begins, longest=begins.diff().max().item(), **GEOMETRY)[0]
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            for begins in ([0, 20, T], [0, 9, T]):
                begins = torch.tensor(begins, dtype=torch.int32, device=DEVICE)
                self.assertTrue(torch.equal(compiled(begins), call(begins)))

    def test_backward_compiled(self):
        """Compiled autograd, of any length too: it makes unknowns of numbers, and keeps what a closure has."""
        q, k = (torch.randn(B, T, heads, D, device=DEVICE, requires_grad=True) for heads in (H, HK))
        enable = getattr(torch._dynamo.compiled_autograd, "_enable", None) or torch._dynamo.compiled_autograd.enable
        call = lambda: nt.attend_win(q, k, k, **GEOMETRY)[0].square().sum()
        want = torch.autograd.grad(call(), (q, k))
        for dynamic in (False, True):
            torch._dynamo.reset()
            q.grad = k.grad = None
            with enable(torch.compile(backend="aot_eager", dynamic=dynamic, fullgraph=True)):
                call().backward()
            for x, g in zip((q, k), want):
                torch.testing.assert_close(x.grad, g)

    @CPU
    def test_a_cache_is_left_alone(self):
        """torch.compile of a module that decodes: it makes no graphs of the package."""
        module, x, graphs = nt.NativeSparseAttention(32, H, HK, **GEOMETRY), torch.randn(B, T, 32), []
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph.forward)
        with torch.no_grad():
            caches = [module.cache(B, 80) for _ in range(2)]
            for some in x.split((40, 1, T - 41), 1):
                self.assertTrue(torch.equal(compiled(some, cache=caches[0]), module(some, cache=caches[1])))
        self.assertLess(len(graphs), 4)


    def test_every_function_compiled_without_a_break(self):
        """The functions that people call, with what they look at before the operators."""
        make = lambda *shape: torch.randn(*shape, device=DEVICE)
        ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        q, k, v, lse, w1 = make(2, T, H, D), make(2, T, HK, D), make(2, T, HK, D), make(2, T, H), make(HK, 8, D)
        some, lists, k_cmp = make(1, 2, H, D), ints(0, -1, -1).expand(2, T, HK, 3), make(2, 12, HK, D)
        step, packed = dict(firsts=ints(5, 7), counts=ints(1, 1)), dict(begins=ints(0, 9, T), longest=43)
        pool, pages, chosen = make(4, 32, HK, D), ints(0, 1, 2, 3).view(2, 2), dict(slc_block=16, slc_count=3)
        every = lambda q, k, v, **more: nt.attention(q, k, v, k, v, k, v, q[..., :3], **more, **GEOMETRY)
        for name, call in (
                ("rope", lambda: nt.rope(q, frequencies=[1.0 / n for n in range(1, 9)])),
                ("compress", lambda: nt.compress(k, w1=w1, phi="conv", cmp_block=8, cmp_stride=4)),
                ("cmp", lambda: nt.attend_cmp(q, k_cmp, k_cmp, tokens=T, **GEOMETRY)),
                ("slc", lambda: nt.attend_slc(q, k, v, lists, **chosen)), ("win", lambda: nt.attend_win(q, k, v, window=5)),
                ("dense", lambda: nt.attend_dense(q[:, 30:], k, v, first=30)),
                ("packed", lambda: nt.attend_dense(q[:1], k[:1], v[:1], **packed)),
                ("step", lambda: nt.attend_win(some, k, v, **step)),
                ("pages", lambda: nt.attend_win(some, pool, pool, pages=pages, **step)),
                ("select", lambda: nt.select_blocks(q, k_cmp, lse, tokens=T, scores=True, **GEOMETRY)),
                ("score", lambda: nt.score_blocks(q, k, scores=True, **chosen)),
                ("stride", lambda: nt.score_blocks(q, k[:, :13], stride=4, scores=True, **chosen)),
                ("score_lists", lambda: nt.score_lists(q, k, lists, stride=1, **chosen)),
                ("rank", lambda: nt.rank_queries(k[..., :4], tokens=T, **chosen)),
                ("merge", lambda: nt.merge(q, lse, q, lse)), ("gate", lambda: nt.gate(q[..., :3], q, q, q)),
                ("whole", lambda: every(q, k, v, phi_k=("conv", {"w1": w1}), blocks=True)),
                ("whole packed", lambda: every(q[:1], k[:1], v[:1], **packed)),
                ("whole step", lambda: every(some, k, v, compressed=(k_cmp.clone(), k_cmp.clone()), **step))):
            torch._dynamo.reset()
            with self.subTest(name):
                found, expected = torch.compile(call, fullgraph=True, backend="eager")(), call()
                for a, b in zip(*[x if isinstance(x, (tuple, list)) else (x,) for x in (found, expected)]):
                    self.assertTrue(torch.equal(a, b))


def alone_rewind(module):
    cache = module.cache(1, 80, max_rewind=25)
    with torch.no_grad():
        module(torch.randn(1, 35, 32), cache=cache)
    cache.rewind(0, 5)


class Module(unittest.TestCase):
    def make(self, **more):
        torch.manual_seed(4)
        return nt.NativeSparseAttention(32, H, HK, **{**GEOMETRY, **more}).to(DEVICE)

    def test_every_parameter_has_a_gradient(self):
        for phi in ("mean", "conv", "mlp"):
            module = self.make(phi=phi)
            module(torch.randn(B, T, 32, device=DEVICE)).square().sum().backward()
            for name, p in module.named_parameters():
                self.assertTrue(p.grad is not None and p.grad.abs().sum() > 0, f"{phi} {name}")

    def test_causal(self):
        module, x = self.make(), torch.randn(B, T, 32, device=DEVICE)
        changed = x.clone()
        changed[:, 30:] = 1
        self.assertTrue(torch.equal(module(x)[:, :30], module(changed)[:, :30]))

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_decoding_is_the_whole(self):
        for phi in ("mean", "conv", "mlp"):
            module, x = self.make(phi=phi), torch.randn(B, T, 32)
            cache = module.cache(B, 80, max_rewind=15)
            with torch.no_grad():
                parts = torch.cat([module(x[:, a:b], cache=cache) for a, b in ((0, 33), (33, 34), (34, T))], 1)
                torch.testing.assert_close(parts, module(x), rtol=1e-5, atol=1e-6)
            self.assertEqual(cache.lengths, [T, T])
            cache.rewind(0, T - 3)
            self.assertEqual(cache.lengths, [T - 3, T])
            with self.assertRaisesRegex(ValueError, "room for 28"):
                module(x, cache=cache)

    #: With which dtype of module, of tokens, of autocast.
    PRECISIONS = ((torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16),
                  (torch.float32, torch.float16))

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_training_prefill_and_decoding_have_the_same_bits(self):
        """In every precision, by default. Debian's torch multiplies rows of float32 by OpenBLAS, whose bits are those of a
        row's neighbours: there a product that has not is put in its place."""
        def of_each_row(x, weight, bias=None):
            y = (x.double()[..., None, :] * weight.double()).sum(-1)
            return (y if bias is None else y + bias.double()).to(x.dtype)

        patch = unittest.mock.patch("torch.nn.functional.linear", of_each_row)
        plain = torch.backends.mkl.is_available() and operators.HAS_OPERATORS
        for (dtype, autocast), kv_heads in itertools.product(self.PRECISIONS, (HK, 1)):
            with self.subTest(dtype=dtype, autocast=autocast, kv_heads=kv_heads), contextlib.ExitStack() as stack:
                if not plain:
                    if autocast is not None or dtype == torch.float16:
                        continue  # which 1.13 has not on the CPU
                    stack.enter_context(patch)
                if autocast is not None:
                    stack.enter_context(torch.autocast("cpu", dtype=autocast))
                torch.manual_seed(4)
                module = nt.NativeSparseAttention(64, H, kv_heads, **GEOMETRY).to(dtype)
                x = torch.randn(B, 200, 64).to(dtype)
                trained = module(x)
                cache = module.cache(B, 200, max_rewind=15)
                bounds = [0, 51, *range(52, 186), 193, 200]
                with torch.no_grad():
                    parts = torch.cat([module(x[:, a:b], cache=cache) for a, b in zip(bounds, bounds[1:])], 1)
                self.assertEqual(cache.dtype, autocast or dtype)
                self.assertEqual(int((parts != trained).any(-1).sum()), 0, "tokens differ")

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_a_caches_dtype(self):
        module = self.make().to(torch.bfloat16)
        x = torch.randn(B, 9, 32).to(torch.bfloat16)
        with torch.no_grad():
            given, taken = module.cache(B, 80, dtype=torch.float32), module.cache(B, 80)
            module(x, cache=given), module(x, cache=taken)
            self.assertEqual((given.dtype, taken.dtype), (torch.float32, torch.bfloat16))
            with self.assertRaisesRegex(nsa.Refused, "x: rows of torch.float32, and the cache holds torch.bfloat16"):
                module.float()(x.float(), cache=taken)

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_a_cache_of_quantised_layers(self):
        """Whose weight is a method, as those of torch.ao."""
        class Quantised(torch.nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer, self.weight = layer, lambda: layer.weight

            def forward(self, x):
                return self.layer(x)

        module, x = self.make(), torch.randn(B, 9, 32)
        with torch.no_grad():
            want = module(x)
            for name, layer in [*module.named_children()]:
                if isinstance(layer, torch.nn.Linear):
                    setattr(module, name, Quantised(layer))
            self.assertTrue(torch.equal(module(x, cache=module.cache(B, 80)), want))

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_caches_of_8_bits(self):
        """A quarter of the bytes, whatever the tokens' dtype; but for the rows' rounding what f32 gives."""
        module, x = self.make(), torch.randn(B, T, 32)
        bounds = [*zip((0, 33, 34), (33, 34, T))]
        with torch.no_grad():
            exact = module(x)
            for kind, off in ((torch.int8, 0.05), (getattr(torch, "float8_e4m3fn", torch.int8), 0.2)):
                cache, wide = (module.cache(B, 80, max_rewind=32, dtype=dtype) for dtype in (kind, torch.float32))
                found = torch.cat([module(x[:, a:b], cache=cache) for a, b in bounds], 1)
                error = float((found - exact).norm() / exact.norm())
                self.assertTrue(0 < error < off, (kind, error))
                self.assertLess(len(cache.rows._memory), 0.5 * len(wide.rows._memory))
                other = copy.copy(cache)
                self.assertEqual((other.dtype, other.lengths), (kind, [T, T]))
                self.assertTrue(torch.equal(module(x[:, :3], cache=other), module(x[:, :3], cache=cache)))
                half, low = copy.deepcopy(module).bfloat16(), x.bfloat16()
                self.assertEqual(half(low[:, :5], cache=half.cache(B, 80, dtype=kind)).dtype, torch.bfloat16)
                with self.assertRaisesRegex(nsa.Refused, "x: rows of torch.float64, and the cache holds"):
                    copy.deepcopy(module).double()(x.double(), cache=module.cache(B, 80, dtype=kind))

    @unittest.skipIf(DEVICE != "cpu", "the cache is the CPU's")
    def test_a_caches_sequences(self):
        """counts, fork, rewind by sequence, no tokens, copies, gradients, and what does not fit."""
        module, x = self.make(), torch.randn(B, 30, 32)
        alone = [self.make().cache(1, 80) for _ in range(B)]
        cache = module.cache(B, 80, max_rewind=31)
        with torch.no_grad():
            y = module(x, cache=cache, counts=[30, 11])
            self.assertEqual(cache.lengths, [30, 11])
            self.assertEqual(int(y[1, 11:].abs().sum()), 0)
            for b, n in enumerate((30, 11)):
                torch.testing.assert_close(module(x[b:b + 1, :n], cache=alone[b])[0], y[b, :n])
            z = module(x[:, :4], cache=cache, counts=torch.tensor([0, 4]))
            self.assertTrue(cache.lengths == [30, 15] and int(z[0].abs().sum()) == 0)
            torch.testing.assert_close(module(x[1:, :4], cache=alone[1]), z[1:])
            self.assertEqual(module(x[:, :0], cache=cache).shape, (B, 0, 32))
            other = copy.deepcopy(cache)
            cache.fork(1, cache, 0, 30)
            cache.rewind(0, 20), cache.rewind(1, 20)
            self.assertEqual((cache.lengths, other.lengths), ([20, 20], [30, 15]))
            both = module(x[:1, 20:].expand(B, 10, 32), cache=cache)
            torch.testing.assert_close(both[0], both[1])
            torch.testing.assert_close(both[0], y[0, 20:])
            far = module.cache(1, 80, max_rewind=31)
            far.fork(0, other, 1, 15)
            torch.testing.assert_close(module(x[:1, :3], cache=far)[0], module(x[:1, :3].expand(B, 3, 32), cache=other)[1])
        for words, call in (
                ("x: 3 sequences, and the cache holds 2", lambda: module(torch.randn(3, 10, 32), cache=cache)),
                ("x: 51 tokens, and the cache has room for 50", lambda: module(torch.randn(B, 51, 32), cache=cache)),
                (r"x: \[51, 0\] tokens, and the cache has room for \[50, 50\]", lambda: module(
                    torch.randn(B, 51, 32), cache=cache, counts=[51, 0])),
                (r"counts: \[1, 5\], must be 2 numbers, 0 .. 4", lambda: module(x[:, :4], cache=cache, counts=[1, 5])),
                ("cache: None, and counts", lambda: module(x, counts=[1, 1])),
                ("cache: of another module", lambda: self.make(window=9)(x, cache=cache)),
                ("begins: a cache has each", lambda: module(x[0], begins=int32(0, 30), longest=30, cache=cache)),
                (r"length: 5, must be 0 or 10 .. 35", lambda: alone_rewind(module))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                call()
        y = module(x[:, :2], cache=cache)
        with self.assertRaisesRegex(NotImplementedError, "attention from a cache has no gradients"):
            (y.sum() + x.sum()).backward()

    def test_packed(self):
        module, x = self.make(), torch.randn(50, 32, device=DEVICE)
        begins = torch.tensor([0, 20, 50], dtype=torch.int32, device=DEVICE)
        y = module(x, begins=begins, longest=30)
        for a, b in ((0, 20), (20, 50)):
            torch.testing.assert_close(y[a:b], module(x[None, a:b])[0], rtol=1e-5, atol=1e-6)

    def test_a_geometry_that_is_none(self):
        with self.assertRaisesRegex(ValueError, "CMP_STRIDE"):
            self.make(cmp_stride=3)
        with self.assertRaisesRegex(ValueError, "none of mean, conv, mlp"):
            self.make(phi="max")

    @F64
    def test_double(self):
        module = self.make().double()
        self.assertEqual(module(torch.randn(1, T, 32, dtype=torch.float64)).dtype, torch.float64)


if __name__ == "__main__":
    unittest.main()
