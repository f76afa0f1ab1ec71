/* page.js - the page: what is chosen, what is computed again when, what is drawn. Twins: page.html,
   page.css. What is computed is nsa.js's; nothing here knows attention but by web.h's numbers. */
"use strict";

const SAMPLES = {
  "A dictionary": `Window \\Win"dow\\, n.
   1. An opening in the wall of a building for the admission of light
      and air, usually closed by casements or sashes of glass.
   2. (Arch.) The shutter, casement, or other framework, which closes
      a window opening.

Block \\Block\\ (bl[o^]k), n.
   1. A piece of wood more or less bulky; a solid mass of wood, stone,
      etc., usually with one or more plane faces.

Window box \\Win"dow box\\, n.
   A box beside a win`,
  "A refrain": "one block, two block, three block, four. a name is given once: the key is Quimby. " +
    "one block, two block, three block, four. ".repeat(7) + "and then it is asked again: the key is Quim",
  "A line": "The query reads a window, some blocks, and a coarse view of all the rest.",
};
const MIN_N = 3, RACE_LENGTHS = [512, 1024, 2048, 4096, 8192];

const at = (id) => document.getElementById(id);
const state = {layer: 0, head: 0, token: 0, held: false, text: new Uint8Array(), spans: [], isa: SIMD128};
let nsa, geometry, worker, playing;

/* ---- Small parts ------------------------------------------------------------------------------ */

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/* SVG from lists: [name, attributes, children or words]. */
function svg(name, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[].concat(children).map((child) => Array.isArray(child) ? svg(...child) : child));
  return made;
}

const kvHead = (head) => Math.floor(head / (nsa.sizes.heads / nsa.sizes.kvHeads));
const percent = (p) => `${(100 * p).toFixed(p < .0995 ? 1 : 0)} %`;
const words = (ms) => ms < 10 ? ms.toFixed(1) : ms.toFixed(0);

function isForced(block, token) {
  return block < nsa.sizes.slcInit || block > Math.floor(token / geometry.slcBlock) - nsa.sizes.slcLocal;
}

/* The spans of a query, from its counts and lists. */
function spansOf(layer, head, token) {
  const {cmpBlock, cmpStride} = nsa.sizes, reads = nsa.reads(layer, kvHead(head), token);
  return {reads, blocks: nsa.blocks(layer, kvHead(head), token),
    covered: reads.cmp ? (reads.cmp - 1) * cmpStride + cmpBlock : 0, begin: token + 1 - reads.win};
}

/* Alt and an arrow go back a page, and so on. */
const isBrowsers = (event) => event.altKey || event.ctrlKey || event.metaKey;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

/* A canvas of the size at which it is shown. */
function context(canvas) {
  const scale = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(box.width * scale));
  canvas.height = Math.max(1, Math.round(box.height * scale));
  return canvas.getContext("2d");
}

/* ---- The text --------------------------------------------------------------------------------- */

/* Bytes to characters: one of several bytes is shown at its last. */
function layOutText() {
  const decoder = new TextDecoder();
  state.spans = [...state.text].map((byte, i) => {
    const end = i + 1 === state.text.length;
    const shown = decoder.decode(Uint8Array.of(byte), {stream: !end});
    const span = element("span", {"data-at": i}, shown === "\n" ? "⏎\n" : shown);
    return span;
  });
  at("tokens").replaceChildren(...state.spans);
}

function showText(spans) {
  const {token} = state, listed = new Set(spans.blocks);
  state.spans.forEach((span, s) => {
    const block = Math.floor(s / geometry.slcBlock);
    const marks = [];
    if (s > token) marks.push("later");
    else {
      if (s < spans.covered) marks.push("cmp");
      if (listed.has(block)) marks.push(isForced(block, token) ? "forced" : "slc");
      if (s >= spans.begin) marks.push("win");
      if (s === token) marks.push("query");
    }
    span.className = marks.join(" ");
  });
}

/* Keeps the query in sight without moving the page. */
function scrollToQuery() {
  const box = at("tokens"), span = state.spans[state.token];
  const top = span.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top + 2 * span.offsetHeight > box.scrollTop + box.clientHeight)
    box.scrollTop = top - box.clientHeight / 2;
}

/* ---- Costs ------------------------------------------------------------------------------------ */

