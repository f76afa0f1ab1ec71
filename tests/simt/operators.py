"""Faults that operators make: the same few edits at every place of a file where they apply.

Twin: none; mutate.py and mutate_header.py try them. Not here: what no operator makes (the lists), how a
fault is planted (plant.py). A fault's name is file:function:operator:number, counted within the function,
so that one can be tried again by its name. What an edit leaves may not compile: then it is no fault.
"""
import collections
import hashlib
import re

TOKEN = re.compile(r'\s+|\d[\w.]*(?<=[eE])[+-]\d+\w*|\d[\w.]*|\w+|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
                   r"|<<=|>>=|<<|>>|[-+*/%&|^<>=!]=|\+\+|--|->|::|&&|\|\||.", re.S)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\\n|[^\n])*", re.S | re.M)
ORDER = {op: i for i, ops in enumerate(("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"))
         for op in ops.split()}
ASSIGNMENTS = set("= += -= *= /= %= |= &= ^= <<= >>=".split())
ENDS = {"(", "[", "{", ")", "]", "}", ";", ",", "?", ":", "return", "else", *ASSIGNMENTS}
OTHERS = {"<": "<= >", "<=": "<", ">": ">= <", ">=": ">", "==": "!= >=", "!=": "==", "+": "-", "-": "+", "*": "/",
          "/": "%", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|", "&&": "||", "||": "&&",
          "+=": "-= =", "-=": "+= =", "|=": "=", "&=": "=", "*=": "=", "min": "max", "max": "min",
          "fminf": "fmaxf", "fmaxf": "fminf", "true": "false", "false": "true"}
PAIRS = ("first last", "begin end", "dim dim_v", "k v", "heads kv_heads", "cmp_block cmp_stride", "x y", "low high",
         "query row", "rows columns", "k_cmp v_cmp", "slc win", "width wide", "of_k of_v", "head kv_head",
         "newest length", "local candidates", "lane thread", "key query", "tokens count", "log log2")
TWINS = collections.defaultdict(list)
for one, two in map(str.split, PAIRS):
    TWINS[one].append(two)
    TWINS[two].append(one)
ORDERS = re.compile(r" \w*(await|wait|release|skip|sync|fence|commit|arrive|start)")
WRITTEN = re.compile(r"(?: \*)?( [\w.> -]+? )(?:[-+*/%&|^]|<<|>>)?= ") # of a statement's words
SYMMETRIC = {"min", "max", "fminf", "fmaxf", "nsa__min", "nsa__max", "nsa__larger",
             "nsa__fits"}
NO_CALL = {"if", "for", "while", "switch", "return", "sizeof", "defined", "decltype", "static_assert", "else"}
Edit = collections.namedtuple("Edit", "name begin end text")


def blank(text):
    """Without comments and directives; nothing moves."""
    return COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


