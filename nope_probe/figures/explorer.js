const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector) => document.querySelector(selector);

const view = {
  ...data.view,
  cells: new Int16Array(buffer(data.view.cells)),
  offsets: new Uint32Array(buffer(data.view.offsets)),
  scales: new Float32Array(buffer(data.view.scales)),
  measures: new Float32Array(buffer(data.view.measures)),
};
const state = { removed: data.removed, layer: data.layer, panel: 0, cell: null };

// Of a map that is stored once, all combinations that share it know the place.
function number(combination, layer, panel) {
  return (combination * view.layers.length + layer) * view.panels.length + panel;
}

function values(combination, layer, panel) {
  const { n, cells, offsets, scales } = view;
  const at = number(combination, layer, panel);
  const map = new Float64Array(n * n).fill(NaN);
  let next = offsets[at];
  for (let query = 0; query < n; query++) {
    for (let key = 0; key < query; key++) {
      const code = cells[next++];
      if (code !== -32768) map[query * n + key] = code * scales[at];
    }
  }
  return map;
}

// The maps that are shown, as [name, combination, panel]: of one panel, or of runs side by side.
function shown() {
  if (data.beside) return view.panels.map((name, p) => [name, state.removed, p]);
  return [["intact", 0, state.panel], ["ablated", state.removed, state.panel]];
}

function measure(combination, layer, panel, index) {
  const start = (number(combination, layer, panel) * data.measures.length + index) * 3;
  return view.measures.subarray(start, start + 3);
}

function percentile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// The middle of the cells of no skipped key, with 0 in it.
function limits(maps) {
  let high = -Infinity;
  for (const map of maps) {
    const kept = [];
    for (let i = 0; i < map.length; i++) {
      if (i % view.n >= view.skip && !Number.isNaN(map[i])) kept.push(Math.abs(map[i]));
    }
    if (kept.length) high = Math.max(high, percentile(Float64Array.from(kept).sort(), 0.99));
  }
  if (high === -Infinity) return [0, 1];
  return [-(high || 1), high || 1];
}

function show(value) {
  if (Number.isNaN(value)) return "\u2013";
  return String(Number(value.toPrecision(3))).replace("-", "\u2212");
}

function interval([value, low, high], name) {
  if (Number.isNaN(value)) return "no pattern";
  if (name === "amplitude" && low <= 0) return "within noise";
  const ends = name === "share" ? [value, low, high].map((end) => Math.round(100 * end)) : [value, low, high];
  const [shown, from, to] = ends.map(show);
  return shown + (name === "share" ? "%" : "") + " <small>[" + from + ", " + to + "]</small>";
}

function difference(one, other) {
  return one.map((value, i) => value - other[i]);
}

function text(tag, content, attributes = {}) {
  const element = document.createElement(tag);
  element.innerHTML = content;
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  return element;
}

// Switches, pickers and the cursor

const switches = data.players.map((player, index) => {
  const button = text("button", player.label, { type: "button", class: "switch", "data-player": player.name });
  button.style.setProperty("--player", player.colour);
  button.addEventListener("click", () => { state.removed ^= 1 << index; draw(); });
  return button;
});
const reset = text("button", "put all back", { type: "button", id: "reset" });
reset.addEventListener("click", () => { state.removed = 0; draw(); });
find("#switches").append(...switches, reset);
find("#switches").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const buttons = [...switches, reset];
  const at = buttons.indexOf(document.activeElement);
  if (!step || at < 0) return;
  event.preventDefault();
  buttons[(at + step + buttons.length) % buttons.length].focus();
});

const range = find("#layers input");
range.max = view.layers.length - 1;
find("#layers").hidden = view.layers.length < 2;
range.addEventListener("input", () => { state.layer = Number(range.value); draw(); });

const select = find("#panels");
select.parentElement.hidden = data.beside || view.panels.length < 2;
if (!data.beside) select.append(...view.panels.map((name, p) => text("option", name, { value: p })));
select.addEventListener("change", () => { state.panel = Number(select.value); draw(); });

const columns = shown().map(([name]) => name);
const canvases = (data.beside ? columns : [...columns, "difference"]).map((of) => {
  const figure = text("figure", "<figcaption></figcaption><canvas tabindex='0' role='img'></canvas><div class='bar'></div><div class='scale'></div>");
  figure.firstChild.textContent = of;
  find(".maps").append(figure);
  const canvas = figure.querySelector("canvas");
  canvas.dataset.of = of;
  return canvas;
});
const head = text("tr", "<th></th>");
columns.forEach((name) => { const cell = text("th", ""); cell.textContent = name; head.append(cell); });
find("thead").append(head);
for (const canvas of canvases) {
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const { n } = view;
    const at = (share) => Math.min(n - 1, Math.max(0, Math.floor(n * share)));
    state.cell = [at((event.clientY - box.top) / box.height), at((event.clientX - box.left) / box.width)];
    drawReadout();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { n } = view;
    const cell = state.cell || [n - 1, 0];
    state.cell = cell.map((each, i) => Math.min(n - 1, Math.max(0, each + step[i])));
    drawReadout();
  });
}

