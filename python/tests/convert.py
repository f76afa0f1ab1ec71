"""`convert` as others use it. Export: checkpoints of the C trainer with every option of its model, opened by
modeling_nsa.py, whose logits must be those of the C program. Import: random weights of Llama's shape and of nsa-vibe's
names, in files as public models have them; their logits in the C program must be those of a reference of their own.

    convert.py TRAIN_TINY CONVERT LOGITS GENERATE INSPECT     run.py calls it, with the package nsa in the path

With the environment variable TRANSFORMERS the real transformers opens the folders; without it a stand-in of a few lines
does, for CI has only Debian's torch. Attention runs in plain PyTorch and through nsa.torch.
"""
import collections
import importlib.util
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import types
import unittest

import torch

TOKENS, LARGEST = 200, 1e-4  # of a difference between two logits
SMALL = """--dim 32 --layers 2 --heads 4 --kv-groups 2 --d-k 8 --d-v 12 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 --nsa-n-sel 4
    --nsa-w 24 --seq-len 64 --batch-size 2 --steps 40 --lr 3e-2 --threads 1 --eval-every 0""".split()
CASES = {
    "mean": "",
    "conv": "--nsa-phi conv --nsa-gate softmax --rope-pairs halves --tied-embeddings",
    "mlp": "--nsa-phi mlp --rope-scaling ntk --rope-factor 4 --heads 6 --rope-base 5000",
    "yarn": "--kv-groups 1 --rope-scaling yarn --rope-factor 4 --rope-trained-context 64 --nsa-l 16 --nsa-d 16",
    "llama": "--shared-kv --mlp swiglu --mlp-hidden 48 --nsa-gate-form linear --norm-eps 1e-5 --nsa-n-init 0"
             " --nsa-n-local 1 --nsa-l 16 --nsa-d 16 --rope-pairs halves --rope-base 500000 --tied-embeddings --d-v 8",
    "layers": "--attention window,cmp+slc,nsa,full --layers 4 --nsa-phi mlp --qk-norm",
    "full": "--attention full --rope-scaling linear --rope-factor 2",
    "window": "--attention window --tied-embeddings --rope-pairs halves",
    "llama3": "--rope-scaling llama3 --rope-factor 8 --rope-trained-context 64 --rope-fast 5 --rope-pairs halves",
}


# ---- A stand-in for transformers ------------------------------------------------------------------------


class StandInConfig:
    output_attentions = output_hidden_states = False

    def __init__(self, tie_word_embeddings=True, **kwargs):
        self.tie_word_embeddings = tie_word_embeddings
        vars(self).update(kwargs)


class StandInModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        self.apply(self._init_weights)


class StandInOutput:
    def __init__(self, **fields):
        vars(self).update(fields)


def stand_in():
    top, outputs = types.ModuleType("transformers"), types.ModuleType("transformers.modeling_outputs")
    top.PretrainedConfig, top.PreTrainedModel, top.GenerationMixin = StandInConfig, StandInModel, object
    top.DynamicCache = StandInCache
    outputs.CausalLMOutputWithPast = outputs.BaseModelOutputWithPast = StandInOutput
    sys.modules.update({"transformers": top, "transformers.modeling_outputs": outputs})


class StandInCache:
    """What modeling_nsa.py asks of a cache: DynamicCache's update and get_seq_length."""

    def __init__(self):
        self.rows = {}

    def get_seq_length(self):
        return self.rows[0][0].shape[2] if self.rows else 0

    def update(self, k, v, layer):
        if layer in self.rows:
            k, v = (torch.cat(pair, 2) for pair in zip(self.rows[layer], (k, v)))
        self.rows[layer] = k, v
        return k, v


