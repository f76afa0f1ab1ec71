#!/usr/bin/env python3
"""Counts the instructions of the loops of sm_90a's kernels that hold products of tensor cores.

No GPU is needed: nvdisasm shows what ptxas made. For each innermost loop with products of a
warpgroup (HGMMA), all in instructions of one warp:

  loop     of one turn, the slow ways of waits left out
  least    of the shortest turn: a tile that needs no mask, and no new maximum
  products of one turn
  before   from the last wait for a tile or a barrier to the first product after it
  between  the most between two products that no wait for products parts: ptxas also puts what no
           product needs there, such as a mask's bounds, and it runs beside the one before
  makes    the most instructions between two such products that make the later one's descriptors
  beside   exponentials between the last product and the last wait for products
  ranks    selection: of the shortest turn that scores a block for each lane and offers the scores
  inserts  of one score that goes into a list in the lanes of a warp

counts.json holds what the version of nvcc named there makes. A kernel that differs is a finding:
look whether it became better or worse, then write the file anew. More than MOST is one in any case.

usage: sass.py NVCC WORK_FOLDER [--nvdisasm PATH] [--write]
"""
import argparse
import json
import pathlib
import re
import shutil
import sys
import sysconfig

import resources

ARCH = "90a"
COUNTS = pathlib.Path(__file__).resolve().parent / "counts.json"
PRODUCT = re.compile(r"\bHGMMA\b")
EXPONENTIAL = re.compile(r"\bMUFU\.EX2\b")
WAIT = re.compile(r"\bBAR\.SYNC|\bSYNCS\.PHASECHK")
DONE = re.compile(r"\bWARPGROUP\.DEPBAR")
SCORE, OFFER, INSERT = (re.compile(rf"\b{word}") for word in (r"LDS\.128\b", r"VOTE\.ANY\b", r"SHFL\.UP\b"))
MOST = {"before": {"attend_dkv": 80, "": 40}, "between": {"": 4}}  # by how kernels' names begin
SHOWN = re.compile(r"(attend_\w+|select_blocks_sm90)_kernel<__nv_bfloat16")  # f16 has the same instructions


def find_nvdisasm(given):
    """nvdisasm of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    packaged = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia"
    found = given or shutil.which("nvdisasm") or next(iter(packaged.rglob("bin/nvdisasm")), None)
    if not found:
        print("no nvdisasm: pip install nvidia-cuda-nvdisasm")
        sys.exit(77)
    return found


def functions(text):
    """{kernel: (instructions, places of labels)}"""
    found, code, labels = {}, None, None
    for line in text.splitlines():
        name = re.match(r"\.text\.(\w+):", line)
        label = re.match(r"\s*(\.L_x_\d+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if name:
            code, labels = found.setdefault(name[1], ([], {}))
        elif label and code is not None:
            labels[label[1]] = len(code)
        elif instruction and code is not None:
            code.append(instruction[1].strip())
    return found


def loops(code, labels, what=PRODUCT):
    """(first, last) of the loops with products, or what else is asked for, that hold no other such loop.
    Behind an EXIT lie the slow ways of waits, which jump back into the middle of a loop and are none."""
    jumps = [(labels[target[1]], i) for i, text in enumerate(code)
             if (target := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text)) and labels[target[1]] < i]
    holding = [(first, last) for first, last in jumps if any(map(what.search, code[first:last]))
               and not any("EXIT" in text for text in code[first:last])]
    return sorted(a for a in holding
                  if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in holding))


def registers(operand):
    """Those that an operand names, uniform ones and predicates too; a descriptor's are four."""
    first = [(kind, int(number)) for kind, number in re.findall(r"\b(UR|UP|R|P)(\d+)", operand)]
    more = range(4) if "gdesc" in operand else range(2) if ".64" in operand else range(1)
    return {f"{kind}{number + i}" for kind, number in first for i in more}


def makes(body, first, last):
    """How many of the instructions between two products make the descriptors of the second."""
    wanted = set().union(*(registers(word) for word in re.findall(r"gdesc\[\w+\]", body[last])))
    number = 0
    for text in reversed(body[first + 1:last]):
        guard, opcode, operands = re.match(r"(@!?\w+)?\s*(\S+)\s*(.*)", text).groups()
        wide = ".64" if re.search(r"64|WIDE", opcode) else ""
        words = [word.strip() + wide for word in operands.split(",")]
        into = 1 + (len(words) > 1 and bool(re.match(r"U?P\d", words[1])))  # a carry beside it
        if wanted & set().union(*map(registers, words[:into])):
            wanted |= set().union(registers(guard or ""), *map(registers, words[into:]))
            number += 1
    return number


