/* nsa.js - web.h's calls as methods of an object, over a compiled module. Twin: web.h. It runs in a
   page, in a worker and in node, and knows no document. */
"use strict";

/* What web_size and web_part are asked for, in the order of web.h. */
const SIZES = ["layers", "heads", "kvHeads", "cmpBlock", "cmpStride", "slcBlock", "slcCount", "window",
  "slcInit", "slcLocal", "slcCountMost", "context", "parameters", "steps", "vocab", "dim"];
const PARTS = ["gates", "scores", "mass", "cmp", "slc", "win"];
const PLAIN = 1, SIMD128 = 6; /* nsa_isa */

/* The four calls of WASI that C's library asks for: a clock, and files, of which there are none. */
function wasi(memory) {
  const NO_FILE = 8; /* errno badf */
  return {
    clock_time_get(clock, precision, at) {
      memory().setBigUint64(at, BigInt(Math.round(performance.now() * 1e6)), true);
      return 0;
    },
    fd_close: () => NO_FILE,
    fd_seek: () => NO_FILE,
    fd_write: () => NO_FILE,
  };
}

class Nsa {
  /* `model` is a file of pack.py's, as bytes. */
  static async open(module, model) {
    const nsa = new Nsa();
    const view = () => new DataView(nsa.c.memory.buffer);
    const instance = await WebAssembly.instantiate(module, {wasi_snapshot_preview1: wasi(view)});
    nsa.c = instance.exports;
    nsa.c._initialize();
    nsa.withBytes(model, (at) => nsa.c.web_open(at, model.length) || nsa.fail());
    nsa.sizes = Object.fromEntries(SIZES.map((name, i) => [name, nsa.c.web_size(i)]));
    return nsa;
  }

  fail() {
    const memory = new Uint8Array(this.c.memory.buffer), at = this.c.web_fault();
    throw new Error(new TextDecoder().decode(memory.slice(at, memory.indexOf(0, at))));
  }

  withBytes(bytes, call) {
    const at = this.c.web_allocate(bytes.length);
    if (!at) throw new Error(`no memory for ${bytes.length} bytes`);
    new Uint8Array(this.c.memory.buffer).set(bytes, at);
    try {
      return call(at);
    } finally {
      this.c.web_release(at);
    }
  }

  /* Reads a text with {slcCount, window, slcBlock}; gives what it cost. */
  read(text, geometry, isa = SIMD128) {
    const {slcCount, window, slcBlock} = geometry;
    this.withBytes(text, (at) =>
      this.c.web_read(at, text.length, slcCount, window, slcBlock, isa) || this.fail());
    this.parts = PARTS.map((name, i) => this.c.web_part(i));
    this.listLength = slcCount;
    return {nsaMs: this.c.web_nsa_ms(), denseMs: this.c.web_dense_ms(), bits: this.c.web_bits()};
  }

  /* {cmp, slc, win}: how many keys a query and kv head reads. */
  reads(layer, kvHead, token) {
    const [cmp, slc, win] = new Int32Array(this.c.memory.buffer, this.c.web_reads(layer, kvHead, token), 3);
    return {cmp, slc, win};
  }

  blocks(layer, kvHead, token) {
    const at = this.c.web_blocks(layer, kvHead, token);
    return [...new Int32Array(this.c.memory.buffer, at, this.listLength)].filter((j) => j >= 0);
  }

  /* {gates, scores, mass, cmp, slc, win}, each an array of numbers. */
  look(layer, head, token) {
    let at = this.c.web_look(layer, head, token);
    return Object.fromEntries(PARTS.map((name, i) => {
      const numbers = new Float64Array(this.c.memory.buffer, at, this.parts[i]).slice();
      at += numbers.byteLength;
      return [name, numbers];
    }));
  }

  next(token) {
    return new Float32Array(this.c.memory.buffer, this.c.web_next(token), this.sizes.vocab).slice();
  }

  /* One layer's attention over so many random rows, in a geometry with all of `sizes`: {ms, keys}. */
  race(tokens, geometry, dense, isa = SIMD128) {
    const {heads, kvHeads, dim, cmpBlock, cmpStride, slcCount, window, slcBlock} = geometry;
    const ms = this.c.web_race(tokens, heads, kvHeads, dim, cmpBlock, cmpStride, slcCount, window, slcBlock,
      dense ? 1 : 0, isa);
    if (ms < 0) throw new Error(`${tokens} tokens: attention failed`);
    return {ms, keys: this.c.web_race_keys()};
  }
}
