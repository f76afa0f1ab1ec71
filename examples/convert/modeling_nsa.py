"""A decoder over Native Sparse Attention (arXiv 2502.11089) in plain PyTorch, as transformers opens it.

Twin of examples/trainer/model of the nsa library, whose checkpoints it reads with their names: `convert export` writes
it beside config.json and model.safetensors. It needs torch and transformers, 4.57 or newer. Where the package nsa is
installed, it computes attention on the CPU; the results are the same within rounding. Plain attention here takes memory
for every query and key of a chunk: it is for reading, short contexts and other devices.

Letters: B sequences, T keys, Q queries, H heads over Hk key-value heads, G = H / Hk.
"""
import copy
import logging
import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

try:  # Trainer's label smoothing shifts the labels of the classes in this list, and of no others
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as listed
except ImportError:
    listed = {}
try:
    import nsa.torch as library
except ImportError:
    library = None

BRANCHES = ("cmp", "slc", "win")
# What an output calls its cache: transformers 5.24 renamed past_key_values.
CACHE = "cache" if "cache" in getattr(CausalLMOutputWithPast, "__dataclass_fields__", ()) else "past_key_values"
CHUNK = 512  # queries at a time
ROPE = {"base": 10000.0, "pairs": "interleaved", "scaling": "none", "factor": 1.0, "trained_context": 0}
# Settings that are read when the model is made, and others of the same parts at every call.
MADE_OF = ("mlp", "rms_norm_eps", "attention", "shared_kv", "qk_norm", "cmp_block", "cmp_stride", "phi", "gate_form", "rope")
is_compiling = torch.compiler.is_compiling if hasattr(torch, "compiler") else lambda: False
# Keys that others write or read, beside those that transformers' own class has; a token's end in _token_id.
IDLE = ("auto_map", "model_type", "torch_dtype", "dtype", "architectures", "transformers_version", "quantization_config",
        "tie_word_embeddings", "loss_type", "tokenizer_class", "pretraining_tp", "unsloth_version")


