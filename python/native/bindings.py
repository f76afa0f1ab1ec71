"""From nsa.h to the package: writes layout.c and _abi.py, so that neither repeats the header by hand.

    python3 bindings.py nsa.h layout.c _abi.py _functions.py

layout.c tells, from the compiler's own offsetof and sizeof, how the structs lie in memory and what the
enums' members are; _abi.py holds the same for ctypes, and the prototypes. src/nsa/_library.py compares the two
at import. _functions.py is a typed function for each of the header's that takes structs and a descriptor.
Twin: nsa/nsa.h, the part before its implementation. What this reader does not understand ends the build.
"""
import re
import sys
import textwrap

SCALARS = {"int": "c_int", "double": "c_double", "float": "c_float", "int32_t": "c_int32",
           "int64_t": "c_int64", "uint16_t": "c_uint16", "size_t": "c_size_t"}
# B, count, list heads, nsa_slc_count(T)
AXES = r"((?:[\w ]+, )+[\w ]+(?:\(T\))?)"


def fail(what):
    sys.exit(f"bindings.py: {what}")


def camel(name):
    """nsa_block_fault -> BlockFault"""
    return "".join(word.capitalize() for word in name.removeprefix("nsa_").split("_"))


def public_part(text):
    begin, end = text.find("#define NSA_H\n"), text.find("#endif /* NSA_H */")
    if begin < 0 or end < 0:
        fail("the header's public part, #define NSA_H .. #endif /* NSA_H */, is not there")
    return text[begin:end]


def words_of(comment):
    """A comment without its stars and line ends."""
    return re.sub(r"\s+", " ", comment.strip().removeprefix("/*").removesuffix("*/")).strip()


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def comment_before(text, at):
    """The comment that ends just before `at`, or none."""
    before = text[:at].rstrip()
    if not before.endswith("*/"):
        return ""
    comment = before[before.rindex("/*"):]
    return "" if comment.startswith("/* ---") else words_of(comment)


def section_before(text, at):
    """The title and the text of the header's section that `at` lies in."""
    found = re.findall(r"/\* ---- (.+?) -{2,}(.*?)\*/", text[:at], re.S)
    return ". ".join(filter(None, map(words_of, found[-1]))) if found else ""


def enums(text):
    """(type name or None, [(member, value)], what the comment before says)."""
    found = []
    for match in re.finditer(r"(?:typedef )?enum(?: (\w+))? \{(.*?)\}(?: \w+)?;", text, re.S):
        value, members = -1, []
        for item in without_comments(match.group(2)).split(","):
            item = item.strip()
            if not item:
                continue
            parts = re.fullmatch(r"(\w+)(?: = (\d+))?", item)
            if not parts:
                fail(f"enum {match.group(1)}: {item!r} is no member that is understood")
            value = int(parts.group(2)) if parts.group(2) else value + 1
            members.append((parts.group(1), value))
        found.append((match.group(1), members, comment_before(text, match.start())))
    return found


def short(member, of):
    """NSA_GATE_SIGMOID of nsa_gate_kind -> SIGMOID: its first words go that are words of the type."""
    words, type_words = member.split("_"), of.upper().split("_")
    while len(words) > 1 and words[0] in type_words:
        words = words[1:]
    name = "_".join(words)
    return name if name[0].isalpha() else "_" + name


class Field:
    def __init__(self, name, declaration, comment):
        self.name, self.declaration, self.comment = name, declaration, comment
        self.ctype = self.enum = self.known_shapes = None

    def shapes(self):
        """{"": ("B", "T", "Hk", "D"), "cmp": ...}, as the comment has them, by the word before each."""
        found = {}
        for word, axes in re.findall(r"(?:(\w+)(?:, optional)?: )?\(" + AXES + r"\)", self.comment):
            found.setdefault("" if word in ("out", "optional") else word,
                             tuple(axis.strip() for axis in axes.split(",")))
        return found


def share_shapes(struct):
    """A comment may speak of several fields: a shape for each, or "likewise", or "as x"."""
    by_declaration = {}
    for field in struct:
        by_declaration.setdefault(field.declaration, []).append(field)
    before = []
    for group in by_declaration.values():
        all_shapes = re.findall(r"\(" + AXES + r"\)", group[0].comment)
        for i, field in enumerate(group):
            field.known_shapes = field.shapes()
            if len(group) > 1 and len(all_shapes) == len(group):
                field.known_shapes = {"": tuple(part.strip() for part in all_shapes[i].split(","))}
            if field.comment.startswith("likewise") and len(before) == len(group):
                field.known_shapes = before[i].known_shapes
            same = re.match(r"as (\w+);", field.comment)
            if same:
                field.known_shapes = next(f.known_shapes for f in struct if f.name == same.group(1))
        before = group