class Function:
    """The tokens of a piece of a file that ends with a function, and what belongs together there."""

    def __init__(self, text, begin, end):
        self.words, self.starts, self.gaps, gap = [], [], [], True
        for found in TOKEN.finditer(text, begin, end):
            if found[0].isspace():
                gap = True
                continue
            self.words.append(found[0])
            self.starts.append(found.start())
            self.gaps.append(gap) # white space before it
            gap = False
        self.text, self.match = text, {}
        opened = []
        for i, word in enumerate(self.words):
            angle = word in "<>" and not self.gaps[i] and not (word == "<" and self.after(i))
            if word in "([{" or angle and word == "<":
                opened.append(i)
            elif word in ")]}" or angle and opened and self.words[opened[-1]] == "<":
                while opened:
                    first = opened.pop()
                    self.match[first], self.match[i] = i, first
                    if self.words[first] != "<" or word == ">":
                        break
        body = next((i for i in range(len(self.words)) if self.words[i] == "{" and i in self.match
                     and self.match[i] == len(self.words) - 1), None)
        head = text[begin:self.starts[body]] if body is not None else ""
        names = re.findall(r"NSA__T\((\w+)\)|(\w+)\s*\(", head) or [("", "file")]
        plain = [a or b for a, b in names if (a or b) not in ("__launch_bounds__", "NSA__T")]
        self.name, self.body = (plain or ["file"])[-1 if "NSA_GRID_CONSTANT" in head else 0], body

    def after(self, i):
        """White space behind token i."""
        return i + 1 < len(self.gaps) and self.gaps[i + 1]

    def is_operand_end(self, i):
        return i >= 0 and (re.match(r"[\w\"']", self.words[i]) and self.words[i] not in NO_CALL
                           or self.words[i] in ")]")

    def is_binary(self, i):
        return (self.words[i] in ORDER and i not in self.match and self.gaps[i] and self.after(i)
                and self.is_operand_end(i - 1))

    def left(self, i, order):
        """Where the operand before token i begins, of an operator of that order."""
        at = i
        while at > 0:
            word = self.words[at - 1]
            if at - 1 in self.match and self.match[at - 1] < at - 1:
                at = self.match[at - 1]
            elif word in ENDS or self.is_binary(at - 1) and ORDER[word] < order:
                break
            else:
                at -= 1
        return at

    def right(self, i, order):
        """Behind the operand that begins with token i."""
        at = i
        while at < len(self.words):
            word = self.words[at]
            if at in self.match and self.match[at] > at and word != "{":
                at = self.match[at] + 1
            elif word in ENDS or at > i and self.is_binary(at) and ORDER[word] <= order:
                break
            else:
                at += 1
        return at

    def span(self, first, behind):
        return self.starts[first], self.starts[behind - 1] + len(self.words[behind - 1])

    def read(self, first, behind):
        begin, end = self.span(first, behind)
        return self.text[begin:end]

    def arguments(self, opened):
        """(first, behind) of each argument of a bracket."""
        first, at, close = opened + 1, opened + 1, self.match[opened]
        while at < close:
            if at in self.match and self.match[at] > at:
                at = self.match[at]
            elif self.words[at] == ",":
                yield first, at
                first = at + 1
            at += 1
        if first < close:
            yield first, close

    def statement(self, i):
        """Where the statement begins that token i, a semicolon, ends; None of what is no statement."""
        at = i
        while at > 0:
            word = self.words[at - 1]
            if word in ("{", "}", ";", "else") or word == ":" and self.gaps[at]:
                break
            if word == ")" and self.words[self.match[at - 1] - 1] in ("if", "for", "while", "switch"):
                break
            at = self.match[at - 1] if self.match.get(at - 1, at) < at - 1 else at - 1
            if word in ("(", "["):
                return None
        words = self.words[at:i]
        if "".join(words[:3]) == "(void)" and "(" not in words[3:]: # for a compiler that warns
            return None
        if not words or words[0] in ("return", "break", "continue", "do", "const", "static", "typedef", "using",
                                     "goto", "case", "constexpr"):
            return None
        declares = len(words) > 1 and re.match(r"\w", words[0]) and (
            re.match(r"\w", words[1]) or words[1] == "*" and self.gaps[at + 1])
        return None if declares else at

    # Each operator yields (first token, behind the last, text).

    def constant(self, i):
        bits = re.fullmatch(r"0x([0-9a-fA-F]+)([uUlL]*)", self.words[i])
        if bits:
            width, number = len(bits[1]), int(bits[1], 16)
            half = (1 << 2 * width) - 1
            for other in dict.fromkeys((number + 1, number >> 1, number & half, number & ~half)):
                yield i, i + 1, f"0x{other:0{width}x}{bits[2]}"
        found = re.fullmatch(r"(\d+)(\.0?f?|[uUlL]*)", self.words[i])
        if found and not (found[1][0] == "0" and len(found[1]) > 1):
            number = int(found[1])
            for other in dict.fromkeys((number + 1, abs(number - 1), 2 * number, number // 2)):
                yield i, i + 1, f"{other}{found[2]}"

    def other(self, i):
        if self.is_binary(i) or self.words[i] in ASSIGNMENTS or self.words[i] in ("true", "false") or (
                self.words[i] in OTHERS and self.words[i].isalpha() and self.words[i + 1:i + 2] == ["("]):
            for word in OTHERS.get(self.words[i], "").split():
                yield i, i + 1, word

    def twin(self, i):
        """A name that is easily taken for it."""
        for word in TWINS.get(self.words[i], ()):
            yield i, i + 1, word

    def operand(self, i):
        """One of two operands alone."""
        if self.is_binary(i):
            order = ORDER[self.words[i]]
            first, behind = self.left(i, order), self.right(i + 1, order)
            yield i, behind, ""
            yield first, i + 1, ""
            if self.words[i] in ("-", "/", "%", "<<", ">>"):
                yield first, behind, f"{self.read(i + 1, behind)} {self.words[i]} {self.read(first, i)}"

    def truth(self, i):
        """What is asked is so, or is not."""
        spans = set()
        if self.is_binary(i) and ORDER[self.words[i]] <= ORDER[">="]:
            order = ORDER[self.words[i]]
            spans = {(self.left(i, order), self.right(i + 1, order))}
            if self.words[i] in ("&&", "||"):
                spans |= {(self.left(i, order), i), (i + 1, self.right(i + 1, order))}
        elif self.words[i] == "?":
            spans = {(self.left(i, 0), i)}
        elif self.words[i] in ("if", "while") and self.words[i + 1:i + 2] == ["("]:
            spans = {(i + 2, self.match[i + 1])}
        elif self.words[i] == "!" and not self.after(i):
            yield i, i + 1, ""
            spans = {(i, self.right(i + 1, len(ORDER)))}
        for first, behind in sorted(spans):
            if first < behind:
                yield first, behind, "true"
                yield first, behind, "false"

    def choice(self, i):
        """One of two values whatever was asked."""
        if self.words[i] != "?":
            return
        first, colon, depth = self.left(i, 0), i + 1, 1
        while colon < len(self.words):
            if colon in self.match and self.match[colon] > colon:
                colon = self.match[colon]
            depth += (self.words[colon] == "?") - (self.words[colon] == ":")
            if not depth or self.words[colon] in (";", ")", "]"):
                break
            colon += 1
        if depth:
            return
        behind = self.right(colon + 1, -1)
        while self.words[behind] == "?": # the second value is a choice itself
            behind = self.right(next(j for j in range(behind, len(self.words)) if self.words[j] == ":") + 1, -1)
        yield first, behind, self.read(i + 1, colon)
        yield first, colon + 1, ""
        yield colon + 1, behind, "0"

    def call(self, i):
        """One of its arguments in place of a call; two neighbours of them swapped."""
        if self.words[i] != "(" or not self.is_operand_end(i - 1) or not re.match(r"\w", self.words[i - 1]) or (
                self.words[i - 1] in NO_CALL):
            return
        given = list(self.arguments(i))
        for first, behind in given:
            yield i - 1, self.match[i] + 1, self.read(first, behind)
        for (a, b), (c, e) in zip(given, given[1:]) if self.words[i - 1] not in SYMMETRIC else ():
            yield a, e, f"{self.read(c, e)}, {self.read(a, b)}"

    def value(self, i):
        """0 or 1 in place of a value, or one more, one less, none of it, twice it."""
        spans = set()
        if re.match(r"[A-Za-z_]", self.words[i]) and self.words[i] not in NO_CALL and (
                i == 0 or self.words[i - 1] not in (".", "->", "::")):
            behind = i + 1
            while behind < len(self.words) and (
                    self.words[behind] in (".", "->", "::") or self.words[behind - 1] in (".", "->", "::")
                    or self.words[behind] in "([<" and behind in self.match and not self.gaps[behind]):
                behind = self.match[behind] + 1 if behind in self.match else behind + 1
            spans = {(i, behind)}
        elif self.words[i] in "([" and i in self.match and self.words[i - 1] != "for":
            spans = {*self.arguments(i)} | ({(i, self.match[i] + 1)} if not self.is_operand_end(i - 1) else set())
        elif self.is_binary(i):
            order = ORDER[self.words[i]]
            spans = {(self.left(i, order), self.right(i + 1, order)), (i + 1, self.right(i + 1, order))}
        elif self.words[i] in (*ASSIGNMENTS, "return", ":"):
            spans = {(i + 1, self.right(i + 1, -1))}
        for first, behind in sorted(spans):
            if first < behind:
                for word in ("0", "1"):
                    yield first, behind, word
                yield first, behind, self.read(first, behind) + " + 1"
                yield first, behind, self.read(first, behind) + " - 1"
                yield first, behind, "0 * " + self.read(first, behind)
                yield first, behind, "2 * " + self.read(first, behind)

    def statement_dropped(self, i):
        if self.words[i] == ";" and self.statement(i) is not None:
            yield self.statement(i), i, ""
        if self.words[i] == "if" and self.words[i + 1:i + 2] == ["("]:
            yield i, self.match[i + 1] + 1, ""
            if self.words[self.match[i + 1] + 1] != "{":
                behind = next(j for j in range(self.match[i + 1], len(self.words)) if self.words[j] == ";")
                yield i, behind + 1, ""

    def swapped(self, i):
        """Two statements in the other order, of which one writes what the other has, or both order copies."""
        first = self.statement(i) if self.words[i] == ";" else None
        if first is None or self.words[first - 1] in (")", "else") or self.words[i + 1:i + 2] == ["else"]:
            return
        last = next((j for j in range(i + 1, len(self.words)) if self.words[j] in (";", "{", "}")), i)
        if self.words[last] != ";" or self.statement(last) != i + 1:
            return
        one, two = (" ".join(["", *self.words[a:b], ""]) for a, b in ((first, i), (i + 1, last)))
        targets = [WRITTEN.match(words) for words in (one, two)]
        if any(target and target[1] in one and target[1] in two for target in targets) or (
                ORDERS.match(one) and ORDERS.match(two)):
            yield first, last + 1, f"{self.read(i + 1, last + 1)} {self.read(first, i + 1)}"

    def weaker(self, i):
        """Half of what a wait for copies does: threads, or the thread's own copies."""
        if self.words[i] == "nsa__cuda_tiles_wait" and self.words[i + 1:i + 2] == ["<"]:
            behind = self.match[i + 1] + 3
            yield i, behind, "__syncthreads()"
            yield i, behind, "nsa__cp_async_wait<0>()"

    OPERATORS = {"constant": constant, "other": other, "twin": twin, "operand": operand, "truth": truth, "choice": choice,
                 "call": call, "value": value, "drop": statement_dropped, "swap": swapped, "weaker": weaker}

    def edits(self, file):
        counts, seen = collections.Counter(), set()
        for operator, make in self.OPERATORS.items():
            for i in range(self.body or len(self.words), len(self.words)):
                for first, behind, text in make(self, i):
                    begin, end = self.span(first, behind)
                    key = (begin, end, text)
                    if key not in seen and self.text[begin:end] != text:
                        seen.add(key)
                        yield Edit(f"{file}:{self.name}:{operator}:{counts[operator]}", begin, end, text)
                        counts[operator] += 1


class File:
    """A file's functions and the edits of each, made when they are asked for."""

    def __init__(self, name, text):
        self.name, self.text, self.bare, counts = name, text, blank(text), collections.Counter()
        ends = [found.end() for found in re.finditer(r"^}\n", self.bare, re.M)]
        self.spans, self.functions, self.made = list(zip([0, *ends], ends)), [], {}
        for span in self.spans:
            function = Function(self.bare, *span)
            counts[function.name] += 1
            if counts[function.name] > 1:  # an overload, or another branch of #if
                function.name += f"#{counts[function.name]}"
            self.functions.append(function)

    def edits_of(self, i):
        if i not in self.made:
            self.made[i] = list(self.functions[i].edits(self.name))
        return self.made[i]

    def edits(self):
        for i in range(len(self.functions)):
            yield from self.edits_of(i)

    def maker(self, old, new):
        """The first edit that leaves what a listed fault leaves; None if no operator makes it. White space,
        comments, brackets around one word and an empty statement are no difference."""
        at, margin = self.text.index(old), 200
        low, high = max(at - margin, 0), min(at + len(old) + margin, len(self.bare))
        left = plain(self.bare[low:at] + blank(new) + self.bare[at + len(old):high])
        for i, (begin, end) in enumerate(self.spans):
            if begin <= at + len(old) and at <= end:
                for edit in self.edits_of(i):
                    if low <= edit.begin <= at + len(old) and at <= edit.end <= high and left == plain(
                            self.bare[low:edit.begin] + edit.text + self.bare[edit.end:high]):
                        return edit
        return None


def quotation(text, edit, everywhere):
    """(old, new): whole lines around an edit, as many as make them stand once in `everywhere`."""
    begin = text.rfind("\n", 0, edit.begin) + 1
    end = (text.find("\n", edit.end) + 1 or len(text) + 1) - 1
    while begin and everywhere.count(text[begin:end]) > 1:
        begin = text.rfind("\n", 0, begin - 1) + 1
    return text[begin:end], text[begin:edit.begin] + edit.text + text[edit.end:end]


SAME = {"true": "1", "false": "0", "nullptr": "NULL", "0.0f": "0", "1.0f": "1"}
TYPES = {"int", "float", "double", "void", "int64_t", "uint32_t", "uint64_t", "uint16_t", "size_t", "T", "char"}


def plain(text):
    """A text's tokens without what makes no difference."""
    words = [SAME.get(word, word) for word in TOKEN.findall(text) if not word.isspace()]
    out = []
    for word in words:
        if word == ";" and out and out[-1] in (";", "{", "}"):
            continue
        out.append(word)
        if len(out) > 3 and out[-1] == ")" and out[-3] == "(" and not (
                re.match(r"[\w>)\]]", out[-4]) and out[-4] != "return") and re.match(r"\w", out[-2]) and (
                out[-2] not in TYPES):
            out[-3:] = [out[-2]]
        if out[-5:] == ["(", "void", ")", "0", ";"]:
            out[-5:] = [";"] if out[-6:-5] not in ([";"], ["{"], ["}"]) else []
    return out


def draw(names, count, seed):
    """`count` of the names, of each operator as many as there are; the same for the same seed."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).hexdigest())
    turns, ranks = collections.Counter(), {}
    for place, name in enumerate(ranked):
        operator = name.split(":")[2]
        ranks[name] = (turns[operator], place)
        turns[operator] += 1
    return sorted(names, key=ranks.get)[:count]
