"""`convert export` as others use what it writes: checkpoints of the C trainer with every option of its model, opened by
modeling_nsa.py, whose logits must be those of the C program.

    convert.py TRAIN_TINY CONVERT LOGITS     run.py calls it, with the package nsa in the path

With the environment variable TRANSFORMERS the real transformers opens the folders; without it a stand-in of a few lines
does, for CI has only Debian's torch. Attention runs in plain PyTorch and through nsa.torch.
"""
import importlib.util
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import types

import torch

TOKENS, LARGEST = 200, 1e-4  # of a difference between two logits
SMALL = """--dim 32 --layers 2 --heads 4 --kv-groups 2 --d-k 8 --d-v 12 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 --nsa-n-sel 4
    --nsa-w 24 --seq-len 64 --batch-size 2 --steps 40 --lr 3e-2 --threads 1 --eval-every 0""".split()
CASES = {
    "mean": "",
    "conv": "--nsa-phi conv --nsa-gate softmax --rope-pairs halves --tied-embeddings",
    "mlp": "--nsa-phi mlp --rope-scaling ntk --rope-factor 4 --heads 6 --rope-base 5000",
    "yarn": "--kv-groups 1 --rope-scaling yarn --rope-factor 4 --rope-trained-context 64 --nsa-l 16 --nsa-d 16",
    "llama": "--shared-kv --mlp swiglu --mlp-hidden 48 --nsa-gate-form linear --norm-eps 1e-5 --nsa-n-init 0 --nsa-n-local 1"
             " --nsa-l 16 --nsa-d 16 --rope-pairs halves --rope-base 500000 --tied-embeddings --d-v 8",
    "layers": "--attention window,cmp+slc,nsa,full --layers 4 --nsa-phi mlp",
    "full": "--attention full --rope-scaling linear --rope-factor 2",
    "window": "--attention window --tied-embeddings --rope-pairs halves",
}


# ---- A stand-in for transformers ------------------------------------------------------------------------


class StandInConfig:
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
    outputs.CausalLMOutputWithPast = StandInOutput
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
    model.load_state_dict(read_safetensors(folder / "model.safetensors"), strict=True)
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
    for name, g in found[0].items():
        h = found[1][name]
        assert float(g.norm()) > 0 and float((g - h).norm() / g.norm()) < 1e-4, (name, g.norm(), (g - h).norm())


def check_refusals(model, tokens):
    padded = torch.ones_like(tokens)
    padded[0, 0] = 0
    for what, arguments in (("attention_mask", {"attention_mask": padded}),
                            ("position_ids", {"position_ids": torch.arange(tokens.shape[1])[None] + 1})):
        try:
            model(tokens, **arguments)
        except ValueError as error:
            assert what in str(error), error
        else:
            raise AssertionError(f"{what} was not refused")


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


def main():
    train, convert, logits = sys.argv[1:4]
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
    return 0