function meanKeys() {
  let sum = 0;
  const {layers, kvHeads} = nsa.sizes, T = state.text.length;
  for (let layer = 0; layer < layers; layer++)
    for (let head = 0; head < kvHeads; head++)
      for (let t = 0; t < T; t++) {
        const {cmp, slc, win} = nsa.reads(layer, head, t);
        sum += cmp + slc + win;
      }
  return sum / (layers * kvHeads * T);
}

function showKeys({reads}) {
  const dense = state.token + 1, sparse = reads.cmp + reads.slc + reads.win;
  const most = Math.max(dense, sparse);
  const bar = (name, parts, total) => element("div", {class: "row"}, element("span", {}, name),
    element("span", {class: "track"}, ...parts.map(([kind, keys]) =>
      element("i", {class: `c-${kind}`, style: `width: ${100 * keys / most}%`, title: `${kind} ${keys}`}))),
    element("b", {}, `${total}`));
  const part = (kind, keys) => element("b", {class: kind}, `${kind} ${keys}`);
  at("key-bars").replaceChildren(
    bar("sparse", [["cmp", reads.cmp], ["slc", reads.slc], ["win", reads.win]], sparse),
    bar("dense", [["dense", dense]], dense),
    element("span", {class: "soft"}, part("cmp", reads.cmp), "  +  ", part("slc", reads.slc), "  +  ",
      part("win", reads.win)));
}

function showCosts(cost) {
  at("mean-sparse").textContent = meanKeys().toFixed(0);
  at("mean-dense").textContent = ((state.text.length + 1) / 2).toFixed(0);
  at("ms-sparse").textContent = words(cost.nsaMs);
  at("ms-dense").textContent = words(cost.denseMs);
  at("bits").textContent = state.text.length > 1 ? cost.bits.toFixed(3) : "–";
  at("bits-trained").textContent = state.trainedBits === undefined || state.text.length < 2 ? "" :
    `as trained ${state.trainedBits.toFixed(3)}`;
}

/* ---- Heads ------------------------------------------------------------------------------------ */

function layOutHeads() {
  const {layers, heads, kvHeads} = nsa.sizes, group = heads / kvHeads;
  const grid = at("heads");
  grid.style.gridTemplateColumns = `1.4rem repeat(${heads}, minmax(0, 1fr))`;
  grid.append(element("span"));
  for (let h = 0; h < heads; h++)
    grid.append(element("span", {class: h && h % group === 0 ? "name second" : "name", title: `group ${kvHead(h)}`},
      `${h}`));
  for (let layer = 0; layer < layers; layer++) {
    grid.append(element("span", {class: "name", title: `layer ${layer}`}, `L${layer}`));
    for (let h = 0; h < heads; h++) {
      const button = element("button", {type: "button", role: "radio", "data-layer": layer, "data-head": h,
        "aria-label": `layer ${layer}, head ${h}, group ${kvHead(h)}`}, element("canvas"));
      if (h && h % group === 0) button.classList.add("second");
      button.addEventListener("click", () => choose(layer, h));
      grid.append(button);
    }
  }
  grid.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!step || isBrowsers(event)) return;
    event.preventDefault();
    choose((state.layer + step[0] + layers) % layers, (state.head + step[1] + heads) % heads);
    grid.querySelector('[aria-checked="true"]').focus();
  });
}

/* One strip: three rows, as dark as softmax is large there. */
function drawStrip(canvas, layer, head, colours) {
  const g = context(canvas), {width, height} = canvas, T = state.text.length;
  const look = nsa.look(layer, head, state.token), {cmpBlock, cmpStride} = nsa.sizes, row = height / 3;
  const dot = (kind, lane, begin, size, p) => {
    if (p <= 0) return;
    g.globalAlpha = Math.min(1, .12 + .88 * Math.sqrt(p * (kind === "cmp" ? 2 : 3)));
    g.fillStyle = colours[kind];
    g.fillRect(begin * width / T, lane * row + 1, Math.max(1, size * width / T), row - 2);
  };
  g.clearRect(0, 0, width, height);
  look.cmp.forEach((p, i) => dot("cmp", 0, i * cmpStride, i === look.cmp.length - 1 ? cmpBlock : cmpStride, p));
  look.slc.forEach((p, s) => dot("slc", 1, s, 1, p));
  look.win.forEach((p, s) => dot("win", 2, s, 1, p));
  g.globalAlpha = 1;
}

