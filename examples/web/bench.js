/* bench.js - what SIMD128 gains in node: one layer's attention, sparse and dense, through two builds of
   the page's module. Twin: bench.py, which builds them. node bench.js SIMD SCALAR MODEL, prints JSON. */
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");

vm.runInThisContext(fs.readFileSync(path.join(__dirname, "nsa.js"), "utf8") + "\nglobalThis.Nsa = Nsa;");

const DETECT = 0, LENGTHS = [1024, 4096], TURNS = 5;
/* The paper's lengths, with the heads of the README's tables. */
const GEOMETRY = {heads: 16, kvHeads: 1, dim: 64, cmpBlock: 32, cmpStride: 16, slcCount: 16, window: 512, slcBlock: 64};

/* The best of some turns, the builds by turns: the first ones are compiled while they run. */
async function main([simd, scalar, model]) {
  const builds = [];
  for (const file of [simd, scalar])
    builds.push(await Nsa.open(await WebAssembly.compile(fs.readFileSync(file)), fs.readFileSync(model)));
  const rows = [];
  for (const tokens of LENGTHS)
    for (const dense of [false, true]) {
      const ms = [Infinity, Infinity];
      let keys;
      for (let turn = 0; turn < (tokens > 2048 ? 2 : TURNS); turn++)
        builds.forEach((nsa, i) => {
          const once = nsa.race(tokens, GEOMETRY, dense, DETECT);
          ms[i] = Math.min(ms[i], once.ms);
          keys = once.keys;
        });
      rows.push({attention: dense ? "dense" : "sparse", tokens, keys: Math.round(keys),
        simd128_ms: Number(ms[0].toFixed(1)), scalar_ms: Number(ms[1].toFixed(1)),
        times_as_fast: Number((ms[1] / ms[0]).toFixed(2))});
    }
  process.stdout.write(JSON.stringify({node: process.version, v8: process.versions.v8, rows}) + "\n");
}

main(process.argv.slice(2)).catch((error) => {
  process.stderr.write(`bench.js: ${error.message}\n`);
  process.exitCode = 1;
});
