"""nsa.jax against plain jax.numpy: values and gradients, under jit, grad and vmap.

References share nothing with the library.
"""
import os
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import nsa  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
if not (pathlib.Path(nsa.__file__).parent / "libnsa_xla.so").exists():
    subprocess.run([sys.executable, "-m", "nsa.build", "jax"], check=True,
                   env={**os.environ, "PYTHONPATH": str(pathlib.Path(nsa.__file__).parents[1])})
import nsa.jax as nj  # noqa: E402
from test_core import SCORED, run_pages, scored_blocks  # noqa: E402

GEOMETRY = dict(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=3, window=24)
B, T, H, HK, D, DV = 2, 52, 4, 2, 16, 8
RNG = np.random.default_rng(11)


def rows(*shape, dtype=jnp.float64):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def reference(q, k, v, sees):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    score = jnp.where(sees, jnp.einsum("bthd,bshd->bths", q, k) / jnp.sqrt(q.shape[3]), -jnp.inf)
    some = sees.any(-1, keepdims=True)
    p = jnp.where(some, jax.nn.softmax(jnp.where(some, score, 0), -1), 0)
    return jnp.einsum("bths,bshd->bthd", p, v)


def sees_window(tokens, width):
    t, s = jnp.arange(tokens)[:, None], jnp.arange(tokens)
    return ((s <= t) & (s > t - width))[None, :, None]


def sees_compressed(tokens, count):
    return (jnp.arange(count) * 4 + 7 <= jnp.arange(tokens)[:, None])[None, :, None]


