/* numbers.js - what the page computes, computed by web.wasm: the lines of numbers.c. Twin: numbers.c.
   In node: node numbers.js WASM MODEL TEXT ISA; in the page a test calls numbersOf. */
"use strict";

const TOKEN_STEP = 7;
const GEOMETRIES = [[6, 32, 16], [4, 8, 32], [64, 512, 16], [3, 100, 64]];
const START = 2166136261;

/* FNV-1a over words of 32 bits. */
function fold(hash, numbers) {
  for (const word of new Int32Array(numbers.buffer, numbers.byteOffset, numbers.byteLength / 4))
    hash = Math.imul(hash ^ word, 16777619);
  return hash;
}

function hashOf(nsa, layer, head, token, slcCount) {
  const kvHead = Math.floor(head / (nsa.sizes.heads / nsa.sizes.kvHeads));
  const reads = nsa.reads(layer, kvHead, token), blocks = nsa.blocks(layer, kvHead, token);
  let hash = START;
  for (const part of Object.values(nsa.look(layer, head, token)))
    hash = fold(hash, Float32Array.from(part)); /* libraries differ in a double's last bit */
  hash = fold(hash, Int32Array.of(reads.cmp, reads.slc, reads.win));
  hash = fold(hash, Int32Array.from({length: slcCount}, (_, i) => i < blocks.length ? blocks[i] : -1));
  return fold(hash, nsa.next(token));
}

const hex = (hash) => (hash >>> 0).toString(16).padStart(8, "0");

function numbersOf(nsa, text, isa) {
  const bytes = text.subarray(0, nsa.sizes.context), lines = [];
  for (const [slcCount, window, slcBlock] of GEOMETRIES) {
    const {bits} = nsa.read(bytes, {slcCount, window, slcBlock}, isa);
    lines.push(`n ${slcCount} w ${window} l' ${slcBlock}: ${hex(fold(START, Float32Array.of(bits)))}`);
    for (let layer = 0; layer < nsa.sizes.layers; layer++)
      for (let head = 0; head < nsa.sizes.heads; head++)
        for (let token = bytes.length - 1; token >= 0; token -= TOKEN_STEP)
          lines.push(`layer ${layer} head ${head} token ${token}: ` +
            hex(hashOf(nsa, layer, head, token, slcCount)));
  }
  return lines.join("\n") + "\n";
}

async function main([wasm, model, text, isa]) {
  const fs = require("fs"), path = require("path"), vm = require("vm");
  vm.runInThisContext(fs.readFileSync(path.join(__dirname, "nsa.js"), "utf8") + "\nglobalThis.Nsa = Nsa;");
  const nsa = await Nsa.open(await WebAssembly.compile(fs.readFileSync(wasm)), fs.readFileSync(model));
  process.stdout.write(numbersOf(nsa, fs.readFileSync(text), Number(isa)));
}

if (typeof process === "object")
  main(process.argv.slice(2)).catch((error) => {
    process.stderr.write(`numbers.js: ${error.message}\n`);
    process.exitCode = 1;
  });