def fields_of(struct, body, known, enum_names):
    found = []
    # A declaration, and the comments up to the next one: what stands behind it belongs to it.
    for piece in re.finditer(r"\s*((?:/\*.*?\*/\s*)*)([^;/]+);[ \t]*((?:/\*.*?\*/)?)", body, re.S):
        declaration, comment = " ".join(piece.group(2).split()), words_of(piece.group(3))
        match = re.fullmatch(r"(?:const )?(\w+) (.+)", declaration)
        if not match:
            fail(f"{struct}: {declaration!r} is no field that is understood")
        base, names = match.groups()
        for name in names.split(","):
            name = name.strip()
            pointer = name.startswith("*")
            name = name.lstrip("* ")
            if not re.fullmatch(r"\w+", name):
                fail(f"{struct}: {name!r} is no name that is understood")
            field = Field(name, declaration, comment)
            field.of_doubles = pointer and base == "double"
            if pointer:
                field.ctype = "c_char_p" if base == "char" else "c_void_p"
            elif base in SCALARS:
                field.ctype = SCALARS[base]
            elif base in enum_names:
                field.ctype, field.enum = "c_int", base
            elif base in known:
                field.ctype = camel(base)
            else:
                fail(f"{struct}.{name}: the type {base} is not known")
            found.append(field)
    rest = without_comments(re.sub(r"[^;]*;", "", without_comments(body)))
    if rest.strip() or not found:
        fail(f"{struct}: {rest.strip()!r} is not understood")
    share_shapes(found)
    return found


def structs(text, enum_names):
    found = {}
    for match in re.finditer(r"typedef struct (\w+) \{(.*?)\n\} \1;", text, re.S):
        name, body = match.groups()
        found[name] = (fields_of(name, body, found, enum_names), comment_before(text, match.start()))
    declared = set(re.findall(r"typedef struct (\w+) \{", text))
    if declared != set(found):
        fail(f"structs that are not understood: {sorted(declared - set(found))}")
    return found


def argument_type(text, struct_names, enum_names):
    text = " ".join(text.split())
    match = re.fullmatch(r"(?:const )?(\w+) ?(\**) ?(\w*)", text)
    if not match:
        fail(f"the argument {text!r} is not understood")
    base, stars, name = match.groups()
    if stars:
        ctype = f"POINTER({camel(base)})" if base in struct_names else "c_void_p"
    elif base in struct_names:
        ctype = camel(base)
    elif base in enum_names or base == "nsa_status":
        ctype = "c_int"
    elif base == "nsa_real":
        ctype = "real"
    else:
        ctype = SCALARS.get(base) or fail(f"the type of {text!r} is not known")
    return name, ctype


def result_type(text, struct_names):
    text = " ".join(text.split())
    if text == "void":
        return "None"
    if text == "const char *":
        return "c_char_p"
    return argument_type(text + " x", struct_names, ())[1]


def comment_of(text, match, last, before, ways):
    """What the header says of a function: the comment above it or behind it; if it stands right below the function that
    it is a part of, that one's; if another of its section goes the same way, forward or backward, that one's; else the
    first comment since the function before, or what the section says."""
    section, name = section_before(text, match.start()), match.group(2)
    way = name.removesuffix("_workspace_size").rpartition("_")[2]
    behind = re.match(r"[ \t]*(/\*.*?\*/)", text[match.end():], re.S)
    comment = comment_before(text, match.start()) or (words_of(behind.group(1)) if behind else "")
    between = text[last.end():match.start()] if last else ""
    above = re.search(r"^/\*(?! ----).*?\*/", between, re.S | re.M)
    if comment:
        ways.setdefault((section, way), comment)
    elif last and between.count("\n") < 2 and way == before[0].removesuffix("_workspace_size").rpartition("_")[2]:
        comment = before[3]
    elif above and "/* ----" not in between:
        comment = words_of(above.group())
    if last and not comment and way not in ("forward", "backward") and between.count("\n") < 2:
        comment = before[3]
    return comment or ways.get((section, way), section)


def functions(text, struct_names, enum_names):
    """(name, result, [(argument, type)], comment)"""
    found, last, ways = [], None, {}
    for match in re.finditer(r"^NSA_API ([\w ]+?[ *]+)(nsa_\w+)\(([^)]*)\);", text, re.M):
        result, name, arguments = match.groups()
        comment = comment_of(text, match, last, found[-1] if found else None, ways)
        found.append((name, result_type(result, struct_names),
                      [argument_type(a, struct_names, enum_names) for a in arguments.split(",")], comment))
        last = match
    declared = len(re.findall(r"^NSA_API ", text, re.M))
    if declared != len(found):
        fail(f"of {declared} functions {len(found)} are understood")
    return found


