"""Popular models of small size as `convert import` reads them: their shapes, made by transformers with random weights
and saved by it, must have its logits here; their tokenizers, made by the package tokenizers, must have its tokens.

    import_models.py CONVERT LOGITS INSPECT [unittest's arguments]

Nothing is fetched. It wants transformers and tokenizers, as transformers.sh installs them.
"""
import array
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import tokenizers
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "trainer"))
import test_convert  # noqa: E402
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402

PROGRAMS = {}
LARGEST = 1e-4  # of a difference between two logits
SIZES = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LLAMA_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_WORDS = LLAMA_WORDS.replace("{1,3}", "")
TEXTS = ("It's 1234 squares, I'LL 81 is.\n\n  And 12\u00bd\u2167\u0663 7?!\t x\u00a0y\r\n",
         " the  12 the 3", "\n \n  \n",
         "e\u0301 \u00e9 \u212b \u1e9b\u0323 \uac00 \u1100\u1161 caf\u00e9 nai\u0308ve",
         "\u0915\u093f \U0001f600\U0001f468\u200d\U0001f469 \u4f60\u597d\uff0c123",
         "x<|endoftext|>y<|im_start|> z", "don't Don'T we'll   ", "a1b22c333d4444 5 55")


def run(program, *words, code=0):
    done = subprocess.run([str(word) for word in (PROGRAMS[program], *words)], capture_output=True, text=True)
    assert done.returncode == code, (program, words, done.returncode, done.stderr)
    return done