function showHeads() {
  const colours = Object.fromEntries(["cmp", "slc", "win"].map((kind) => [kind, colour(kind)]));
  for (const button of at("heads").querySelectorAll("button")) {
    const layer = Number(button.dataset.layer), head = Number(button.dataset.head);
    const chosen = layer === state.layer && head === state.head;
    button.setAttribute("aria-checked", chosen);
    button.tabIndex = chosen ? 0 : -1;
    drawStrip(button.firstChild, layer, head, colours);
  }
}

/* ---- The chosen head -------------------------------------------------------------------------- */

/* A lane: a name, what it says, an axis, and bars drawn by `bars`, which is given the lane's scale. */
function lane(kind, wide, top, height, name, says, bars) {
  return ["g", {class: `lane lane-${kind}`, transform: `translate(0 ${top})`}, [
    ["text", {class: "lane-name", x: 0, y: -7}, name],
    ["text", {x: wide, y: -7, "text-anchor": "end"}, says],
    ["line", {class: "axis", x1: 0, x2: wide, y1: height, y2: height}], ...bars]];
}

function barsOf(values, height, place, classOf, most = Math.max(1e-9, ...values)) {
  const bars = [];
  values.forEach((p, i) => {
    const [x, width] = place(i), tall = Math.max(p > 0 ? 1 : 0, height * p / most);
    if (tall) bars.push(["rect", {class: classOf(i), x: x.toFixed(2), y: (height - tall).toFixed(2),
      width: Math.max(.6, width).toFixed(2), height: tall.toFixed(2)}, [["title", {}, `${percent(p)}`]]]);
  });
  return bars;
}

function drawLanes(spans, look) {
  const {token} = state, T = state.text.length, {cmpBlock, cmpStride} = nsa.sizes, size = geometry.slcBlock;
  const wide = Math.max(300, at("lanes").clientWidth); /* in pixels, so that words keep their size */
  const tall = 54, pitch = tall + 38, first = 24, each = wide / T, listed = new Set(spans.blocks);
  const block = (j) => [j * size * each + 1, (Math.min(T, (j + 1) * size) - j * size) * each - 2];
  const seen = (kind, begin, end) => ["rect", {class: `b-${kind} seen`, x: begin * each, y: 0,
    width: Math.max(0, end - begin) * each, height: tall}];
  const kindOf = (j) => isForced(j, token) ? "forced" : "slc";
  const chosen = spans.blocks.filter((j) => !isForced(j, token));
  const most = Math.max(1e-9, ...look.scores, ...look.mass);
  const outlined = wide < 560 ? "outline: dense" : "outline: what dense attention would give the block";
  const outline = look.mass.slice(0, Math.floor(token / size) + 1);
  const lanes = [
    lane("cmp", wide, first, tall, "Compressed", `${spans.reads.cmp} rows of ${cmpBlock} tokens`, [
      seen("cmp", 0, spans.covered),
      ...barsOf(look.cmp, tall,
        (i) => [(i * cmpStride + (cmpBlock - cmpStride) / 2) * each, cmpStride * each - .5], () => "b-cmp")]),
    lane("score", wide, first + pitch, tall, "Scores of blocks", outlined, [
      ...barsOf(look.scores, tall, block, (j) => listed.has(j) ? `b-${kindOf(j)}` : "b-score", most),
      ...barsOf(outline, tall, block, () => "b-mass", most)]),
    lane("slc", wide, first + 2 * pitch, tall, "Selected",
      `${spans.reads.slc} tokens of ${spans.blocks.length} blocks`, [
      ...spans.blocks.map((j) => seen(kindOf(j), j * size, Math.min(token + 1, (j + 1) * size))),
      ...barsOf(look.slc, tall, (s) => [s * each, each], (s) => `b-${kindOf(Math.floor(s / size))}`)]),
    lane("win", wide, first + 3 * pitch, tall, "Window", `the last ${spans.reads.win} tokens`, [
      seen("win", spans.begin, token + 1),
      ...barsOf(look.win, tall, (s) => [s * each, each], () => "b-win")]),
  ];
  const bottom = first + 3 * pitch + tall, x = (token + .5) * each;
  at("lanes").replaceChildren(svg("svg", {viewBox: `0 0 ${wide} ${bottom + 4}`, role: "img",
    "aria-label": sentence(spans, look, chosen)}, [
    ["rect", {class: "future", x: (token + 1) * each, y: first, width: wide - (token + 1) * each,
      height: bottom - first}],
    ["line", {class: "query-line", x1: x, x2: x, y1: first, y2: bottom}], ...lanes]));
}

