"""Plants many faults in one file of the kernels; which of them is there is chosen at run time.

Twin: none; mutate.py compiles and runs what is planted here. Not here: a parser of C++. Compiling
takes far longer than running, so faults share a program: the smallest whole expression or statement
around what a fault changes becomes `(nsa_fault == 7 ? (NEW) : (OLD))`. A piece cut wrong does
not compile, and one that must be a constant does not either: mutate.py plants such faults alone.
"""
import re

# The number is a constant to the kernels: no access that the checker sees. The host's C sets it.
DECLARATION = 'extern "C" const int nsa_fault;\n'
DEFINITION = """#include <stdlib.h>
int nsa_fault;
static void __attribute__((constructor)) choose(void) { nsa_fault = atoi(getenv("NSA_FAULT")); }
"""
TOKEN = re.compile(r"\s+|\w+|[-+*/%&|^<>=!]=|\+\+|--|->|::|&&|\|\||.", re.S)
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^="}
JUMPS = {"return", "goto", "break", "continue", "case", "default", "do", "else"}
DEEPER = {"(": 1, "[": 1, ")": -1, "]": -1}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def without_comments(text):
    """Blanks in their place, so that nothing moves."""
    return COMMENT.sub(lambda found: re.sub(r"\S", " ", found[0]), text)


def change(old, new):
    """What of `old` gives way to what: (begin, end, text), whole tokens, no last semicolon."""
    a, b = TOKEN.findall(old), TOKEN.findall(new)
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    begin, a, b = len("".join(a[:head])), a[head:], b[head:]
    while a and b and a[-1] == b[-1]:
        a.pop(), b.pop()
    gone, come = "".join(a), "".join(b).strip()
    begin, gone = begin + len(gone) - len(gone.lstrip()), gone.strip()
    if gone.endswith(";") and (not come or come.endswith(";")):
        gone, come = gone[:-1], come[:-1]
    return begin, begin + len(gone), come


def left_end(tokens, at):
    """Where the expression that goes on at token `at` begins; whether a statement could too."""
    depth, last_closed = 0, None
    for i in range(at - 1, -1, -1):
        token = tokens[i]
        if depth or token in (")", "]"):
            last_closed = last_closed if depth else i
            depth -= DEEPER.get(token, 0)
        elif token in ("if", "for", "while") and last_closed is not None:
            return last_closed + 1, True
        elif token in ("else", "return", "(", "[", ";", "{", "}", ",", "?", ":", *ASSIGNMENTS):
            return i + 1, token in ("else", ";", "{", "}")
    return 0, False


def right_end(tokens, left, behind, statement):
    """Where what begins at token `left` and holds those before `behind` ends; None: not whole."""
    depth = questions = 0
    for i in range(left, len(tokens) + 1):
        token = tokens[i] if i < len(tokens) else ";"
        inside = i < behind
        if depth == 0 and token in ("{", "}", ")", "]"):
            return None if inside or questions or statement else i
        if depth == 0 and token == ";" and not (statement and inside):
            return None if inside or questions else i
        if depth == 0 and not statement:
            if token == "," or token == ":" and not questions or (
                    token == "?" and not questions and not inside):
                return None if inside or questions else i
            questions += (token == "?") - (token == ":")
        depth += DEEPER.get(token, 0)
    return None


def in_braces(tokens, at):
    """Whether the innermost bracket around token `at` is a brace: no loop's head, no argument."""
    depth = 0
    for token in reversed(tokens[:at]):
        depth -= DEEPER.get(token, 0) + (token == "{") - (token == "}")
        if depth < 0:
            return token == "{"
    return False


