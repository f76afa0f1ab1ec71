"""Special tokens by one rule: what a text begins with and ends with in training, in shards and in what generate writes.

usage: test_special.py TRAINER FOLDER SHARDS GENERATE. Twins: examples/trainer/data/tokenizer.h, docs/training.md.
The oracle is the package tokenizers, which reads the same tokenizer.json.
"""
import json
import os
import struct
import subprocess
import sys

import packages
from runs import PATIENCE, Runs, check, done

runs, shards, generate = Runs(sys.argv[1], sys.argv[2], "special"), sys.argv[3], sys.argv[4]
packages.need(sys.argv[2], "tokenizers")
from tokenizers import Tokenizer  # noqa: E402

PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
SPELLED = {b: chr(b) for b in PLAIN} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in PLAIN)}
MERGES = ["t h", "th e", "\u0120 the", "i n"]
WORDS = [SPELLED[b] for b in range(256)] + ["th", "the", "\u0120the", "in"]
BEGIN, END, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
STORIES = "Once there was a thing.\n<|endoftext|>\nThe other thing, in the end.<|endoftext|>A third"
DOCUMENTS = ["the thing", "in", STORIES, "a" + TURN + "the", BEGIN + "the", "\u00fcber " + END, " the \n\n the "]


def token(identity, content):
    return {"id": identity, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def tokenizer_json(vocab, added, template):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": template, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                    "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                      "merges": MERGES}}


def folder(name, files):
    path = runs.root / name
    path.mkdir()
    for file, data in files.items():
        (path / file).write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def gpt2():
    """The same vocabulary as two files and as one."""
    vocab = {word: i for i, word in enumerate([*WORDS, "<|endoftext|>"])}
    two = folder("two_files", {"vocab.json": vocab, "merges.txt": "#version: 0.2\n" + "\n".join(MERGES) + "\n"})
    one = folder("one_file", {"tokenizer.json": tokenizer_json(vocab, [token(260, "<|endoftext|>")], None)})
    return two, one


def llama(sequence):
    """Its template in a list of processors, as the published one has it, or alone."""
    single = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single + single,
                "special_tokens": {BEGIN: {"id": BEGIN, "ids": [260], "tokens": [BEGIN]}}}
    if sequence:
        template = {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, template]}
    added = [token(260, BEGIN), token(261, END), token(262, TURN)]
    name = "llama_sequence" if sequence else "llama"
    return folder(name, {"tokenizer.json": tokenizer_json({w: i for i, w in enumerate(WORDS)}, added, template)})


def encode(vocabulary, documents, name):
    text = runs.root / f"{name}.jsonl"
    text.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    out = runs.root / f"{name}_shards"
    subprocess.run([shards, out, text, "--tokenizer-path", vocabulary], check=True, capture_output=True, timeout=PATIENCE)
    data = (out / "shard_000000.bin").read_bytes()[1024:]
    return list(struct.unpack(f"<{len(data) // 2}H", data)), out


def test_same_tokens():
    """A text's special tokens are taken out of it, by either form of a vocabulary, as the package takes them."""
    two, one = gpt2()
    reference = Tokenizer.from_file(str(one / "tokenizer.json"))
    want = [i for d in DOCUMENTS for i in [*reference.encode(d).ids, 260]]
    check(want.count(260) == len(DOCUMENTS) + 2, want)
    for vocabulary in (two, one):
        found, _ = encode(vocabulary, DOCUMENTS, vocabulary.name)
        check(found == want, vocabulary.name, found, want)
    return two, one


def test_another_vocabulary(two, one):
    """Tokens of another making are other data, of which a run that goes on tells; another file of them is nothing."""
    other = folder("reversed", {"vocab.json": (two / "vocab.json").read_text(), "merges.txt": "\n".join(MERGES[::-1])})
    for name, line in (("kept.txt", "the thing in {}\n"), ("kept.jsonl", '{{"text": "the thing in {}"}}\n')):
        data = runs.root / name
        data.write_text("".join(line.format(i) for i in range(400)))
        common = ("--tokenizer", "gpt2", "--data", data, "--eval-every", 0)
        runs.train(f"{name}_run", *common, "--tokenizer-path", two, "--steps", 1)
        for steps, vocabulary in ((2, one), (3, other)):
            _, said, also = runs.train(f"{name}_run", *common, "--tokenizer-path", vocabulary, "--steps", steps, "--resume")
            check(("(tokenizer, names, sizes or contents differ)" in said + also) == (vocabulary == other), name, steps, said, also)
    words = {word: i for i, word in enumerate([*WORDS[:256], *WORDS[:255:-1], "<|endoftext|>"])}
    turned = folder("turned", {"vocab.json": words, "merges.txt": "t h\nth e\n"})
    kept = runs.root / "kept.txt_run"
    for options in (("--resume",), ("--init-from", kept, "--tokenizer", "gpt2", "--data", data)):
        out = kept.name if options == ("--resume",) else "from_kept"
        _, _, also = runs.train(out, *options, "--tokenizer-path", turned, "--steps", 4, code=2)
        check(f"the model's tokens are not those of {turned}: data.tokenizer_path must name the" in also, also)
    check("the model's tokens are not those of" in write(kept, "--tokenizer-path", turned, code=2)[1], "generate")
    write(kept, "--tokenizer-path", one, "--length", "3")
    runs.train("more", "--init-from", kept, "--tokenizer", "gpt2", "--tokenizer-path", other, "--data", data, "--steps", 1)