// What is shown

let maps = {};

function draw() {
  const start = performance.now();
  maps = Object.fromEntries(shown().map(([name, place, panel]) => [name, values(place, state.layer, panel)]));
  if (!data.beside) maps.difference = difference(maps.ablated, maps.intact);
  switches.forEach((each, i) => each.setAttribute("aria-pressed", !(state.removed >> i & 1)));
  range.value = state.layer;
  find("#layers output").textContent = "L" + view.layers[state.layer];
  select.value = state.panel;
  drawMaps();
  drawNumbers();
  drawReadout();
  document.body.dataset.removed = state.removed;
  document.body.dataset.milliseconds = (performance.now() - start).toFixed(1);
}

function drawMaps() {
  // A run has a scale of its own, that of its intact map and of what is left.
  const ofRun = (place, of) => limits([values(0, state.layer, place), maps[of]]);
  const both = data.beside ? null : limits([maps.intact, maps.ablated]);
  const stops = diverging();
  canvases.forEach((canvas, place) => {
    const of = canvas.dataset.of;
    const scale = both || ofRun(place, of);
    paint(canvas, maps[of], view.n, scale, stops);
    const figure = canvas.parentElement;
    canvas.setAttribute("aria-label", of + ": " + view.panels[data.beside ? place : state.panel] + " of L" + view.layers[state.layer]);
    figure.querySelector(".bar").style.background = "linear-gradient(to right, " + stops.join(", ") + ")";
    figure.querySelector(".scale").innerHTML = "<span>" + show(scale[0]) + "</span><span>nats</span><span>" + show(scale[1]) + "</span>";
  });
}

function removedWords() {
  const gone = data.players.filter((_, i) => state.removed >> i & 1).map((player) => player.label);
  if (!gone.length) return "Nothing is removed";
  return "Without " + (gone.length > 1 ? gone.slice(0, -1).join(", ") + " and " : "") + gone[gone.length - 1];
}

function keptWords([share, low, high]) {
  if (Number.isNaN(share)) return "there is no intact positional pattern to share";
  const left = low <= 0 && high >= 0 ? "nothing that can be told from noise" : show(Math.round(100 * share)) + "%";
  return left + " is left of the intact positional pattern";
}

function drawNumbers() {
  const rows = data.measures.map((each, index) => {
    const cells = shown().map(([of, combination, p], i) => "<td data-measure='" + each.name + "' data-of='" + (data.beside ? i : of) + "'>" + interval(measure(combination, state.layer, p, index), each.name) + "</td>");
    return "<tr><th scope='row'>" + each.label + (each.unit ? ", " + each.unit : "") + "</th>" + cells.join("") + "</tr>";
  });
  find("#numbers").innerHTML = rows.join("");
  const kept = ([, combination, p]) => keptWords(measure(combination, state.layer, p, data.measures.length - 1));
  const left = data.beside ? shown().map((run) => run[0] + ": " + kept(run)).join("; ") : kept(shown()[1]);
  const where = "L" + view.layers[state.layer] + (data.beside ? "" : ", " + view.panels[state.panel]);
  find("#says").textContent = state.removed ? removedWords() + ", " + left + " (" + where + ")." : removedWords() + " (" + where + "): press a switch.";
}

function drawReadout() {
  if (!state.cell) {
    find("#readout").textContent = "Queries go down, keys to the right. Point at a cell, or focus a map and use the arrow keys.";
    return;
  }
  const [query, key] = state.cell;
  const about = view.block > 1 ? "\u2248 " : "";
  const place = (index) => about + Math.round(index * view.block + (view.block - 1) / 2);
  const parts = Object.keys(maps).map((of) => of + " " + show(maps[of][query * view.n + key]));
  find("#readout").textContent = "query " + place(query) + ", key " + place(key) + ": " + parts.join(", ") + " nats";
}

dark.addEventListener("change", draw);
new ResizeObserver(() => {
  // In a frame of a page or notebook, the frame is as high as what it holds.
  try {
    if (window.frameElement) window.frameElement.style.height = document.querySelector("main").scrollHeight + 24 + "px";
  } catch { /* a page of another origin: its frame keeps the height that it has */ }
}).observe(document.querySelector("main"));
draw();
document.body.explorer = { data, state, view, values, measure, draw };