LAYOUT = '''/* Written by bindings.py from nsa.h. How its structs lie in memory, as this compiler has it. */
#define NSA__SIZE(s) #s, (long)sizeof(s), -1
#define NSA__FIELD(s, f) #s "." #f, (long)sizeof(((s *)0)->f), (long)offsetof(s, f)
#define NSA__MEMBER(m) #m, (long)(m), -2
/* offset: -1 where the entry is a whole struct; -2 where it is an enum's member, and size its value. */
NSA_API int nsa_python_layout(int i, const char **name, long *size, long *offset);
NSA_API int nsa_python_layout(int i, const char **name, long *size, long *offset) {
    static const struct { const char *name; long size, offset; } entries[] = {
%s    };
    if (i < 0 || i >= (int)(sizeof entries / sizeof entries[0])) return 0;
    *name = entries[i].name;
    *size = entries[i].size;
    *offset = entries[i].offset;
    return 1;
}
'''


def write_layout(found, all_enums):
    lines = [f"        {{NSA__MEMBER({member})}},\n" for _, members, _ in all_enums for member, _ in members]
    for name, (fields, _) in found.items():
        lines.append(f"        {{NSA__SIZE({name})}},\n")
        lines += [f"        {{NSA__FIELD({name}, {field.name})}},\n" for field in fields]
    return LAYOUT % "".join(lines)


def docstring(text, indent):
    text = text.replace("\\", "\\\\").replace('"', "'")
    if not text:
        return ""
    pad = " " * indent
    lines = textwrap.wrap(text, 100 - indent)
    return f'{pad}"""' + f"\n{pad}".join(lines) + ('"""\n' if len(lines) == 1 else f'\n{pad}"""\n')


HINTS = {"c_int": "int", "c_int32": "int", "c_int64": "int", "c_double": "float", "c_float": "float",
         "c_size_t": "int", "c_uint16": "int", "c_void_p": "Address", "c_char_p": "str"}


def write_struct(name, fields, comment):
    about = [comment] if comment else []
    text = f"class {camel(name)}(Struct):\n"
    listing = []
    for field in fields:
        listing += textwrap.wrap(f"{field.name}: {field.comment}" if field.comment else field.name, 94,
                                 initial_indent="      ", subsequent_indent="          ")
    body = "\n".join(textwrap.wrap(about[0], 94, subsequent_indent="    ") if about else [name])
    doc = (body + "\n\n" + "\n".join(listing)).replace("\\", "\\\\").replace('"""', "'''")
    text += f'    """{doc}\n    """\n'
    for field in fields:
        hint = HINTS.get(field.ctype, field.ctype)
        if hint == "Tensor":
            hint = "Array"
        if field.enum:
            hint = f"{camel(field.enum)} | int | str"
        text += f"    {field.name}: {hint}\n"
    text += "    _fields_ = [\n"
    text += "".join(f'        ("{field.name}", {field.ctype}),\n' for field in fields) + "    ]\n"
    shapes = {field.name: field.known_shapes for field in fields
              if field.known_shapes and field.ctype == "Tensor"}
    # What a forward writes: the header says "out", and Attend is the struct of forwards whose lse is one.
    written = [field.name for field in fields if field.ctype == "Tensor"
               and (field.name == "out" or re.match("out[:,]", field.comment)
                    or (name, field.name) == ("nsa_attend", "lse"))]
    marks = {field.name: camel(field.enum) for field in fields if field.enum}
    text += "    _shapes_ = {" + "".join(f"\n        {k!r}: {v!r}," for k, v in shapes.items())
    text += "\n    }\n" if shapes else "}\n"
    text += f"    _outputs_ = {tuple(written)!r}\n"
    text += f"    _doubles_ = {tuple(field.name for field in fields if field.of_doubles)!r}\n"
    text += "    _enums_ = {" + ", ".join(f'"{k}": {v}' for k, v in marks.items()) + "}\n"
    words = [f"{camel(name)}.{field.name} = Words({camel(name)}.{field.name})  # type: ignore\n" for field in fields
             if field.ctype == "c_char_p"]
    return text + ("\n\n" + "".join(words) if words else "") + "\n\n"