function sentence(spans, look, chosen) {
  const {reads} = spans, ofThese = chosen.length ? `, of which it chose ${chosen.join(", ")}` : "";
  return `Token ${state.token}, layer ${state.layer}, head ${state.head}: reads ${reads.cmp} compressed rows, ` +
    `${reads.slc} tokens of blocks ${spans.blocks.join(", ")}${ofThese}, ` +
    `and ${reads.win} of its window; dense attention reads ${state.token + 1}. ` +
    `Gates ${[...look.gates].map((g) => g.toFixed(2)).join(", ")}.`;
}

function showGates(look) {
  at("gates").replaceChildren(...["cmp", "slc", "win"].map((kind, i) =>
    element("div", {class: "row"}, element("b", {class: kind}, kind), element("span", {class: "track"},
      element("i", {class: `c-${kind}`, style: `width: ${Math.min(100, 100 * look.gates[i])}%`})),
    element("span", {}, look.gates[i].toFixed(2)))));
}

function shown(byte) {
  if (byte === 10 || byte === 32) return byte === 10 ? "⏎" : "␣";
  return byte < 32 || byte > 126 ? `\\x${byte.toString(16).padStart(2, "0")}` : String.fromCharCode(byte);
}

function showNext() {
  const p = nsa.next(state.token), after = state.text[state.token + 1];
  const best = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, 5);
  const parts = best.flatMap((byte) => [element("code", {}, shown(byte)), ` ${percent(p[byte])}  `]);
  const truth = after === undefined ? [] :
    ["The text goes on with ", element("code", {}, shown(after)), ` (${percent(p[after])}).`];
  at("next").replaceChildren("Out of all layers comes a guess at the next byte: ", ...parts, ...truth);
}

/* ---- Steps ------------------------------------------------------------------------------------ */

function showSteps(spans, look) {
  const {cmpBlock, cmpStride} = nsa.sizes, {reads} = spans, t = state.token;
  const chosen = spans.blocks.filter((j) => !isForced(j, t));
  const candidates = Math.floor(t / geometry.slcBlock) + 1;
  const gates = [...look.gates].map((g) => g.toFixed(2));
  const lines = [
    `t = ${t}, w = ${geometry.window}: tokens ${spans.begin} … ${t}, ${reads.win} keys`,
    reads.cmp ? `l = ${cmpBlock}, d = ${cmpStride}: ${reads.cmp} rows for tokens 0 … ${spans.covered - 1}` :
      `t + 1 < l = ${cmpBlock}: no block is complete yet`,
    `n = ${geometry.slcCount} of ${candidates}: ` +
      (chosen.length ? `chosen ${chosen.join(", ")}` : "nothing to choose") +
      `, forced ${spans.blocks.filter((j) => isForced(j, t)).join(", ")}`,
    `${spans.blocks.length} blocks of l′ = ${geometry.slcBlock}: ${reads.slc} keys`,
    `out = ${gates[0]} cmp + ${gates[1]} slc + ${gates[2]} win`,
  ];
  lines.forEach((line, i) => { at(`live-${i + 1}`).textContent = line; });
}

function listenToSteps() {
  for (const item of at("steps").children) {
    const on = () => { document.body.dataset.step = item.dataset.step; };
    const off = () => { delete document.body.dataset.step; };
    for (const [event, call] of [["mouseenter", on], ["focus", on], ["mouseleave", off], ["blur", off]])
      item.addEventListener(event, call);
  }
}

/* ---- The map ---------------------------------------------------------------------------------- */