class NSAConfig(PretrainedConfig):
    """Sizes by their usual names; those of sparse attention by nsa.h's. attention: nsa, cmp+slc, full or window, one
    for all layers or a list. phi: mean, conv or mlp. gate: sigmoid or softmax, its logits from an MLP of the group's
    mean query (gate_form mlp) or a linear map of x (linear). rope: base, pairs, scaling (none, linear, ntk, yarn or
    llama3), factor, trained_context, fast and slow."""

    model_type = "nsa_decoder"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(self, vocab_size=256, hidden_size=128, num_hidden_layers=1, num_attention_heads=8,
                 num_key_value_heads=2, head_dim=16, v_head_dim=16, intermediate_size=512, mlp="silu",
                 rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=128, attention="nsa",
                 shared_kv=False, qk_norm=False, cmp_block=16, cmp_stride=8, slc_block=32, slc_count=8, slc_init=1,
                 slc_local=2, window=64, phi="mean", gate="sigmoid", gate_form="mlp", rope=None, use_cache=True,
                 **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        self.intermediate_size = intermediate_size
        self.mlp = mlp
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.attention = attention
        self.shared_kv = shared_kv
        self.qk_norm = qk_norm
        self.cmp_block = cmp_block
        self.cmp_stride = cmp_stride
        self.slc_block = slc_block
        self.slc_count = slc_count
        self.slc_init = slc_init
        self.slc_local = slc_local
        self.window = window
        self.phi = phi
        self.gate = gate
        self.gate_form = gate_form
        self.use_cache = use_cache
        self.rope = {**ROPE, **(rope or {})}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def check(self):
        """What the model would read in another way than it is meant, or not at all."""
        kinds = [self.attention] if isinstance(self.attention, str) else list(self.attention)
        rope = self.rope
        if not ROPE.keys() <= rope.keys():  # from_pretrained(rope=...) replaces the checkpoint's
            raise ValueError(f"rope: {rope}, must have all of {', '.join(ROPE)}, for nothing of the checkpoint's stays")
        for name, values, known in (
                ("mlp", [self.mlp], ("silu", "swiglu")), ("phi", [self.phi], ("mean", "conv", "mlp")),
                ("gate", [self.gate], ("sigmoid", "softmax")), ("gate_form", [self.gate_form], ("mlp", "linear")),
                ("attention", kinds, ("nsa", "cmp+slc", "full", "window")),
                ("rope: pairs", [rope["pairs"]], ("interleaved", "halves")),
                ("rope: scaling", [rope["scaling"]], ("none", "linear", "ntk", "yarn", "llama3")),
                ("rope", rope, ("base", "pairs", "scaling", "factor", "trained_context", "fast", "slow"))):
            for value in values:
                if value not in known:
                    raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
        for name, value in vars(self).items():
            if name.startswith(("rope_", "sliding_window")) and value is not None:
                raise ValueError(f"{name}: must be absent; `rope` has the positions, `window` the window")
        block, stride, slc_block = self.cmp_block, self.cmp_stride, self.slc_block
        heads, groups, scaled = self.num_attention_heads, self.num_key_value_heads, rope["scaling"] != "none"
        over = rope["scaling"] in ("yarn", "llama3")  # a trained context, which has a length
        one_each = kinds == [self.attention] or len(kinds) == self.num_hidden_layers
        for name, holds, allowed in (
                ("attention", one_each, "one word, or one for each layer"),
                ("num_key_value_heads", groups >= 1 and heads % groups == 0, "a divisor of num_attention_heads"),
                ("head_dim", self.head_dim >= 2 and self.head_dim % 2 == 0, "even, at least 2"),
                ("rope", rope["base"] > 1 and (not scaled or rope["factor"] >= 1) and (not over or rope["trained_context"] >= 1),
                 "of a base above 1, where scaled a factor of at least 1, and of yarn and llama3 a trained_context"),
                ("window", self.window >= 1, "at least 1"),
                ("cmp_stride", stride >= 1 and block % stride == 0, "a divisor of cmp_block"),
                ("slc_block", slc_block >= block and slc_block % max(1, stride) == 0,
                 "a multiple of cmp_stride, at least cmp_block"),
                ("slc_count", self.slc_count >= max(1, self.slc_init + self.slc_local),
                 "at least 1, and slc_init + slc_local")):
            if not holds:
                raise ValueError(f"{name}: {getattr(self, name)}, must be {allowed}")

    def warn(self):
        """Of a key that nothing reads, as a misspelled one. transformers makes an attribute of it and says nothing."""
        known = {*vars(NSAConfig()), *IDLE}
        for name, value in vars(self).items():
            idle = name in known or name.startswith("_") or name.endswith("_token_id")
            if not idle and value is not None and value is not False:
                logging.getLogger(__name__).warning("config.json: %s: this model has no such setting; ignored", name)

    def attention_of(self, layer):
        return self.attention if isinstance(self.attention, str) else self.attention[layer]


# ---- Positions ----


def frequencies(rope, width):
    """What each pair turns by from one position to the next, and YaRN's factor on the result."""
    base, factor, scaling = rope["base"], rope["factor"], rope["scaling"]
    if scaling == "ntk" and width > 2:
        base *= factor ** (width / (width - 2))
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if scaling == "linear":
        return [f / factor for f in plain], 1.0
    context, fast, slow = rope["trained_context"], rope.get("fast"), rope.get("slow") or 1  # turns over it
    if scaling == "llama3":
        fast = fast or 4
        shares = [min(max((context * f / (2 * math.pi) - slow) / (fast - slow), 0), 1) for f in plain]
        return [f / factor + s * (f - f / factor) for f, s in zip(plain, shares)], 1.0
    if scaling != "yarn":
        return plain, 1.0
    low, high = (width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast or 32, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    high = high if high > low else low + 0.001
    ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
    return [f + r * (f / factor - f) for f, r in zip(plain, ramps)], 0.1 * math.log(factor) + 1


def rotation(turns, magnitude, places, like):
    """(cosine, sine), each (B or 1, T, 1, width / 2), of the places (B or 1, T) of tokens in their sequences."""
    angles = places.to("cpu", torch.float64)[..., None, None] * torch.tensor(turns, dtype=torch.float64)
    return [(y * magnitude).to(like.device, like.dtype) for y in (angles.cos(), angles.sin())]


def turn(x, rotated_by, pairs):
    """RoPE of x (B, T, H, D)."""
    cosine, sine = rotated_by
    if pairs == "halves":
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cosine - b * sine, a * sine + b * cosine), -1).flatten(-2)


