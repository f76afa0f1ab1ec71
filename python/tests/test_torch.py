"""nsa.torch: gradcheck in float64 for every operator, and with a torch that has operators opcheck, compile.

References are plain torch in float64, which share nothing with the library. The same file runs with the torch of
Debian 12, 1.13, whose autograd Functions take the operators' place; what only newer ones have is skipped there.
"""
import math
import os
import unittest

import torch

import nsa
import nsa.torch as nt
from nsa.torch import _operators as operators
from nsa._pack import PHI, options

DEVICE = os.environ.get("NSA_TEST_DEVICE", "cpu")
GEOMETRY = dict(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, window=24)
NEW = unittest.skipUnless(operators.HAS_OPERATORS, f"torch {torch.__version__} has no operators of this kind")
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
                ("begins: ends at row 99", lambda: nt.attend_win(
                    q[:1], k[:1], v[:1], begins=torch.tensor([0, 99], dtype=torch.int32), longest=99))):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                call()

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


@NEW
class Operators(unittest.TestCase):
    def samples(self, dtype):
        text = options(**GEOMETRY)
        q, k, v = (rows(B, T, h, D, dtype=dtype) for h in (H, HK, HK))
        blocks = lists(dtype)
        yield torch.ops.nsa.rope.default, (q, None, None, 0, 0, "")
        for kind in ("mean", "mlp"):
            p = parameters(kind, D, dtype=dtype)
            given = [p.get(name) for name in PHI]
            yield torch.ops.nsa.compress.default, (k, *given, None, 0, kind, text)
        for branch in ("win", "dense"):
            yield getattr(torch.ops.nsa, "attend_" + branch).default, (q, k, v, None, None, T, 0, text)
        yield torch.ops.nsa.attend_slc.default, (q, k, v, blocks, None, T, 0, text)
        compressed = [rows(B, 12, HK, D, dtype=dtype) for _ in range(2)]
        yield torch.ops.nsa.attend_cmp.default, (q, *compressed, None, None, T, 0, text)
        lse = nt.attend_cmp(q, *compressed, tokens=T, **GEOMETRY)[1]
        for scores in (False, True):
            yield torch.ops.nsa.select_blocks.default, (q.detach(), compressed[0].detach(), lse.detach(), None, T, 0,
                                                        scores, text)
            yield torch.ops.nsa.score_blocks.default, (q.detach(), k.detach(), None, None, T, 0, "relu", "max", scores,
                                                       text)
        yield torch.ops.nsa.rank_queries.default, (rows(B, T, HK, 4, dtype=dtype, grad=False), None, T, 0, text)
        yield torch.ops.nsa.merge.default, tuple(rows(*shape, dtype=dtype) for shape in
                                                 ((B, T, H, DV), (B, T, H, DV), (B, T, H), (B, T, H)))
        yield torch.ops.nsa.gate.default, (rows(B, T, HK, 3, dtype=dtype), *(rows(B, T, H, D, dtype=dtype) for _ in "abc"),
                                           "")
        q, k, v, gates, phi_k, phi_v = whole_tensors(dtype=dtype)
        given = [p[name] for p in (phi_k, phi_v) for name in PHI]
        yield torch.ops.nsa.attention.default, (q, k[0], v[0], k[1], v[1], k[2], v[2], gates, *given, None, 0, 0, "mlp",
                                                "mlp", text)

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
