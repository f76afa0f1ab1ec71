"""Rotary positions as configurations of transformers 5 name them, in the fields of nsa.Rope.

Twin: nsa_rope of nsa.h, whose scalings these are. Not here: arithmetic; frequencies are nsa_rope_frequencies'.
"""
from __future__ import annotations

import math
from typing import Any, Mapping

from ._refused import refused

#: Of each type the keys that it needs, and those that it may have.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "yarn": (set(), {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                     "mscale_all_dim", "truncate"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "original_max_position_embeddings", "attention_factor"}),
}
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_options(parameters: Mapping[str, Any], max_position_embeddings: int | None = None, tokens: int = 0) -> dict[str, Any]:
    """A configuration's rope_parameters (or its rope_scaling, with rope_theta) as fields of nsa.Rope, options of
    nsa.torch.rope, and `rope` of nsa.torch.NativeSparseAttention: pairs are halves, as transformers rotates.

    max_position_embeddings: the configuration's. tokens: of the longest sequence now, which dynamic and longrope ask for;
    0: no more than the model was trained with. dim is that of the numbers that turn: with partial_rotary_factor a part of
    a head's, x[..., :dim].
    """
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters: {parameters!r}, must be a configuration's rope_parameters, or {{'rope_theta': its rope_theta}} "
                        "where it has no others")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    given = {name: value for name, value in parameters.items() if value is not None and name not in _ALWAYS}
    if kind not in _KEYS:
        raise refused("OPTION", "rope_type", f"{kind!r} is none of {', '.join(_KEYS)}")
    needed, allowed = _KEYS[kind]
    for name in given:
        if name not in needed | allowed:
            raise refused("OPTION", name, f"no parameter of {kind}; there are {', '.join(sorted(needed | allowed)) or 'none'}")
    for name in sorted(needed - set(given)):
        raise refused("NULL", name, f"not given, and {kind} needs it")
    made: dict[str, Any] = dict(pairs="halves", base=float(parameters.get("rope_theta", 10000.0)))
    if kind != "default":
        made["scaling"] = kind
    trained = given.get("original_max_position_embeddings")
    if kind == "dynamic":
        trained = max_position_embeddings if max_position_embeddings is not None else trained
    if kind in ("dynamic", "yarn", "longrope"):
        if trained is None:
            trained = max_position_embeddings
        if trained is None:
            raise refused("NULL", "max_position_embeddings", f"not given, and {kind} needs it")
    if kind in ("yarn", "longrope") and "factor" not in given and (kind == "yarn" or "attention_factor" not in given):
        if max_position_embeddings is None:
            raise refused("NULL", "factor", "not given, and no max_position_embeddings that it follows from")
        given["factor"] = max_position_embeddings / trained
    for name, field in (("factor", "factor"), ("beta_fast", "fast"), ("beta_slow", "slow"), ("high_freq_factor", "fast"),
                        ("low_freq_factor", "slow"), ("mscale", "mscale"), ("mscale_all_dim", "mscale_all_dim"),
                        ("attention_factor", "magnitude")):
        if name in given:
            made[field] = float(given[name])
    if trained is not None:
        made["trained_context"] = int(trained)
    if kind in ("dynamic", "longrope"):
        made["context"] = int(tokens)
    if kind == "longrope":
        made["short_factors"], made["long_factors"] = list(given["short_factor"]), list(given["long_factor"])
        made.setdefault("factor", 1.0)
        if "magnitude" not in made and not math.isfinite(made["factor"]):
            raise refused("SIZE", "factor", f"{made['factor']}, must be finite")
    if not parameters.get("truncate", True):  # None is no default there: transformers asks whether it holds
        made["untruncated"] = 1
    return made