# ---- Sparse attention ----


def attend(q, k, v, seen):
    """q (B, Hk, G, Q, D), k and v (B, Hk, S, D), seen (..., Q, S): the output, and the probabilities in f32. A query
    that sees no key gets zeros."""
    scores = torch.einsum("bhgqd,bhsd->bhgqs", q, k).float() * q.shape[-1] ** -0.5
    p = torch.softmax(scores.masked_fill(~seen, torch.finfo(torch.float32).min), -1)
    p = torch.where(seen, p, torch.zeros_like(p))
    return torch.einsum("bhgqs,bhsd->bhgqd", p.to(v.dtype), v), p


def overlaps(count, tokens, config, device):
    """(count, blocks): how many strides of a compressed block lie in a selection block, Eq. 9."""
    begin = torch.arange(count, device=device)[:, None] * config.cmp_stride
    block = torch.arange(-(-tokens // config.slc_block), device=device)[None] * config.slc_block
    both = torch.minimum(begin + config.cmp_block, block + config.slc_block) - torch.maximum(begin, block)
    return both.clamp(min=0).float() / config.cmp_stride


@torch.no_grad()
def select(p, places, tokens, config):
    """The selected blocks of each query as a mask (B, Hk, Q, blocks), from p (B, Hk, G, Q, N) of the compressed keys.
    First and last blocks are forced and count; of equal scores the lower index wins; NaN ranks last."""
    score = p.sum(2) @ overlaps(p.shape[-1], tokens, config, p.device)
    block = torch.arange(score.shape[-1], device=p.device)
    last = (places // config.slc_block)[:, None]
    candidate = block <= last
    forced = candidate & ((block < config.slc_init) | (block > last - config.slc_local))
    score = score.masked_fill(score.isnan(), -1).masked_fill(forced, math.inf).masked_fill(~candidate, -math.inf)
    best = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :config.slc_count]
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True) & candidate


def attend_sparse(q, k, v, k_cmp, v_cmp, gates, first, config):
    """q (B, Q, H, D), of which row 0 stands at `first`; k and v (B, T, Hk, D) of slc and, if there is a third gate,
    win; compressed rows (B, N, Hk, D); gates (B, Q, H, 2 or 3). Returns (B, Q, H, Dv)."""
    tokens, groups, device = k[0].shape[1], k[0].shape[2], q.device
    q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    k, v = ([x.transpose(1, 2) for x in pair] for pair in (k, v))
    k_cmp, v_cmp = k_cmp.transpose(1, 2), v_cmp.transpose(1, 2)
    key = torch.arange(tokens, device=device)
    last = torch.arange(k_cmp.shape[2], device=device) * config.cmp_stride + config.cmp_block - 1
    outs = []
    for begin in range(0, max(1, q.shape[3]), CHUNK):
        some = q[:, :, :, begin:begin + CHUNK]
        place = torch.arange(first + begin, first + begin + some.shape[3], device=device)
        past = key <= place[:, None]
        cmp, p = attend(some, k_cmp, v_cmp, last <= place[:, None])
        chosen = select(p, place, tokens, config).repeat_interleave(config.slc_block, -1)[..., :tokens]
        branches = [cmp, attend(some, k[0], v[0], (chosen & past)[:, :, None])[0]]
        if gates.shape[-1] == 3:
            branches.append(attend(some, k[1], v[1], past & (key > place[:, None] - config.window))[0])
        outs.append(torch.stack(branches, -1))
    branches = torch.cat(outs, 3).permute(0, 3, 1, 2, 4, 5).flatten(2, 3)
    return (branches * gates[:, :, :, None]).sum(-1)


def attend_dense(q, k, v, first, window):
    """Every key up to the query, or the last `window` of them where it is not 0."""
    tokens = k.shape[1]
    q = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
    k, v, key = k.transpose(1, 2), v.transpose(1, 2), torch.arange(tokens, device=q.device)
    outs = []
    for begin in range(0, max(1, q.shape[3]), CHUNK):
        some = q[:, :, :, begin:begin + CHUNK]
        place = torch.arange(first + begin, first + begin + some.shape[3], device=q.device)[:, None]
        outs.append(attend(some, k, v, (key <= place) & (key > place - (window or tokens)))[0])
    return torch.cat(outs, 3).permute(0, 3, 1, 2, 4).flatten(2, 3)


# ---- Modules ----


class NSARMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class NSAPhi(nn.Module):
    """Compression of l rows to one, by key-value head; a bias of every key would change no softmax, so k has none."""

    NAMES = ("pos", "w1", "b1", "w2", "b2")

    def __init__(self, config, width, bias):
        super().__init__()
        heads, block = config.num_key_value_heads, config.cmp_block
        self.kind, self.block, self.stride = config.phi, block, config.cmp_stride
        shapes = {}
        if config.phi == "conv":
            shapes = {"w1": (heads, block, width), "b1": (heads, width) if bias else None}
        elif config.phi == "mlp":
            shapes = {"pos": (heads, block, width), "w1": (heads, width, block * width), "b1": (heads, width),
                      "w2": (heads, width, width), "b2": (heads, width) if bias else None}
        for name in self.NAMES:
            shape = shapes.get(name)
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))
        self.reset()

    def reset(self):
        with torch.no_grad():
            for name, x in self.named_parameters(recurse=False):
                if self.kind == "conv" and name == "w1":
                    x.fill_(1 / self.block)
                elif name in ("b1", "b2"):
                    x.zero_()
                else:
                    x.normal_(std=0.02 if name == "pos" else x.shape[-1] ** -0.5)

    def given(self):
        found = {name: getattr(self, name) for name in self.NAMES if getattr(self, name) is not None}
        return self.kind, {name: x[:, None] if name in ("b1", "b2") else x for name, x in found.items()}

    def forward(self, x):
        """The compressed rows of x; of None what nsa.torch needs for them. It is asked for by a call, in front of which
        accelerate fetches weights that lie elsewhere."""
        if x is None:
            return self.given()
        if x.shape[1] < self.block:
            return x[:, :0]
        rows = x.unfold(1, self.block, self.stride).transpose(-1, -2)  # (B, N, Hk, l, D)
        if self.kind == "mean":
            return rows.mean(-2)
        if self.kind == "conv":
            y = torch.einsum("bnhld,hld->bnhd", rows, self.w1)
            return y if self.b1 is None else y + self.b1
        y = torch.einsum("bnhf,hof->bnho", (rows + self.pos).flatten(3), self.w1) + self.b1
        y = torch.einsum("bnhf,hof->bnho", F.silu(y), self.w2)
        return y if self.b2 is None else y + self.b2


class NSAAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer, self.kind, self.pairs = config, layer, config.attention_of(layer), config.rope["pairs"]
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.sparse = self.kind in ("nsa", "cmp+slc")
        self.count = 3 if self.kind == "nsa" else 2  # branches, if there are any
        self.branches = ["_" + b for b in BRANCHES[:self.count]] if self.sparse and not config.shared_kv else [""]
        self.W_Q = nn.Linear(width, heads * config.head_dim, bias=False)
        for name in self.branches:
            setattr(self, "W_K" + name, nn.Linear(width, groups * config.head_dim, bias=False))
            setattr(self, "W_V" + name, nn.Linear(width, groups * config.v_head_dim, bias=False))
        if self.sparse:
            self.phi_k = NSAPhi(config, config.head_dim, bias=False)
            self.phi_v = NSAPhi(config, config.v_head_dim, bias=True)
            if config.gate_form == "linear":
                self.gate = nn.Linear(width, heads * self.count, bias=False)
            else:
                half = config.head_dim // 2
                self.gate = nn.ModuleDict({"fc1": nn.Linear(config.head_dim, half), "fc2": nn.Linear(half, self.count)})
        self.q_norm = self.k_norm = None  # of each head, before the gate and RoPE
        if config.qk_norm:
            self.q_norm = NSARMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = NSARMSNorm(config.head_dim, config.rms_norm_eps)
        self.out = nn.Linear(heads * config.v_head_dim, width, bias=False)

    def logits_of_gates(self, x, q):
        """(B, Q, H or Hk, branches), from q before positions turn it."""
        if self.config.gate_form == "linear":
            return self.gate(x).unflatten(-1, (-1, self.count))
        mean = q.unflatten(2, (self.config.num_key_value_heads, -1)).mean(3)
        return self.gate["fc2"](F.silu(self.gate["fc1"](mean)))

    def keys(self, x, first, rotated_by, past):
        """k and v of each branch, all tokens so far; the cache holds the branches' heads side by side."""
        config = self.config
        k = [getattr(self, "W_K" + n)(x).unflatten(-1, (-1, config.head_dim)) for n in self.branches]
        v = [getattr(self, "W_V" + n)(x).unflatten(-1, (-1, config.v_head_dim)) for n in self.branches]
        k, v = torch.cat(k, 2), torch.cat(v, 2)
        k = turn(k if self.k_norm is None else self.k_norm(k).to(v.dtype), rotated_by, self.pairs)
        if past is not None:
            k, v = remember(k, v, first, past, self.layer)
        return [x.split(config.num_key_value_heads, 2) * (1 if len(self.branches) > 1 else 3) for x in (k, v)]

    def forward(self, x, first, begins, rotated_by, past):
        config = self.config
        q = self.W_Q(x).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q = q if self.q_norm is None else self.q_norm(q).to(q.dtype)
        gates = self.logits_of_gates(x, q) if self.sparse else None
        q = turn(q, rotated_by, self.pairs)
        k, v = self.keys(x, first, rotated_by, past)
        return self.out(self.attend(q, k, v, gates, first, begins).flatten(2))

    def attend(self, q, k, v, gates, first, begins):
        """Rows with as much padding in front go together, without it: each sequence is computed as it is alone."""
        by_library = library is not None and q.device.type == "cpu"
        compute = self.by_library if by_library else self.by_torch
        if begins is None:
            return compute(q, k, v, gates, first)
        out = q.new_zeros((*q.shape[:3], self.config.v_head_dim))
        for begin in set(begins):
            rows = torch.tensor([i for i, b in enumerate(begins) if b == begin], device=q.device)
            skip = max(begin - first, 0)
            if skip >= q.shape[1]:
                continue
            some = [[y[rows, begin:] for y in x] for x in (k, v)]
            some_gates = None if gates is None else gates[rows, skip:]
            out[rows, skip:] = compute(q[rows, skip:], *some, some_gates, max(first - begin, 0))
        return out

    def by_torch(self, q, k, v, gates, first):
        config = self.config
        if not self.sparse:
            return attend_dense(q, k[0], v[0], first, config.window if self.kind == "window" else 0)
        gates = gates.sigmoid() if config.gate == "sigmoid" else gates.softmax(-1)
        gates = gates.repeat_interleave(config.num_attention_heads // gates.shape[2], 2)
        return attend_sparse(q, k[1:], v[1:], self.phi_k(k[0]), self.phi_v(v[0]), gates, first, config)

    def by_library(self, q, k, v, gates, first):
        config = self.config
        if self.kind == "full":
            return library.attend_dense(q, k[0], v[0], first=first)[0]
        if self.kind == "window":
            return library.attend_win(q, k[0], v[0], first=first, window=config.window)[0]
        window = config.window
        if self.count == 2:  # a window of one token, whose gate is shut: the logit's exp and its sigmoid are 0
            gates, window = torch.cat((gates, torch.full_like(gates[..., :1], -1e4)), -1), 1
        return library.attention(q, k[0], v[0], k[1], v[1], k[-1], v[-1], gates, phi_k=self.phi_k(None),
                                 phi_v=self.phi_v(None), first=first, gate=config.gate, cmp_block=config.cmp_block,
                                 cmp_stride=config.cmp_stride, slc_block=config.slc_block, slc_count=config.slc_count,
                                 slc_init=config.slc_init, slc_local=config.slc_local, window=window)


class NSAMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.gate = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)) if self.gate is None else F.silu(self.gate(x)) * self.fc1(x))


class NSABlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.norm1 = NSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = NSAAttention(config, layer)
        self.norm2 = NSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = NSAMLP(config)

    def forward(self, x, first, begins, rotated_by, past):
        x = x + self.attn(self.norm1(x), first, begins, rotated_by, past)
        return x + self.mlp(self.norm2(x))


class NSABackbone(nn.Module):
    """The model without lm_head, which trainers call that compute the loss themselves (TRL), and others freeze. Made anew
    for who asks: the modules are the model's own."""

    _tp_plan = _pp_plan = None

    def __init__(self, model):
        super().__init__()
        self.config, self.embed, self.blocks, self.norm = model.config, model.embed, model.blocks, model.norm
        self.whole = (model,)  # not a part of this one

    def forward(self, *arguments, **given):
        given.update(output_hidden_states=True, logits_to_keep=1, return_dict=True)
        out = NSAForCausalLM.forward(self.whole[0], *arguments, **given)
        return BaseModelOutputWithPast(last_hidden_state=out.hidden_states[-1])


listed[NSAConfig.model_type] = "NSAForCausalLM"


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NSAConfig
    _no_split_modules = ["NSABlock"]
    _tied_weights_keys = {"lm_head.weight": "embed.weight"}  # where config.tie_word_embeddings says so
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # num_items_in_batch, of Trainer

    def __init__(self, config):
        super().__init__(config)
        config.check()
        config.warn()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(NSABlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = NSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.rope = frequencies(config.rope, config.head_dim)  # PyTorch 2.4 compiles no dict of a config
        self.made_of = copy.deepcopy({name: getattr(config, name) for name in MADE_OF})
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, NSARMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, NSAPhi):
            module.reset()

    @property
    def base_model(self):
        return NSABackbone(self)

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, embed):
        self.embed = embed

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def create_masks_for_generate(self, attention_mask=None, **kwargs):
        """For static caches transformers would make a mask of every key for every query; forward reads padding."""
        return attention_mask

    def prepare_inputs_for_generation(self, input_ids, *args, attention_mask=None, inputs_embeds=None, **kwargs):
        # A chunk of a long prompt (prefill_chunk_size) may have no token of a short row.
        if attention_mask is not None and bool(((attention_mask[:, -1] == 0) & (attention_mask != 0).any(1)).any()):
            raise ValueError("attention_mask: a prompt ends with padding, and generate goes on behind it; padding must "
                             "stand in front (tokenizer.padding_side = 'left')")
        for name in ("tokenizer", "assistant_tokenizer"):  # of stop_strings, which reach the model with the rest
            kwargs.pop(name, None)
        return super().prepare_inputs_for_generation(input_ids, *args, attention_mask=attention_mask,
                                                     inputs_embeds=inputs_embeds, **kwargs)

    def _get_static_cache_init_shape(self):
        """None: a static cache takes the shapes of its layers, which differ, from their first keys."""

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        if generation_config.assistant_early_exit is not None:
            raise NotImplementedError("assistant_early_exit: this model has no exit before its last layer; must be None, "
                                      "assistant_model or prompt_lookup_num_tokens may guess")
        return super()._get_candidate_generator(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError("generate_batch, cache_implementation 'paged': this model reads no pages; must be generate, "
                                  "with a dynamic or a static cache")

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, return_dict=None, output_hidden_states=None,
                output_attentions=None, token_type_ids=None, num_items_in_batch=None, cache=None,
                cache_position=None, **kwargs):
        """As transformers' decoders. labels: the loss is the mean over labels, or their sum over num_items_in_batch.
        Padding in front of a sequence's tokens or behind them, by attention_mask, changes nothing of their logits."""
        refuse(output_attentions=output_attentions or self.config.output_attentions, **kwargs)
        if not is_compiling():
            self.check_config()
        if token_type_ids is not None and bool((token_type_ids != 0).any()):
            raise ValueError("token_type_ids: must be 0, a text has no parts")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: one of them must be given")
        if past_key_values is not None and cache is not None and cache is not past_key_values:
            raise ValueError("past_key_values, cache: two caches, must be one (PEFT may put its prefix into the first alone)")
        past = self.cache_of(past_key_values if cache is None else cache, use_cache)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        first = 0 if past is None else int(past.get_seq_length())
        if x.dim() != 3:
            raise ValueError("input_ids, inputs_embeds: must be (B, T), and (B, T, hidden_size)")
        last = first + x.shape[1]
        if cache_position is not None and cache_position.tolist() != list(range(first, last)):
            raise ValueError(f"cache_position: must be the tokens' places in the cache, {first} .. {last - 1}")
        begins, places = places_of(attention_mask, position_ids, first, *x.shape[:2])
        rotated_by = rotation(*self.rope, places, x)
        states = [x]
        for block in self.blocks:
            if self.recomputes():
                x = self._gradient_checkpointing_func(block.__call__, x, first, begins, rotated_by, past)
            else:
                x = block(x, first, begins, rotated_by, past)
            states.append(x)
        states[-1] = x = self.norm(x)
        kept = x[:, -logits_to_keep or None:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        logits = self.lm_head(kept)
        loss = None if labels is None else loss_of(logits, labels, num_items_in_batch)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=tuple(states) if wants_states else None,
                                     **{CACHE: past})
        as_tuple = return_dict is False or (return_dict is None and getattr(self.config, "return_dict", True) is False)
        return out.to_tuple() if as_tuple else out

    def check_config(self):
        """Edited afterwards they would do nothing, or half of what they say."""
        for name, value in self.made_of.items():
            if getattr(self.config, name) != value:
                raise ValueError(f"config.{name}: {getattr(self.config, name)!r}, and the model was made with {value!r}, "
                                 f"which stays; must be given to from_pretrained({name}=...)")

    def recomputes(self):
        """Whether backward will compute the layers again: not within generate, which records nothing, of a model in training."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def cache_of(self, past, use_cache):
        """The cache to read and to extend, or None."""
        if self.recomputes():
            if past is not None and int(past.get_seq_length()):
                raise ValueError("past_key_values: a layer that is computed again would append its keys twice; must be "
                                 "None with gradient checkpointing")
            return None
        if past is not None and not hasattr(past, "get_seq_length"):
            raise ValueError(f"past_key_values: {type(past).__name__}, must be a Cache of transformers (DynamicCache, "
                             "StaticCache)")
        if past is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            from transformers import DynamicCache
            past = DynamicCache()
        return past


def refuse(**given):
    """Keywords that would change a result here, were they known: None, False and what is so anyway do not."""
    for name, value in given.items():
        if value is None or value is (name == "is_causal"):
            continue
        packed = name.startswith(("cu_seq", "max_length"))
        raise ValueError(f"{name}: this model has no use for it; must be None"
                         + "; a row holds one text: packing, padding_free must be off" * packed)


def remember(k, v, first, past, layer):
    """k and v (B, T, H, D) of all tokens so far, these among them, from a cache and now in it."""
    count, widths, more = k.shape[1], (k.shape[-1], v.shape[-1]), ()
    if getattr(past, "is_compileable", False):  # static: in transformers 4 of one width, and told where to write
        k, v = (F.pad(y, (0, max(widths) - y.shape[-1])) for y in (k, v))
        more = ({"cache_position": torch.arange(first, first + count, device=k.device)},)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    check_held(past, layer, keys=k, values=v)
    k, v = past.update(k, v, layer, *more)
    if k.shape[2] < first + count:
        raise ValueError(f"past_key_values: {type(past).__name__} kept {k.shape[2]} of {first + count} tokens; must be "
                         "one that keeps all (DynamicCache, StaticCache)")
    return [y[:, :, :first + count, :width].transpose(1, 2) for y, width in zip((k, v), widths)]


def check_held(past, layer, **rows):
    """What a cache has of a layer, against the rows that it would get behind it."""
    for held in getattr(past, "layers", [])[layer:layer + 1]:
        for name, x in rows.items():
            there, wanted = getattr(held, name, None), (x.shape[0], x.shape[1], x.shape[3])
            if there is not None and there.dim() == 4 and (there.shape[0], there.shape[1], there.shape[3]) != wanted:
                raise ValueError(f"past_key_values: {name} {tuple(there.shape)} of layer {layer}, must be {wanted[:2]} of any "
                                 f"tokens of {wanted[2]} numbers, as this model makes them (PEFT's prefix tuning makes others)")


def places_of(mask, positions, first, rows, count):
    """(padding in front of each row or None, the places (B or 1, T) of these tokens in their sequences). A token's
    block is its place in the sequence, so positions of one's own would move it."""
    places, begins = torch.arange(first, first + count)[None], None
    seen = torch.ones((rows, count), dtype=torch.bool)
    if mask is not None:
        if not torch.is_tensor(mask) or tuple(mask.shape) != (rows, first + count):
            raise ValueError(f"attention_mask: must be (B, T) with the tokens of the cache, {(rows, first + count)}")
        mask = mask.cpu() != 0
        begin, some = (mask.cumsum(1) == 0).sum(1), mask.sum(1)
        every = torch.arange(first + count)
        if not bool((mask == ((every >= begin[:, None]) & (every < (begin + some)[:, None]))).all()):
            raise ValueError("attention_mask: padding must stand in front of a sequence's tokens or behind them")
        if bool(begin.any()):
            begins, places = begin.tolist(), (places - begin[:, None]).clamp(min=0)
        seen = mask[:, first:]
    if positions is not None and not bool(((positions.cpu() == places) | ~seen).all()):
        raise ValueError(f"position_ids: must be the tokens' places, {first} .. {first + count - 1} without padding")
    return begins, places


def loss_of(logits, labels, count):
    """Of each token by the logits in front of it. With gradient accumulation a step's labels are counted by Trainer."""
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"labels: must be {tuple(logits.shape[:2])}, a label for each row of logits, logits_to_keep 0")
    labels = labels[:, 1:].to(logits.device).flatten()
    how = "mean" if count is None else "sum"
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, ignore_index=-100, reduction=how)
    return loss if count is None else loss / (count.to(loss.device) if torch.is_tensor(count) else count)