def version_of(text):
    return ".".join(re.findall(r"#define NSA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def write_abi(version, all_enums, found, prototypes):
    text = ('"""Written by bindings.py from nsa.h: enums, structs and prototypes."""\n'
            "from __future__ import annotations\n\n"
            "from ctypes import (POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t,\n"
            "                    c_uint16, c_void_p)\nfrom enum import IntEnum\nfrom typing import Any\n\n"
            "from ._struct import Address, Array, Struct, Words\n\n"
            f'VERSION = "{version}"\n\n\n')
    for name, members, comment in all_enums:
        of = name or "nsa_error"
        text += f"class {camel(of)}(IntEnum):\n" + docstring(comment, 4)
        text += "".join(f"    {short(member, of)} = {value}\n" for member, value in members) + "\n\n"
    for name, (fields, comment) in found.items():
        text += write_struct(name, fields, comment)
    text += "MEMBERS = {\n" + "".join(f'    "{member}": {value},\n' for _, members, _ in all_enums
                                    for member, value in members) + "}\n\n"
    text += "STRUCTS = {\n" + "".join(f'    "{name}": {camel(name)},\n' for name in found) + "}\n\n\n"
    text += "__all__ = [\n" + "".join(f'    "{camel(name)}",\n' for name in sorted(
        [name or "nsa_error" for name, _, _ in all_enums] + list(found))) + "]\n\n\n"
    text += "def prototypes(real: Any) -> dict[str, tuple[Any, list[Any], list[str], str]]:\n"
    text += '    """name: (result, argument types, argument names, what the header says), for a C type of sums."""\n'
    text += "    return {\n"
    for name, result, arguments, comment in prototypes:
        types = ", ".join(ctype for _, ctype in arguments)
        names = ", ".join(repr(argument) for argument, _ in arguments)
        text += f"        {name!r}: ({result}, [{types}], [{names}], {comment!r}),\n"
    return text + "    }\n"


def write_functions(found, prototypes):
    """The functions of the patterns (structs, desc[, workspace, bytes]) -> status and (structs, desc,
    integers) -> a number. nsa/__init__.py has the others."""
    text = ('"""Written by bindings.py from nsa.h: its functions that take structs and a descriptor."""\n'
            "from __future__ import annotations\n\nfrom ._abi import *  # noqa: F403\n"
            "from ._library import call, number\nfrom ._struct import Array\n\n\n")
    names = []
    for name, result, arguments, comment in prototypes:
        plain = name.removeprefix("nsa_")
        types = [ctype for _, ctype in arguments]
        pointers = [ctype[8:-1] for ctype in types if ctype.startswith("POINTER")]
        rest = types[len(pointers):]
        if not pointers or pointers[-1] != "Desc" or len(set(pointers[:-1])) > 1 or pointers[0] == "Tensor":
            continue
        structs_in = [argument for argument, _ in arguments[:len(pointers) - 1]]
        given = "".join(f"{argument}: {kind}, " for argument, kind in zip(structs_in, pointers)) + "desc: Desc"
        passed = "(" + "".join(argument + ", " for argument in structs_in) + ")"
        if result == "c_int" and rest in ([], ["c_void_p", "c_size_t"]) and pointers != ["Desc"]:
            workspace = bool(rest)
            text += f"def {plain}({given}" + (", workspace: Array = None" if workspace else "") + ") -> None:\n"
            body = f"    call({name!r}, {passed}, desc" + (", workspace" if workspace else "") + ")\n"
        elif result in ("c_int", "c_int64", "c_size_t") and set(rest) <= {"c_int"} and name != "nsa_desc_check":
            integers = [argument for argument, _ in arguments[len(pointers):]]
            text += f"def {plain}({given}" + "".join(f", {argument}: int" for argument in integers) + ") -> int:\n"
            body = f"    return number({', '.join([repr(name), passed, 'desc', *integers])})\n"
        else:
            continue
        size_of = name.removesuffix("_workspace_size")
        if size_of != name:
            comment = f"Bytes of workspace that {size_of.removeprefix('nsa_')} takes. {comment}"
        text += docstring(comment, 4) + body + "\n\n"
        names.append(plain)
    return text + "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"


def main(arguments):
    if len(arguments) != 4:
        sys.exit(__doc__)
    with open(arguments[0], encoding="utf-8") as file:
        text = public_part(file.read())
    all_enums = enums(text)
    enum_names = {name for name, _, _ in all_enums if name}
    found = structs(text, enum_names)
    prototypes = functions(text, found, enum_names)
    contents = (write_layout(found, all_enums), write_abi(version_of(text), all_enums, found, prototypes),
                write_functions(found, prototypes))
    for path, content in zip(arguments[1:], contents):
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)


if __name__ == "__main__":
    main(sys.argv[1:])