def least(code, labels, first, *by):
    """Instructions on the shortest way from `first` by way of others to the last of `by`, parts of which
    may lie elsewhere. BRA.DIV jumps if the lanes of a warp are apart, which they are not."""
    ends = (first, *by)
    return 1 + sum(steps(code, labels, *ends[i:i + 2]) for i in range(len(by)))


def steps(code, labels, first, last):
    seen, now, number = {first}, [first], 0
    while last not in now:
        ahead = set()
        for i in now:
            target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", code[i])
            if target:
                ahead.add(labels[target[1]])
            if not target and "EXIT" not in code[i] or code[i].startswith(("@", "BRA.DIV")):
                ahead.add(i + 1)
        now = ahead - seen
        seen |= ahead
        number += 1
    return number


def count(body):
    """The figures of a loop, whose end goes on at its beginning."""
    products = [i for i, text in enumerate(body) if PRODUCT.search(text)]
    waits = [i for i, text in enumerate(body) if WAIT.search(text)]
    pairs = [(a, b) for a, b in zip(products, products[1:])
             if not any(DONE.search(text) or WAIT.search(text) for text in body[a:b])]
    done = max(i for i, text in enumerate(body) if DONE.search(text))
    behind = [min((p - w) % len(body) for p in products) for w in waits]
    return {"loop": len(body), "products": len(products),
            "before": min(behind) if behind else None,
            "between": max((b - a - 1 for a, b in pairs), default=0),
            "makes": max((makes(body, a, b) for a, b in pairs), default=0),
            "beside": sum(bool(EXPONENTIAL.search(text)) for text in body[products[-1]:done])}


def ranking(code, labels, first, last):
    """What selection's loop does beside sums: its ranking lies behind them."""
    scores = [i for i in range(first, last) if SCORE.search(code[i])]
    offers = [i for i in range(first, last) if OFFER.search(code[i]) and i > scores[-1]]
    found = {"ranks": least(code, labels, first, scores[-1], offers[0], last)}
    for begin, end in loops(code, labels, INSERT):
        up = next(i for i in range(begin, end) if INSERT.search(code[i]))
        found["inserts"] = least(code, labels, begin, up, end)
    return found


def measure(nvcc, nvdisasm, work):
    """(version of nvcc, {kernel: [figures of each loop]})"""
    resources.compile_one(nvcc, work, ARCH, False)
    text = resources.run([nvdisasm, "-c", work / "user.cubin"])
    named = {resources.kernel_name(mangled): body for mangled, body in functions(text).items()
             if any(map(PRODUCT.search, body[0]))}
    figures = {name: [{**count(code[first:last + 1]), "least": least(code, labels, first, last),
                       **(ranking(code, labels, first, last) if name.startswith("select") else {})}
                      for first, last in loops(code, labels)]
               for name, (code, labels) in named.items() if SHOWN.match(name)}
    return resources.run([nvcc, "--version"]).splitlines()[-2], figures


def compare(counts, figures):
    """What differs from the counts that are kept."""
    return [f"{name}: {figures.get(name)}, counts.json has {counts.get(name)}"
            for name in sorted({*counts, *figures}) if figures.get(name) != counts.get(name)]


def beyond(figures):
    """Where tensor cores wait for more instructions than they may."""
    return [f"{name}: {what} {loop[what]}, at most {most} may be" for name in sorted(figures)
            for loop in figures[name] for what, limits in MOST.items()
            if (loop[what] or 0) > (most := next(limits[word] for word in limits if name.startswith(word)))]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("nvcc")
    options.add_argument("work", type=pathlib.Path)
    options.add_argument("--nvdisasm")
    options.add_argument("--write", action="store_true")
    given = options.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    kept = json.loads(COUNTS.read_text()) if COUNTS.exists() else {"nvcc": None, "kernels": {}}
    version, figures = measure(given.nvcc, find_nvdisasm(given.nvdisasm), given.work)
    for name in sorted(figures):
        print(name, *figures[name], sep="\n    ")
    if given.write:
        COUNTS.write_text(json.dumps({"nvcc": version, "arch": ARCH, "kernels": figures}, indent=1,
                                     sort_keys=True) + "\n")
        return 0
    if version != kept["nvcc"]:
        print(f"counts.json is of {kept['nvcc']}, this is {version}: not compared")
        return 77
    findings = compare(kept["kernels"], figures) + beyond(figures)
    print(*findings, f"{len(figures)} kernels, {len(findings)} findings", sep="\n")
    return min(len(findings), 76)


if __name__ == "__main__":
    sys.exit(main())
