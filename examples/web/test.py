#!/usr/bin/env python3
"""Tests of the page.

  test.py build [--out FOLDER]     web.wasm, the page, and the same sources natively, for the next two
  test.py numbers [--out FOLDER]   web.wasm in node gives the numbers of the native program
  test.py primitives [--out FOLDER]
                                   the tests of nsa.h against its dense reference, on SIMD128, in node
  test.py page [--out FOLDER] [--pictures FOLDER]
                                   the page in a headless Chromium: those numbers, pointer, keyboard,
                                   sliders, the race, a phone's width, reduced motion; no request

Without a word: build, numbers and page. FOLDER is build/web if none is named. Exit code 77: something is not
installed, and which.
Twins: build.py, browser.py.
"""
import argparse
import base64
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import browser
import build

HERE = pathlib.Path(__file__).resolve().parent
TEXT = build.ROOT / "LICENSE"
MODEL = HERE / "model.bin"
# nsa_isa natively and in WebAssembly, that must have the same bits: neither has a fused multiply-add.
PAIRS = {"the plain loops": (1, 1), "SSE2 and SIMD128": (2, 6)}
PHONE = (390, 844)
# All but test_attention, which asks for workspaces of millions of tokens: of 32 bits there are none.
PRIMITIVES = ("block_index", "rope", "compress", "select_blocks", "gate", "attend_cmp", "attend_slc", "attend_win",
              "attend_dense", "merge", "rank_queries", "score_blocks", "decode", "findings")


class Skipped(Exception):
    """What is not installed."""


def need_compiler():
    """clang, the linker, C's library and the compiler's own, for WebAssembly."""
    for program in ("clang", "wasm-ld"):
        if not shutil.which(program):
            raise Skipped(f"no {program}")
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "a.c"
        source.write_text("#include <math.h>\nint main(void) { return (int)exp(1.0); }\n")
        done = subprocess.run(["clang", build.WASM[0], source, "-lm", "-o", f"{source}.wasm"], capture_output=True)
    if done.returncode:
        raise Skipped("clang cannot build for wasm32-wasi: wasi-libc or libclang-rt-dev-wasm32 is missing")


def native_numbers(out, isa):
    return subprocess.run([out / "numbers", MODEL, TEXT, str(isa)], check=True, capture_output=True, text=True).stdout


def first_difference(a, b):
    return next((f"{x}, but {y}" for x, y in zip(a.splitlines(), b.splitlines()) if x != y), "another number of lines")


def check(holds, words):
    if not holds:
        raise SystemExit(f"failed: {words}")
    print(f"ok: {words}")


def same(a, b, words):
    check(a == b, words if a == b else f"{words}: {first_difference(a, b)}")


# ---- The build --------------------------------------------------------------------------------

def build_all(out):
    need_compiler()
    build.build_wasm(out)
    build.build_native(out)
    build.build_page(out, MODEL)


def need_built(out):
    """What build_all made, or, without a compiler, the name of what is missing."""
    if not all((out / name).exists() for name in ("web.wasm", "numbers", "nsa.html")):
        need_compiler()
        raise SystemExit(f"{out} holds no build: `test.py build` first")


# ---- The numbers ------------------------------------------------------------------------------

def numbers(out):
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Skipped("the bits are SSE2's; this is no x86-64")
    if not shutil.which("node"):
        raise Skipped("no node")
    need_built(out)
    found = {}
    for name, (native, wasm) in PAIRS.items():
        there = subprocess.run(["node", HERE / "numbers.js", out / "web.wasm", MODEL, TEXT, str(wasm)],
                               check=True, capture_output=True, text=True).stdout
        found[name] = native_numbers(out, native)
        check(found[name].count("\n") > 1000, f"{name}: {found[name].count(chr(10))} lines")
        same(found[name], there, f"{name}: the same bits natively and in node")
    check(len(set(found.values())) == len(PAIRS), "the lines tell one instruction set from another")


def primitives(out):
    if not shutil.which("node"):
        raise Skipped("no node")
    need_compiler()
    tests = build.ROOT / "tests"
    for name in PRIMITIVES:
        program = out / f"test_{name}.wasm"
        build.run(["clang", *build.WASM, "-O2", f"-I{build.ROOT / 'nsa'}", f"-I{tests}", f"-I{tests / 'harness'}",
                   tests / f"test_{name}.c", tests / "harness" / "nsa_impl.c", "-lm", "-Wl,-z,stack-size=8388608",
                   "-o", program])
        done = subprocess.run(["node", HERE / "program.js", program, "quick"], capture_output=True, text=True)
        said = done.stdout.strip().splitlines()
        check(done.returncode == 0 and said and said[-1].endswith(" 0 failures"),
              said[-1] if said else f"test_{name}: {done.stderr}")