class Import(unittest.TestCase):
    def setUp(self):
        transformers.logging.set_verbosity_error()
        room = tempfile.TemporaryDirectory()
        self.addCleanup(room.cleanup)
        self.room = pathlib.Path(room.name)

    def save(self, config, dtype=torch.float32):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, p in model.named_parameters():  # logits that differ, norms that do something
                draw = torch.randn(p.shape)
                p.copy_(1 + 0.3 * draw if p.dim() == 1 else draw * 1.5 * p.shape[1] ** -0.5)
            model.get_input_embeddings().weight.normal_()
            for p in model.parameters():
                p.copy_(p.to(dtype))
        model.save_pretrained(self.room / "model", state_dict={k: x.to(dtype) for k, x in model.state_dict().items()})
        return model.eval()

    def compare(self, config, dtype=torch.float32, change=None):
        model = self.save(config, dtype)
        if change:
            path = self.room / "model" / "config.json"
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
        run("convert", "import", self.room / "model", self.room / "in")
        tokens = torch.randint(0, 300, (1, 200))
        (self.room / "tokens").write_bytes(array.array("i", tokens[0].tolist()).tobytes())
        run("logits", self.room / "in", self.room / "tokens", self.room / "logits")
        got = torch.frombuffer(bytearray((self.room / "logits").read_bytes()), dtype=torch.float32).reshape(200, -1)
        with torch.no_grad():
            want = model(tokens).logits[0]
        worst, spread = float((got - want).abs().max()), float(want.std())
        print(f"{self._testMethodName}: largest difference of a logit {worst:.2g}, spread {spread:.2g}", flush=True)
        self.assertGreater(spread, 0.5)
        self.assertLess(worst, LARGEST)

    def test_smollm2(self):
        self.compare(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5, head_dim=8))

    def test_llama(self):
        self.compare(transformers.LlamaConfig(**SIZES), dtype=torch.bfloat16)

    def test_llama_without_groups(self):
        sizes = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
        self.compare(transformers.LlamaConfig(**sizes),
                     change=lambda c: {name: x for name, x in c.items() if name != "num_key_value_heads"})

    def rope(self, make, **rope):
        """In the words of whichever transformers this is; 5 has one object."""
        if transformers.__version__.startswith("4."):
            theta = rope.pop("rope_theta")
            return make(rope_theta=theta, rope_scaling=rope)
        return make(rope_parameters=rope)

    def test_llama_3_2(self):
        make = lambda **rope: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=16, **rope)
        self.compare(self.rope(make, rope_theta=5e5, **LLAMA3))

    def test_llama_3_2_of_the_other_generation(self):
        """The same model, its RoPE spelled as the other transformers does."""
        def respelled(config):
            both = config.pop("rope_parameters", None)
            if both:
                config["rope_theta"] = both.pop("rope_theta")
                return {**config, "rope_scaling": both}
            both = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}
            return {**config, "rope_parameters": both}

        make = lambda **rope: transformers.LlamaConfig(**SIZES, **rope)
        self.compare(self.rope(make, rope_theta=1e4, **LLAMA3), change=respelled)

    def test_linear_and_yarn(self):
        make = lambda **rope: transformers.LlamaConfig(**SIZES, **rope)
        self.compare(self.rope(make, rope_theta=1e4, rope_type="linear", factor=4.0))
        run_again = self.room / "in"
        run_again.rename(self.room / "linear")
        self.compare(self.rope(make, rope_theta=1e4, rope_type="yarn", factor=4.0, beta_fast=20.0, beta_slow=2.0,
                               original_max_position_embeddings=128))

    def test_mistral(self):
        self.compare(transformers.MistralConfig(**SIZES, sliding_window=None))

    def test_mistral_with_its_window_is_refused(self):
        self.save(transformers.MistralConfig(**SIZES, sliding_window=32))
        self.assertIn("sliding_window", run("convert", "import", self.room / "model", self.room / "in", code=2).stderr)

    def test_qwen3(self):
        for tied in (True, False):
            self.compare(transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied))
            (self.room / "in").rename(self.room / f"in_{tied}")

    def test_others_are_refused(self):
        """Other kinds that this transformers makes, by their model_type or a key; none is taken in silence."""
        for make, some in ((transformers.Qwen2Config, {}), (transformers.GraniteConfig, {"logits_scaling": 8.0}),
                           (transformers.GemmaConfig, {"head_dim": 8}), (transformers.Gemma2Config, {"head_dim": 8}),
                           (transformers.Phi3Config, {"pad_token_id": 0}), (transformers.Olmo2Config, {}),
                           (transformers.SmolLM3Config, {"pad_token_id": 0}), (transformers.CohereConfig, {}),
                           (transformers.GPT2Config, {}), (transformers.StableLmConfig, {}),
                           (transformers.Qwen3Config, {"attention_bias": True}),
                           (transformers.LlamaConfig, {"attention_bias": True}),
                           (transformers.LlamaConfig, {"mlp_bias": True}),
                           (transformers.LlamaConfig, {"hidden_act": "gelu"})):
            sizes = {} if make is transformers.GPT2Config else SIZES
            make(**{**sizes, **some}).save_pretrained(self.room / "other")
            done = run("convert", "import", self.room / "other", self.room / "none", code=2)
            self.assertRegex(done.stderr, "config.json: (model_type|attention_bias|mlp_bias|hidden_act)")

    # ---- Tokenizers ----

    def tokenizer(self, splitter, normalizer=None, template=False):
        whole = tokenizers.Tokenizer(models.BPE())
        whole.pre_tokenizer, whole.decoder = splitter, decoders.ByteLevel()
        if normalizer:
            whole.normalizer = normalizer
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=380, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                 special_tokens=["<|endoftext|>", "<|im_start|>"], show_progress=False)
        more = "the then 12 123 caf\u00e9 'll we'll \u00e9\u00e9 \u4f60\u597d " * 20
        whole.train_from_iterator([*TEXTS, more], trainer)
        whole.post_processor = processors.ByteLevel(trim_offsets=False)
        if template:
            whole.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", whole.token_to_id("<|im_start|>"))])
        return whole

    def check_tokens(self, whole):
        test_convert.write_model(self.room / "model", {**test_convert.SPARSE, "vocab_size": whole.get_vocab_size()})
        whole.save(str(self.room / "model" / "tokenizer.json"))
        run("convert", "import", self.room / "model", self.room / "in")
        of_char = {test_convert.spelled(bytes([b])): b for b in range(256)}
        for text in TEXTS:
            run("inspect", self.room / "in", "--prompt", text, "--out", self.room / "seen.json")
            got = [bytes.fromhex(piece) for piece in json.loads((self.room / "seen.json").read_text())["text"]]
            special = {x.content: x.content.encode() for x in whole.get_added_tokens_decoder().values()}
            want = [special.get(token) or bytes(of_char[c] for c in token) for token in whole.encode(text).tokens]
            self.assertEqual(got, want, text)

    def level(self, splits):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)

    def test_tokenizer_of_smollm2(self):
        self.check_tokens(self.tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                                  self.level(True)])))

    def test_tokenizer_of_llama(self):
        split = pre_tokenizers.Split(Regex(LLAMA_WORDS), "isolated")
        self.check_tokens(self.tokenizer(pre_tokenizers.Sequence([split, self.level(False)]), template=True))

    def test_tokenizer_of_qwen(self):
        split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
        self.check_tokens(self.tokenizer(pre_tokenizers.Sequence([split, self.level(False)]), normalizers.NFC()))

    def test_tokenizer_of_several_splits(self):
        """As DeepSeek's: one after the other, of patterns that leave text between and of one that matches nothing."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated")
                  for pattern in (r"\p{N}{1,3}", "[\u4e00-\u9fff]+", r"x*", r"\p{L}+")]
        self.check_tokens(self.tokenizer(pre_tokenizers.Sequence([*splits, self.level(False)])))


def main():
    for i, name in enumerate(("convert", "logits", "inspect")):
        PROGRAMS[name] = os.path.abspath(sys.argv[1 + i])
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}", flush=True)
    return not unittest.main(module=__name__, argv=[sys.argv[0], *sys.argv[4:]], exit=False).result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