def open_by_stand_in(folder):
    """(model, its module): config.json to NSAConfig, model.safetensors to its tensors, by name and all of them."""
    spec = importlib.util.spec_from_file_location("modeling_nsa", folder / "modeling_nsa.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["auto_map"] == {"AutoConfig": "modeling_nsa.NSAConfig",
                                    "AutoModelForCausalLM": "modeling_nsa.NSAForCausalLM"}
    model = module.NSAForCausalLM(module.NSAConfig(**settings))
    found = read_safetensors(folder / "model.safetensors")
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed.weight
        found.update({name: found[of] for name, of in model._tied_weights_keys.items()})
    model.load_state_dict(found, strict=True)
    return model, module


def read_safetensors(path):
    raw = path.read_bytes()
    length, = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8:8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, of in header.items():
        begin, end = of["data_offsets"]
        assert of["dtype"] == "F32", name
        values = torch.frombuffer(bytearray(raw[8 + length + begin:8 + length + end]), dtype=torch.float32)
        found[name] = values.reshape(of["shape"])
    return found


def open_by_transformers(folder):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    text = "caf\u00e9 \u2260 \U0001f600\n \x00 end"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text, ids
    return model, sys.modules[type(model).__module__]


# ---- Comparisons ----------------------------------------------------------------------------------------


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stderr}"


def logits_of(program, checkpoint, tokens, folder):
    """Those of the C program, (T, vocab)."""
    (folder / "tokens").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    run(program, checkpoint, folder / "tokens", folder / "logits")
    raw = bytearray((folder / "logits").read_bytes())
    return torch.frombuffer(raw, dtype=torch.float32).reshape(len(tokens), -1)