/* A pixel for each query and key, kept until the head or the geometry changes. */
function paintMap() {
  const T = state.text.length, size = geometry.slcBlock, image = new ImageData(T, T);
  const paint = (t, s, [r, g, b], a) => image.data.set([r, g, b, a], 4 * (t * T + s));
  for (let t = 0; t < T; t++) {
    const spans = spansOf(state.layer, state.head, t);
    for (let s = 0; s < spans.covered; s++)
      paint(t, s, [0, 158, 115], Math.floor(s / nsa.sizes.cmpStride) % 2 ? 74 : 48);
    for (const j of spans.blocks)
      for (let s = j * size; s < Math.min(t + 1, (j + 1) * size); s++)
        paint(t, s, [230, 159, 0], isForced(j, t) ? 120 : 255);
    for (let s = spans.begin; s <= t; s++) paint(t, s, [0, 114, 178], 225);
  }
  state.map = element("canvas", {width: T, height: T});
  state.map.getContext("2d").putImageData(image, 0, 0);
}

function drawMap() {
  const canvas = at("map"), g = context(canvas), {width, height} = canvas, T = state.text.length;
  g.imageSmoothingEnabled = T > width;
  g.fillStyle = colour("hair");
  g.beginPath();
  g.moveTo(width, 0), g.lineTo(width, height), g.lineTo(0, 0);
  g.fill();
  g.drawImage(state.map, 0, 0, width, height);
  const y = (state.token + .5) * height / T;
  g.strokeStyle = colour("query");
  g.lineWidth = Math.max(1.5, height / T);
  g.beginPath();
  g.moveTo(0, y), g.lineTo(width, y);
  g.stroke();
}

/* ---- The race --------------------------------------------------------------------------------- */

/* The worker is nsa.js again, with a module of its own, so that the page stays awake. */
function startWorker(module, model) {
  const loop = `let nsa;
    onmessage = async ({data}) => {
      if (data.model) { nsa = await Nsa.open(data.module, data.model); return; }
      try {
        postMessage({...data, ...nsa.race(data.tokens, data.geometry, data.dense, data.isa)});
      } catch (error) {
        postMessage({error: error.message});
      }
    };`;
  const source = new Blob([at("nsa-js").textContent, loop], {type: "text/javascript"});
  worker = new Worker(URL.createObjectURL(source));
  worker.postMessage({module, model});
}

function raceOnce(question) {
  return new Promise((resolve, reject) => {
    worker.onmessage = ({data}) => data.error ? reject(new Error(data.error)) : resolve(data);
    worker.postMessage(question);
  });
}

async function race() {
  const results = [], rules = {...nsa.sizes, ...geometry}, isa = state.isa;
  at("race").disabled = true;
  try {
    await raceOnce({tokens: RACE_LENGTHS[0], geometry: rules, dense: false, isa}); /* compiled while it runs */
    for (const tokens of RACE_LENGTHS) {
      const sparse = await raceOnce({tokens, geometry: rules, dense: false, isa});
      const dense = await raceOnce({tokens, geometry: rules, dense: true, isa});
      results.push({tokens, sparse, dense});
      drawRace(results);
    }
  } catch (error) {
    at("race-words").textContent = error.message;
  }
  at("race").disabled = false;
}

