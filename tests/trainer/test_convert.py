"""convert as a program: what an import refuses and what it makes of config.json and tokenizers, exports that come back,
folders that move, what lay there before. python/tests has the logits of other programs.

    test_convert.py TRAIN_TINY CONVERT LOGITS GENERATE INSPECT [unittest's arguments]
"""
import array
import fcntl
import json
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

from poison import KINDS, change

PROGRAMS, PACK = {}, pathlib.Path(__file__).resolve().parents[2] / "examples/web/pack.py"
SMALL = """--dim 32 --layers 2 --heads 4 --kv-groups 2 --d-k 8 --d-v 12 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 --nsa-n-sel 4
    --nsa-w 24 --seq-len 64 --batch-size 2 --steps 3 --lr 3e-2 --threads 1 --eval-every 0""".split()
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
         "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
         "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02,
         "intermediate_size": 48, "max_position_embeddings": 256, "mlp_bias": False, "num_attention_heads": 4,
         "num_hidden_layers": 1, "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
         "transformers_version": "4.40.1", "use_cache": True, "vocab_size": 256}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
          "rope_type": "llama3"}


SPARSE = {**LLAMA, "block_size": 16, "block_counts": 4, "window_size": 16}  # which inspect can look into


def run(program, *words, code=0, **options):
    command = [str(word) for word in (PROGRAMS[program], *words)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), (command, done.returncode, done.stderr)
    return done


