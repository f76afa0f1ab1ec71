#!/usr/bin/env python3
"""Checks that everything has its twins of the same name (CONTRIBUTING.md, habit 1).

A primitive X is what nsa.h declares as nsa_X_forward, or as nsa_X with a workspace of its own. Each
needs: nsa_X_backward beside nsa_X_forward; a definition in nsa.h's implementation; a test
tests/test_X.c (tests/test_attend.c serves every attend_...); a heading of docs/algorithm.md that
names it. And nothing on the CUDA side may be without its twin here: neither nsa_cuda_X in
nsa_cuda.cuh nor a file kernels/X.cuh (twin of a primitive, of a section of the implementation, or part
of one that is). A line `Twin: ...` at the top of a source file names files; each must exist. Under nsa/
it names sections in quotes and functions of the first file, too; each must stand there.

  check_twins.py            checks, also that the map of the primitives in docs/algorithm.md is up to date
  check_twins.py --write    brings that map up to date

Exit code: the number of findings, at most 99.
"""
import pathlib
import re
import subprocess
import sys

from check_docs import anchor

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Of kernels/: what tells nvcc from the host, loading, Hopper's products of a warpgroup. The CPU needs none.
WITHOUT_TWIN = {"common", "load", "warpgroup"}
BRANCHES = "attend_branches"  # the kernel file of every attend_X


def read(path):
    """The text of a file of the tree, empty where there is none."""
    return (ROOT / path).read_text() if (ROOT / path).is_file() else ""


def primitives(declarations):
    """Every X, and whether it has a forward (what has none has no backward either)."""
    names = set(re.findall(r"\bnsa_(\w+)_workspace_size\(", declarations))
    names |= set(re.findall(r"\bnsa_(\w+)_forward\(", declarations))
    names = {re.sub(r"_(forward|backward)$", "", name) for name in names}
    return {name: f"nsa_{name}_forward(" in declarations for name in sorted(names)}


def definitions():
    """Names of the public functions that the implementation defines, macros expanded."""
    command = ["cc", "-E", "-P", "-DNSA_IMPLEMENTATION", "-xc", "nsa/nsa.h"]
    text = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout
    return re.findall(r"\bextern [^;{}()]*?(nsa_\w+)\([^;{}()]*\)\s*{", text)


def has_test(name):
    """Whether a test program of that name exists; the branches may share one."""
    files = [f"tests/test_{name}.c", "tests/test_attend.c" if name.startswith("attend_") else ""]
    return any(file and (ROOT / file).is_file() for file in files)


def check_primitive(name, has_forward, defined, declarations, headings):
    calls = [f"nsa_{name}_forward", f"nsa_{name}_backward"] if has_forward else [f"nsa_{name}"]
    for call in calls:
        if f"{call}(" not in declarations:
            yield f"nsa/nsa.h declares no {call}"
        elif defined.count(call) != 1:
            yield f"nsa/nsa.h does not define {call} exactly once"
    if not has_test(name):
        yield f"tests/test_{name}.c is missing"
    if not any(re.search(rf"`nsa_{name}(_forward)?`", heading) for heading in headings):
        yield f"docs/algorithm.md has no heading that names nsa_{name}"


def check_cuda(names, functions, sections):
    cuda = read("nsa/nsa_cuda.cuh")
    for call in sorted(set(re.findall(r"\bnsa_cuda_(\w+)\(", cuda))):
        known = f"nsa_{call}" in functions or call == "check_blocks"
        if re.search(r"_(forward|backward)$", call) and not known:
            yield f"nsa/nsa_cuda.cuh has nsa_cuda_{call}, nsa/nsa.h no nsa_{call}"
    for path in sorted((ROOT / "nsa/kernels").glob("*.cuh")):
        words = path.stem.replace("_", " ")
        # The section may bear a longer form of the name: attend, Attention; decode, Decoding.
        section = any(title.lower().startswith(words[:5]) for title in sections)
        if path.stem not in names and not section and path.stem not in WITHOUT_TWIN:
            yield f"nsa/kernels/{path.name} is the twin of no primitive and of no section of nsa.h"


# ---- Twin lines ----

TWIN = re.compile(r"\bTwin: (.*?)(?:\.(?=\s)|;|\*/)", re.S)
FILE = re.compile(r"[\w/.*]*\w\.(?:cuh|cu|cpp|c|h|py)\b")


def tracked():
    """The files of the tree, of which git knows; without git, all."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.splitlines()
    found = listed or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.*")]
    return [pathlib.Path(path) for path in found if (ROOT / path).is_file()]


def titles(text):
    """The titles of a file's sections; `/* -- backward --` is one, too."""
    return re.findall(r"^/\* (----? .+?|-- .+?)(?: -*)?(?: \*/)?$", text, re.M)