def test_template():
    """A document of training is what the package makes of its text, template and all, and the token that ends it."""
    for vocabulary in (llama(True), llama(False)):
        reference = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
        want = [i for d in DOCUMENTS for i in [*reference.encode(d).ids, 261]]
        check(want[0] == 260 and want.count(260) == len(DOCUMENTS) + 1, want)
        found, made = encode(vocabulary, DOCUMENTS, vocabulary.name)
        check(found == want, found, want)
        text = runs.root / "plain.txt"
        text.write_text("the thing in " * 400)
        out = runs.root / f"{vocabulary.name}_of_text"
        subprocess.run([shards, out, text, "--tokenizer-path", vocabulary], check=True, capture_output=True, timeout=PATIENCE)
        words = ("--tokenizer", "gpt2", "--tokenizer-path", vocabulary, "--steps", 2, "--eval-every", 0)
        losses = [(runs.train(f"{vocabulary.name}_{i}", *words, "--data", data)[0] / "training.csv").read_text()
                  for i, data in enumerate((text, out))]
        first, second = ([row.split(",")[1::3] for row in rows.splitlines()] for rows in losses)
        check(first == second, losses)
    return vocabulary


def told_apart(text):
    """A vocabulary whose tokens are all pairs of neighbours in the text: where it is split shows."""
    pairs = sorted({text[i:i + 2] for i in range(len(text) - 1)})
    spelled = [[SPELLED[pair[0]], SPELLED[pair[1]]] for pair in pairs]
    words = [SPELLED[b] for b in range(256)] + [a + b for a, b in spelled] + ["<|endoftext|>"]
    return {word: i for i, word in enumerate(words)}, spelled


def compare(name, whole, text, same=True):
    """What shards makes of a text, beside what the package makes of it; or, not `same`, that it is refused."""
    path, out = folder(name, {"tokenizer.json": whole}), runs.root / f"{name}_made"
    given = runs.root / f"{name}.txt"
    given.write_bytes(text)
    ran = subprocess.run([shards, out, given, "--tokenizer-path", path], capture_output=True, text=True, timeout=PATIENCE)
    if not same:
        check(ran.returncode == 2 and "tokenizer.json" in ran.stderr or "pattern" in ran.stderr, name, ran)
        return ran
    check(ran.returncode == 0, name, ran)
    data = (out / "shard_000000.bin").read_bytes()[1024:]
    found = list(struct.unpack(f"<{len(data) // 2}H", data))
    want = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text.decode()).ids
    check(found[:-1] == want, name, found, want)
    return ran


