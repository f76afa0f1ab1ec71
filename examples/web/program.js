/* program.js - runs a program that was built for WASI in node: arguments, what it prints, its exit code.
   It stands in for node:wasi, which in node 20 crashed now and then when a program had ended. Nothing
   of files. node program.js WASM [ARGUMENT]... */
"use strict";
const fs = require("fs");

const OK = 0, NO_FILE = 8;

class Exit extends Error {}

function imports(memory, words) {
  const bytes = words.map((word) => new TextEncoder().encode(`${word}\0`));
  const set = (at, number) => memory().setUint32(at, number, true);
  return {
    args_sizes_get(count, size) {
      set(count, bytes.length);
      set(size, bytes.reduce((sum, word) => sum + word.length, 0));
      return OK;
    },
    args_get(list, at) {
      for (const word of bytes) {
        set(list, at);
        new Uint8Array(memory().buffer).set(word, at);
        list += 4;
        at += word.length;
      }
      return OK;
    },
    environ_sizes_get(count, size) {
      set(count, 0);
      set(size, 0);
      return OK;
    },
    environ_get: () => OK,
    clock_time_get(clock, precision, at) {
      memory().setBigUint64(at, process.hrtime.bigint(), true);
      return OK;
    },
    fd_close: () => OK,
    fd_seek: () => NO_FILE,
    fd_fdstat_get: () => NO_FILE,
    fd_write(file, vectors, count, written) {
      let sum = 0;
      for (let i = 0; i < count; i++) {
        const at = memory().getUint32(vectors + 8 * i, true), size = memory().getUint32(vectors + 8 * i + 4, true);
        fs.writeSync(file, new Uint8Array(memory().buffer, at, size));
        sum += size;
      }
      set(written, sum);
      return OK;
    },
    proc_exit(code) {
      throw Object.assign(new Exit(), {code});
    },
  };
}

async function main([file, ...words]) {
  let c;
  const {instance} = await WebAssembly.instantiate(fs.readFileSync(file),
    {wasi_snapshot_preview1: imports(() => new DataView(c.memory.buffer), [file, ...words])});
  c = instance.exports;
  try {
    c._start();
  } catch (error) {
    if (!(error instanceof Exit)) throw error;
    process.exitCode = error.code;
  }
}

main(process.argv.slice(2)).catch((error) => {
  process.stderr.write(`program.js: ${error.message}\n`);
  process.exitCode = 126;
});
