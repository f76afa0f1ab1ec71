"""nsa.rope_options against transformers' own numbers, and what turns by them in every layer of the package.

    python3 test_rope.py record     writes rope.json, with the transformers that is installed

The numbers of rope.json are transformers' ROPE_INIT_FUNCTIONS', in float32; where transformers is installed they are asked
again. Twin: tests/test_rope.c. Not here: the rotation itself, which test_core holds.
"""
import json
import pathlib
import sys
import types
import unittest

import numpy as np

import nsa

TABLE = pathlib.Path(__file__).with_name("rope.json")
LONG = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.25, 1.5, 1.5, 2.0, 2.0, 3.0],
            long_factor=[1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], original_max_position_embeddings=4096)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
#: (parameters, max_position_embeddings, tokens)
CASES = [(dict(rope_type="default"), 2048, 0), (dict(rope_type="default", rope_theta=500000.0), 2048, 0),
         (dict(rope_type="linear", factor=3.0), 2048, 0)]
CASES += [(dict(rope_type="dynamic", factor=2.0), 2048, tokens) for tokens in (0, 100, 2048, 2049, 8192)]
CASES += [(dict(rope_type="dynamic", factor=4.0, rope_theta=1e6), 512, 5000)]
CASES += [({**YARN, **more}, 8192, 0) for more in (
    {}, dict(attention_factor=1.5), dict(mscale=1.0, mscale_all_dim=0.707), dict(mscale=0.707), dict(truncate=False),
    dict(beta_fast=16.0, beta_slow=2.0), dict(rope_theta=150000.0, truncate=False, factor=32.0), dict(factor=None),
    dict(truncate=None))]
CASES += [({**LLAMA3, **more}, 131072, 0) for more in ({}, dict(rope_theta=500000.0, factor=32.0), dict(high_freq_factor=8.0))]
CASES += [({**LONG, **more}, 131072, tokens) for more in ({}, dict(factor=2.0), dict(attention_factor=1.19), dict(factor=1.0))
          for tokens in (0, 4096, 4097)]
DIM = 16