def test_patterns():
    """Regular expressions as the package has them, or refused: spaces of all scripts, case, flags in the middle."""
    spaces = "a\u0085b\u200bc\u180ed\u00a0e\u2028f \u3000g\v\u1680h\u202fi\u205f" * 3
    cases = (("\\s+", spaces, True), ("\\S+", spaces, True), ("[^\\sa]+", spaces, True), ("[\\s\\p{L}]", spaces, True),
             ("\\s+(?!\\S)|\\s", spaces, True), ("[\\S]", spaces, False), ("(?i:'S|'ll)", "it's IT'S 'LL 'lL", True),
             ("(?i)b|c", "ab aB c C", True), ("a(?i)b|c", "ab aB c C", False), ("(?i:ss)", "ss \u00df", False),
             ("(?:a|b){1,3}+", "abababab", False), ("a{2}?", "aaab", False), ("a{1,2}?b{2,}?", "aabbb abb", True),
             ("\\p{Han}+", "a\u6f22\u3001\u30fc\u5b57b", True), ("[^\\p{Greek}]", "a\u03b1\u0345b\u0342", True),
             ("\\P{^Katakana}+", "\u30ab\u30fc\u3001a", True), ("\\p{^Lu}+|\\p{Yi}", "aAB\ua000", True),
             ("(?i:[\\p{Lu}])+", "aAb", False), ("(?i:b)[\\p{Lu}]|(?-i:[\\p{Ll}])", "bA Ba aB", True),
             ("(?i:\u00e9)", "\u00e9\u00c9", False), ("(?i:fi)", "fi \ufb01", False), ("(?i:K)", "kK\u212a", True))
    for i, (pattern, text, same) in enumerate(cases):
        vocab, merges = told_apart(text.encode())
        whole = tokenizer_json(vocab, [], None)
        level = whole["pre_tokenizer"] | {"use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
        whole["model"]["merges"] = merges
        compare(f"pattern{i}", whole, text.encode(), same)


def test_odd_tokenizers():
    """Added tokens that the vocabulary has by another number, and what would give other tokens."""
    vocab = {w: i for i, w in enumerate([*WORDS, "<|endoftext|>"])}
    text = b"a the<x>the in a"
    for i, added in enumerate((token(300, "the"), token(300, "a"), token(261, "<x>"), token(257, "the"))):
        compare(f"added{i}", tokenizer_json(vocab, [added], None), text)
    for i, contents in enumerate((("<x>th", "h<x>"), ("<x>the", "<x>"), ("a the", "e<x>"), ("the<x>the", "e<x"))):
        ordinary = token(261, contents[0]) | {"normalized": True, "special": False}  # looked for after the others
        compare(f"ordinary{i}", tokenizer_json(vocab, [ordinary, token(262, contents[1])], None), text)
    accents = "the<x>the<x>\u0338 the<y\u0301 e\u0301 in<x>".encode()  # two of which are composed first
    whole = tokenizer_json(vocab, [], None)
    cut = whole | {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}}
    check(encode(folder("cut", {"tokenizer.json": cut}), DOCUMENTS, "cut")[0] ==
          encode(folder("uncut", {"tokenizer.json": whole}), DOCUMENTS, "uncut")[0], "documents are never cut")
    listed = {**vocab, "\uff5cend\u2581of\uff5c": 261, "a b": 262}  # as BpeTrainer lists special tokens
    added = [token(261, "\uff5cend\u2581of\uff5c"), token(262, "a b")]
    compare("listed", tokenizer_json(listed, added, None), "the a b\uff5cend\u2581of\uff5c in\uff5c".encode())
    compare("unlisted", tokenizer_json(listed, added[1:], None), text, False)
    composed, form_c = token(261, "e\u0301") | {"normalized": True}, {"normalizer": {"type": "NFC"}}
    ran = compare("normal", tokenizer_json(vocab, [composed], None) | form_c, text, False)
    for i, contents in enumerate((("<x>",), ("<y",), ("e",), ("n<x", "<x>"))):
        added = [token(261 + k, content) | {"normalized": not k} for k, content in enumerate(contents)]
        compare(f"accent{i}", tokenizer_json(vocab, added, None) | form_c, accents, "utf8proc" not in ran.stderr)
    for key, value in (("dropout", 0.5), ("end_of_word_suffix", "</w>"), ("continuing_subword_prefix", "##"),
                       ("byte_fallback", True), ("merges", [["t", "h", "e"]])):
        whole = tokenizer_json(vocab, [], None)
        whole["model"][key] = value
        compare(f"odd_{key}", whole, text, False)
    for key, value in (("pre_tokenizer", {"type": "ByteLevel"}), ("version", "2.0"), ("pre_tokenizer", {
            "type": "Sequence", "pretokenizers": [{"type": "Digits"}, tokenizer_json(vocab, [], None)["pre_tokenizer"]]})):
        compare(f"unsaid{len(str(value))}", tokenizer_json(vocab, [], None) | {key: value}, text, False)
    pair = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}], "pair": [],
            "special_tokens": {}}
    compare("odd_template", tokenizer_json(vocab, [], pair), text, False)
    compare("odd_added", tokenizer_json(vocab, {"a": 1}, None), text, False)