def contents(folder):
    """But for locks, which a process loses when it closes the file."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def weights_of(config):
    """Shapes by Llama's names."""
    dim, hidden = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or dim // heads
    groups = config.get("num_key_value_heads") or heads
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], dim), "model.norm.weight": (dim,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in (("input_layernorm", (dim,)), ("post_attention_layernorm", (dim,)),
                            ("self_attn.q_proj", (heads * width, dim)), ("self_attn.k_proj", (groups * width, dim)),
                            ("self_attn.v_proj", (groups * width, dim)), ("self_attn.o_proj", (dim, heads * width)),
                            ("mlp.gate_proj", (hidden, dim)), ("mlp.up_proj", (hidden, dim)),
                            ("mlp.down_proj", (dim, hidden))):
            shapes[at + name + ".weight"] = shape
        if "block_size" in config:
            shapes[at + "self_attn.g_proj.weight"] = (3 * heads, dim)
    return shapes


def write_model(folder, config, weights=True):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not weights:
        return folder
    draw, header, data = random.Random(3), {}, b""
    for name, shape in weights_of(config).items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        raw = array.array("f", [draw.gauss(0, 0.3) for _ in range(count)]).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def spelled(data):
    """Bytes in the printable characters of byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return "".join(chr(b) if b in plain else chr(256 + others.index(b)) for b in data)


def tokenizer(**changes):
    """tokenizer.json: bytes, a few merges, one added token."""
    vocab = {spelled(bytes([b])): b for b in range(256)}
    merges = [["1", "2"], ["t", "h"], ["th", "e"], [spelled(b" "), "the"], [spelled(b"\xc3"), spelled(b"\xa9")]]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
             "post_processor": None, "decoder": level, "added_tokens": [
                 {"id": len(vocab), "content": "<|endoftext|>", "special": True, "normalized": False, "lstrip": False,
                  "rstrip": False, "single_word": False}],
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                       "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                       "vocab": vocab, "merges": merges}}
    return {**whole, **changes}


DIGITS = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def saved(folder):
    state = json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())
    return state["content"]["config"]


def logits(run_folder, room, tokens=range(40, 160)):
    (room / "tokens").write_bytes(array.array("i", list(tokens)).tobytes())
    run("logits", run_folder, room / "tokens", room / "logits")
    return (room / "logits").read_bytes()


class Convert(unittest.TestCase):
    def setUp(self):
        room = tempfile.TemporaryDirectory()
        self.addCleanup(room.cleanup)
        self.room = pathlib.Path(room.name)
        (self.room / "text").write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(600)))

    def train(self, name, *options):
        run("train_tiny", *SMALL, *options, "--data", self.room / "text", "--out-dir", self.room / name)
        return self.room / name

    def refused(self, words, config, *options):
        folder = write_model(self.room / "refused", config, weights=False)
        done = run("convert", "import", folder, self.room / "none", *options, code=2)
        for word in words.split("|"):
            self.assertIn(word, done.stderr)
        self.assertFalse((self.room / "none" / "checkpoints").exists())

    def settings(self, config, *options):
        folder = write_model(self.room / "read", config)
        shutil.rmtree(self.room / "read_in", ignore_errors=True)
        run("convert", "import", folder, self.room / "read_in", *options)
        return saved(self.room / "read_in")

    # ---- Exports that come back (C3) ----

    def test_own_exports_come_back(self):
        """Equal logits, bit by bit, and equal settings."""
        for i, options in enumerate((
                "--attention full --mlp swiglu --rope-base 500000 --nsa-w 24",
                "--nsa-phi conv --nsa-gate softmax --rope-pairs halves --tied-embeddings --norm-eps 1e-5",
                "--nsa-phi mlp --rope-scaling ntk --rope-factor 4 --nsa-gate-form linear --shared-kv --mlp-hidden 40",
                "--rope-scaling yarn --rope-factor 4 --rope-trained-context 64 --rope-fast 16 --rope-slow 2",
                "--rope-scaling llama3 --rope-factor 8 --rope-trained-context 64 --rope-fast 5",
                "--attention window,cmp+slc,nsa,full,window,cmp+slc,nsa,full --layers 8 --qk-norm --nsa-n-init 0",
                "--attention window,nsa --layers 5 --nsa-n-local 1")):
            made = self.train(f"run{i}", *options.split())
            run("convert", "export", made, self.room / f"hf{i}")
            done = run("convert", "import", self.room / f"hf{i}", self.room / f"back{i}")
            self.assertNotIn("tokens are", done.stderr)
            self.assertEqual(logits(made, self.room), logits(self.room / f"back{i}", self.room), options)
            was, now = saved(made), saved(self.room / f"back{i}")
            for key in was:
                if key.startswith(("model.", "nsa.", "data.tokenizer")) and key not in ("model.vocab_size",
                                                                                        "model.mlp_hidden"):
                    self.assertEqual(was[key], now[key], key)

    def test_own_tokenizer_comes_back(self):
        folder = self.room / "tokens"
        folder.mkdir()
        whole = tokenizer(pre_tokenizer=DIGITS)
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        made = self.train("run", "--tokenizer", "gpt2", "--tokenizer-path", folder)
        run("convert", "export", made, self.room / "hf")
        run("convert", "import", self.room / "hf", self.room / "back")
        self.assertEqual(json.loads((self.room / "back" / "tokenizer" / "tokenizer.json").read_text()), whole)
        options = ("--prompt", "12 is the", "--length", "20", "--temperature", "0")
        self.assertEqual(run("generate", made, *options).stdout, run("generate", self.room / "back", *options).stdout)

    def test_unknown_key_of_own_export_is_refused(self):
        made = self.train("run")
        run("convert", "export", made, self.room / "hf")
        config = json.loads((self.room / "hf" / "config.json").read_text())
        self.refused("novelty", {**config, "novelty": 2})
        self.refused("rope: ntk_alpha", {**config, "rope": {**config["rope"], "ntk_alpha": 2}})

    # ---- What is refused (C3) ----

    def test_model_types(self):
        for kind, words in (("granite", "granite|multiplied"), ("qwen2", "qwen2|biases"), ("gemma2", "gemma2"),
                            ("smollm3", "smollm3"), ("phi3", "phi3"), ("nonsense", "nonsense|must be llama"),
                            (None, "model_type: none")):
            config = {**LLAMA, "model_type": kind}
            if kind is None:
                del config["model_type"]
            self.refused("config.json: model_type|" + words, config)

    def test_keys(self):
        """Whatever may change a logit, by its name; whatever cannot, and null and false, is passed over."""
        for key, value in (("attention_bias", True), ("mlp_bias", True), ("hidden_act", "gelu"), ("sliding_window", 16),
                           ("attention_multiplier", 0.5), ("logits_scaling", 8.0), ("embedding_multiplier", 12.0),
                           ("residual_multiplier", 0.2), ("final_logit_softcapping", 30.0), ("no_rope_layers", [1, 0]),
                           ("attn_logit_softcapping", 50.0), ("partial_rotary_factor", 0.5), ("rope_interleaved", True),
                           ("num_local_experts", 8), ("layer_types", ["sliding_attention"]), ("novelty", 0),
                           ("quantization_config", {"bits": 4}), ("use_sliding_window", True), ("novelty", "yes"),
                           ("head_dim", "wide"), ("num_key_value_heads", "two"), ("tie_word_embeddings", "yes"),
                           ("rope_scaling", "linear"), ("scale_attn_weights", True), ("novelty", []),
                           ("is_causal", False), ("hidden_act", 3), ("layer_types", "sliding_attention"),
                           ("use_sliding_window", "yes"), ("window_size", 16), ("block_counts", 4)):
            self.refused(f"config.json: {key}", {**LLAMA, key: value})
        plain = self.settings(LLAMA)
        for key, value in (("novelty", None), ("novelty", False), ("layer_types", ["full_attention"]),
                           ("partial_rotary_factor", 1.0), ("hidden_act", "swish"), ("dtype", "bfloat16"),
                           ("transformers.js_config", {"dtype": "q4"}), ("pad_token_id", 0), ("id2label", {"0": "x"}),
                           ("sliding_window", None), ("eos_token_id", [1, 2]), ("is_llama_config", True),
                           ("is_causal", True), ("window_size", None)):
            self.assertEqual(self.settings({**LLAMA, key: value}), plain, key)

    def test_sizes_are_needed(self):
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            self.refused(f"config.json: {key}", {name: x for name, x in LLAMA.items() if name != key})

    def test_windows(self):
        """Mistral's is on where it is absent, Qwen's has a switch."""
        mistral = {**LLAMA, "model_type": "mistral"}
        self.refused("sliding_window|4096", mistral)
        self.refused("sliding_window", {**mistral, "sliding_window": 32})
        self.refused("sliding_window", {**mistral, "sliding_window": 32, "use_sliding_window": False})  # not its key
        self.assertEqual(self.settings({**mistral, "sliding_window": None})["model.attention"], "full")
        qwen = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
        self.refused("use_sliding_window", {**qwen, "use_sliding_window": True, "sliding_window": 32})
        self.refused("layer_types", {**qwen, "layer_types": ["sliding_attention"]})
        done = self.refuse_weights({**qwen, "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1})
        self.assertIn("q_norm", done.stderr)  # which the weights here lack, and nothing else

    def refuse_weights(self, config):
        return run("convert", "import", write_model(self.room / "weights", config), self.room / "none", code=2)

    # ---- What is read ----

    def test_rope_of_both_generations(self):
        """rope_theta and rope_scaling, or rope_parameters."""
        for scaling in (LLAMA3, {"type": "linear", "factor": 4.0}, {"rope_type": "default"}, None,
                        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20}):
            old = self.settings({**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
            new = {name: x for name, x in LLAMA.items() if not name.startswith("rope")}
            both = {"rope_type": (scaling or {}).get("type", "default"), "rope_theta": 5e5, **(scaling or {})}
            self.assertEqual(self.settings({**new, "rope_parameters": both}), old, scaling)
            self.assertEqual(old["model.rope_base"], 5e5)
        found = self.settings({**LLAMA, "rope_scaling": LLAMA3})
        names = ("scaling", "factor", "trained_context", "fast", "slow")
        self.assertEqual([found["model.rope_" + name] for name in names], ["llama3", 32, 64, 4, 1])

    def test_rope_that_is_refused(self):
        for scaling, words in (({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling: dynamic"),
                               ({"rope_type": "longrope", "short_factor": [1]}, "rope_scaling: longrope"),
                               ({"type": "su", "factor": 2.0}, "rope_scaling: su"), ({"factor": 2.0}, "rope_type"),
                               ({**LLAMA3, "novelty": 1}, "rope_scaling: novelty"),
                               ({**LLAMA3, "factor": "big"}, "factor"), ({**LLAMA3, "factor": 0.5}, "factor"),
                               ({**LLAMA3, "high_freq_factor": 0.5}, "rope_slow"),
                               ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor: must be a number above 0"),
                               ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor: must be a number above 0"),
                               ({**LLAMA3, "low_freq_factor": "1"}, "low_freq_factor: must be a number"),
                               ({**LLAMA3, "original_max_position_embeddings": None}, "original_max_position"),
                               ({**LLAMA3, "type": "linear"}, "rope_type is llama3 and type is linear"),
                               ({"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}, "beta_fast: must be a number"),
                               ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale"),
                               ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate"),
                               ({"rope_type": "yarn", "factor": 4.0, "truncate": 0}, "truncate"),
                               ({"rope_type": "yarn", "factor": 4.0, "truncate": None}, "truncate"),
                               ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}, "attention_factor"),
                               ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
                               ({"full_attention": {"rope_type": "default"}}, "full_attention")):
            self.refused(words, {**LLAMA, "rope_scaling": scaling})
            new = {name: x for name, x in LLAMA.items() if not name.startswith("rope")}
            self.refused(words, {**new, "rope_parameters": {"rope_theta": 1e4, **scaling}})

    def test_a_key_of_another_kind(self):
        """What is there and is no number does not mean what an absent key means; nor does a key that is there twice."""
        for key, value, words in (("rope_theta", "500000", "rope_theta: must be a number"),
                                  ("rope_theta", [5e5], "rope_theta: must be a number"),
                                  ("max_position_embeddings", "2k", "max_position_embeddings: must be a number"),
                                  ("max_position_embeddings", 0, "max_position_embeddings: must be 1 or more"),
                                  ("partial_rotary_factor", "1", "partial_rotary_factor: must be a number"),
                                  ("rope_theta", None, "rope_theta: must be a number, or absent"),
                                  ("rope_parameters", {"rope_theta": None}, "rope_theta: must be a number, or absent"),
                                  ("rope_scaling", {"rope_type": None}, "rope_type: must be a word"),
                                  ("rope_scaling", {"rope_type": 5, "type": "linear"}, "rope_type: must be a word"),
                                  ("rope_scaling", {"rope_type": "linear", "type": 5}, "type: must be a word"),
                                  ("rms_norm_eps", None, "rms_norm_eps: must be a number"),
                                  ("rope_parameters", "linear", "rope_parameters: must be an object"),
                                  ("rope_parameters", {"rope_theta": 5e5}, "rope_theta: is there twice")):
            self.refused(words, {**LLAMA, key: value})
        self.refused("head_dim: must be an integer", {**LLAMA, "model_type": "qwen3", "head_dim": None})
        # What transformers makes of null: a switch that is off, heads of an equal share, none left out.
        done = self.refuse_weights({**LLAMA, "tie_word_embeddings": None})
        self.assertIn("lm_head.weight", done.stderr)  # which the weights here lack, as the embeddings' are its own
        for key in ("head_dim", "num_key_value_heads", "max_position_embeddings"):
            absent = {name: x for name, x in LLAMA.items() if name != key}
            self.assertEqual(self.settings({**absent, key: None}), self.settings(absent), key)
        older = {"type": "linear", "factor": 4.0}
        for scaling in ({"rope_type": None, **older}, {"rope_type": "linear", "type": None, "factor": 4.0}):
            self.assertEqual(self.settings({**LLAMA, "rope_scaling": scaling}), self.settings({**LLAMA, "rope_scaling": older}))
        both = {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
        self.refused("rope_scaling and rope_parameters: must be the same", {**LLAMA, **both})
        same = self.settings({**LLAMA, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3})
        self.assertEqual(same, self.settings({**LLAMA, "rope_scaling": LLAMA3}))

    # ---- Files of tensors ----

    def test_index(self):
        """A file as it is stands above an index, as transformers has it; an index that names too much is refused."""
        whole = write_model(self.room / "whole", LLAMA)
        run("convert", "import", whole, self.room / "a")
        names = list(weights_of(LLAMA))
        index = whole / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {names[0]: "gone.safetensors"}}))
        run("convert", "import", whole, self.room / "b")
        self.assertEqual(logits(self.room / "a", self.room), logits(self.room / "b", self.room))
        (whole / "model.safetensors").rename(whole / "all.safetensors")
        index.rename(self.room / "index")
        for other in (whole, whole / "all.safetensors"):
            done = run("convert", "import", other, self.room / "other", code=2)
            self.assertIn(f"{other}: has neither model.safetensors nor its index: must be a folder", done.stderr)
        (whole / "adapter_config.json").write_text("{}")
        done = run("convert", "import", whole, self.room / "adapted", code=2)
        self.assertIn(f"{whole}/adapter_config.json: of PEFT, whose adapter transformers would add", done.stderr)
        (whole / "adapter_config.json").unlink()
        for extra, words in ((None, ""), ("model.layers.0.foo", "tensor model.layers.0.foo: no file has it")):
            listed = {name: "all.safetensors" for name in names + [extra] * bool(extra)}
            index.write_text(json.dumps({"weight_map": listed}))
            done = run("convert", "import", whole, self.room / f"c{extra}", code=2 if extra else 0)
            self.assertIn(words, done.stderr)
        for name in ("..\\all.safetensors/x", "/dev/zero", "a" * 300, "all.safetensors\0", "CON/all", 5, None, []):
            index.write_text(json.dumps({"weight_map": {**listed, names[1]: name}}))
            run("convert", "import", whole, self.room / "d", code=2)
        self.assertFalse((self.room / "d" / "checkpoints").exists())

    def test_wide_numbers(self):
        """The same weights in f64 are the same model."""
        narrow, wide = write_model(self.room / "narrow", LLAMA), self.room / "wide"
        shutil.copytree(narrow, wide)
        raw = (narrow / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:8 + length])
        for entry in header.values():
            entry.update(dtype="F64", data_offsets=[2 * x for x in entry["data_offsets"]])
        text = json.dumps(header).encode()
        data = array.array("d", array.array("f", raw[8 + length:])).tobytes()
        (wide / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        for folder in (narrow, wide):
            run("convert", "import", folder, self.room / f"of_{folder.name}")
        self.assertEqual(logits(self.room / "of_narrow", self.room), logits(self.room / "of_wide", self.room))

    def test_numbers_that_are_none(self):
        """A weight that is not finite in f32 is refused by name; one that is too large shows in what it computes."""
        folder = write_model(self.room / "odd", LLAMA)
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size, = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8:8 + size])
        at = 8 + size + header["model.norm.weight"]["data_offsets"][0] + 4
        for value in (float("nan"), float("inf"), float("-inf"), 3e38):
            path.write_bytes(raw[:at] + struct.pack("<f", value) + raw[at + 4:])
            done = run("convert", "import", folder, self.room / "of_odd", code=0 if value == 3e38 else 2)
            self.assertEqual("model.norm.weight: number 1 is " in done.stderr, value != 3e38, done.stderr)
        path.write_bytes(raw)
        entry = header["model.norm.weight"]
        wide = {"model.norm.weight": {**entry, "dtype": "F64", "data_offsets": [0, 8 * 32]}}
        text = json.dumps(wide).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<d", 1e300) + bytes(8 * 31))
        done = run("convert", "import", folder, self.room / "wide", code=2)
        self.assertIn("model.norm.weight: number 0 is inf; must be finite in f32", done.stderr)
        done = run("generate", self.room / "of_odd", "--prompt", "a", "--length", "3", code=1)
        self.assertIn("for the token behind the first 1: its weights are not finite, or too large", done.stderr)

    def test_tied_head(self):
        """It may stand beside the embedding; another one is the model's for some versions of transformers."""
        folder = write_model(self.room / "tied", LLAMA)
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size, = struct.unpack_from("<Q", raw)
        header, data = json.loads(raw[8:8 + size]), raw[8 + size:]
        embed = header["model.embed_tokens.weight"]
        begin, end = embed["data_offsets"]
        header["lm_head.weight"] = {**embed, "data_offsets": [len(data), len(data) + end - begin]}
        text = json.dumps(header).encode()
        for change, code in ((b"", 0), (b"\0\0\x80\x3f", 2)):
            head = data[begin:end - len(change)] + change
            path.write_bytes(struct.pack("<Q", len(text)) + text + data + head)
            done = run("convert", "import", folder, self.room / f"tied_{code}", code=code)
            self.assertEqual("lm_head.weight: differs from the embedding" in done.stderr, bool(code))

    def test_absent_keys(self):
        """They mean what transformers' class of that type takes them for."""
        absent = {name: x for name, x in LLAMA.items() if name != "num_key_value_heads"}
        self.assertEqual(self.settings(absent)["model.n_kv_groups"], 4)
        self.assertEqual(self.settings({**LLAMA, "num_key_value_heads": None})["model.n_kv_groups"], 4)
        self.assertEqual(self.settings({**LLAMA, "head_dim": None})["model.d_k"], 8)
        done = self.refuse_weights({**absent, "model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 32})
        self.assertIn("q_proj", done.stderr)  # whose heads are 128 wide there

    # ---- Tokenizers (C5) ----

    def imported(self, name, **changes):
        folder = write_model(self.room / name, {**SPARSE, "vocab_size": 262})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(**changes)))
        run("convert", "import", folder, self.room / f"{name}_in")
        return self.room / f"{name}_in"

    def pieces(self, folder, text):
        run("inspect", folder, "--prompt", text, "--out", self.room / "seen.json")
        return [bytes.fromhex(piece) for piece in json.loads((self.room / "seen.json").read_text())["text"]]

    def test_digits(self):
        """Each a word of its own, with the space before it, or in runs; as the package tokenizers splits."""
        text = "12 the  12 the\n\n 12\u00bd 2's"
        plain = [b"12", b" the", b" ", b" ", b"12", b" the", b"\n", b"\n", b" ", b"12", b"\xc2", b"\xbd", b" ", b"2",
                 b"'", b"s"]
        each = [piece for whole in plain for piece in ([b"1", b"2"] if whole == b"12" else [whole])]
        self.assertEqual(self.pieces(self.imported("plain"), text), plain)
        self.assertEqual(self.pieces(self.imported("digits", pre_tokenizer=DIGITS), text), each)
        runs = json.loads(json.dumps(DIGITS))
        runs["pretokenizers"][0]["individual_digits"] = False
        self.assertEqual(self.pieces(self.imported("runs", pre_tokenizer=runs), text), plain)

    def test_form_c(self):
        """e and an accent become one letter, where the build has what does it; else the tokenizer is refused."""
        text = "e\u0301 \u00e9 \u212b"
        self.assertEqual(self.pieces(self.imported("raw"), text)[0], b"e")
        folder = write_model(self.room / "nfc", {**SPARSE, "vocab_size": 262})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(normalizer={"type": "NFC"})))
        done = run("convert", "import", folder, self.room / "nfc_in", code=(0, 2))
        if done.returncode:
            self.assertIn("normalizer: NFC needs utf8proc", done.stderr)
            return
        want = [b"\xc3\xa9", b" ", b"\xc3\xa9", b" ", b"\xc3", b"\x85"]
        self.assertEqual(self.pieces(self.room / "nfc_in", text), want)

    def test_form_c_of_added_tokens(self):
        """One that is looked for in form C must be in it: the package composes it first."""
        known = {"special": False, "normalized": True, "lstrip": False, "rstrip": False, "single_word": False}
        for content, code in (("caf\u00e9", 2), ("the", 0), ("<x>", 0), ("tool_1", 0)):
            folder = write_model(self.room / f"added_{content}", {**SPARSE, "vocab_size": 263})
            whole = tokenizer(normalizer={"type": "NFC"})
            whole["added_tokens"].append({**known, "id": 262, "content": content})
            (folder / "tokenizer.json").write_text(json.dumps(whole))
            done = run("convert", "import", folder, self.room / f"{content}_in", code=(0, 2))
            if "needs utf8proc" not in done.stderr:
                self.assertEqual(done.returncode, code, (content, done.stderr))
                self.assertEqual("added_tokens, number 1" in done.stderr, bool(code))

    def test_tokenizers_refused(self):
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        for change, words in (({"normalizer": {"type": "NFKC"}}, "normalizer"),
                              ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
                              ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer"),
                              ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}, "pre_tokenizer"),
                              ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [level, level]}},
                               "pre_tokenizer"),
                              ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                                  {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Removed"}, level]}},
                               "pre_tokenizer"),
                              ({"model": {**tokenizer()["model"], "byte_fallback": True}}, "byte_fallback")):
            folder = write_model(self.room / "bad", {**LLAMA, "vocab_size": 262})
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer(**change)))
            done = run("convert", "import", folder, self.room / "none", code=2)
            self.assertIn(words, done.stderr)
            self.assertFalse((self.room / "none").exists())

    def test_sentencepiece_is_refused(self):
        for name in ("tokenizer.model", "spiece.model", "vocab.txt"):
            folder = write_model(self.room / name, {**LLAMA, "vocab_size": 300})
            (folder / name).write_bytes(b"\n\x0e")
            done = run("convert", "import", folder, self.room / "none", code=2)
            self.assertIn(f"{name}: ", done.stderr)
            self.assertIn("byte-level BPE", done.stderr)
            self.assertFalse((self.room / "none").exists())
        run("convert", "import", folder, self.room / "weights_alone", "--tokenizer", "byte")

    def test_no_tokenizer(self):
        """256 tokens are bytes; others are numbers, and a prompt of text is refused."""
        write_model(self.room / "bytes", LLAMA)
        done = run("convert", "import", self.room / "bytes", self.room / "bytes_in")
        self.assertIn("tokens are bytes", done.stderr)
        run("generate", self.room / "bytes_in", "--prompt", "12", "--length", "3")
        write_model(self.room / "numbers", {**LLAMA, "vocab_size": 300})
        done = run("convert", "import", self.room / "numbers", self.room / "numbers_in")
        self.assertIn("tokens are numbers", done.stderr)
        done = run("generate", self.room / "numbers_in", "--prompt", "12", "--length", "3", code=(1, 2))
        self.assertIn("tokenizer", done.stderr)

    # ---- Folders (C6) ----

    def test_import_moves(self):
        """No absolute path in it: it works where it is put, from wherever it is called."""
        folder = self.imported("there", pre_tokenizer=DIGITS)
        state = (folder / "checkpoints" / "latest" / "state.json").read_text()
        self.assertNotIn(str(self.room), state)
        (self.room / "elsewhere").mkdir()
        moved = self.room / "elsewhere" / "model"
        folder.rename(moved)
        want = run("generate", moved, "--prompt", "12", "--length", "5", "--temperature", "0").stdout
        for at, name in ((moved.parent, "model"), (moved, "."), (moved, "checkpoints"), (moved / "checkpoints", "."),
                         (moved / "checkpoints", "step_00000000"), (moved / "checkpoints" / "step_00000000", ".")):
            done = run("generate", name, "--prompt", "12", "--length", "5", "--temperature", "0", cwd=at)
            self.assertEqual(done.stdout, want, (at, name))

    def test_init_from_import(self):
        """The trainers take the model's settings and the tokenizer from it; what is said beside that must agree."""
        folder = self.imported("there", pre_tokenizer=DIGITS)
        options = ("--init-from", folder, "--data", self.room / "text", "--steps", "1", "--threads", "1", "--seq-len",
                   "32")
        run("train_tiny", *options, "--out-dir", self.room / "tuned")
        was, now = saved(folder), saved(self.room / "tuned")
        for key in was:
            if key.startswith(("model.", "nsa.")):
                self.assertEqual(was[key], now[key], key)
        self.assertEqual(now["data.tokenizer"], "gpt2")
        self.assertEqual(now["train.seq_len"], 32)
        done = run("train_tiny", *options, "--dim", "64", "--out-dir", self.room / "other", code=2)
        self.assertIn("model.dim is 64 here and 32 in the checkpoint", done.stderr)

    def test_damaged_checkpoint(self):
        made = self.train("run")
        path = made / "checkpoints" / "latest" / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(bytes(raw))
        done = run("convert", "export", made, self.room / "hf", code=2)
        self.assertIn("model.safetensors", done.stderr)
        self.assertIn("checksum", done.stderr)
        self.assertFalse((self.room / "hf").exists())

    def test_export_of_other_weights(self):
        """Settings that ask for other tensors than there are make no folder; here a tokenizer has one token more."""
        for name in ("one", "two"):
            (self.room / name).mkdir()
            whole = tokenizer()
            if name == "two":
                whole["added_tokens"].append({**whole["added_tokens"][0], "content": "<more>",
                                              "id": whole["added_tokens"][0]["id"] + 1})
            (self.room / name / "tokenizer.json").write_text(json.dumps(whole))
        model = self.train("of_one", "--tokenizer", "gpt2", "--tokenizer-path", self.room / "one")
        done = run("convert", "export", model, self.room / "hf", "--tokenizer-path", self.room / "two", code=2)
        self.assertIn("model.safetensors: tensor embed.weight: by the settings it must be embed.weight", done.stderr)
        self.assertFalse((self.room / "hf").exists())
        run("convert", "export", model, self.room / "hf", "--tokenizer-path", self.room / "one")

    def test_export_over_an_older_one(self):
        """Nothing of it is left; another model's files are not touched."""
        folder = self.room / "tokens"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
        bpe = self.train("bpe", "--tokenizer", "gpt2", "--tokenizer-path", folder)
        made = self.train("run", "--vocab-size", "300")
        run("convert", "export", made, self.room / "fresh")
        for first in (bpe, made):
            run("convert", "export", first, self.room / "hf")
            (self.room / "hf" / "README.md").write_text("mine")
        want = {path.name: path.read_bytes() for path in (self.room / "fresh").iterdir()}
        got = {path.name: path.read_bytes() for path in (self.room / "hf").iterdir()}
        self.assertEqual(got.pop("README.md"), b"mine")
        self.assertEqual(got, want)
        for name in ("tokenizer.model", "model.safetensors.index.json", "special_tokens_map.json"):
            (self.room / "hf" / name).write_text("{}")
            self.assertIn(name, run("convert", "export", made, self.room / "hf", code=2).stderr)
            (self.room / "hf" / name).unlink()
        other = write_model(self.room / "other", LLAMA)
        before = {path.name: path.read_bytes() for path in other.iterdir()}
        self.assertIn("older export", run("convert", "export", made, other, code=2).stderr)
        self.assertEqual({path.name: path.read_bytes() for path in other.iterdir()}, before)

    def test_export_of_numbers_that_are_none(self):
        """Weights of a checkpoint that are not finite are refused by tensor, as those of an import are."""
        out = self.train("with_nan")
        change(out / "checkpoints/latest", KINDS["nan"][0])
        for command in (("convert", "export", out, self.room / "hf_of_nan"), ("generate", out, "--prompt", "a"),
                        ("inspect", out, "--prompt", "a", "--out", self.room / "seen.json")):
            done = run(*command, code=2)
            self.assertIn("tensor norm.weight: number 0 is nan; must be finite in f32", done.stderr)
        self.assertEqual(list((self.room / "hf_of_nan").iterdir()), [])

    def test_file_of_the_page(self):
        """examples/web/pack.py: numbers that are none are refused by tensor, and an older file outlives a full disk."""
        out, to = self.train("for_page"), self.room / "model.bin"
        command = [sys.executable, PACK, out, to]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        older = to.read_bytes()
        done = subprocess.run(command, capture_output=True, text=True,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
        self.assertIn("model.bin: cannot write: File too large", done.stderr)
        weights = out / "checkpoints/latest/model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-4])
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertRegex(done.stderr, r"has \d+ numbers, and a shape of .*: cut short")
        for header in ("[]", '{"a": 1}', '{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
                       '{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
                       '{"a": {"dtype": "F32", "shape": [1], "data_offsets": null}}'):
            weights.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
            done = subprocess.run(command, capture_output=True, text=True)
            self.assertRegex(done.stderr, "^.*step_00000003: no checkpoint that the page can take: .*\n$")
        weights.write_bytes(whole)
        change(out / "checkpoints/latest", KINDS["nan"][0])
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertIn("model.safetensors: norm.weight has numbers that are not finite", done.stderr)
        self.assertEqual((to.read_bytes(), sorted(self.room.glob("model.bin*"))), (older, [to]))

    def test_export_on_a_full_disk(self):
        """The older export stays whole until the new one is."""
        first, second = self.train("first"), self.train("second", "--seed", "7")
        run("convert", "export", first, self.room / "hf")
        before = {path.name: path.read_bytes() for path in (self.room / "hf").iterdir()}
        for limit in (10, 3000, 60000):  # of its first file, of modeling_nsa.py, of the weights
            done = run("convert", "export", second, self.room / "hf", code=1, restore_signals=False,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
            self.assertIn("File too large", done.stderr)
            self.assertEqual({path.name: path.read_bytes() for path in (self.room / "hf").iterdir()}, before)
        run("convert", "export", second, self.room / "hf")
        run("convert", "export", second, self.room / "fresh")
        self.assertEqual(*({path.name: path.read_bytes() for path in (self.room / name).iterdir()}
                           for name in ("hf", "fresh")))

    def test_two_at_once(self):
        """A folder that another process exports or trains into is refused, and nothing of it changes."""
        first, second = self.train("first"), self.train("second", "--seed", "7")
        run("convert", "export", first, self.room / "hf")
        (self.room / "hf/.export").mkdir()
        (self.room / "hf/.export/config.json").write_text("half")
        empty = self.room / "empty"
        empty.mkdir()
        source = write_model(self.room / "model", LLAMA)
        for held, words in ((self.room / "hf/.export", ("export", second, self.room / "hf")),
                            (empty, ("import", source, empty))):
            with open(held / ".lock", "w") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX)
                before = contents(held.parent)
                self.assertIn(f"{held}: another run is in this folder (process {os.getpid()})",
                              run("convert", *words, code=1).stderr)
                self.assertEqual(contents(held.parent), before)
            run("convert", *words)  # the lock of a process that is gone holds nobody up
        self.assertFalse((self.room / "hf/.export").exists())

    def test_export_over_links(self):
        """An older export's weights that have other names, or lie elsewhere, stay what they are there."""
        first, second = self.train("first"), self.train("second", "--seed", "7")
        for name in ("copy", "hub"):
            run("convert", "export", first, self.room / name)
        weights = self.room / "copy" / "model.safetensors"
        want = weights.read_bytes()
        os.link(weights, self.room / "kept")
        (self.room / "hub" / "model.safetensors").rename(self.room / "blob")
        (self.room / "hub" / "model.safetensors").symlink_to("../blob")
        for name in ("copy", "hub"):
            run("convert", "export", second, self.room / name)
            made = self.room / name / "model.safetensors"
            self.assertTrue(made.is_file() and not made.is_symlink() and made.read_bytes() != want, name)
        for name in ("kept", "blob"):
            self.assertEqual((self.room / name).read_bytes(), want, name)

    def test_idle_options_of_an_import(self):
        """What is of a run and not of a model does nothing there, and is refused."""
        folder = write_model(self.room / "model", LLAMA)
        for option in ("--check", "--resume", "--out-dir=x", "--lr=1e-3", "--precision=bf16", "--data=x", "--sample=9"):
            done = run("convert", "import", folder, self.room / "none", option, code=2)
            self.assertRegex(done.stderr, option.split("=")[0] + r"\)?: has no effect")
        self.assertFalse((self.room / "none").exists())
        (self.room / "my.yaml").write_text("train: {lr: 0.5}\n")
        run("convert", "import", folder, self.room / "some", "--seq-len", "64", "--seed=7", "--tokenizer", "byte",
            "--config", self.room / "my.yaml")

    def test_import_beside_another_tokenizer(self):
        """OUT_DIR/tokenizer would be this model's: what is there already is refused, and a fault leaves none."""
        folder = write_model(self.room / "whole", {**SPARSE, "vocab_size": 262})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
        broken = shutil.copytree(folder, self.room / "broken")
        (broken / "model.safetensors").unlink()
        for _ in range(2):
            self.assertIn("model.safetensors", run("convert", "import", broken, self.room / "out", code=2).stderr)
            self.assertFalse((self.room / "out" / "tokenizer").exists())
        (broken / "merges.txt").mkdir()
        self.assertIn("merges.txt: must be a plain file",
                      run("convert", "import", broken, self.room / "out", code=2).stderr)
        self.assertFalse((self.room / "out" / "tokenizer").exists())
        run("convert", "import", folder, self.room / "out")
        theirs = self.room / "used" / "tokenizer"
        theirs.mkdir(parents=True)
        (theirs / "tokenizer.json").write_text("mine")
        numbers = write_model(self.room / "numbers", {**LLAMA, "vocab_size": 300})
        for source in (folder, numbers):
            self.assertIn("used/tokenizer: is there already",
                          run("convert", "import", source, self.room / "used", code=2).stderr)
        self.assertEqual((theirs / "tokenizer.json").read_text(), "mine")

    def test_tokenizer_settings(self):
        """What transformers passes to forward, and where padding stands; what the file says already stays."""
        folder = self.room / "tokens"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
        longest = int(1e30)  # as transformers writes where a tokenizer knows no end
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "right", "model_max_length": longest}))
        bpe = self.train("bpe", "--tokenizer", "gpt2", "--tokenizer-path", folder)
        for made, side in ((bpe, "right"), (self.train("run"), "left")):
            run("convert", "export", made, self.room / f"hf_{side}")
            found = json.loads((self.room / f"hf_{side}" / "tokenizer_config.json").read_text())
            self.assertEqual(found["model_input_names"], ["input_ids", "attention_mask"])
            self.assertEqual(found["padding_side"], side)
            self.assertEqual(found["model_max_length"] == longest, made == bpe)
        run("convert", "import", self.room / "hf_right", self.room / "again")
        (folder / "tokenizer_config.json").write_text("{ }")
        run("convert", "export", bpe, self.room / "hf_right")
        found = json.loads((self.room / "hf_right" / "tokenizer_config.json").read_text())
        self.assertEqual(sorted(found), ["model_input_names", "model_max_length", "padding_side"])


def main():
    for i, name in enumerate(("train_tiny", "convert", "logits", "generate", "inspect")):
        PROGRAMS[name] = os.path.abspath(sys.argv[1 + i])
    unittest.main(argv=[sys.argv[0], *sys.argv[6:]])


if __name__ == "__main__":
    main()