def sees_blocks(blocks, group, tokens):
    s = jnp.arange(tokens)
    inside = ((s // 16) == blocks[..., None]).any(-2) & (s <= s[:, None, None])
    return jnp.repeat(inside, group, 2)


def parameters(kind, width):
    if kind == "conv":
        return dict(w1=rows(HK, 8, width), b1=rows(HK, 1, width))
    if kind == "mlp":
        return dict(pos=rows(HK, 8, width), w1=rows(HK, 5, 8 * width), b1=rows(HK, 1, 5), w2=rows(HK, width, 5),
                    b2=rows(HK, 1, width))
    return {}


def reference_phi(x, kind, p):
    n = (x.shape[1] - 8) // 4 + 1
    blocks = jnp.stack([x[:, 4 * i:4 * i + 8] for i in range(n)], 1).transpose(0, 1, 3, 2, 4)
    if kind == "mean":
        return blocks.mean(3)
    if kind == "conv":
        return (blocks * p["w1"]).sum(3) + p["b1"][:, 0]
    flat = (blocks + p["pos"]).reshape(*blocks.shape[:3], -1)
    hidden = jax.nn.silu(jnp.einsum("bnhi,hoi->bnho", flat, p["w1"]) + p["b1"][:, 0])
    return jnp.einsum("bnho,hdo->bnhd", hidden, p["w2"]) + p["b2"][:, 0]


def whole_inputs(kind):
    q, gates = rows(B, T, H, D), rows(B, T, HK, 3)
    k, v = ([rows(B, T, HK, w) for _ in range(3)] for w in (D, DV))
    return [q, k[0], v[0], k[1], v[1], k[2], v[2], gates], parameters(kind, D), parameters(kind, DV)


def whole(arrays, phi_k, phi_v, kind, **more):
    return nj.attention(*arrays, phi_k=(kind, phi_k), phi_v=(kind, phi_v), **GEOMETRY, **more)


def reference_whole(arrays, phi_k, phi_v, kind, blocks):
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = arrays
    k_cmp, v_cmp = reference_phi(k_cmp, kind, phi_k), reference_phi(v_cmp, kind, phi_v)
    branches = (reference(q, k_cmp, v_cmp, sees_compressed(T, k_cmp.shape[1])),
                reference(q, k_slc, v_slc, sees_blocks(blocks, H // HK, T)), reference(q, k_win, v_win, sees_window(T, 24)))
    g = jnp.repeat(jax.nn.sigmoid(gates), H // HK, 2)
    return sum(g[..., i:i + 1] * branch for i, branch in enumerate(branches))


def close(a, b, tolerance=1e-9):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def both(function, plain, *inputs):
    """Values and all gradients of a weighted sum, both under jit."""
    out = jax.jit(function)(*inputs)
    close(out, plain(*inputs))
    weight = rows(*out.shape)
    places = tuple(range(len(inputs)))
    found = jax.jit(jax.grad(lambda *x: (function(*x) * weight).sum(), places))(*inputs)
    close(found, jax.grad(lambda *x: (plain(*x) * weight).sum(), places)(*inputs))


class Pages(unittest.TestCase):
    def test_page(self):
        given = {name: jnp.asarray(RNG.standard_normal((1, 64, heads, 16)).astype(np.float32))
                 for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        for said in run_pages(self, "test_jax", **given):
            self.assertEqual([g.shape for g in said["gradients"]], [given[name].shape for name in "qkv"])


class Jax(unittest.TestCase):
    def setUp(self):
        self.q, self.k, self.v = rows(B, T, H, D), rows(B, T, HK, D), rows(B, T, HK, DV)

    def test_win_and_dense(self):
        both(lambda *x: nj.attend_win(*x, **GEOMETRY)[0], lambda *x: reference(*x, sees_window(T, 24)), self.q, self.k,
             self.v)
        both(lambda *x: nj.attend_dense(*x)[0], lambda *x: reference(*x, sees_window(T, T)), self.q, self.k, self.v)

    def test_cmp_select_slc(self):
        k, v = rows(B, 12, HK, D), rows(B, 12, HK, DV)
        both(lambda *x: nj.attend_cmp(*x, tokens=T, **GEOMETRY)[0], lambda *x: reference(*x, sees_compressed(T, 12)),
             self.q, k, v)
        _, lse = nj.attend_cmp(self.q, k, v, tokens=T, **GEOMETRY)
        blocks = jax.jit(lambda *x: nj.select_blocks(*x, tokens=T, **GEOMETRY))(self.q, k, lse)
        d = nsa.desc(B, T, H, HK, D, **GEOMETRY)
        self.assertIsNone(nsa.check_blocks(np.asarray(blocks), d))
        both(lambda *x: nj.attend_slc(*x, blocks, **GEOMETRY)[0], lambda *x: reference(*x, sees_blocks(blocks, H // HK, T)),
             self.q, self.k, self.v)

    def test_compress(self):
        for kind in ("mean", "conv", "mlp"):
            both(lambda x, p: nj.compress(x, p, phi=kind, cmp_block=8, cmp_stride=4),
                 lambda x, p: reference_phi(x, kind, p), self.k, parameters(kind, D))

    def test_gate_and_rope(self):
        def plain(logits, *x):
            g = jnp.repeat(jax.nn.sigmoid(logits), H // HK, 2)
            return sum(g[..., i:i + 1] * y for i, y in enumerate(x))
        both(nj.gate, plain, rows(B, T, HK, 3), *(rows(B, T, H, DV) for _ in range(3)))

        def turned(x):
            angle = jnp.arange(T)[:, None, None] * 10000.0 ** (-jnp.arange(D // 2) * 2 / D)
            a, b = x[..., :D // 2], x[..., D // 2:]
            return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
        both(lambda x: nj.rope(x, pairs="halves"), turned, self.q)

    def test_a_guard_of_transfers(self):
        """Numbers of options lie in the graph; they go to the device because nsa says so."""
        numbers = dict(frequencies=[0.5 ** i for i in range(D // 2)])
        want = nj.rope(self.q, **numbers)
        with jax.transfer_guard("disallow"):
            got = nj.rope(self.q, **numbers)
            _, back = jax.vjp(lambda x: nj.rope(x, **numbers), self.q)
            back(got)
        np.testing.assert_array_equal(got, want)

    def test_a_program_from_elsewhere(self):
        """What jax.export wrote finds the handler once nsa.jax is imported, though nothing of it was called. Here it is
        called without attributes, which it refuses."""
        code = ("import jax, numpy, nsa.jax\n"
                "print(jax.ffi.ffi_call('nsa', jax.ShapeDtypeStruct((1,), 'float32'))(numpy.zeros(1, 'float32')))")
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.assertIn("nsa: attributes are missing", run.stderr)

    def test_a_program_of_another_version(self):
        """It has the bytes of structs, which would be misread here."""
        try:
            from jax.export import DisabledSafetyCheck, export
        except ImportError as missing:
            self.skipTest(f"jax.export of {jax.__version__}: {missing}")

        def written():
            rope = export(jax.jit(lambda x: nj.rope(x)), disabled_checks=[DisabledSafetyCheck.custom_call("nsa")])
            return rope(self.q).call
        np.testing.assert_array_equal(written()(self.q), nj.rope(self.q))
        with mock.patch.object(nj, "_LAYOUT", nj._LAYOUT ^ 1):
            other = written()
        with self.assertRaisesRegex(Exception, "another version .* must be exported again"):
            jax.block_until_ready(other(self.q))

    def test_second_derivatives_are_refused(self):
        """With nsa's own words, wherever the first one is differentiated."""
        for f in (lambda x: nj.attend_win(x, self.k, self.v)[0], nj.rope, lambda x: nj.gate(x[..., :3], x, x, x),
                  lambda x: nj.merge(x, x[..., 0], x, x[..., 1])[0]):
            gradient = jax.grad(lambda x: (f(x) ** 2).sum())
            for second in jax.grad(lambda x: gradient(x).sum()), jax.jit(jax.jacrev(gradient)):
                with self.assertRaisesRegex(NotImplementedError, "nsa has first derivatives alone"):
                    second(self.q)

    def test_the_whole(self):
        for kind in ("mean", "conv", "mlp"):
            arrays, phi_k, phi_v = whole_inputs(kind)
            _, blocks = whole(arrays, phi_k, phi_v, kind, blocks=True)
            both(lambda a, p, r: whole(a, p, r, kind), lambda a, p, r: reference_whole(a, p, r, kind, blocks),
                 arrays, phi_k, phi_v)

    def test_vmap(self):
        arrays, phi_k, phi_v = whole_inputs("mlp")
        more = [jnp.stack([a, 2 * a, a[::-1]]) for a in arrays]

        def one(a, p):
            return whole(a, p, phi_v, "mlp")
        found = jax.jit(jax.vmap(one, (0, None)))(more, phi_k)
        for i in range(3):
            close(found[i], one([a[i] for a in more], phi_k))
        weight = rows(*found.shape)
        each = [jax.grad(lambda p: (one([a[i] for a in more], p) * weight[i]).sum())(phi_k) for i in range(3)]
        summed = jax.grad(lambda p: (jax.vmap(one, (0, None))(more, p) * weight).sum())(phi_k)
        close(summed, jax.tree.map(lambda *x: sum(x), *each))

    def test_packed_sequences(self):
        begins = jnp.array([0, 20, 52], jnp.int32)
        q, k, v = self.q[:1], self.k[:1], self.v[:1]
        out, _ = jax.jit(lambda *x: nj.attend_win(*x, begins=begins, longest=32, window=24))(q, k, v)
        for a, b in ((0, 20), (20, 52)):
            close(out[:, a:b], nj.attend_win(q[:, a:b], k[:, a:b], v[:, a:b], window=24)[0])

    def test_floats_and_halves(self):
        exact = nj.attend_win(self.q, self.k, self.v, **GEOMETRY)[0]
        for dtype, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)):
            out, lse = nj.attend_win(*(x.astype(dtype) for x in (self.q, self.k, self.v)), **GEOMETRY)
            self.assertEqual((out.dtype, lse.dtype), (dtype, jnp.float32))
            self.assertLess(float(jnp.linalg.norm(out.astype(jnp.float64) - exact) / jnp.linalg.norm(exact)), bound)

    def test_lse_and_merge(self):
        def lse(q, k, v):
            score = jnp.einsum("bthd,bshd->bths", q, jnp.repeat(k, H // HK, 2)) / jnp.sqrt(D)
            return jax.nn.logsumexp(jnp.where(sees_window(T, 24), score, -jnp.inf), -1) + 0 * v.sum()
        both(lambda *x: nj.attend_win(*x, **GEOMETRY)[1], lse, self.q, self.k, self.v)

        def merged(out_a, lse_a, out_b, lse_b):
            total = jnp.logaddexp(lse_a, lse_b)
            return jnp.exp(lse_a - total)[..., None] * out_a + jnp.exp(lse_b - total)[..., None] * out_b
        parts = rows(B, T, H, DV), rows(B, T, H), rows(B, T, H, DV), rows(B, T, H)
        both(lambda *x: nj.merge(*x)[0], merged, *parts)
        both(lambda *x: nj.merge(*x)[1], lambda a, la, b, lb: jnp.logaddexp(la, lb) + 0 * (a + b).sum(-1), *parts)

    def test_scores_and_the_ranking_of_them(self):
        blocks, scores = jax.jit(lambda *x: nj.score_blocks(*x, act="relu", pool="mean", scores=True, **GEOMETRY))(
            self.q, self.k)
        dots = jax.nn.relu(jnp.einsum("bthgd,bshd->bthgs", self.q.reshape(B, T, HK, H // HK, D), self.k)).sum(3)
        close(scores[:, T - 1, :, 1], dots[:, T - 1, :, 16:32].mean(-1))
        ranked = jax.jit(lambda x: nj.rank_queries(x, tokens=T, **GEOMETRY))(scores)
        np.testing.assert_array_equal(ranked, blocks)
        weights = rows(B, T, H)
        _, weighed = nj.score_blocks(self.q, self.k, weights, scores=True, **GEOMETRY)
        dots = jnp.einsum("bthgd,bshd->bthgs", self.q.reshape(B, T, HK, H // HK, D), self.k)
        dots = (dots * weights.reshape(B, T, HK, H // HK, 1)).sum(3)
        close(weighed[:, T - 1, :, 2], dots[:, T - 1, :, 32:48].max(-1))
        k = rows(B, 12, HK, D)
        _, lse = nj.attend_cmp(self.q, k, k, tokens=T, **GEOMETRY)
        blocks, scores = nj.select_blocks(self.q, k, lse, tokens=T, scores=True, **GEOMETRY)
        np.testing.assert_array_equal(nj.rank_queries(scores, tokens=T, **GEOMETRY), blocks)

    def test_scores_of_lists_have_gradients(self):
        at = jnp.arange(T)
        for pool, weights in ("max", ()), ("mean", (rows(B, T, H),)):
            how = dict(act="relu", pool=pool, **GEOMETRY)
            lists = nj.score_blocks(self.q, self.k, *weights, **how)

            def plain(q, k, *weights):
                value = jax.nn.relu(jnp.einsum("bthgd,bshd->bthgs", q.reshape(B, T, HK, H // HK, D), k))
                for w in weights:
                    value = value * w.reshape(B, T, HK, H // HK, 1)
                value = value.sum(3)[:, :, :, None]
                there = (at // 16 == lists[..., None]) & (at <= at[:, None])[None, :, None, None]
                mean = (value * there).sum(-1) / jnp.maximum(there.sum(-1), 1)
                best = jnp.where(there, value, -jnp.inf).max(-1)
                return jnp.where(there.any(-1), best if pool == "max" else mean, -jnp.inf)

            inputs = self.q, self.k, *weights
            expected = plain(*inputs)
            close(jax.jit(lambda q, k, *w: nj.score_lists(q, k, lists, *w, **how))(*inputs), expected)
            incoming = rows(*expected.shape)
            found, its = (jax.jit(jax.grad(lambda *x, f=f: jnp.where(expected == -jnp.inf, 0, f(*x) * incoming).sum(),
                                           argnums=tuple(range(len(inputs)))))(*inputs)
                          for f in (lambda q, k, *w: nj.score_lists(q, k, lists, *w, **how), plain))
            for x, y in zip(found, its):
                close(x, y)

    def test_keys_that_stand_for_several_tokens(self):
        for stride, act, pool, weighs, forced, init, local in SCORED:
            k, w = rows(B, T // stride, HK, D), rows(B, T, H) if weighs else None
            how = dict(act=act, pool=pool, stride=stride, scores=True, slc_block=16, slc_count=2, forced=forced, slc_init=init,
                       slc_local=local)
            lists, scores = jax.jit(lambda *x: nj.score_blocks(*x, **how))(self.q, k, w)
            late = nj.score_blocks(self.q[:, 30:], k, None if w is None else w[:, 30:], first=30, longest=T, **how)
            for b in range(B):
                expected, its = scored_blocks(*(None if x is None else np.asarray(x[b]) for x in (self.q, k, w)), T, stride, 16,
                                              2, act, pool, forced, init, local)
                with self.subTest(stride=stride, forced=forced):
                    close(scores[b], its)
                    np.testing.assert_array_equal(lists[b], expected)
            np.testing.assert_array_equal(late[0], lists[:, 30:])
            np.testing.assert_array_equal(late[1], scores[:, 30:])
        with self.assertRaisesRegex(nsa.Refused, "stride: .*3, must be a divisor of slc_block"):
            nj.score_blocks(self.q, self.k, stride=3, slc_block=16)

    def test_mask_and_list_heads(self):
        t, s = jnp.arange(T)[:, None], jnp.arange(T)
        both(lambda *x: nj.attend_win(*x, mask="none", **GEOMETRY)[0],
             lambda *x: reference(*x, (jnp.abs(t - s) < 24)[None, :, None]), self.q, self.k, self.v)
        each = dict(GEOMETRY, list_heads=H, slc_local=1)
        blocks = nj.score_blocks(self.q, rows(B, T, HK, D), **each)
        self.assertEqual(blocks.shape, (B, T, H, 3))
        self.assertFalse(np.array_equal(blocks[:, :, 0], blocks[:, :, 1]))
        both(lambda *x: nj.attend_slc(*x, blocks, **each)[0],
             lambda *x: reference(*x, sees_blocks(blocks, 1, T)), self.q, self.k, self.v)

    def test_queries_at_positions_of_their_own(self):
        firsts, counts, ends = (30, 9), (11, 43), (41, 52)
        at = dict(firsts=jnp.array(firsts, jnp.int32), counts=jnp.array(counts, jnp.int32))

        def ragged(x):
            return jnp.concatenate([x[b:b + 1, f:f + n] for b, (f, n) in enumerate(zip(firsts, counts))], 1)

        def each(q, k, v):
            parts = [reference(q[:, a:a + n], k[b:b + 1, :f + n], v[b:b + 1, :f + n], sees_window(T, 24)[:, f:f + n, :, :f + n])
                     for b, (a, f, n) in enumerate(zip((0, 11), firsts, counts))]
            return jnp.concatenate(parts, 1)
        both(lambda *x: nj.attend_win(*x, **at, **GEOMETRY)[0], each, ragged(self.q), self.k, self.v)
        close(nj.rope(ragged(self.q), longest=T, **at), ragged(nj.rope(self.q)))
        more = [jnp.stack([a, 2 * a]) for a in (ragged(self.q), self.k, self.v)]
        swapped = jnp.stack([at["counts"], at["counts"]])
        found = jax.vmap(lambda q, k, v, c: nj.attend_win(q, k, v, firsts=at["firsts"], counts=c, **GEOMETRY)[0])(*more, swapped)
        for i in range(2):
            close(found[i], each(*(a[i] for a in more)))
        self.assertEqual(tuple(f + n for f, n in zip(firsts, counts)), ends)

    def test_steps_over_pages(self):
        lengths, steps, size, pages = (41, 52), (((0, 0), (30, 9)), ((30, 9), (11, 43))), 16, 9
        table = RNG.permutation(pages)[:8].reshape(2, 4).astype(np.int32)
        phis = dict(phi_k=("mlp", parameters("mlp", D)), phi_v=("conv", parameters("conv", DV)))
        gates = rows(B, T, HK, 3)

        def paged(x):
            found = np.full((pages, size, *x.shape[2:]), np.nan)
            for b in range(2):
                for s in range(T):
                    found[table[b, s // size], s % size] = x[b, s]
            return jnp.asarray(found)

        def step(q, k, v, gates, compressed, firsts, counts, table):
            return nj.attention(q, k, v, k, v, k, v, gates, compressed=compressed, firsts=firsts, counts=counts, pages=table,
                                blocks=True, **phis, **GEOMETRY)
        compiled = jax.jit(step, donate_argnums=4)
        k, v, found = paged(self.k), paged(self.v), ([], [])
        compressed = tuple(jnp.zeros((pages, size // 4, HK, w)) for w in (D, DV))
        for firsts, counts in steps:
            q, g = (jnp.concatenate([x[b, f:f + n] for b, (f, n) in enumerate(zip(firsts, counts))])[None]
                    for x in (self.q, gates))
            out, blocks, compressed = compiled(q, k, v, g, compressed, jnp.array(firsts, jnp.int32),
                                               jnp.array(counts, jnp.int32), table)
            for b, part in enumerate((slice(0, counts[0]), slice(counts[0], None))):
                found[b].append((out[:, part], blocks[:, part]))
        # Primitives over the same pages, all queries at once.
        q = jnp.concatenate([self.q[b:b + 1, :n] for b, n in enumerate(lengths)], 1)
        at = dict(firsts=jnp.zeros(2, jnp.int32), counts=jnp.array(lengths, jnp.int32))
        where = dict(at, pages=jnp.asarray(table))
        g = jnp.concatenate([gates[b:b + 1, :n] for b, n in enumerate(lengths)], 1)
        outs = lambda q: step(q, k, v, g, compressed, *at.values(), table)[0].sum()
        for refuse in (lambda: jax.grad(outs)(q), lambda: jax.grad(lambda k: nj.compress(
                k, out=jnp.zeros_like(compressed[0]), cmp_block=8, cmp_stride=4, **where).sum())(k)):
            with self.assertRaisesRegex(NotImplementedError, "of a step has no gradients"):
                refuse()
        beside = jax.grad(lambda q: q.sum() + outs(jax.lax.stop_gradient(q)))(q)
        np.testing.assert_array_equal(beside, jnp.ones_like(q))
        k_cmp = nj.compress(k, phis["phi_k"][1], phi="mlp", out=jnp.zeros_like(compressed[0]), cmp_block=8, cmp_stride=4, **where)
        lse = nj.attend_cmp(q, k_cmp, k_cmp, tokens=T, **where, **GEOMETRY)[1]
        lists, scores = nj.select_blocks(q, k_cmp, lse, tokens=T, scores=True, **where, **GEOMETRY)
        ranked = nj.rank_queries(scores, tokens=T, **at, **GEOMETRY)
        slc, by_tokens = nj.attend_slc(q, k, v, lists, **where, **GEOMETRY)[0], nj.score_blocks(q, k, **where, **GEOMETRY)
        four, tail = dict(cmp_block=4, cmp_stride=4), dict(stride=4, slc_block=16, slc_count=2, forced="tail", slc_local=0, slc_init=0)
        means = nj.compress(k, out=jnp.zeros_like(compressed[0]), **four, **where)
        by_means = nj.score_blocks(q, means, longest=T, **where, **tail)
        for b, n in enumerate(lengths):
            alone = [x[b:b + 1, :n] for x in (self.q, self.k, self.v, gates)]
            q, k, v, g = alone
            expected = nj.attention(q, k, v, k, v, k, v, g, blocks=True, **phis, **GEOMETRY)
            for i in range(2):
                np.testing.assert_array_equal(jnp.concatenate([parts[i] for parts in found[b]], 1), expected[i])
            part = slice(0, 41) if b == 0 else slice(41, None)
            np.testing.assert_array_equal(lists[:, part], expected[1])
            np.testing.assert_array_equal(ranked[:, part], expected[1])
            np.testing.assert_array_equal(slc[:, part], nj.attend_slc(q, k, v, expected[1], **GEOMETRY)[0])
            np.testing.assert_array_equal(by_tokens[:, part], nj.score_blocks(q, k, **GEOMETRY))
            np.testing.assert_array_equal(by_means[:, part], nj.score_blocks(q, nj.compress(k, **four), **tail))

    def test_sizes_are_no_options(self):
        for name in ("batch", "heads", "kv_heads", "dim", "dim_v", "count", "gate_heads", "gate_stride", "rows", "table_width",
                     "page_tokens", "page_count"):
            for call in (nj.attend_dense, nj.attend_win):
                with self.subTest(name), self.assertRaisesRegex(nsa.Refused, f"{name}: no option; there are"):
                    call(self.q, self.k, self.v, **{name: 200000})
        with self.assertRaisesRegex(nsa.Refused, "tokens: no option"):
            nj.attend_dense(self.q, self.k, self.v, tokens=200000)

    def test_a_dtype_is_refused_where_the_call_is_traced(self):
        lists = jnp.zeros((B, T, HK, 3), jnp.int32)
        for words, call in (
                ("q: int32, must be float32, bfloat16, ", lambda: nj.attend_win(self.q.astype(jnp.int32), self.k, self.v)),
                ("k: complex64, must be", lambda: nj.attend_win(self.q, self.k.astype(jnp.complex64), self.v)),
                ("blocks: float64, must be int32", lambda: nj.attend_slc(self.q, self.k, self.v, lists * 1.0, **GEOMETRY)),
                ("positions: float64, must be int32", lambda: nj.rope(self.q, rows(B, T))),
                ("lse: float16, must be float32", lambda: nj.select_blocks(
                    self.q, rows(B, 12, HK, D), rows(B, T, H, dtype=jnp.float16), tokens=T, **GEOMETRY))):
            for traced in (call, lambda call=call: jax.eval_shape(call)):
                with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                    traced()

    def test_arrays_of_numpy(self):
        """They are JAX's, whose numbers have 32 bits here, before anything says what they are: numpy's own have 64."""
        narrow = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        q, k, v, gates = (RNG.standard_normal((1, T, h, w)) for h, w in ((H, D), (HK, D), (HK, D), (H, 3)))
        lists, weights = np.zeros((1, T, HK, 3), np.int64) - [0, 1, 1], RNG.standard_normal((1, T, H))
        one, w1 = dict(begins=np.array([0, 20, T]), longest=32), RNG.standard_normal((HK, 8, D))
        step = dict(firsts=np.array([0]), counts=np.array([T]))
        for name, call in (
                ("rope", lambda x: nj.rope(x(q), x(np.arange(T)[None]), frequencies=np.arange(1.0, 9))),
                ("compress", lambda x: nj.compress(x(k), {"w1": x(w1)}, phi="conv", cmp_block=8, cmp_stride=4)),
                ("win", lambda x: nj.attend_win(x(q), x(k), v=x(v), window=9)),
                ("packed", lambda x: nj.attend_dense(x(q), x(k), x(v), **jax.tree.map(x, one))),
                ("a step", lambda x: nj.attend_dense(x(q), x(k), x(v), **jax.tree.map(x, step))),
                ("slc", lambda x: nj.attend_slc(x(q), x(k), x(v), x(lists), slc_block=16, slc_count=3)),
                ("lists", lambda x: nj.score_lists(x(q), x(k), x(lists), x(weights), slc_block=16, slc_count=3)),
                ("score", lambda x: nj.score_blocks(x(q), x(k), x(weights), slc_block=16, slc_count=3, scores=True)),
                ("merge", lambda x: nj.merge(x(q), x(weights), x(q), x(weights))),
                ("gate", lambda x: nj.gate(x(gates), x(q), x(q), x(q))),
                ("whole", lambda x: nj.attention(*map(x, (q, k, v, k, v, k, v, gates)), phi_k=("conv", {"w1": x(w1)}), **GEOMETRY))):
            with self.subTest(name), narrow(False):
                found, expected = (jax.tree.leaves(call(x)) for x in (lambda x: x, jnp.asarray))
                for a, b in zip(found, expected):
                    self.assertEqual(a.dtype, b.dtype)
                    np.testing.assert_array_equal(a, b)
        with self.assertRaisesRegex(nsa.Refused, "^w1: ndarray, must be a number, a word, or numbers in a list"):
            nj.compress(k, w1=w1)
        np.testing.assert_array_equal(nj.attend_win(q, k, v, window=np.int64(7), scale=1 / np.sqrt(16))[0],
                                      nj.attend_win(q, k, v, window=7, scale=0.25)[0])

    def test_fewer_queries_than_tokens(self):
        with self.assertRaisesRegex(nsa.Refused, "first: not given, and there are 12 rows of queries for 52 tokens"):
            nj.attend_dense(self.q[:, 40:], self.k, self.v)
        np.testing.assert_array_equal(nj.attend_dense(self.q[:, 40:], self.k, self.v, first=40)[0],
                                      nj.attend_dense(self.q, self.k, self.v)[0][:, 40:])

    def test_rows_of_no_sequence(self):
        q, k, v = (x[:1, :37] for x in (self.q, self.k, self.v))
        for begins, first in (([0, 20, 30], 0), ([5, 20, 37], 0), ([0, 20, 37], 4)):
            at, rest = dict(begins=jnp.array(begins, jnp.int32), longest=20, first=first, **GEOMETRY), np.ones(37, bool)
            for a, b in zip(begins, begins[1:]):
                rest[a:b - first] = False
            out, lse = nj.attend_win(q, k, v, **at)
            whole, lists = nj.attention(q, k, v, k, v, k, v, rows(1, 37, HK, 3), blocks=True, **at)
            turned = nj.rope(q, begins=at["begins"], longest=20, first=first)
            for x, value in ((out, 0), (lse, -np.inf), (whole, 0), (lists, -1), (turned, 0)):
                self.assertTrue((np.asarray(x)[0, rest] == value).all(), (begins, value))
                self.assertFalse((np.asarray(x)[0, ~rest] == value).all())

    def test_a_batch_of_none(self):
        q, k, v = (x[:0] for x in (self.q, self.k, self.v))
        w1 = rows(HK, 8, D)
        out = nj.attention(q, k, v, k, v, k, v, rows(0, T, HK, 3), phi_k=("conv", {"w1": w1}), **GEOMETRY)
        gradient = jax.grad(lambda w: nj.compress(k, {"w1": w}, phi="conv", cmp_block=8, cmp_stride=4).sum())(w1)
        self.assertEqual((out.shape, float(abs(gradient).sum())), ((0, T, H, DV), 0))

    def split(self, call, *places):
        """A function of arrays that two devices share by these axes, or both have."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
        return jax.shard_map(call, mesh=mesh, in_specs=places, out_specs=self.OVER)

    OVER, BOTH = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()

    @unittest.skipUnless(hasattr(jax, "shard_map"), "a jax without it")
    def test_shard_map(self):
        """Results differ between devices as their inputs do: gradients are taken, and nobody takes them for equal."""
        win = lambda q, k, v: nj.attend_win(q, k, v, window=16)[0]
        split = self.split(win, *[self.OVER] * 3)
        for place in range(3):
            got, want = (jax.jit(jax.grad(lambda *x: f(*x).sum(), place))(self.q, self.k, self.v) for f in (split, win))
            np.testing.assert_array_equal(got, want)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
        with self.assertRaisesRegex(ValueError, "out_specs"):
            jax.shard_map(win, mesh=mesh, in_specs=(self.OVER,) * 3, out_specs=self.BOTH)(self.q, self.k, self.v)

    @unittest.skipUnless(hasattr(jax, "shard_map"), "a jax without it")
    def test_shard_map_of_arrays_that_all_devices_have(self):
        """As JAX's own operations: their gradient is the sum of the devices'."""
        q, one, lists = self.q, rows(1, T, HK, D), jnp.zeros((B, T, HK, 3), jnp.int32).at[..., 1:].set(-1)
        gates, out, lse = rows(1, T, H, 3), rows(1, T, H, DV), rows(1, T, H)
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        whole = lambda q, k, gates, p: nj.attention(q, k, k, k, k, k, k, gates, phi_k=("mlp", p), **GEOMETRY)
        for name, call, *given in (
                ("attend", lambda q, k: nj.attend_win(q, k, k, window=16)[0], q, one),
                ("queries", lambda k, q: nj.attend_dense(q, k, k)[0], self.k, q[:1]),
                ("attend_slc", lambda lists, q, k: nj.attend_slc(q, k, k, lists, **GEOMETRY)[0], lists, q[:1], one),
                ("rope", lambda at, x: nj.rope(x, at), at, q[:1]),
                ("compress", lambda x, p: nj.compress(x, p, phi="mlp", cmp_block=8, cmp_stride=4), self.k, parameters("mlp", D)),
                ("merge", lambda out_a, out_b, lse: nj.merge(out_a, lse, out_b, lse)[0], self.v.repeat(2, 2), out, lse),
                ("gate", lambda cmp, logits, slc: nj.gate(logits, cmp, slc, slc), self.v.repeat(2, 2), gates, out),
                ("score_lists", lambda q, k, lists: jnp.maximum(nj.score_lists(q, k, lists, **GEOMETRY), -9), q, one, lists[:1]),
                ("attention", whole, q, one, gates, parameters("mlp", D))):
            floats = [i for i, x in enumerate(given) if isinstance(x, dict) or jnp.issubdtype(x.dtype, jnp.floating)]
            split = self.split(call, self.OVER, *[self.BOTH] * (len(given) - 1))
            alone = lambda *x: jnp.concatenate([call(x[0][b:b + 1], *x[1:]) for b in range(B)])
            weight = rows(*alone(*given).shape)
            got, want = (jax.grad(lambda *x: (f(*x) * weight).sum(), floats)(*given) for f in (split, alone))
            for one_got, one_want in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                np.testing.assert_allclose(one_got, one_want, atol=1e-12, err_msg=name)

    @unittest.skipUnless(hasattr(jax, "set_mesh"), "a jax without it")
    def test_a_mesh_with_explicit_axes(self):
        """What jax.make_mesh makes unless told otherwise: arrays whose types say how they are split have gradients of such types."""
        mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
        gates, p = rows(B, T, HK, 3), parameters("mlp", D)
        call = lambda q, k, gates, p: (nj.attention(q, k, k, k, k, k, k, gates, phi_k=("mlp", p), **GEOMETRY) * q).sum()
        want = jax.grad(call, (0, 1, 2, 3))(self.q, self.k, gates, p)
        for axes in ("batch",), (None, None, "batch"):
            given = *[jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes))) for x in (self.q, self.k, gates)], p
            with jax.set_mesh(mesh):
                for taken in jax.grad(call, (0, 1, 2, 3)), jax.jit(jax.grad(call, (0, 1, 2, 3))):
                    got = taken(*given)
                    self.assertEqual(jax.typeof(got[0]), jax.typeof(given[0]))
                    for one_got, one_want in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                        np.testing.assert_allclose(one_got, one_want, atol=1e-12)

    def test_refusals(self):
        ragged, at = self.q.reshape(1, B * T, H, D), jnp.zeros(2, jnp.int32)
        for words, call in (
                ("counts: in all they must be the rows of queries", lambda: nj.attend_win(
                    ragged, self.k, self.v, firsts=at, counts=jnp.array([52, 51], jnp.int32))),
                ("firsts: NSA_ERROR_RANGE", lambda: nj.attend_win(
                    ragged, self.k, self.v, firsts=at - 1, counts=jnp.array([52, 52], jnp.int32))),
                ("rows: NSA_ERROR_BEGINS", lambda: nj.attend_win(
                    self.q[:1], self.k[:1], self.v[:1], begins=jnp.array([0, 99], jnp.int32), longest=99)),
                ("out: firsts, counts and pages need it", lambda: nj.compress(self.k, firsts=at, counts=at)),
                ("firsts, counts: one of them alone", lambda: nj.attend_win(ragged, self.k, self.v, counts=at))):
            with self.subTest(words), self.assertRaisesRegex(Exception, words):
                jax.block_until_ready(call())
        with self.assertRaisesRegex(nsa.Refused, "window: NSA_ERROR_SIZE: 0, must be >= 1"):
            nj.attend_win(self.q, self.k, self.v, window=0)
        short, whole = "longest: 50, and each sequence has 52 tokens: must be at least as many", lambda n: [
            lambda: nj.attend_win(self.q, self.k, self.v, longest=n), lambda: nj.rope(self.q, longest=n),
            lambda: nj.compress(self.k, longest=n, cmp_block=8, cmp_stride=4),
            lambda: nj.score_blocks(self.q, self.k, longest=n), lambda: nj.attend_win(
                ragged, self.k, self.v, firsts=at, counts=at + T, longest=n)]
        for less, more in zip(whole(T - 2), whole(T + 2)):
            with self.assertRaisesRegex(nsa.Refused, short):
                less()
            more()
        with self.assertRaisesRegex(nsa.Refused, "^first: 3, must be 0: firsts say"):
            nj.attend_win(ragged, self.k, self.v, firsts=at, counts=at + T, first=3)
        for words, call in (
                ("v: shape .*, must have 4 axes", lambda: nj.attend_win(self.q, self.k, self.v[0])),
                ("x: shape .*, must have 4 axes", lambda: nj.rope(self.q[0])),
                ("x: shape .*, must have 4 axes", lambda: nj.compress(self.k[0])),
                ("cmp: shape .*, must have 4 axes", lambda: nj.gate(self.q, self.q[0], self.q, self.q)),
                ("out_a: shape .*, must have 4 axes", lambda: nj.merge(self.q[0], self.q, self.q, self.q)),
                ("k: None, must be a tensor", lambda: nj.attend_win(self.q, None, self.v)),
                ("k_win: shape .*, must have 4 axes", lambda: nj.attention(
                    self.q, self.k, self.v, self.k, self.v, self.k[0], self.v, self.q)),
                ("begins: list, must be an array of int32", lambda: nj.attend_win(
                    self.q[:1], self.k[:1], self.v[:1], begins=[0, T], longest=T)),
                ("pages: list, must be an array of int32", lambda: nj.attend_win(self.q, self.k, self.v, pages=[[0], [1]])),
                ("positions: list, must be an array", lambda: nj.rope(self.q, [[0] * T] * B)),
                ("blocks: list, must be an array", lambda: nj.attend_slc(self.q, self.k, self.v, [[0]])),
                ("w1: list, must be an array", lambda: nj.compress(self.k, {"w1": [1.0]}, phi="conv")),
                ("q: list, must be a tensor", lambda: nj.score_blocks([0.0], self.k)),
                ("k: list, must be a tensor", lambda: nj.score_lists(self.q, [0.0], self.q)),
                ("q: list, must be a tensor", lambda: nj.select_blocks([0.0], self.k, self.q, tokens=T)),
                ("scores: list, must be a tensor", lambda: nj.rank_queries([0.0], tokens=T)),
                ("dim: NSA_ERROR_SIZE: 15, must be even", lambda: nj.rope(self.q[..., :15])),
                ("base: NSA_ERROR_SIZE: -1.0, must be above 1", lambda: nj.rope(self.q, base=-1.0))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                call()
        np.testing.assert_array_equal(*(nj.attend_win(self.q[:, 3:], self.k, self.v, first=n)[0] for n in (3, jnp.int32(3))))
        with self.assertRaisesRegex(TypeError, "^first: .*, must be an integer"):
            jax.jit(lambda n: nj.attend_win(self.q[:, 3:], self.k, self.v, first=n))(3)
        with self.assertRaisesRegex(ValueError, "windows: no option"):
            nj.attend_win(self.q, self.k, self.v, windows=3)
        with self.assertRaisesRegex(ValueError, "v: shape"):
            nj.attend_win(self.q, self.k, self.v[:1])
        with self.assertRaisesRegex(ValueError, "phi: 'mean' has no b1"):
            nj.compress(self.k, parameters("conv", D))


if __name__ == "__main__":
    unittest.main()