def test_tokens_beside():
    """What files of transformers add to tokenizer.json must be in it: else a text has other tokens there."""
    vocab = {w: i for i, w in enumerate([*WORDS, "<|endoftext|>"])}
    whole = tokenizer_json(vocab, [token(261, "<x>")], None)
    for i, content in enumerate(("<x>", "<y>", "the")):
        for name, beside in (("added_tokens.json", {content: 261}), ("special_tokens_map.json", {"pad_token": content}),
                             ("special_tokens_map.json", {"eos_token": {"content": content, "lstrip": False}}),
                             ("special_tokens_map.json", {"additional_special_tokens": [content, {"content": content}]}),
                             ("tokenizer_config.json", {"pad_token": content, "add_bos_token": True, "token_x": "y"}),
                             ("tokenizer_config.json", {"added_tokens_decoder": {"261": {"content": content}},
                                                        "model_max_length": int(1e30)})):
            path = folder(f"beside{len(os.listdir(runs.root))}", {"tokenizer.json": whole, name: beside})
            ran = subprocess.run([shards, runs.root / f"{path.name}_made", runs.root / "two_files.jsonl", "--tokenizer-path",
                                  path], capture_output=True, text=True, timeout=PATIENCE)
            words = f'{name}: token "{content}": must be an added token of tokenizer.json too'
            check(ran.returncode == 2 and words in ran.stderr if i else ran.returncode == 0, ran)
    spaced = {"tokenizer_config.json": {"add_prefix_space": True}}  # which transformers puts in the place of the file's own
    for files in ({"tokenizer.json": whole}, {"vocab.json": vocab, "merges.txt": "t h\n"}):
        ran = subprocess.run([shards, runs.root / "spaced_made", runs.root / "two_files.jsonl", "--tokenizer-path",
                              folder(f"spaced{len(files)}", files | spaced)], capture_output=True, text=True, timeout=PATIENCE)
        check(ran.returncode == 2 and "tokenizer_config.json: add_prefix_space: must be false" in ran.stderr, ran)


def test_numbers_of_added_tokens():
    """The package numbers them itself: what a file numbers otherwise is refused by name, all else is what it makes."""
    vocab = {w: i for i, w in enumerate([*WORDS, "<|endoftext|>"])}
    sparse = {w: i if i < 260 else i + 40 for w, i in vocab.items()}  # 261 tokens, the largest id is 300
    text = b"a the<x>the<y> in a <|endoftext|>"
    whole = 0
    for i, (words, *added) in enumerate((
            (vocab, (261, "<x>"), (262, "<y>")), (vocab, (262, "<x>")), (vocab, (261, "<x>"), (300, "<y>")),
            (vocab, (262, "<x>"), (261, "<y>")), (vocab, (261, "<x>"), (261, "<y>")), (vocab, (5, "<x>")),
            (vocab, (261, "<x>"), (261, "<x>")), (vocab, (261, "<x>"), (262, "<x>")),
            (vocab, (260, "<|endoftext|>"), (261, "<x>")), (sparse, (261, "<x>")), (sparse, (301, "<x>")),
            (sparse, (300, "<|endoftext|>"), (301, "<x>")), (sparse, (301, "<x>"), (300, "<|endoftext|>")))):
        json_of = tokenizer_json(words, [token(*one) for one in added], None)
        reference = Tokenizer.from_str(json.dumps(json_of))
        same = all(reference.token_to_id(content) == number for number, content in added)
        ran = compare(f"number{i}", json_of, text, same)
        check(same or "the package tokenizers numbers these without gaps" in ran.stderr, i, ran)
        whole += same
    check(whole == 4, whole)
    taken = tokenizer_json(sparse | {"in": 261}, [token(261, "<x>")], None)
    check("id 261 is that of another token" in compare("taken", taken, text, False).stderr, "taken")


def test_both_ends():
    """Templates that say what ends a text too, of either kind: a document is what the package makes of it."""
    vocab = {w: i for i, w in enumerate([*WORDS, "spare"])}  # none of the usual names
    added = [token(261, "<s>"), token(262, "[SEP]")]
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in ((261, "<s>"), (262, "[SEP]"))}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": "[SEP]", "type_id": 0}}]
    forms = {"template": {"type": "TemplateProcessing", "single": single, "pair": single + single,
                          "special_tokens": special},
             "roberta": {"type": "RobertaProcessing", "sep": ["[SEP]", 262], "cls": ["<s>", 261], "trim_offsets": True,
                         "add_prefix_space": False}}
    for name, template in forms.items():
        path = folder(f"ends_{name}", {"tokenizer.json": tokenizer_json(vocab, added, template)})
        reference = Tokenizer.from_file(str(path / "tokenizer.json"))
        found, _ = encode(path, DOCUMENTS, path.name)
        want = [i for d in DOCUMENTS for i in reference.encode(d).ids]
        check(found == want and want[-1] == 262, name, found, want)
    forms["template"]["single"] = [single[0], *single]
    text = runs.root / "two_files.jsonl"
    for name, files, words in (
            ("twice", {"tokenizer.json": tokenizer_json(vocab, added, forms["template"])}, "with one token before"),
            ("two", {"tokenizer.json": tokenizer_json(vocab, added, {"type": "Sequence", "processors": [
                forms["roberta"], forms["roberta"]]})}, "at most one of them may add tokens"),
            ("strange", {"tokenizer.json": tokenizer_json(vocab, added, {"type": "Other"})}, "post_processor: Other"),
            ("beside", {"vocab.json": vocab | {"<|endoftext|>": 263}, "merges.txt": "t h\n",
                        "added_tokens.json": {"<pad>": 261}},
             "added_tokens.json: token \"<pad>\": must be an added token of tokenizer.json too")):
        ran = subprocess.run([shards, runs.root / "refused", text, "--tokenizer-path", folder(name, files)],
                             capture_output=True, text=True, timeout=PATIENCE)
        check(ran.returncode == 2 and words in ran.stderr, ran)


