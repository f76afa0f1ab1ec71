"""The structs that examples/embed/embed.py repeats for ctypes, beside nsa.h's: names, offsets and sizes.

    embed_fields.py CC DIR

Names come from the header's text, by the reader that makes the Python package; offsets and sizes from CC, which sees
declarations alone. A field that is missing, or that lies elsewhere, is named. Twin: examples/embed/embed.py.
"""
import ast
import ctypes
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "native"))
import bindings  # noqa: E402

EXAMPLE = ROOT / "examples" / "embed" / "embed.py"


def repeated():
    """{"nsa_tensor": its Structure}: the example's classes, without the rest of it, which runs at import."""
    tree = ast.parse(EXAMPLE.read_text())
    kept = [node for node in tree.body if isinstance(node, (ast.ImportFrom, ast.ClassDef))]
    names = {}
    exec(compile(ast.Module(kept, []), str(EXAMPLE), "exec"), names)
    return {"nsa_" + name.lower(): kind for name, kind in names.items()
            if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure}


def fields_of(struct):
    text = bindings.public_part((ROOT / "nsa" / "nsa.h").read_text())
    found = bindings.structs(text, {name for name, _, _ in bindings.enums(text) if name})
    return [field.name for field in found[struct][0]]


def in_c(compiler, folder, structs):
    """{"nsa_desc.batch": (offset, size)}, and of each whole struct (-1, size)."""
    lines = ['#include "nsa.h"', "#include <stdio.h>", "int main(void) {"]
    for struct, fields in structs.items():
        lines.append(f'    printf("{struct} -1 %d\\n", (int)sizeof({struct}));')
        lines += [f'    printf("{struct}.{field} %d %d\\n", (int)offsetof({struct}, {field}), '
                  f"(int)sizeof((({struct} *)0)->{field}));" for field in fields]
    source = folder / "fields.c"
    source.write_text("\n".join([*lines, "    return 0;", "}", ""]))
    program = folder / "fields"
    subprocess.run([compiler, "-std=c99", "-I", str(ROOT / "nsa"), str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: (int(at), int(size)) for name, at, size in map(str.split, said.splitlines())}


def main(arguments):
    if len(arguments) != 2:
        sys.exit(__doc__)
    compiler, folder = arguments[0], pathlib.Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    here, structs = {}, {}
    for struct, kind in repeated().items():
        here[struct] = (-1, ctypes.sizeof(kind))
        for field, *_ in kind._fields_:
            here[f"{struct}.{field}"] = (getattr(kind, field).offset, getattr(kind, field).size)
        structs[struct] = fields_of(struct)
    if set(structs) != {"nsa_tensor", "nsa_desc", "nsa_attend"}:
        sys.exit(f"embed.py has the structs {sorted(structs)}: not the three that its calls take")
    there = in_c(compiler, folder, structs)
    wrong = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    for name in wrong:
        print(f"{name}: offset and size {there.get(name, 'none')} in nsa.h, {here.get(name, 'none')} in embed.py")
    print(f"{len(there)} places, {len(wrong)} that differ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