def far(what, got, want):
    """The largest difference, which must be small beside logits that differ from each other."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    worst, spread = float((got - want).abs().max()), float(want.std())
    assert spread > 0.5, f"{what}: logits of a spread of {spread} show nothing"
    assert worst <= LARGEST, f"{what}: {worst} at {int((got - want).abs().argmax())}, more than {LARGEST}"
    return worst


@torch.no_grad()
def in_chunks(model, cache, tokens, size):
    parts = tokens.split(size, 1)
    return torch.cat([model(some, past_key_values=cache, use_cache=True).logits for some in parts], 1)[0]


def compare(name, model, module, want, tokens, real):
    tokens = torch.tensor(tokens)[None]
    cache = (sys.modules["transformers"].DynamicCache if real else StandInCache)
    worst = []
    for library in (None, module.library):
        if library is None and worst:
            raise AssertionError("the package nsa is not installed: modeling_nsa.py did not find it")
        module.library = library
        with torch.no_grad():
            out = model(tokens, labels=tokens)
        worst.append(far(f"{name}, {library}", out.logits[0], want))
        expected = torch.nn.functional.cross_entropy(want[:-1], tokens[0, 1:])
        assert abs(float(out.loss - expected)) < 1e-4, (name, out.loss, expected)
        worst.append(far(f"{name}, {library}, in chunks", in_chunks(model, cache(), tokens, 37), want))
    return worst


def check_gradients(model, module, tokens):
    """Plain PyTorch's gradients against nsa.torch's."""
    found, library = [], module.library
    for module.library in (None, library):
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert model(tokens[:, :0]).logits.shape[1] == 0
    for name, g in found[0].items():
        h = found[1][name]
        assert float(g.norm()) > 0 and float((g - h).norm() / g.norm()) < 1e-4, (name, g.norm(), (g - h).norm())


def check_refusals(model, tokens):
    hole = torch.ones_like(tokens)
    hole[0, 1] = 0
    for what, arguments in (("attention_mask", {"attention_mask": hole}),
                            ("position_ids", {"position_ids": torch.arange(tokens.shape[1])[None] + 1}),
                            ("cache_position", {"cache_position": torch.arange(tokens.shape[1]) + 1}),
                            ("past_key_values", {"past_key_values": ((tokens, tokens),)}),
                            ("input_ids", {"input_ids": tokens[0]}),
                            ("nonsense", {"nonsense": 1})):
        try:
            model(**{"input_ids": tokens, **arguments})
        except ValueError as error:
            assert what in str(error), error
        else:
            raise AssertionError(f"{what} was not refused")


def check_settings(model):
    """What config.json may say and the model does not do, by name: nothing of it is ignored."""
    plain = {name: x for name, x in vars(model.config).items() if not name.startswith("_")}
    assert type(model)(type(model.config)(**plain)) is not None
    assert type(model.config)(rope={"base": 5000.0}).rope["pairs"] == "interleaved"  # as if given without it
    for name, value in (("window", 0), ("cmp_stride", 3), ("slc_block", 6), ("slc_count", 0), ("slc_count", 2),
                        ("attention", ["full"] * 9), ("attention", "half"), ("rope_scaling", {"rope_type": "linear"}),
                        ("rope_theta", 5e5), ("sliding_window", 8), ("rope", {**model.config.rope, "pairs": "half"}),
                        ("rope", {**model.config.rope, "scaling": "longrope"}),
                        ("rope", {**model.config.rope, "ntk_alpha": 2}), ("rope", {"base": 1.0}),
                        ("rope", {**model.config.rope, "scaling": "linear", "factor": 0.5}),
                        ("rope", {"scaling": "yarn", "factor": 2.0}), ("num_key_value_heads", 5), ("head_dim", 7)):
        try:
            type(model)(type(model.config)(**{**plain, "slc_init": 1, "slc_local": 2, name: value}))
        except ValueError as error:
            assert str(error).startswith(name), error
        else:
            raise AssertionError(f"{name} = {value} was not refused")
    with unittest.TestCase().assertLogs(type(model).__module__, "WARNING") as heard:
        type(model)(type(model.config)(**{**plain, "cmp_blocks": 32, "final_logit_softcapping": 30.0, "pad_token_id": 0,
                                          "attention_bias": False, "architectures": ["a"], "loss_type": "x"}))
    assert [line.split(": ")[1] for line in sorted(heard.output)] == ["cmp_blocks", "final_logit_softcapping"], heard


@torch.no_grad()
def check_padding(model, module, tokens):
    """Rows of a padded batch have the logits that they have alone; by both ways, whole and through a cache."""
    rows, library = [tokens[0, :count] for count in (120, 31, 7)], module.library
    for module.library in (None, library):
        for front in (True, False):
            batch, mask = torch.zeros(3, 120, dtype=torch.long), torch.zeros(3, 120, dtype=torch.long)
            places = [slice(120 - len(row), 120) if front else slice(0, len(row)) for row in rows]
            for i, row in enumerate(rows):
                batch[i, places[i]], mask[i, places[i]] = row, 1
            cache = StandInCache()
            made = [model(batch, attention_mask=mask).logits]
            made.append(torch.cat([model(batch[:, at:at + 50], attention_mask=mask[:, :at + 50], past_key_values=cache,
                                         use_cache=True).logits for at in range(0, 120, 50)], 1))
            for i, row in enumerate(rows):
                want = model(row[None]).logits[0]
                for got in made:
                    assert float((got[i, places[i]] - want).abs().max()) < 1e-5, (front, i)


def check_ties(model, module):
    """Equal scores, or none: the lower blocks. Compressed rows are one to a block, the query in block 49."""
    config = type(model.config)(cmp_block=16, cmp_stride=16, slc_block=16, slc_count=8)
    place = torch.tensor([49 * 16])
    for score, want in ((torch.ones(49), [0, 1, 2, 3, 4, 5, 48, 49]), (torch.zeros(49), [0, 1, 2, 3, 4, 5, 48, 49]),
                        (torch.arange(49.) // 2, [0, 42, 44, 45, 46, 47, 48, 49]),
                        (torch.full((49,), math.nan), [0, 1, 2, 3, 4, 5, 48, 49])):
        chosen = module.select(score.reshape(1, 1, 1, 1, 49), place, 50 * 16, config)
        assert chosen.flatten().nonzero().flatten().tolist() == want, (score, chosen.flatten().nonzero().flatten())


def check_generate(model, tokens):
    """Greedy tokens of generate() from its cache are those without one."""
    made = [model.generate(tokens[:, :50], max_new_tokens=40, do_sample=False, use_cache=cached)
            for cached in (True, False)]
    assert made[0].shape == (1, 90) and bool((made[0] == made[1]).all()), made


# ---- Import ---------------------------------------------------------------------------------------------

# NSA-1B's shape, small: one block size for all, groups of 16 heads, tied, an eps and a base of its own.
LLAMA = {"architectures": ["LlamaNSAForCausalLM"], "model_type": "llama-nsa", "attention_bias": False, "head_dim": 8,
         "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 4096,
         "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 2,
         "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "vocab_size": 256, "block_size": 16, "block_counts": 4, "window_size": 24}


def random_llama(config, seed):
    """Tensors by Llama's names, in bf16; large enough for logits and choices of blocks that differ."""
    draw = torch.Generator().manual_seed(seed)
    dim, hidden, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (heads * width, dim), "self_attn.k_proj": (groups * width, dim),
              "self_attn.v_proj": (groups * width, dim), "self_attn.o_proj": (dim, heads * width),
              "mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim), "mlp.down_proj": (dim, hidden)}
    if "block_size" in config:
        shapes["self_attn.g_proj"] = (3 * heads, dim)
    found = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], dim, generator=draw)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=draw) * 1.5 * shape[1] ** -0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = 1 + 0.3 * torch.randn(dim, generator=draw)
    found["model.norm.weight"] = 1 + 0.3 * torch.randn(dim, generator=draw)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = torch.randn(config["vocab_size"], dim, generator=draw)
    return {name: x.to(torch.bfloat16) for name, x in found.items()}


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, x in tensors.items():
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[x.dtype]
        bits = torch.int16 if x.element_size() == 2 else torch.int32
        raw = bytes(x.contiguous().view(bits).numpy().tobytes())
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_llama(folder, config, tensors):
    """In two files and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, index = list(tensors), {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        some = names[i::2]
        write_safetensors(folder / file, {name: tensors[name] for name in some})
        index.update({name: file for name in some})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def softmax_over(q, keys, values, seen):
    """One query row against the keys that `seen` lists: NumPy's way, in f64."""
    if not seen:
        return torch.zeros(values.shape[-1], dtype=torch.float64), {}
    scores = keys[seen] @ q * q.shape[-1] ** -0.5
    p = torch.exp(scores - scores.max())
    p = p / p.sum()
    return p @ values[seen], dict(zip(seen, p.tolist()))