def test_no_vocabulary():
    """A file in the place of its folder, and a folder of another kind of vocabulary."""
    for path in (runs.root / "one_file/tokenizer.json", folder("pieces", {"tokenizer.model": "x"})):
        ran = subprocess.run([shards, runs.root / "refused", runs.root / "two_files.jsonl", "--tokenizer-path", path],
                             capture_output=True, text=True, timeout=PATIENCE)
        check(ran.returncode == 2 and f"{path}: must be a folder that has tokenizer.json, or vocab.json and" in ran.stderr, ran)


def write(model, *options, code=0):
    ran = subprocess.run([generate, model, "--threads", "1", *options], capture_output=True, timeout=PATIENCE)
    check(ran.returncode == code, ran)
    return ran.stdout.decode(), ran.stderr.decode()


def test_end(vocabulary):
    """A model of short documents ends its text, and generate with it; what stands around a text is not printed."""
    data = runs.root / "short.jsonl"
    data.write_text("".join(json.dumps({"text": "the thing in"}) + "\n" for _ in range(2000)))
    model, _, _ = runs.train("short", "--tokenizer", "gpt2", "--tokenizer-path", vocabulary, "--data", data,
                             "--steps", 60, "--eval-every", 0, "--lr", "1e-2")
    for prompt in ("the", ""):
        _, said, _ = runs.train(f"sampled{prompt}", "--tokenizer", "gpt2", "--tokenizer-path", vocabulary,
                                "--data", data, "--steps", 60, "--eval-every", 0, "--lr", "1e-2", "--sample", 40,
                                "--temperature", 0, "--prompt", prompt)
        check("---- sample after training ----\nthe thing in\n----\n" in said, "the trainer's own sample", said[-300:])
    greedy = ("--temperature", "0", "--length", "40")
    text, said = write(model, "--prompt", "the", *greedy)
    check(text == "the thing in\n" and "(the end of the text)" in said, text, said)
    text, said = write(model, *greedy)
    check(text == "the thing in\n", "from nothing", text)
    text, said = write(model, "--prompt", "the", *greedy, "--ignore-eos")
    check(text.startswith("the thing in" + END + BEGIN + "the thing in") and "text: 40 tokens," in said, text, said)
    text, said = write(model, "--prompt", "the", *greedy, "--stop", "ing in")
    check(text == "the th\n" and "(--stop)" in said, text, said)
    text, said = write(model, "--prompt", "the", *greedy, "--stop", "nowhere", "--stop", "g i", "--stop", "in")
    check(text == "the th\n", "the first of several", text)
    text, said = write(model, "--prompt", "the", *greedy, "--stop", "the", "--stop", "inn")
    check(text == "the thing in\n", "the prompt does not end it, nor does half of a stop", text)
    for options, words in ((("--stop", ""), "--stop: must be text"), (("--bench", "--stop", "x"), "with --bench"),
                           (("--bench", "--ignore-eos"), "with --bench"),
                           (("--bench", "--length", "9"), "--length: has no effect with --bench"),
                           (("--bench", "--seed", "9"), "--seed: has no effect with --bench"),
                           (("--temperature", "0", "--min-p", "0.1"), "sample.temperature = 0"),
                           (("--repetition-window", "5"), "sample.repetition_penalty = 1"),
                           (("--repetition-penalty", "0"), "must be a number above 0"),
                           (("--min-p", "1.5"), "in 0 .. 1")):
        check(words in write(model, *options, code=2)[1], options, words)


test_another_vocabulary(*test_same_tokens())
test_patterns()
test_odd_tokenizers()
test_tokens_beside()
test_numbers_of_added_tokens()
test_no_vocabulary()
test_both_ends()
test_end(test_template())
done()