# ---- The page ---------------------------------------------------------------------------------

def token_of(page):
    return page.evaluate("state.token")


def bytes_of(data):
    """An expression of these bytes."""
    return f"Uint8Array.from(atob('{base64.b64encode(data).decode()}'), (c) => c.charCodeAt(0))"


def check_reads(page):
    """What the page says that a query reads, beside the formulas of docs/algorithm.md."""
    for token in (0, 14, 15, 100, 301):
        page.evaluate(f"point({token}, true)")
        said = page.evaluate("nsa.reads(state.layer, kvHead(state.head), state.token)")
        blocks = page.evaluate("nsa.blocks(state.layer, kvHead(state.head), state.token)")
        size, window = page.evaluate("[geometry.slcBlock, geometry.window]")
        l, d = page.evaluate("[nsa.sizes.cmpBlock, nsa.sizes.cmpStride]")
        expected = {"cmp": 0 if token < l - 1 else (token - l + 1) // d + 1, "win": min(window, token + 1),
                    "slc": sum(min(token + 1, (j + 1) * size) - j * size for j in blocks)}
        check(said == expected, f"token {token} reads {expected}")
        marked = page.evaluate("['query', 'win'].map((kind) => document.querySelectorAll(`#tokens .${kind}`).length)")
        check(marked == [1, expected["win"]], f"token {token}: its window is marked")
        total = page.evaluate("document.querySelector('#key-bars .row > b:last-child').textContent")
        check(int(total) == sum(expected.values()), f"token {token}: the bar says {total}")


def check_keyboard(page):
    page.evaluate("point(200, true), at('tokens').focus()")
    page.key("ArrowLeft", 3)
    check(token_of(page) == 197, "arrows move the query")
    for modifier in (2, 4):
        page.key("ArrowLeft", modifiers=modifier)
    check(token_of(page) == 197, "keys with Ctrl or Meta are the browser's")
    page.key("PageUp")
    check(token_of(page) == 197 - page.evaluate("geometry.slcBlock"), "PgUp moves it by a block")
    page.key("Home")
    check(token_of(page) == 0, "Home moves it to the first token")
    page.evaluate("choose(0, 0), document.querySelector('#heads [aria-checked=true]').focus()")
    page.key("ArrowRight")
    page.key("ArrowDown")
    check(page.evaluate("[state.layer, state.head]") == [1, 1], "arrows move through layers and heads")
    check(page.evaluate("document.activeElement.dataset.layer") == "1", "the focus goes along")


def check_sliders(page):
    before = page.evaluate("[geometry.slcCount, nsa.reads(1, 0, 301).slc, at('bits').textContent]")
    page.evaluate("at('n').focus()")
    page.key("ArrowRight")
    page.until(f"geometry.slcCount === {before[0] + 1} && nsa.reads(1, 0, 301).slc !== {before[1]}")
    check(page.evaluate("at('bits').textContent") != before[2], "n changes what is read, and the model's bits per byte")
    page.key("End")
    page.until("geometry.slcCount === Number(at('n').max) && nsa.reads(1, 0, 301).slc === 302")
    print("ok: with room for every block slc reads all")
    page.evaluate("at('w').focus()")
    page.key("Home")
    page.until("geometry.window === 4 && nsa.reads(1, 0, 301).win === 4")
    page.evaluate("at('block').focus()")
    page.key("End")
    page.until("geometry.slcBlock === 64 && Math.max(...nsa.blocks(1, 0, 301)) === 4")
    check(page.evaluate("Number(at('n').max)") == 8, "longer blocks: fewer of them")
    page.evaluate("at('reset').click()")
    check(page.evaluate("at('bits').textContent") == before[2], "as trained again")
    page.evaluate("at('plain').click()")
    check(page.evaluate("state.isa") == 1 and float(page.evaluate("at('ms-sparse').textContent")) > 0,
          "without SIMD128")
    page.evaluate("at('plain').click()")


def check_pointer(page):
    place = ("(() => { const b = state.spans[40].getBoundingClientRect(); "
             "return [b.x + b.width / 2, b.y + b.height / 2]; })()")
    page.evaluate("point(9, true), state.held = false, at('tokens').scrollTop = 0, at('tokens').scrollIntoView()")
    x, y = page.evaluate(place)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.until("state.token === 40")
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    check(page.evaluate("state.held"), "a click holds the token")
    page.key("Escape")
    check(not page.evaluate("state.held"), "Esc lets go")


