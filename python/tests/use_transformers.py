"""An exported checkpoint in the hands of transformers' users: generate in its ways, padding, caches, pipelines,
Trainer, PEFT. Each result is held against the same model without the thing in question, or against transformers' Llama.

    use_transformers.py TRAIN_TINY CONVERT [unittest's arguments]

It wants transformers, accelerate and peft, as transformers.sh installs them. convert.py compares logits.
"""
import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

import accelerate
import peft
import safetensors.torch
import torch
import transformers

PROGRAMS = []
SHAPE = """--dim 32 --layers 3 --heads 4 --kv-groups 2 --d-k 8 --d-v 12 --nsa-l 8 --nsa-d 4 --nsa-l-sel 16 --nsa-n-sel 4
    --nsa-w 24 --attention nsa,full,window --seq-len 64 --batch-size 2 --steps 60 --lr 3e-2 --threads 1 --eval-every 0
    --qk-norm --nsa-phi mlp""".split()
LENGTHS = (1, 7, 60, 90)


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stderr}"


def prompts():
    """Of several lengths, as lists of tokens."""
    text = "".join(f"{i * i} is the square of {i}, {'odd' if i % 2 else 'even'}.\n" for i in range(40, 50)).encode()
    return [list(text[7 * i:7 * i + length]) for i, length in enumerate(LENGTHS)]