function drawRace(results) {
  const all = results.flatMap((r) => [r.sparse.ms, r.dense.ms]), left = 54, right = 390, top = 12, bottom = 208;
  const low = Math.floor(Math.log10(Math.max(.1, Math.min(...all))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...all))));
  const doublings = (tokens) => Math.log2(tokens / RACE_LENGTHS[0]);
  const x = (tokens) => left + (right - left) * doublings(tokens) / doublings(RACE_LENGTHS.at(-1));
  const y = (ms) => bottom - (bottom - top) * (Math.log10(Math.max(ms, .01)) - low) / (high - low);
  const place = (kind) => (r) => `${x(r.tokens).toFixed(1)} ${y(r[kind].ms).toFixed(1)}`;
  const line = (kind) => [["path", {class: kind, d: `M${results.map(place(kind)).join("L")}`}],
    ...results.map((r) => ["circle", {class: kind, cx: x(r.tokens), cy: y(r[kind].ms), r: 3.5},
      [["title", {}, `${r.tokens} tokens: ${words(r[kind].ms)} ms, ${r[kind].keys.toFixed(0)} keys a query`]]])];
  const rows = [];
  for (let e = low; e <= high; e++)
    rows.push(["line", {class: "grid", x1: left, x2: right, y1: y(10 ** e), y2: y(10 ** e)}],
      ["text", {x: left - 6, y: y(10 ** e) + 4, "text-anchor": "end"},
        e >= 3 ? `${10 ** (e - 3)} s` : `${10 ** e} ms`]);
  const last = results.at(-1);
  at("race-chart").replaceChildren(svg("svg", {viewBox: "0 0 410 248", role: "img",
    "aria-label": "milliseconds by the number of tokens, both logarithmic"}, [
    ...rows, ...RACE_LENGTHS.map((n) => ["text", {x: x(n), y: bottom + 18, "text-anchor": "middle"}, `${n}`]),
    ["text", {x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle"}, "tokens"],
    ...line("dense"), ...line("sparse")]));
  at("race-words").textContent =
    `At ${last.tokens} tokens a query reads ${last.sparse.keys.toFixed(0)} keys instead of ` +
    `${last.dense.keys.toFixed(0)}: ${words(last.sparse.ms)} ms instead of ${words(last.dense.ms)} (grey), ` +
    `${(last.dense.ms / last.sparse.ms).toFixed(1)} times as fast.`;
}

/* ---- What happens ----------------------------------------------------------------------------- */

/* All that hangs on the query and the head. */
function show() {
  const spans = spansOf(state.layer, state.head, state.token);
  const look = nsa.look(state.layer, state.head, state.token);
  showText(spans);
  showKeys(spans);
  showHeads();
  drawLanes(spans, look);
  showGates(look);
  showNext();
  showSteps(spans, look);
  drawMap();
  at("detail-title").textContent =
    `Layer ${state.layer}, head ${state.head}: token ${state.token} of ${state.text.length}`;
  at("summary").textContent = sentence(spans, look, spans.blocks.filter((j) => !isForced(j, state.token)));
}

function point(token, hold) {
  const most = state.text.length - 1;
  if (hold !== undefined) state.held = hold;
  token = Math.min(most, Math.max(0, token));
  if (token === state.token && hold === undefined) return;
  state.token = token;
  show();
}

function choose(layer, head) {
  state.layer = layer;
  state.head = head;
  paintMap();
  show();
}

/* Reads the text again: after an edit, or with other n, w, l'. */
function compute() {
  const cost = nsa.read(state.text, geometry, state.isa);
  state.token = Math.min(state.token, state.text.length - 1);
  paintMap();
  showCosts(cost);
  show();
  document.body.dataset.ready = "yes";
}

function setText(text) {
  const bytes = new TextEncoder().encode(text).subarray(0, nsa.sizes.context);
  state.text = bytes.length ? bytes : new TextEncoder().encode("\n");
  state.trainedBits = nsa.read(state.text, trained(), state.isa).bits;
  layOutText();
  compute();
  scrollToQuery();
}

function trained() {
  const {slcCount, window, slcBlock} = nsa.sizes;
  return {slcCount, window, slcBlock};
}

/* w runs over powers of 2, l' over multiples of d from l on, n up to room for every block. */
function sliders() {
  const {context, cmpBlock, cmpStride, slcCountMost} = nsa.sizes;
  const n = at("n"), w = at("w"), block = at("block");
  const show = () => {
    n.max = Math.min(slcCountMost, Math.ceil(context / geometry.slcBlock));
    geometry.slcCount = Math.min(geometry.slcCount, Number(n.max));
    n.value = geometry.slcCount;
    w.value = Math.log2(geometry.window);
    block.value = geometry.slcBlock;
    at("n-out").textContent = geometry.slcCount;
    at("w-out").textContent = geometry.window;
    at("block-out").textContent = geometry.slcBlock;
    w.setAttribute("aria-valuetext", `${geometry.window} tokens`);
    for (const slider of [n, w, block])
      slider.style.setProperty("--at", `${100 * (slider.value - slider.min) / (slider.max - slider.min)}%`);
  };
  Object.assign(n, {min: MIN_N, step: 1});
  Object.assign(w, {min: 2, max: Math.log2(context), step: 1});
  Object.assign(block, {min: cmpBlock, max: 4 * cmpBlock, step: cmpStride});
  let waiting = false;
  const changed = () => {
    geometry = {slcCount: Number(n.value), window: 2 ** Number(w.value), slcBlock: Number(block.value)};
    show();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      compute();
    });
  };
  for (const slider of [n, w, block]) slider.addEventListener("input", changed);
  at("reset").addEventListener("click", () => {
    geometry = trained();
    show();
    compute();
  });
  show();
}

