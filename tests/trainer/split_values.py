#!/usr/bin/env python3
"""The pieces into which the package tokenizers splits texts by patterns, for test_split.c.

usage: split_values.py > split_values.h, with a Python that has the package (0.23.3 wrote the file that is there).
A piece is what Split (Isolated) and then ByteLevel, without a pattern of its own, give to the model.
"""
import tokenizers
from tokenizers import Regex, pre_tokenizers

PATTERNS = [
    # that match nothing, or nothing here and there
    r"x*", r"a|x*", r"x*|a", r"(?=a)", r"(?<=a)", r"", r"|a", r"a??", r"(?:)", r"\s*", r"a*?b*?",
    # that leave text between matches
    r"\p{L}+", r"b", r"zzz", r"[0-9]", r" ", r"ab", r"\p{N}{1,2}", r"é", r"[^a]",
    # that look around them
    r"(?<=a)b", r"(?<!a)b", r"a(?=b)", r"a(?!b)", r"\s+(?!\S)|\s+", r"(?<= )\S",
    # of lines
    r"^a", r"b$", r"\n", r"\s", r".", r".+", r"\A.", r".\z", r".\Z",
    # of models in use
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
TEXTS = ["a", "xxa", "ab xab", "aab b1", "é12 3a", "a\nb\na", "b \n a", "漢a漢", "it's 2024"]


def quoted(text):
    """As a literal of C, in several where it is long."""
    parts, room = [""], 70
    for byte in text.encode():
        plain = 32 <= byte < 127 and chr(byte) not in "\"\\"
        if len(parts[-1]) > room:
            parts.append("")
        parts[-1] += chr(byte) if plain else f"\\{byte:03o}"
    return "\n     ".join(f'"{part}"' for part in parts)


def pieces(pattern, text):
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]


print("/* split_values.h - texts, and the pieces of the package tokenizers " + tokenizers.__version__ +
      ". Twin: split_values.py,\n   which wrote it. */\n/* clang-format off */")
print("static const struct {\n    const char *pattern, *text, *pieces[16];\n} splits[] = {")
for pattern in PATTERNS:
    for text in TEXTS:
        print(f"    {{{quoted(pattern)},")
        print(f"     {quoted(text)}, {{{', '.join(map(quoted, pieces(pattern, text)))}}}}},")
print("};")