def padded(rows, left):
    """(tokens, mask): zeros in front, or behind."""
    most = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), most, dtype=torch.long), torch.zeros(len(rows), most, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(most - len(row), most) if left else slice(0, len(row))
        tokens[i, at], mask[i, at] = torch.tensor(row), 1
    return tokens, mask


class Uses(unittest.TestCase):
    with_library = False

    @classmethod
    def setUpClass(cls):
        cls.room = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.room.name)
        text = "".join(f"{i * i} is the square of {i}, {'odd' if i % 2 else 'even'}.\n" for i in range(600))
        (cls.folder / "text").write_text(text)
        run(PROGRAMS[0], *SHAPE, "--data", cls.folder / "text", "--out-dir", cls.folder / "run")
        run(PROGRAMS[1], "export", cls.folder / "run", cls.folder / "hf")

    @classmethod
    def tearDownClass(cls):
        cls.room.cleanup()

    def setUp(self):
        torch.manual_seed(1)
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # which transformers 4's Trainer sets for all that come later
        transformers.logging.set_verbosity_error()
        self.model = self.open()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder / "hf", trust_remote_code=True)
        self.prompt = torch.tensor(prompts()[3])[None]

    def open(self, folder=None, **options):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder or self.folder / "hf", trust_remote_code=True, **options)
        module = sys.modules[type(model).__module__]
        if self.with_library:
            import nsa.torch
            module.library = nsa.torch
        else:
            module.library = None
        return model.eval()

    def generate(self, tokens=None, model=None, **options):
        tokens = self.prompt if tokens is None else tokens
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, **options}
        return (model or self.model).generate(tokens, **options)

    def same(self, got, want, most=1e-5):
        self.assertEqual(got.shape, want.shape)
        self.assertLessEqual(float((got - want).detach().abs().max()), most)

    def equal(self, got, want):
        self.assertEqual(got.tolist(), want.tolist())

    # ---- generate ----

    def test_page(self):
        """README's lines, in a folder where the export lies as there."""
        sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
        import check_docs
        with tempfile.TemporaryDirectory() as room, contextlib.redirect_stdout(io.StringIO()) as printed:
            (pathlib.Path(room) / "hf").mkdir()
            (pathlib.Path(room) / "hf/quickstart").symlink_to(self.folder / "hf")
            before = os.getcwd()
            os.chdir(room)
            try:
                for _, _, block in check_docs.fences_run_by("python/tests/use_transformers.py"):
                    exec(block, {})
            finally:
                os.chdir(before)
        self.assertTrue(printed.getvalue().startswith("The "))

    def test_greedy(self):
        got = self.generate()
        self.equal(got, self.generate(use_cache=False))
        self.equal(got, self.generate(attention_mask=torch.ones_like(self.prompt)))
        tokens = self.prompt
        with torch.no_grad():
            for _ in range(30):
                tokens = torch.cat((tokens, self.model(tokens).logits[:, -1:].argmax(-1)), 1)
        self.equal(got, tokens)

    def test_sampled(self):
        made = []
        for cached in (True, False):
            torch.manual_seed(3)
            made.append(self.generate(do_sample=True, top_k=20, top_p=0.9, use_cache=cached, num_return_sequences=3))
        self.equal(*made)

    def test_beams(self):
        some = {"num_beams": 4, "num_return_sequences": 2}
        self.equal(self.generate(**some), self.generate(use_cache=False, **some))

    def test_assisted(self):
        want = self.generate()
        assistant = self.open()
        with torch.no_grad():
            for p in assistant.parameters():  # of other opinions now and then
                p.add_(0.1 * p.std() * torch.randn(p.shape) if p.numel() > 1 else 0)
        self.equal(self.generate(assistant_model=assistant), want)
        ends = {"eos_token_id": 255}  # which transformers 4 cannot do without there
        self.equal(self.generate(prompt_lookup_num_tokens=4, **ends), self.generate(**ends))

    def test_stop_strings(self):
        """Which generate finds by a tokenizer; in transformers 5 that reaches the model."""
        want = self.generate()[0]
        stop = bytes(want[100:104].tolist()).decode()
        made = self.generate(stop_strings=[stop], tokenizer=self.tokenizer)[0]
        self.equal(made, want[:len(made)])
        self.assertTrue(bytes(made[90:].tolist()).decode().endswith(stop))

    def test_static_cache(self):
        want = self.generate()
        self.equal(self.generate(cache_implementation="static"), want)
        tokens, mask = padded(prompts(), left=True)
        self.equal(self.generate(tokens, attention_mask=mask, cache_implementation="static"),
                   self.generate(tokens, attention_mask=mask))

    def test_prefill_in_chunks(self):
        """A batch's chunk may have no token of a short row."""
        tokens, mask = padded(prompts(), left=True)
        chunks = {"prefill_chunk_size": 37}
        self.equal(self.generate(**chunks), self.generate())
        if transformers.__version__.startswith("4."):  # whose places of a chunk leave padding out of account
            with self.assertRaisesRegex(ValueError, "position_ids"):
                self.generate(tokens, attention_mask=mask, **chunks)
            return
        for some in ({}, {"cache_implementation": "static", "disable_compile": True}):
            self.equal(self.generate(tokens, attention_mask=mask, **chunks, **some), self.generate(tokens, attention_mask=mask))
        tokens, mask = padded(prompts(), left=False)
        with self.assertRaisesRegex(ValueError, "attention_mask.*padding_side"):
            self.generate(tokens, attention_mask=mask, **chunks)

    def test_continuous_batching_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "generate_batch"):
            self.model.generate_batch(prompts())

    def test_early_exit_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "assistant_early_exit.*last layer"):
            self.generate(assistant_early_exit=2)

    def test_two_caches_are_refused(self):
        with self.assertRaisesRegex(ValueError, "past_key_values, cache"):
            self.model(self.prompt, past_key_values=transformers.DynamicCache(), cache=transformers.DynamicCache())

    def test_sliding_cache_is_refused(self):
        """A cache that forgets keys which blocks are chosen from."""
        config = transformers.LlamaConfig(num_hidden_layers=3)
        config.sliding_window, config.layer_types = 8, ["sliding_attention"] * 3
        cache = transformers.DynamicCache(config=config)
        with self.assertRaisesRegex(ValueError, "past_key_values"), torch.no_grad():
            for i in range(0, 60, 20):
                self.model(self.prompt[:, i:i + 20], past_key_values=cache, use_cache=True)

    def test_cache_from_outside(self):
        """A prompt's cache, which generate goes on from; and by the names of both generations."""
        want = self.generate()
        for name in ("past_key_values", "cache"):
            cache = transformers.DynamicCache()
            with torch.no_grad():
                self.model(self.prompt[:, :40], use_cache=True, **{name: cache})
            self.assertEqual(int(cache.get_seq_length()), 40)
        self.equal(self.generate(past_key_values=cache), want)

    def test_default_cache(self):
        with torch.no_grad():
            out = self.model(self.prompt[:, :-1])
            got = self.model(self.prompt[:, -1:], past_key_values=out.past_key_values).logits
            self.same(got, self.model(self.prompt, use_cache=False).logits[:, -1:])
            self.assertIsNone(self.model(self.prompt, use_cache=False).past_key_values)

    def test_embeddings_as_input(self):
        embeds = self.model.get_input_embeddings()(self.prompt)
        got = self.model.generate(inputs_embeds=embeds, max_new_tokens=30, do_sample=False, pad_token_id=0)
        self.equal(got[:, -30:], self.generate()[:, -30:])

    def test_streamers(self):
        streamer = transformers.TextIteratorStreamer(self.tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=self.generate, kwargs={"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
        want = self.tokenizer.decode(self.generate()[0, self.prompt.shape[1]:])
        self.assertEqual(text, want)
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            self.generate(streamer=transformers.TextStreamer(self.tokenizer))
        self.assertIn(want, heard.getvalue())

    def test_pipeline(self):
        texts = [bytes(row).decode() for row in prompts()]
        make = transformers.pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        options = {"max_new_tokens": 12, "do_sample": False}
        alone = [make(text, **options)[0]["generated_text"] for text in texts]
        self.assertEqual(alone[3].encode(), bytes(self.generate(max_new_tokens=12)[0].tolist()))
        self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        make = transformers.pipeline("text-generation", model=self.model, tokenizer=self.tokenizer)
        batch = [found[0]["generated_text"] for found in make(texts, batch_size=len(texts), **options)]
        self.assertEqual(batch, alone)

    # ---- Padding ----

    def test_left_padding(self):
        """Rows of a batch are what they are alone: logits, generated tokens, beams."""
        tokens, mask = padded(prompts(), left=True)
        with torch.no_grad():
            batch = self.model(tokens, attention_mask=mask).logits
            for row, prompt in enumerate(prompts()):
                want = self.model(torch.tensor(prompt)[None]).logits[0]
                self.same(batch[row, -len(prompt):], want)
        for some in ({}, {"num_beams": 3}):
            made = self.generate(tokens, attention_mask=mask, **some)
            for row, prompt in enumerate(prompts()):
                alone = self.generate(torch.tensor(prompt)[None], **some)
                self.equal(made[row, tokens.shape[1]:], alone[0, len(prompt):])

    def test_left_padding_in_chunks(self):
        tokens, mask = padded(prompts(), left=True)
        with torch.no_grad():
            want, cache, parts = self.model(tokens, attention_mask=mask).logits, transformers.DynamicCache(), []
            for some in tokens.split(37, 1):
                seen = mask[:, :int(cache.get_seq_length()) + some.shape[1]]
                parts.append(self.model(some, attention_mask=seen, past_key_values=cache, use_cache=True).logits)
        got = torch.cat(parts, 1)
        for row, prompt in enumerate(prompts()):
            self.same(got[row, -len(prompt):], want[row, -len(prompt):])

    def test_right_padding(self):
        tokens, mask = padded(prompts(), left=False)
        with torch.no_grad():
            batch = self.model(tokens, attention_mask=mask).logits
            for row, prompt in enumerate(prompts()):
                self.same(batch[row, :len(prompt)], self.model(torch.tensor(prompt)[None]).logits[0])
        with self.assertRaisesRegex(ValueError, "attention_mask.*padding_side"):
            self.generate(tokens, attention_mask=mask, max_new_tokens=1)

    def test_gradients_of_padding(self):
        """A padded batch has the gradients of its sequences, each alone."""
        grads = []
        for left in (True, False, None):
            self.model.zero_grad()
            if left is None:
                rows = [torch.tensor(p)[None] for p in prompts() if len(p) > 1]
                count = sum(row.shape[1] - 1 for row in rows)
                for row in rows:
                    self.model(row, labels=row, num_items_in_batch=count).loss.backward()
            else:
                tokens, mask = padded(prompts(), left)
                labels = tokens.masked_fill(mask == 0, -100)
                if left:  # no label for the first token: what stands in front is padding
                    labels.scatter_(1, mask.argmax(1)[:, None], -100)
                self.model(tokens, attention_mask=mask, labels=labels).loss.backward()
            grads.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        for got in grads[:2]:
            self.assertLess(float((got - grads[2]).norm() / grads[2].norm()), 1e-5)

    # ---- What is refused ----

    def test_refused(self):
        holes = torch.ones_like(self.prompt)
        holes[0, 20] = 0
        for words, given in (("attention_mask", {"attention_mask": holes}),
                             ("attention_mask", {"attention_mask": torch.ones(1, 1, 90, 90)}),
                             ("attention_mask", {"attention_mask": torch.ones(1, 12)}),
                             ("position_ids", {"position_ids": torch.arange(90)[None] + 1}),
                             ("position_ids", {"position_ids": torch.arange(90)[None] % 45}),
                             ("output_attentions", {"output_attentions": True}),
                             ("token_type_ids", {"token_type_ids": torch.ones_like(self.prompt)}),
                             ("cu_seq_lens_q.*packing", {"cu_seq_lens_q": torch.tensor([0, 40, 90])}),
                             ("is_causal", {"is_causal": 0.5}),
                             ("head_mask", {"head_mask": torch.ones(3, 4)}),
                             ("nonsense", {"nonsense": 1}),
                             ("cache_position", {"cache_position": torch.arange(90) + 1}),
                             ("past_key_values", {"past_key_values": ((self.prompt, self.prompt),)}),
                             ("labels", {"labels": self.prompt, "logits_to_keep": 2})):
            with self.assertRaisesRegex(ValueError, words):
                self.model(self.prompt, **given)
        with self.assertRaisesRegex(ValueError, "input_ids"):
            self.model()
        with torch.no_grad():
            want = self.model(self.prompt).logits
            for given in ({"token_type_ids": torch.zeros_like(self.prompt)}, {"position_ids": torch.arange(90)[None]},
                          {"head_mask": None, "output_attentions": False}):
                self.same(self.model(self.prompt, **given).logits, want, 0)

    def test_a_config_edited_afterwards(self):
        """Of a model that is made; what is read at every call takes effect."""
        want = self.model(self.prompt).logits
        self.model.config.slc_count, self.model.config.window = 3, 5
        self.assertGreater(float((self.model(self.prompt).logits - want).detach().abs().max()), 1e-4)
        for name, value in ("attention", "full"), ("cmp_stride", 1), ("rms_norm_eps", 0.1):
            model = self.open()
            setattr(model.config, name, value)
            with self.assertRaisesRegex(ValueError, f"^config.{name}: {value!r}, .* from_pretrained"):
                model(self.prompt)
        self.model.config.rope["factor"] = 4.0
        with self.assertRaisesRegex(ValueError, "^config.rope: .* from_pretrained"):
            self.generate()
        with self.assertRaisesRegex(ValueError, "^rope: .*, must have all of base, pairs, scaling, factor, trained_context"):
            self.open(rope={"scaling": "linear", "factor": 4.0})
        rope = dict(self.open().config.rope, scaling="linear", factor=4.0)
        self.assertGreater(float((self.open(rope=rope)(self.prompt).logits - want).detach().abs().max()), 1e-4)

    def test_not_causal_is_refused(self):
        """is_causal False asks for other results; False is no absence there."""
        with self.assertRaisesRegex(ValueError, "is_causal"):
            self.model(self.prompt, is_causal=False)

    # ---- Outputs ----

    def test_hidden_states(self):
        with torch.no_grad():
            out = self.model(self.prompt, output_hidden_states=True)
            self.assertEqual(len(out.hidden_states), 4)
            self.same(out.hidden_states[0], self.model.get_input_embeddings()(self.prompt), 0)
            self.same(self.model.lm_head(out.hidden_states[-1]), out.logits, 0)
            self.same(self.model.blocks[1](out.hidden_states[1], 0, None, self.rotation(out.hidden_states[1]), None),
                      out.hidden_states[2])
        made = self.generate(return_dict_in_generate=True, output_hidden_states=True, output_logits=True)
        self.assertEqual((len(made.hidden_states), len(made.hidden_states[0])), (30, 4))

    def rotation(self, x):
        return sys.modules[type(self.model).__module__].rotation(*self.model.rope, torch.arange(x.shape[1])[None], x)

    def test_logits_to_keep(self):
        with torch.no_grad():
            whole = self.model(self.prompt).logits
            self.same(self.model(self.prompt, logits_to_keep=2).logits, whole[:, -2:])
            self.same(self.model(self.prompt, logits_to_keep=torch.tensor([5, 7])).logits, whole[:, [5, 7]])
            self.assertIsInstance(self.model(self.prompt, return_dict=False), tuple)

    def test_half(self):
        """bf16 weights, and autocast, as Trainer's bf16."""
        with torch.no_grad():
            want = self.model(self.prompt).logits
            with torch.autocast("cpu", torch.bfloat16):
                got = self.model(self.prompt).logits
            self.assertLess(float((got - want).abs().mean() / want.std()), 0.1)
            narrow = self.open().to(torch.bfloat16)
            self.assertLess(float((narrow(self.prompt).logits - want).abs().mean() / want.std()), 0.1)
            self.assertEqual(self.generate(model=narrow).shape, (1, 120))

    def test_tokenizer(self):
        """What the tokenizer gives, forward takes."""
        found = self.tokenizer("12 is", return_tensors="pt")
        self.assertEqual(sorted(found), ["attention_mask", "input_ids"])
        self.model.generate(**found, max_new_tokens=2)
        self.assertEqual(self.tokenizer.padding_side, "left")

    # ---- Training ----

    def gradients(self, model, tokens, **given):
        model.zero_grad()
        model(tokens, labels=tokens, **given).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def test_gradient_checkpointing(self):
        self.model.train()
        want = self.gradients(self.model, self.prompt)
        before = self.peak(self.model)
        for reentrant in (False, True):
            self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                self.model.enable_input_require_grads()
            self.assertTrue(self.model.is_gradient_checkpointing)
            got = self.gradients(self.model, self.prompt, use_cache=True)
            for name, g in want.items():
                self.same(got[name], g)
        self.assertLess(self.peak(self.model), 0.7 * before)
        want = self.generate(use_cache=False)
        self.equal(self.generate(), want)  # of a model in training, as Trainer leaves it
        cache = transformers.DynamicCache()
        self.model.gradient_checkpointing_disable()
        self.model(self.prompt[:, :10], past_key_values=cache, use_cache=True)
        self.model.gradient_checkpointing_enable()
        with self.assertRaisesRegex(ValueError, "past_key_values"):
            self.model(self.prompt[:, 10:], past_key_values=cache)

    def peak(self, model):
        """Numbers that autograd keeps of one forward."""
        kept = {}

        def keep(x):
            kept[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(self.prompt, labels=self.prompt)
        return sum(kept.values())

    def trained(self, model, rows, batch, accumulate, **options):
        """The weights behind one step of plain descent, and its change."""
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters() if p.requires_grad])
        arguments = transformers.TrainingArguments(
            str(self.folder / "trainer"), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
            max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, weight_decay=0.0, **options)
        transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()
        return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]) - before

    def llama(self):
        torch.manual_seed(5)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2))

    def test_compiled(self):
        """By PyTorch 2.4 too, which knows numbers and words of a config and nothing else."""
        want = self.gradients(self.model, self.prompt)
        compiled = torch.compile(self.model, backend="eager")
        for name, g in self.gradients(compiled, self.prompt).items():
            self.same(g, want[name.removeprefix("_orig_mod.")])
        torch._dynamo.reset()

    def test_accumulation(self):
        """One step of 8 rows of unequal lengths: 8x1, 4x2, 2x4 and 1x8 are one gradient, as for transformers' Llama;
        and that of the mean over all labels, computed here."""
        rows = [{"input_ids": self.prompt[0, i:i + 10 + 9 * i]} for i in range(8)]
        for make in (self.llama, self.open):
            found = [self.trained(make(), rows, 8 // n, n) for n in (1, 2, 4, 8)]
            for change in found[1:]:
                self.assertLess(float((change - found[0]).norm() / found[0].norm()), 1e-5, make)
            model = make()
            batch = collate(rows)
            labels = batch["labels"][:, 1:]
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100]).backward()
            want = -torch.cat([p.grad.flatten() for p in model.parameters()])
            share = float((found[0] @ want) / (want @ want))  # transformers 4 counts each row's first label too
            self.assertLess(float((found[0] - share * want).norm() / want.norm()), 1e-4, make)
            shares = locals().get("shares", []) + [share]
        self.assertAlmostEqual(*shares, places=4)

    def test_trainer_with_checkpointing_and_bf16(self):
        """Each parameter's change by itself: of all together lm_head's is the most."""
        def apart(changes, others):
            sizes = [p.numel() for p in self.model.parameters()]
            return max(float((x - y).norm() / y.norm()) for x, y in zip(changes.split(sizes), others.split(sizes)))

        # A model as it begins: in the trained one a token's gate, the same wherever that token stands, moves the sum by a
        # tenth. Of six seeds autocast was at most 0.04 off, as products that are rounded to bf16 alone are.
        def made(**options):
            torch.manual_seed(1)
            return self.trained(type(self.model)(self.model.config), rows, 2, 2, **options)
        rows = [{"input_ids": self.prompt[0, i:i + 40]} for i in range(4)]
        plain = made()
        self.assertLess(apart(made(gradient_checkpointing=True), plain), 1e-5)
        self.assertLess(apart(made(bf16=True), plain), 0.08)

    def test_label_smoothing(self):
        """Trainer shifts labels for classes that it knows as language models; for others each token would be its own."""
        rows = [{"input_ids": self.prompt[0, i:i + 40]} for i in range(8)]
        tokens = torch.stack([row["input_ids"] for row in rows])
        model = self.open()
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.2).backward()
        want = -torch.cat([p.grad.flatten() for p in model.parameters()])
        got = self.trained(self.open(), rows, 8, 1, label_smoothing_factor=0.2)
        self.assertLess(float((got / got.norm() - want / want.norm()).norm()), 1e-4)

    def test_trainer_evaluates(self):
        rows = [{"input_ids": self.prompt[0, i:i + 40]} for i in range(4)]
        arguments = transformers.TrainingArguments(str(self.folder / "trainer"), use_cpu=True, report_to=[],
                                                   disable_tqdm=True, per_device_eval_batch_size=2)
        trainer = transformers.Trainer(model=self.model, args=arguments, eval_dataset=rows, data_collator=collate)
        tokens = torch.stack([row["input_ids"] for row in rows])
        with torch.no_grad():
            want = float(self.model(tokens, labels=tokens).loss)
        share = trainer.evaluate()["eval_loss"] / want
        self.assertLess(min(abs(share - 1), abs(share - 39 / 40)), 1e-4)  # transformers 4 counts the first label too
        self.assertEqual(trainer.predict(rows).predictions.shape, (4, 40, 256))

    def test_lora(self):
        config = peft.LoraConfig(r=4, target_modules=["W_Q", "W_K", "W_V", "out", "fc1", "fc2"], task_type="CAUSAL_LM")
        tuned = peft.get_peft_model(self.model, config)
        rows = [{"input_ids": self.prompt[0, i:i + 40]} for i in range(8)]
        changes = [float(self.trained(tuned, rows, 8, 1).norm()), float(self.trained(tuned, rows, 2, 4).norm())]
        self.assertGreater(min(changes), 0)
        tuned.eval()
        made = self.generate(model=tuned)
        tuned.save_pretrained(self.folder / "lora")
        again = peft.PeftModel.from_pretrained(self.open(), self.folder / "lora").eval()
        self.equal(self.generate(model=again), made)
        self.equal(self.generate(model=again.merge_and_unload()), made)
        self.assertFalse(torch.equal(self.model(self.prompt).logits, self.open()(self.prompt).logits))

    def test_saved_and_opened(self):
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(1.01)
        self.model.save_pretrained(self.folder / "saved")
        self.tokenizer.save_pretrained(self.folder / "saved")
        self.assertTrue((self.folder / "saved" / "modeling_nsa.py").exists())
        again = self.open(self.folder / "saved")
        self.same(again(self.prompt).logits, self.model(self.prompt).logits, 0)

    def test_weights_elsewhere(self):
        """On the disk until a module is called; tied embeddings are the head's weights too."""
        places = {"embed": "cpu", "blocks": "disk", "norm": "cpu", "lm_head": "cpu"}
        tied = self.tied()
        for folder, model in ("hf", self.model), ("tied", tied):
            want = model(self.prompt).logits
            some = self.open(self.folder / folder, device_map=places, offload_folder=self.folder / "disk")
            self.same(some(self.prompt).logits, want, 0)
            waits = accelerate.cpu_offload(self.open(self.folder / folder), execution_device="cpu")
            self.same(waits(self.prompt).logits, want, 0)

    def tied(self):
        """A model whose lm_head is its embedding."""
        shutil.copytree(self.folder / "hf", self.folder / "tied", dirs_exist_ok=True)
        config = json.loads((self.folder / "hf/config.json").read_text())
        (self.folder / "tied/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        weights = {name: x for name, x in self.model.state_dict().items() if name != "lm_head.weight"}
        safetensors.torch.save_file(weights, self.folder / "tied/model.safetensors", {"format": "pt"})
        return self.open(self.folder / "tied")

    def test_vocabulary_resized(self):
        for model in self.model, self.tied():
            model.resize_token_embeddings(300)
            self.assertEqual(model(self.prompt).logits.shape, (1, 90, 300))

    def test_the_loss_by_others(self):
        """TRL calls what is below the head, multiplies by the head's weight, and asks for its bias."""
        for model in self.model, self.tied():
            head, out = model.get_output_embeddings(), model.base_model(input_ids=self.prompt, use_cache=False)
            hidden = out.last_hidden_state
            self.assertIsNone(head.bias)
            self.same(hidden @ head.weight.T, model(self.prompt).logits)
            (hidden @ head.weight.T).sum().backward()
            self.assertTrue(all(p.grad is not None for p in (head.weight, model.embed.weight, model.blocks[0].attn.W_Q.weight)))
            self.assertIs(model.get_decoder(), model)
            model.base_model.requires_grad_(False)
            left = [name for name, p in model.named_parameters() if p.requires_grad]
            self.assertEqual(left, ["lm_head.weight"] if model is self.model else [])

    def test_prefixes(self):
        """Of PEFT: virtual tokens are embeddings; keys and values in a cache are not those of three branches."""
        tuned = peft.get_peft_model(self.model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8))
        tuned(self.prompt, labels=self.prompt).loss.backward()
        self.assertEqual(self.generate(model=tuned.eval()).shape, (1, 120))
        tuned = peft.get_peft_model(self.open(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8))
        with self.assertRaisesRegex(ValueError, r"past_key_values: keys .* of layer 0, must be \(1, 6\).*prefix tuning"):
            tuned(self.prompt)


def collate(rows):
    """Padding behind, as transformers' collators do it."""
    tokens, mask = padded([row["input_ids"].tolist() for row in rows], left=False)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class UsesOfTheLibrary(Uses):
    """The same with the package nsa, which computes attention on the CPU."""

    with_library = True


def main():
    PROGRAMS[:] = sys.argv[1:3]
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, PEFT {peft.__version__}, "
          f"Python {sys.version.split()[0]}", flush=True)
    return not unittest.main(module=__name__, argv=[sys.argv[0], *sys.argv[3:]], exit=False).result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