function stopPlaying() {
  clearInterval(playing);
  playing = undefined;
  at("play").setAttribute("aria-pressed", "false");
}

function play() {
  if (playing) {
    stopPlaying();
    return;
  }
  if (state.token >= state.text.length - 1) point(0);
  at("play").setAttribute("aria-pressed", "true");
  playing = setInterval(() => {
    if (state.token >= state.text.length - 1) stopPlaying();
    point(state.token + 1);
    scrollToQuery();
  }, 80);
}

function listenToText() {
  const box = at("tokens"), tokenOf = (event) => event.target.dataset.at;
  box.addEventListener("pointerover", (event) => {
    if (!state.held && !playing && event.pointerType === "mouse" && tokenOf(event)) point(Number(tokenOf(event)));
  });
  box.addEventListener("click", (event) => {
    if (tokenOf(event)) point(Number(tokenOf(event)), !(state.held && Number(tokenOf(event)) === state.token));
  });
  box.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -geometry.slcBlock, PageDown: geometry.slcBlock,
      Home: -state.token, End: state.text.length}[event.key];
    if (step !== undefined && !isBrowsers(event)) {
      event.preventDefault();
      point(state.token + step, true);
      scrollToQuery();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.held = false;
  });
  at("map").addEventListener("pointermove", (event) => pointInMap(event));
  at("map").addEventListener("pointerdown", (event) => pointInMap(event));
}

function pointInMap(event) {
  const box = at("map").getBoundingClientRect();
  point(Math.floor((event.clientY - box.top) / box.height * state.text.length));
}

function listenToEditor() {
  const input = at("input");
  let timer;
  at("edit").addEventListener("click", () => {
    const open = at("editor").hidden;
    at("editor").hidden = !open;
    at("edit").setAttribute("aria-expanded", open);
    if (open) input.focus();
  });
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      setText(input.value);
      point(state.text.length - 1);
    }, 120);
  });
  for (const [name, text] of Object.entries(SAMPLES)) {
    const button = element("button", {type: "button"}, name);
    button.addEventListener("click", () => {
      input.value = text;
      setText(text);
      point(state.text.length - 1, true);
    });
    at("samples").append(button);
  }
}

/* ---- Opening ---------------------------------------------------------------------------------- */

async function unpack(id) {
  const packed = Uint8Array.from(atob(at(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function introduce() {
  const {parameters, layers, heads, kvHeads, steps, context} = nsa.sizes;
  at("limit").textContent = context;
  at("about").textContent =
    `${parameters.toLocaleString("en")} parameters, ${layers} layers, ${heads} query heads that share ${kvHeads} ` +
    `key-value heads, a token for each byte, ${steps} steps of training by this project's ./quickstart. nsa/nsa.h ` +
    "computes it here, as WebAssembly. Nothing is loaded and nothing is sent.";
  at("too-short").textContent = context;
  at("foot").textContent =
    "What the vector code of nsa.h computes here has the bits of its SSE2 code on a PC, and the plain C those of " +
    "plain C: a test compares what this page shows with a native build of the same sources.";
}

async function open() {
  let module, model;
  try {
    [module, model] = [await WebAssembly.compile(await unpack("module")), await unpack("model")];
    nsa = await Nsa.open(module, model);
  } catch (error) {
    at("about").textContent = `This page needs a browser with WebAssembly SIMD (all since 2023): ${error.message}`;
    return;
  }
  geometry = trained();
  state.layer = nsa.sizes.layers - 1;
  introduce();
  layOutHeads();
  sliders();
  listenToText();
  listenToEditor();
  listenToSteps();
  startWorker(module, model);
  at("play").addEventListener("click", play);
  at("race").addEventListener("click", race);
  at("plain").addEventListener("change", () => {
    state.isa = at("plain").checked ? PLAIN : SIMD128;
    compute();
  });
  at("input").value = Object.values(SAMPLES)[0];
  state.token = Infinity;
  setText(at("input").value);
  let resizing;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(show);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}

open();