def check_text(page):
    for text, tokens in (("", 1), ("a", 1), ("é", 2), ("x" * 600, 512), ("</script>\u0000\U0001f600", 14)):
        page.evaluate(f"setText(new TextDecoder().decode({bytes_of(text.encode())}))")
        check(page.evaluate("[state.spans.length, state.token < state.spans.length]") == [tokens, True],
              f"a text of {len(text)} characters: {tokens} tokens")
    page.evaluate("at('edit').click(), at('input').select()")
    page.call("Input.insertText", text="Typed by hand, read at once.")
    page.until("state.text.length === 28")
    check(page.evaluate("at('tokens').textContent") == "Typed by hand, read at once.", "what is typed is read")
    page.evaluate("document.querySelector('#samples button').click(), at('edit').click()")


def check_race(page):
    page.evaluate("at('race').click()")
    page.until("!at('race').disabled")
    check("8192 tokens" in page.evaluate("at('race-words').textContent"), page.evaluate("at('race-words').textContent"))
    check(page.evaluate("document.querySelectorAll('#race-chart circle').length") == 10, "five lengths, twice")


def check_phone(page):
    page.size(*PHONE, 2, True)
    page.evaluate("new Promise((done) => setTimeout(done, 300))")
    wide = page.evaluate("[document.documentElement.scrollWidth, ...[...document.querySelectorAll('main *')].map("
                         "(e) => e.closest('svg, #tokens') ? 0 : Math.ceil(e.getBoundingClientRect().right))]")
    check(max(wide) <= PHONE[0], f"nothing is wider than a phone's {PHONE[0]}")
    small = page.evaluate("[...document.querySelectorAll('button, input[type=range]')].filter((e) => e.offsetParent && "
                          "e.getBoundingClientRect().height < 24).length")
    check(small == 0, "nothing to press is smaller than 24 pixels")


def page_test(out, pictures):
    program = browser.find()
    if not program:
        raise Skipped("no chromium")
    need_built(out)
    page = browser.Browser(program)
    try:
        page.size(1440, 1000)
        page.open(out / "nsa.html")
        page.until("document.body.dataset.ready === 'yes'")
        check_reads(page)
        check_keyboard(page)
        check_sliders(page)
        check_pointer(page)
        check_text(page)
        check_race(page)
        if pictures:
            take_pictures(page, pictures)
        check_phone(page)
        page.media(prefers_reduced_motion="reduce")
        check(page.evaluate("getComputedStyle(at('play')).display") == "none", "reduced motion: nothing moves")
        if platform.machine() in ("x86_64", "AMD64"):
            page.evaluate((HERE / "numbers.js").read_text())
            for name, (native, wasm) in PAIRS.items():
                there = page.evaluate(f"numbersOf(nsa, {bytes_of(TEXT.read_bytes())}, {wasm})")
                same(native_numbers(out, native), there, f"{name}: the same bits natively and in the page")
        check(not page.problems(), f"no error, and no request: {page.problems()}")
    finally:
        page.close()


def take_pictures(page, folder):
    """The whole page on a desktop, dark, and on a phone; and its beginning, which docs/web.png is."""
    folder.mkdir(parents=True, exist_ok=True)
    page.evaluate("at('tokens').scrollTop = 0, choose(nsa.sizes.layers - 1, 4), document.activeElement.blur()")
    for name, width, height, scale, scheme in (("desktop", 1440, None, 1, "light"), ("dark", 1440, None, 1, "dark"),
                                               ("phone", 390, None, 1.5, "light"), ("web", 1440, 1250, 1, "light")):
        page.media(prefers_color_scheme=scheme)
        page.size(width, 900, scale, name == "phone")
        page.evaluate("scrollTo(0, 0), new Promise((done) => setTimeout(done, 500))")
        page.size(width, height or page.evaluate("document.documentElement.scrollHeight"), scale, name == "phone")
        page.evaluate("new Promise((done) => setTimeout(done, 500))")
        page.picture(folder / f"{name}.png")
    page.media(prefers_color_scheme="light")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="build, numbers, page, primitives")
    parser.add_argument("--out", type=pathlib.Path, default=build.ROOT / "build" / "web")
    parser.add_argument("--pictures", type=pathlib.Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tests = {"build": build_all, "numbers": numbers, "primitives": primitives,
             "page": lambda out: page_test(out, options.pictures)}
    skipped = False
    for name in options.what or ("build", "numbers", "page"):
        if name not in tests:
            parser.error(f"{name}: must be one of {', '.join(tests)}")
        try:
            tests[name](options.out)
        except Skipped as reason:
            print(f"skipped: {name}: {reason}")
            skipped = True
    sys.exit(77 if skipped else 0)


if __name__ == "__main__":
    main()
