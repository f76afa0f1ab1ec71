#!/usr/bin/env python3
"""Checks that nsa.h can be read from top to bottom: no section of its implementation depends on one
that depends on it.

  check_sections.py            prints each circle that there is
  check_sections.py --graph    prints which sections each section uses, too

A section goes from one banner, a line that begins with `/* ---- `, to the next. It defines functions,
types, constants and macros whose names begin with nsa_ or NSA_, and uses those that others define. A
macro that a section undefines is its parameter and no dependence. The text of the tiles is used by
the section that includes this file again. Not here: the public part, and names without prefix.

Exit code: the number of circles, at most 99.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BANNER = re.compile(r"^/\* ---- (.+?)(?: -*)?(?: \*/)?$", re.M)
WORD = re.compile(r"\b(?:nsa|NSA)_\w+")
# What makes a name a definition; a function's brace tells it from a prototype.
DEFINITIONS = [
    re.compile(r"^#define (NSA_\w+)", re.M),
    re.compile(r"^(?:NSA_API|NSA__\w+|static)\b[^;={}()]*?\b(nsa_\w+)\([^;{}]*\)\s*\{", re.M),
    re.compile(r"^static const [^;={}()]*?\b(nsa_\w+)(?:\[\])? =", re.M),
    re.compile(r"^typedef (?:struct|enum) (nsa_\w+) \{", re.M),
    re.compile(r"^typedef [^;{}]*?\b(nsa_\w+)(?:\([^;{}]*\))?;", re.M),
]
ENUM = re.compile(r"^(?:typedef )?enum(?: \w+)? \{(.*?)\}", re.M | re.S)
PASTED = re.compile(r"^ +NSA_API [^;={}()]*?\b(nsa_\w+##\w+##\w+)\(", re.M)


def bare(text):
    """The text without comments, string contents and the backslashes of macros."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    return re.sub(r" *\\$", "", text, flags=re.M)


def sections(text):
    """(title, text without comments) of every section, in order."""
    banners = list(BANNER.finditer(text))
    ends = [banner.start() for banner in banners[1:]] + [len(text)]
    return [(banner[1], bare(text[banner.start():end])) for banner, end in zip(banners, ends)]


def defined(text):
    """The names that a section's text defines, as strings or, where a macro pastes them, patterns."""
    names = {name for pattern in DEFINITIONS for name in pattern.findall(text)}
    for body in ENUM.findall(text):
        names |= set(re.findall(r"(?:^|,)\s*(NSA_\w+)", body))
    names -= set(re.findall(r"^#undef (\w+)", text, re.M))
    return names, [re.compile(re.sub(r"##\w+##", r"\\w+", name) + "$") for name in PASTED.findall(text)]


def dependences(parts):
    """Of every section the names that it takes from another: {title: {other title: names}}."""
    owners, patterns = {}, []
    for title, text in parts:
        names, pasted = defined(text)
        owners.update({name: title for name in names})
        patterns += [(pattern, title) for pattern in pasted]
    graph = {}
    for title, text in parts:
        uses = graph.setdefault(title, {})
        own = set(re.findall(r"^#undef (\w+)", text, re.M))
        for word in set(WORD.findall(text)) - own:
            owner = owners.get(word) or next((t for p, t in patterns if p.match(word)), None)
            if owner and owner != title:
                uses.setdefault(owner, set()).add(word)
        if re.search(r"^#include NSA__THIS_FILE", text, re.M):
            uses.setdefault(parts[-1][0], set()).add("its text")
    return graph


def circles(graph):
    """Groups of sections that reach each other, each a list."""
    reach = {title: set(graph[title]) for title in graph}
    for middle in graph:
        for title in graph:
            if middle in reach[title]:
                reach[title] |= reach[middle]
    groups = {tuple(t for t in graph if t in reach[title] and title in reach[t])
              for title in graph if title in reach[title]}
    return sorted(groups)


def main(arguments):
    if arguments not in ([], ["--graph"]):
        raise SystemExit("usage: check_sections.py [--graph]")
    header = (ROOT / "nsa/nsa.h").read_text()
    parts = sections(header[header.index("/* ==== Implementation"):])
    graph = dependences(parts)
    arrows = sum(len(uses) for uses in graph.values())
    for title in graph if arguments else ():
        print(f"{title}: {'; '.join(t for t in graph if t in graph[title]) or 'nothing'}")
    found = circles(graph)
    for group in found:
        print("a circle of sections: " + "; ".join(group))
        for title in group:
            for other in group:
                if other in graph[title]:
                    print(f"  {title} uses of {other}: {', '.join(sorted(graph[title][other]))}")
    print(f"{len(parts)} sections, {arrows} arrows checked, {len(found)} circles")
    return min(len(found), 99) if arrows > len(parts) else 99


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