class Piece:
    """The part of a file in which a fault, or several of one place, can be chosen."""

    def __init__(self, text, fault, number):
        begin, end, come = change(without_comments(fault.old), without_comments(fault.new))
        at = text.index(fault.old)
        self.text = without_comments(text)
        self.edits = [(number, at + begin, at + end, come)]
        tokens, starts = TOKEN.findall(self.text), [0]
        for token in tokens:
            starts.append(starts[-1] + len(token))
        first = next(i for i in range(len(tokens)) if starts[i + 1] > at + begin)
        behind = next(i for i in range(first, len(starts)) if starts[i] >= at + end)
        left = first + 1
        while True:
            left, opens = left_end(tokens, first if left > first else left - 1)
            for self.statement in (opens and in_braces(tokens, left), False):
                right = right_end(tokens, left, behind, self.statement)
                if right:
                    break
            self.begin, self.end = starts[left], starts[right or left]
            if right and self.is_whole(self.variant(*self.edits[0][1:])):
                break
            if left == 0: # nothing whole: all of the file, which does not compile
                self.begin, self.end = 0, len(text)
                break

    def is_whole(self, text):
        tokens = TOKEN.findall(text)
        return right_end(tokens, 0, len(tokens), self.statement) == len(tokens)

    def variant(self, begin, end, come):
        return self.text[self.begin:begin] + come + self.text[end:self.end]

    def declares(self):
        """Whether it is a declaration: in a choice nobody behind it would see the name."""
        words = [word for word in TOKEN.findall(self.text[self.begin:self.end]) if not word.isspace()]
        names = [word for word in words[:5] if word not in ("*", "const", "static", "struct")]
        return self.statement and all(re.match(r"[A-Za-z_]", word) for word in names[:2]) and words[0] not in JUMPS

    def takes(self, other):
        """Whether the other lies within this one; its faults are then chosen here too."""
        inside = self.begin <= other.begin and other.end <= self.end
        if inside:
            self.edits += other.edits
        return inside

    def choice(self):
        """In the file's own lines: what stands behind must not move."""
        whole = self.text[self.begin:self.end]
        space, behind = whole[:len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()):]
        wrap = "({{ {}; (void)0; }})" if self.statement else "({})"
        new = [f"nsa_fault == {number} ? {wrap.format(' '.join(self.variant(*edit).split()))} : "
               for number, *edit in self.edits]
        return f"{space}({''.join(new)}{wrap.format(whole.strip())}){behind}"


def functions(text):
    """(begin, end) of pieces of a file that each end with the end of a function."""
    ends = [found.end() for found in re.finditer(r"^}\n", text, re.M)]
    return list(zip([0, *ends], [*ends, len(text)]))


def plant_many(text, faults):
    """(text, {number: its lines}) of a file with those of {number: fault} that go together: each
    within one function."""
    lines, result = {}, []
    for begin, end in functions(text):
        mine = {number: fault for number, fault in faults.items()
                if text.count(fault.old) == 1 and begin <= text.index(fault.old)
                and text.index(fault.old) + len(fault.old) <= end}
        planted, lines_of = plant_in(text[begin:end], mine) if mine else (text[begin:end], {})
        first = text.count("\n", 0, begin)
        lines.update({number: range(span.start + first, span.stop + first)
                      for number, span in lines_of.items()})
        result.append(planted)
    return "".join(result), lines


def plant_in(text, faults):
    """The same of one function."""
    pieces = [piece for number, fault in faults.items() if not (piece := Piece(text, fault, number)).declares()]
    kept = []
    for piece in sorted(pieces, key=lambda piece: piece.begin - piece.end):
        if not any(other.takes(piece) for other in kept) and all(
                piece.end <= other.begin or other.end <= piece.begin for other in kept):
            kept.append(piece)
    lines, result = {}, text
    for piece in sorted(kept, key=lambda piece: piece.begin, reverse=True):
        result = result[:piece.begin] + piece.choice() + result[piece.end:]
        span = range(text.count("\n", 0, piece.begin) + 1, text.count("\n", 0, piece.end) + 2)
        lines.update({number: span for number, *_ in piece.edits})
    return result, lines
