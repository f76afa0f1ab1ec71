"""RoPE as transformers names it: its frequencies and attention factors beside those of nsa_rope_frequencies.

    rope.py               compares; transformers.sh calls it, with the package nsa in the path
    rope.py --constants   writes tests/harness/rope_constants.h, which test_rope.c holds nsa.h to

Twin: tests/test_rope.c, which has the same models. Not here: rotations.
"""
import ctypes
import pathlib
import sys
import types

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PAIRS = (0, 1, 5, 9, 12, 15, 18, 21, 25, 28, 31)  # of those that a head of 64 has
SHORT = [1 + 0.03125 * i for i in range(64)]
LONG = [1 + 0.0625 * i * i for i in range(64)]
LARGEST = 4e-7  # relative: transformers computes in f32

# name: head width, base, max_position_embeddings, tokens of the longest sequence now, transformers' parameters
MODELS = {
    "default": (64, 10000, 2048, 100, dict(rope_type="default")),
    "linear": (64, 10000, 8192, 100, dict(rope_type="linear", factor=4.0)),
    "dynamic, short": (64, 10000, 2048, 2048, dict(rope_type="dynamic", factor=2.0)),
    "dynamic, long": (64, 10000, 2048, 7000, dict(rope_type="dynamic", factor=2.0)),
    "yarn": (128, 1e6, 131072, 100, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)),
    "yarn, attention_factor": (64, 10000, 16384, 100, dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=2048, attention_factor=1.375, beta_fast=16.0,
        beta_slow=2.0)),
    "yarn, mscale": (64, 10000, 163840, 100, dict(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0)),
    "yarn, one mscale": (64, 10000, 163840, 100, dict(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.707)),
    "yarn, truncate false": (64, 150000, 131072, 100, dict(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)),
    "yarn, 3 tokens": (64, 10000, 131072, 100, dict(
        rope_type="yarn", factor=32.0, original_max_position_embeddings=3)),
    "llama3, 3.1": (128, 500000, 131072, 100, dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192)),
    "llama3, 3.2": (64, 500000, 131072, 100, dict(
        rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192)),
    "longrope, short": (64, 10000, 131072, 4096, dict(
        rope_type="longrope", factor=32.0, original_max_position_embeddings=4096)),
    "longrope, long": (64, 10000, 131072, 4097, dict(
        rope_type="longrope", factor=32.0, original_max_position_embeddings=4096)),
    "longrope, attention_factor": (64, 10000, 131072, 4097, dict(
        rope_type="longrope", factor=32.0, original_max_position_embeddings=4096, attention_factor=1.25)),
}


def of_transformers(dim, base, longest, now, parameters):
    """(frequencies, attention factor)."""
    parameters = dict(parameters, rope_theta=float(base))
    if parameters["rope_type"] == "longrope":
        parameters.update(short_factor=SHORT[:dim // 2], long_factor=LONG[:dim // 2])
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=longest,
                         rope_parameters=parameters)
    if parameters["rope_type"] == "default":
        made = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return made.inv_freq.double().tolist(), float(made.attention_scaling)
    found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=now)
    return found.double().tolist(), float(factor)


def of_nsa(dim, base, longest, now, parameters):
    import nsa
    from nsa._library import library
    p = types.SimpleNamespace(**parameters)
    take = lambda name: getattr(p, name, 0) or 0  # noqa: E731
    keep = [(ctypes.c_double * len(x))(*x) for x in (SHORT, LONG)]
    r = nsa.Rope(heads=1, dim=dim, base=float(base), context=now, factor=float(take("factor")),
                 scaling={"default": "none"}.get(p.rope_type, p.rope_type),
                 trained_context=take("original_max_position_embeddings") or longest,
                 fast=float(take("beta_fast") or take("high_freq_factor")),
                 slow=float(take("beta_slow") or take("low_freq_factor")), magnitude=float(take("attention_factor")),
                 mscale=float(take("mscale")), mscale_all_dim=float(take("mscale_all_dim")),
                 untruncated=int(getattr(p, "truncate", True) is False),
                 short_factors=ctypes.addressof(keep[0]), long_factors=ctypes.addressof(keep[1]))
    frequencies, magnitude = (ctypes.c_double * (dim // 2))(), ctypes.c_double()
    library().check(library().nsa_rope_frequencies(ctypes.byref(r), frequencies, ctypes.byref(magnitude)))
    return list(frequencies), magnitude.value


def compare():
    worst = 0.0
    for name, model in MODELS.items():
        (wanted, factor), (got, magnitude) = of_transformers(*model), of_nsa(*model)
        assert len(got) == len(wanted), name
        for i, (a, b) in enumerate(zip(got + [magnitude], wanted + [factor])):
            off = abs(a - b) / abs(b)
            worst = max(worst, off)
            assert off <= LARGEST, f"{name}, pair {i}: {a!r}, transformers has {b!r}"
    print(f"{len(MODELS)} models as transformers {transformers.__version__} has them: {worst:.1e} apart at most")


def constants():
    lines = [f"""/* rope_constants.h - RoPE's frequencies and attention factors, of transformers {transformers.__version__}.
   Twin: python/tests/rope.py, which writes this file. Not here: what the models are. */
#ifndef ROPE_CONSTANTS_H
#define ROPE_CONSTANTS_H

typedef struct rope_constant {{
    const char *name;
    double magnitude, frequency[{len(PAIRS)}]; /* of rope_constant_pairs */
}} rope_constant;

static const int rope_constant_pairs[] = {{{', '.join(map(str, PAIRS))}}};

/* clang-format off: a table is read in columns. */
static const rope_constant rope_constants[] = {{"""]
    for name, model in MODELS.items():
        found, factor = of_transformers(*model)
        numbers = [f"{found[i]:.9g}" for i in PAIRS]
        lines.append(f'    {{"{name}", {factor:.15g},')
        lines += [f"     {{{', '.join(numbers[:6])},", f"      {', '.join(numbers[6:])}}}}},"]
    lines.append("};\n/* clang-format on */\n\n#endif\n")
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/harness/rope_constants.h"
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    constants() if sys.argv[1:] == ["--constants"] else compare()