def check_twin_line(path, files):
    """What the Twin line of a file names and cannot be found."""
    found = TWIN.search("\n".join((ROOT / path).read_text(errors="replace").splitlines()[:12]))
    if not found or found[1].startswith("none"):
        return
    sentence = " ".join(found[1].split())
    twins = FILE.findall(sentence)
    for twin in twins:
        if not any(file.match(twin) for file in files):
            yield f"{path}: its twin {twin} does not exist"
    if path.parts[0] != "nsa" or not twins:
        return
    text = (ROOT / next(file for file in files if file.match(twins[0]))).read_text()
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    for section in re.findall(r'"(.+?)"', sentence):
        if not any(title.lstrip("- ").startswith(section.strip("- ")) for title in titles(text)):
            yield f"{path}: {twins[0]} has no section {section}"
    for name in re.findall(r"\bnsa_\w+\b(?!\.)", sentence):
        if not re.search(rf"\b{name}\b", code):
            yield f"{path}: {twins[0]} has no {name}"
    if path.parent.name == "kernels" and not re.search(r'"|\bnsa_\w+\b(?!\.)', sentence):
        yield f"{path}: its Twin line names no section and no function"


def check_twin_lines():
    files = tracked()
    for path in files:
        if path.suffix in (".c", ".h", ".cpp", ".cu", ".cuh"):
            yield from check_twin_line(path, files)


# ---- The map in docs/algorithm.md: where each primitive is, made from what the checks find ----

MAP_PAGE = "docs/algorithm.md"
MAP = re.compile(r"(<!-- map -->\n)(.*?)(<!-- end of map -->)", re.S)


def declared_at(declarations, name, has_forward):
    """Where nsa.h's public part declares a primitive's (forward) function."""
    call = f"nsa_{name}_forward" if has_forward else f"nsa_{name}"
    return re.search(rf"^NSA_API \w+ {call}\(", declarations, re.M).start()


def link(path, words):
    """A link from docs/algorithm.md to a path relative to the root."""
    return f"[{words}]({path.removeprefix('docs/') if path.startswith('docs/') else '../' + path})"


def heading_link(path, pattern):
    """A link to the first heading of a document that matches, by the name that GitHub gives it; or ""."""
    for line in read(path).splitlines():
        if line.startswith("#") and re.search(pattern, line):
            return link(f"{path}#{anchor(line)}", pathlib.Path(path).stem)
    return ""


def map_row(name, has_forward, declarations):
    call = f"nsa_{name}_forward" if has_forward else f"nsa_{name}"
    above = declarations[:declared_at(declarations, name, has_forward)]
    title = re.findall(r"^/\* ---- (.+?) -*(?: \*/)?$", above, re.M)[-1]
    section, equation = re.split(r"[,:]", title)[0], re.search(r"Eq\. (.+)$", title)
    branch = name.startswith("attend_")
    test = "attend" if branch and not (ROOT / f"tests/test_{name}.c").is_file() else name
    kernel = f"nsa/kernels/{BRANCHES if branch else name}.cuh"
    backward = r"`nsa_attend_\w+_backward`" if branch else f"`nsa_{name}_backward`"
    docs = [heading_link("docs/algorithm.md", rf"`nsa_{name}(_forward)?`"),
            heading_link("docs/gradients.md", backward)]
    cells = [f"`{call}`", equation[1] if equation else "", section,
             link(kernel, pathlib.Path(kernel).name) if (ROOT / kernel).is_file() else "",
             link(f"tests/test_{test}.c", f"test_{test}.c"), ", ".join(filter(None, docs))]
    return "| " + " | ".join(cells) + " |"


def check_map(names, declarations, write):
    """The table between the two comments of docs/algorithm.md, in the order of the header."""
    order = sorted(names, key=lambda name: declared_at(declarations, name, names[name]))
    table = "\n".join(["| function | equation of the paper | section of nsa.h | kernel | test | read |",
                       "|---|---|---|---|---|---|",
                       *(map_row(name, names[name], declarations) for name in order), ""])
    old = read(MAP_PAGE)
    new = MAP.sub(lambda m: m[1] + table + m[3], old)
    if not MAP.search(old):
        yield f"{MAP_PAGE} has no map of the primitives"
    elif new != old and not write:
        yield f"{MAP_PAGE}: the map of the primitives is out of date; run scripts/check_twins.py --write"
    elif new != old:
        (ROOT / MAP_PAGE).write_text(new)


def main(arguments):
    if arguments not in ([], ["--write"]):
        raise SystemExit("usage: check_twins.py [--write]")
    header = read("nsa/nsa.h")
    declarations = header[:header.index("#endif /* NSA_H */")] if "#endif /* NSA_H */" in header else header
    functions = set(re.findall(r"\bnsa_\w+(?=\()", declarations))
    headings = [line for line in read("docs/algorithm.md").splitlines() if line.startswith("#")]
    names = primitives(declarations)
    sections = re.findall(r"^/\* ---- ([^-:]+)", header, re.M)
    defined, findings = definitions(), []
    for name, has_forward in names.items():
        findings += check_primitive(name, has_forward, defined, declarations, headings)
    findings += check_cuda(names, functions, sections)
    findings += check_twin_lines()
    findings += check_map(names, declarations, bool(arguments))
    for finding in findings:
        print(finding)
    print(f"{len(names)} primitives checked ({', '.join(names)}), {len(findings)} findings")
    return min(len(findings), 99) if names else 99


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