def of_transformers(parameters, trained, tokens):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    given = {"rope_theta": 10000.0, "factor": None, **parameters}
    config = types.SimpleNamespace(rope_parameters=given, max_position_embeddings=trained, head_dim=DIM, hidden_size=2 * DIM,
                                   num_attention_heads=2, standardize_rope_params=lambda: None)
    if given["rope_type"] == "default":
        return [given["rope_theta"] ** (-2 * i / DIM) for i in range(DIM // 2)], 1.0
    found, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu", seq_len=tokens or None)
    return [float(x) for x in found], float(factor)


class Rope(unittest.TestCase):
    def held(self, frequencies, magnitude, expected, factor):
        np.testing.assert_allclose(frequencies, expected, rtol=3e-6)
        self.assertAlmostEqual(magnitude, factor, places=6)

    def test_the_numbers_of_transformers(self):
        table = json.loads(TABLE.read_text())
        self.assertEqual(len(table["cases"]), len(CASES))
        for case, (parameters, trained, tokens) in zip(table["cases"], CASES):
            with self.subTest(case=case):
                self.assertEqual([case["parameters"], case["trained"], case["tokens"]],
                                 [json.loads(json.dumps(parameters)), trained, tokens])
                made = nsa.Rope(dim=DIM, heads=1, **nsa.rope_options(parameters, trained, tokens))
                self.held(*nsa.rope_frequencies(made), case["frequencies"], case["factor"])

    def test_the_transformers_that_is_here(self):
        try:
            import transformers
        except ImportError:
            self.skipTest("transformers is not installed")
        if int(transformers.__version__.split(".")[0]) < 5:
            self.skipTest("rope_parameters are transformers 5's")
        for parameters, trained, tokens in CASES:
            with self.subTest(parameters=parameters, tokens=tokens):
                made = nsa.Rope(dim=DIM, heads=1, **nsa.rope_options(parameters, trained, tokens))
                self.held(*nsa.rope_frequencies(made), *of_transformers(parameters, trained, tokens))

    def turned(self, x, options):
        """numpy's: halves, in double."""
        made = nsa.Rope(dim=DIM, heads=x.shape[2], **options)
        frequencies, magnitude = nsa.rope_frequencies(made)
        angle = np.arange(x.shape[1])[:, None] * np.array(frequencies)
        cos, sin, half = magnitude * np.cos(angle)[None, :, None], magnitude * np.sin(angle)[None, :, None], DIM // 2
        a, b = x[..., :half].astype(float), x[..., half:].astype(float)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def test_every_layer_turns_by_them(self):
        x = np.random.default_rng(3).standard_normal((1, 40, 2, DIM)).astype(np.float32)
        for options in (nsa.rope_options(LONG, 131072, 4097), nsa.rope_options(LLAMA3),
                        dict(pairs="halves", frequencies=[0.5 / (i + 1) for i in range(8)], magnitude=1.25)):
            expected, out = self.turned(x, options), np.empty_like(x)
            nsa.rope_forward(nsa.Rope(x=x, out=out, heads=2, dim=DIM, **options), nsa.desc(1, 40, 2, 1, DIM))
            np.testing.assert_allclose(out, expected, atol=1e-5)
            try:
                import torch
                import nsa.torch as nt
                y = torch.from_numpy(x).requires_grad_()
                turned = nt.rope(y, **options)
                np.testing.assert_array_equal(turned.detach().numpy(), out)
                turned.sum().backward()
                module = nt.NativeSparseAttention(32, 2, 1, DIM, rope=dict(options, base=7.0))
                self.assertEqual(module(torch.randn(1, 40, 32)).shape, (1, 40, 32))
            except ImportError:
                pass
            try:
                import jax
                import nsa.jax as nj
                np.testing.assert_array_equal(jax.jit(lambda z: nj.rope(z, **options))(x), out)
                gradient = jax.jit(jax.grad(lambda z: nj.rope(z, **options).sum()))(x)
                np.testing.assert_allclose(gradient, y.grad.numpy(), atol=1e-5)
            except (ImportError, RuntimeError, NameError):
                pass

    def test_what_is_no_configuration(self):
        for words, call in (
                ("rope_type: 'proportional' is none of default, linear", lambda: nsa.rope_options(dict(rope_type="proportional"))),
                ("factr: no parameter of linear; there are factor", lambda: nsa.rope_options(dict(rope_type="linear", factr=2))),
                ("factor: not given, and linear needs it", lambda: nsa.rope_options(dict(rope_type="linear"))),
                ("max_position_embeddings: not given, and dynamic", lambda: nsa.rope_options(dict(rope_type="dynamic", factor=2))),
                (r"short_factors: shape \(7,\), must be \(dim / 2\) = \(8,\)", lambda: nsa.rope_frequencies(nsa.Rope(
                    dim=DIM, heads=1, **nsa.rope_options(dict(LONG, short_factor=[1.0] * 7), 131072)))),
                (r"frequencies: shape \(3,\), must be", lambda: nsa.rope_forward(nsa.Rope(
                    x=np.zeros((1, 4, 2, DIM), np.float32), out=np.zeros((1, 4, 2, DIM), np.float32), heads=2, dim=DIM,
                    frequencies=[1.0, 2.0, 3.0]), nsa.desc(1, 4, 2, 1, DIM)))):
            with self.subTest(words), self.assertRaisesRegex(nsa.Refused, words):
                call()


def record():
    import transformers
    cases = []
    for parameters, trained, tokens in CASES:
        frequencies, factor = of_transformers(parameters, trained, tokens)
        cases.append(dict(parameters=parameters, trained=trained, tokens=tokens, frequencies=frequencies, factor=factor))
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    TABLE.write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n  {lines}]}}\n')


if __name__ == "__main__":
    sys.exit(record()) if sys.argv[1:] == ["record"] else unittest.main()