def reference_attention(q, k, v, gates, config):
    """Query by query, in f64, from the definition: blocks of one size, complete ones averaged; a query's own block and
    the best others; the window. q (T, H, D), k and v (T, Hk, D), gates (T, H, 3)."""
    tokens, heads, size = q.shape[0], q.shape[1], config["block_size"]
    groups = k.shape[1]
    out = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.float64)
    for g in range(groups):
        pooled_k = torch.stack([k[i:i + size, g].mean(0) for i in range(0, tokens - size + 1, size)])
        pooled_v = torch.stack([v[i:i + size, g].mean(0) for i in range(0, tokens - size + 1, size)])
        for t in range(tokens):
            mine = range(g * heads // groups, (g + 1) * heads // groups)
            complete, own, score = list(range((t + 1) // size)), t // size, {}
            cmp = {}
            for h in mine:
                cmp[h], p = softmax_over(q[t, h], pooled_k, pooled_v, complete)
                for block, share in p.items():
                    score[block] = score.get(block, 0) + share
            others = sorted((b for b in range(own)), key=lambda b: (-score.get(b, 0), b))
            blocks = sorted(others[:config["block_counts"] - 1] + [own])
            chosen = [s for b in blocks for s in range(b * size, min((b + 1) * size, t + 1))]
            near = list(range(max(0, t - config["window_size"] + 1), t + 1))
            for h in mine:
                slc, win = (softmax_over(q[t, h], k[:, g], v[:, g], seen)[0] for seen in (chosen, near))
                out[t, h] = gates[t, h, 0] * cmp[h] + gates[t, h, 1] * slc + gates[t, h, 2] * win
    return out


def reference_llama(config, tensors, tokens):
    """The logits of Llama's shape with sparse attention, in f64."""
    w = {name: x.double() for name, x in tensors.items()}

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[name]

    def turned(x):
        half = config["head_dim"] // 2
        rate = torch.tensor([config["rope_theta"] ** (-i / half) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * rate
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1)

    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = ((y @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(len(tokens), -1, config["head_dim"])
                   for n in "qkv")
        gates = torch.sigmoid(y @ w[at + "self_attn.g_proj.weight"].T).reshape(len(tokens), -1, 3)
        attended = reference_attention(turned(q), turned(k), v, gates, config)
        x = x + attended.reshape(len(tokens), -1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T


def check_import(programs, folder, tokens):
    """bf16 in two files to the C program's logits; then generate, inspect, and out again to the same weights."""
    train, convert, logits, generate, inspect = programs
    tokens = tokens[:150]
    tensors = random_llama(LLAMA, 5)
    write_llama(folder / "llama_nsa", LLAMA, tensors)
    run(convert, "import", folder / "llama_nsa", folder / "imported")
    got = logits_of(logits, folder / "imported", tokens, folder)
    want = reference_llama(LLAMA, tensors, tokens)
    worst = far("import", got.double(), want)
    print(f"import: largest difference of a logit {worst:.2g}, spread {float(want.std()):.2g}")
    run(generate, folder / "imported", "--prompt", "7 is the square of", "--length", "20")
    run(inspect, folder / "imported", "--prompt", "81 is the square of 9, odd. " * 4, "--out", folder / "inspect.json")
    run(convert, "export", folder / "imported", folder / "again")
    again = read_safetensors(folder / "again" / "model.safetensors")
    assert bool((again["blocks.1.attn.W_K.weight"] == tensors["model.layers.1.self_attn.k_proj.weight"].float()).all())
    run(train, "--init-from", folder / "imported", "--data", folder / "text", "--out-dir", folder / "tuned", "--steps",
        "1", "--seq-len", "64", "--threads", "1")


# ---- A tokenizer ----------------------------------------------------------------------------------------

# Llama 3's splitter; and for ASCII in the words of Python's re.
SPLITTER = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+")
IN_ASCII = SPLITTER.replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9")
for class_of in ("a-zA-Z", "0-9"):
    IN_ASCII = re.sub(r"(?<![\[a-zA-Z0-9-])" + class_of + r"(?![\]a-zA-Z0-9])", f"[{class_of}]", IN_ASCII)
FIRST, LAST = "<|begin_of_text|>", "<|end_of_text|>"


def spelled(data):
    """Bytes in the printable characters of byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return "".join(chr(b) if b in plain else chr(256 + others.index(b)) for b in data)


def joined(parts, pair):
    found = []
    for part in parts:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return found


def make_tokenizer(text):
    """(tokenizer.json as a dict, an encoder): 40 merges of the most frequent pairs, a whole word beside them."""
    words = [[spelled(bytes([b])) for b in word.encode()] for word in re.findall(IN_ASCII, text)]
    merges = []
    while len(merges) < 40:
        counts = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        words = [joined(word, merges[-1]) for word in words]
    vocab = {spelled(bytes([b])): b for b in range(256)}
    for token in [a + b for a, b in merges] + [spelled(b" square,")]:
        vocab[token] = len(vocab)
    added = [{"id": len(vocab) + i, "content": content, "special": True, "normalized": False, "lstrip": False,
              "rstrip": False, "single_word": False} for i, content in enumerate((FIRST, LAST, "<|end_of"))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITTER}, "behavior": "Isolated", "invert": False}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": FIRST, "type_id": 0}},
                                                         {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {FIRST: {"id": FIRST, "ids": [added[0]["id"]], "tokens": [FIRST]}}}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
             "post_processor": {"type": "Sequence", "processors": [byte_level, template]}, "decoder": byte_level,
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                       "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                       "vocab": vocab, "merges": [list(pair) for pair in merges]}}

    def encode(text):
        ids = [added[0]["id"]]
        for part in re.split("(" + "|".join(re.escape(x["content"]) for x in added) + ")", text):
            special = [x["id"] for x in added if x["content"] == part]
            for word in [] if special else re.findall(IN_ASCII, part):
                parts = [spelled(bytes([b])) for b in word.encode()]
                for pair in [] if "".join(parts) in vocab else merges:
                    parts = joined(parts, pair)
                ids += [vocab[p] for p in (["".join(parts)] if "".join(parts) in vocab else parts)]
            ids += special
        return ids

    return whole, encode


def check_tokenizer(programs, folder, text, real):
    """tokenizer.json as Llama 3 has it: what inspect says a prompt's tokens are."""
    _, convert, logits, generate, inspect = programs
    whole, encode = make_tokenizer(text[:4000])
    config = {**LLAMA, "vocab_size": 304, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    write_llama(folder / "bpe", config, random_llama(config, 7))
    (folder / "bpe" / "tokenizer.json").write_text(json.dumps(whole))
    run(convert, "import", folder / "bpe", folder / "bpe_in")
    prompt = f"It's 1234 squares, 81 is the square, I'LL.{LAST}\n\n  And  <|end_of 7?! {LAST}x is the square of\t 3 "
    run(inspect, folder / "bpe_in", "--prompt", prompt, "--out", folder / "bpe.json")
    pieces = [bytes.fromhex(piece) for piece in json.loads((folder / "bpe.json").read_text())["text"]]
    names = {i: token for token, i in whole["model"]["vocab"].items()}
    of_char = {spelled(bytes([b])): b for b in range(256)}
    special = {x["id"]: x["content"].encode() for x in whole["added_tokens"]}
    want = [special.get(i) or bytes(of_char[c] for c in names[i]) for i in encode(prompt)]
    assert pieces == want, (pieces, want)
    run(convert, "export", folder / "bpe_in", folder / "bpe_out")
    assert json.loads((folder / "bpe_out" / "tokenizer.json").read_text()) == whole
    for key, value, words in (("normalizer", {"type": "NFKC"}, "normalizer"), ("added_tokens", [], "names a token"),
                              ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer"),
                              ("model", {**whole["model"], "byte_fallback": True}, "byte_fallback"),
                              ("model", {**whole["model"], "merges": [["a", "zz"]]}, "merges, number 0")):
        (folder / "bpe" / "tokenizer.json").write_text(json.dumps({**whole, key: value}))
        refused(words, convert, "import", folder / "bpe", folder / "bpe_bad")
    if real:
        import transformers
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "bpe_out", trust_remote_code=True)
        assert tokenizer(prompt)["input_ids"] == encode(prompt), (tokenizer(prompt)["input_ids"], encode(prompt))


def check_vibe(programs, folder, tokens):
    """The names of nsa-vibe's byte model: W_K_sel for W_K_slc, norm_f for norm; one file, settings by hand. In f32
    nothing may change; f16 must be what its numbers are in f32."""
    train, convert, logits = programs[:3]
    run(train, *SMALL, "--nsa-gate", "softmax", "--data", folder / "text", "--out-dir", folder / "byte")
    run(convert, "export", folder / "byte", folder / "hf_byte")
    tensors = read_safetensors(folder / "hf_byte" / "model.safetensors")
    theirs = {name.replace("_slc.", "_sel."): x for name, x in tensors.items()}
    theirs["norm_f.weight"] = theirs.pop("norm.weight")
    half = {name: x.half() for name, x in theirs.items()}
    found = {"byte": logits_of(logits, folder / "byte", tokens, folder)}
    for name, some in (("f32", theirs), ("f16", half), ("wide", {name: x.float() for name, x in half.items()})):
        (folder / name).mkdir()
        write_safetensors(folder / name / "model.safetensors", some)
        shape = SMALL[:SMALL.index("--batch-size")]
        run(convert, "import", folder / name, folder / f"{name}_in", *shape, "--nsa-gate", "softmax")
        found[name] = logits_of(logits, folder / f"{name}_in", tokens, folder)
    assert bool((found["byte"] == found["f32"]).all() and (found["f16"] == found["wide"]).all()), found
    assert not bool((found["f32"] == found["f16"]).all())


def refused(words, *command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr, (words, done.returncode, done.stderr)


def check_import_refusals(convert, folder):
    """What has no counterpart, is missing, or is too much, by name."""
    tensors = random_llama(LLAMA, 5)
    for i, (change, words) in enumerate((({"hidden_act": "gelu"}, "hidden_act"), ({"mlp_bias": True}, "mlp_bias"),
                                         ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: longrope"),
                                         ({"vocab_size": "many"}, "vocab_size"), ({"block_counts": 0}, "nsa.n_sel"),
                                         ({"head_dim": 16}, "its shape is not"),
                                         ({"num_hidden_layers": 3}, "blocks.2."),
                                         ({"num_hidden_layers": 1}, "model.layers.1."))):
        write_llama(folder / f"bad{i}", {**LLAMA, **change}, tensors)
        refused(words, convert, "import", folder / f"bad{i}", folder / "none")
        assert not (folder / "none" / "checkpoints").exists(), words
    index = folder / "bad0" / "model.safetensors.index.json"
    (folder / "bad0" / "config.json").write_text(json.dumps(LLAMA))
    index.write_text(json.dumps({"weight_map": {"x": "../llama_nsa/model-00001-of-00002.safetensors"}}))
    refused("must name a file of the folder", convert, "import", folder / "bad0", folder / "none")


def check_dense(programs, folder, tokens):
    """transformers' own Llama, dense, with a head of its own."""
    import transformers
    config = {name: x for name, x in LLAMA.items() if name not in ("block_size", "block_counts", "window_size")}
    config.update(num_attention_heads=6, tie_word_embeddings=False, model_type="llama")
    config["architectures"] = ["LlamaForCausalLM"]
    write_llama(folder / "dense", config, random_llama(config, 6))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    run(programs[1], "import", folder / "dense", folder / "dense_in")
    with torch.no_grad():
        want = model(torch.tensor(tokens)[None]).logits[0]
    print(f"dense: {far('dense', logits_of(programs[2], folder / 'dense_in', tokens, folder), want):.2g}")


def main():
    programs = train, convert, logits, _, _ = sys.argv[1:6]
    real = bool(os.environ.get("TRANSFORMERS"))
    if not real:
        stand_in()
    folder = pathlib.Path(tempfile.mkdtemp())
    text = "".join(f"{i * i} is the square of {i}, {'odd' if i % 2 else 'even'}.\n" for i in range(600))
    (folder / "text").write_text(text)
    tokens = list(text.encode()[5000:5000 + TOKENS])
    for name, options in CASES.items():
        run(train, *SMALL, *options.split(), "--data", folder / "text", "--out-dir", folder / name)
        run(convert, "export", folder / name, folder / f"hf_{name}")
        model, module = (open_by_transformers if real else open_by_stand_in)(folder / f"hf_{name}")
        want = logits_of(logits, folder / name, tokens, folder)
        worst = compare(name, model.eval(), module, want, tokens, real)
        print(f"{name}: largest difference of a logit {max(worst):.2g}, spread {float(want.std()):.2g}")
        check_gradients(model, module, torch.tensor(tokens)[None])
        check_refusals(model, torch.tensor(tokens)[None])
        check_ties(model, module)
        if real:
            check_generate(model, torch.tensor(tokens)[None])
        else:
            check_padding(model, module, torch.tensor(tokens)[None])
            check_settings(model)
    check_import(programs, folder, tokens)
    check_vibe(programs, folder, tokens)
    check_tokenizer(programs, folder, text, real)
    check_import_refusals(convert, folder)
    if real:
        check_dense(programs, folder, tokens)
    return 0
