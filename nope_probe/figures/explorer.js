const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector) => document.querySelector(selector);

const view = {
  ...data.view,
  cells: new Int16Array(buffer(data.view.cells)),
  offsets: new Uint32Array(buffer(data.view.offsets)),
  scales: new Float32Array(buffer(data.view.scales)),
  measures: new Float32Array(buffer(data.view.measures)),
  leads: new Float32Array(buffer(data.view.leads)),
};
// A map is drawn with the first key's lead on its left, before a gap.
const hasLeads = view.leads.some((lead) => !Number.isNaN(lead));
const LEAD = hasLeads ? Math.max(1, Math.round(view.n / 20)) : 0;
const EDGE = hasLeads ? LEAD + Math.max(1, Math.round(view.n / 50)) : 0;
const state = { removed: data.removed, layer: data.layer, panel: 0, cell: null };

// Of a map that is stored once, all conditions that share it know the place.
function number(condition, layer, panel) {
  return (condition * view.layers.length + layer) * view.panels.length + panel;
}

function values(condition, layer, panel) {
  const { n, cells, offsets, scales } = view;
  const at = number(condition, layer, panel);
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

function leads(condition, layer, panel) {
  const at = number(condition, layer, panel) * view.n;
  return view.leads.subarray(at, at + view.n);
}

// The maps that are shown, as [name, condition, panel].
function shown() {
  return [["intact", 0, state.panel], ["without", state.removed, state.panel]];
}

function measure(condition, layer, panel, index) {
  const start = (number(condition, layer, panel) * data.measures.length + index) * 3;
  return view.measures.subarray(start, start + 3);
}

function percentile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// The largest of most numbers of some arrays, 1 where there is none.
function largest(arrays) {
  let high = 0;
  for (const numbers of arrays) {
    const kept = Float64Array.from(numbers).filter((x) => !Number.isNaN(x)).map(Math.abs).sort();
    if (kept.length) high = Math.max(high, percentile(kept, 0.99));
  }
  return high || 1;
}

// A map with its lead column, whose colours are those of leads: [cells, width].
function framed(map, lead, ratio) {
  const { n } = view;
  const width = n + EDGE;
  const cells = new Float64Array(n * width).fill(NaN);
  for (let query = 0; query < n; query++) {
    for (let i = 0; i < LEAD; i++) cells[query * width + i] = lead[query] * ratio;
    for (let key = 0; key < n; key++) cells[query * width + EDGE + key] = map[query * n + key];
  }
  return [cells, width];
}

function show(value) {
  if (Number.isNaN(value)) return "\u2013";
  return String(Number(value.toPrecision(3))).replace("-", "\u2212");
}

function interval([value, low, high], unit) {
  if (Number.isNaN(value)) return "\u2013";
  const ends = unit === "%" ? [value, low, high].map((end) => Math.round(100 * end)) : [value, low, high];
  const [shown, from, to] = ends.map(show);
  return shown + (unit === "%" ? "%" : "") + " <small>[" + from + ", " + to + "]</small>";
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

// Choices, pickers and the cursor

const choices = data.choices.map((choice, index) => {
  const button = text("button", choice.label, { type: "button", class: "choice", role: "radio", "data-removed": choice.name });
  button.style.setProperty("--choice", choice.colour);
  button.addEventListener("click", () => { state.removed = index; draw(); });
  return button;
});
find("#choices").append(...choices);
find("#choices").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  state.removed = (state.removed + step + choices.length) % choices.length;
  draw();
  choices[state.removed].focus();
});

const range = find("#layers input");
range.max = view.layers.length - 1;
find("#layers").hidden = view.layers.length < 2;
range.addEventListener("input", () => { state.layer = Number(range.value); draw(); });

const select = find("#panels");
select.parentElement.hidden = view.panels.length < 2;
select.append(...view.panels.map((name, p) => text("option", name, { value: p })));
select.addEventListener("change", () => { state.panel = Number(select.value); draw(); });

const columns = shown().map(([name]) => name);
const canvases = [...columns, "difference"].map((of) => {
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
    const column = ((event.clientX - box.left) / box.width) * (n + EDGE);
    const query = Math.min(n - 1, Math.max(0, Math.floor((n * (event.clientY - box.top)) / box.height)));
    state.cell = [query, column < EDGE ? 0 : Math.min(n - 1, Math.floor(column - EDGE))];
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
let firsts = {};

function draw() {
  const start = performance.now();
  maps = Object.fromEntries(shown().map(([name, place, panel]) => [name, values(place, state.layer, panel)]));
  firsts = Object.fromEntries(shown().map(([name, place, panel]) => [name, leads(place, state.layer, panel)]));
  maps.difference = difference(maps.without, maps.intact);
  firsts.difference = difference(Float64Array.from(firsts.without), firsts.intact);
  choices.forEach((button, i) => {
    button.setAttribute("aria-checked", i === state.removed);
    button.tabIndex = i === state.removed ? 0 : -1;
  });
  range.value = state.layer;
  find("#layers output").textContent = "L" + view.layers[state.layer];
  select.value = state.panel;
  drawMaps();
  drawNumbers();
  drawReadout();
  document.body.dataset.removed = data.choices[state.removed].name;
  document.body.dataset.milliseconds = (performance.now() - start).toFixed(1);
}

function drawMaps() {
  const stops = diverging();
  const high = largest([maps.intact, maps.without]);
  const lead = largest([firsts.intact, firsts.without]);
  canvases.forEach((canvas) => {
    const of = canvas.dataset.of;
    const [cells, width] = framed(maps[of], firsts[of], high / lead);
    canvas.style.aspectRatio = width + " / " + view.n;
    paint(canvas, cells, width, view.n, [-high, high], stops);
    const figure = canvas.parentElement;
    canvas.setAttribute("aria-label", of + ": " + view.panels[state.panel] + " of L" + view.layers[state.layer]);
    figure.querySelector(".bar").style.background = "linear-gradient(to right, " + stops.join(", ") + ")";
    const first = hasLeads ? "; first key \u00b1" + show(lead) : "";
    figure.querySelector(".scale").innerHTML = "<span>" + show(-high) + "</span><span>nats, 99% of cells" + first + "</span><span>" + show(high) + "</span>";
  });
}

function leftWords(condition, panel) {
  const [lead, kept] = [0, 2].map((index) => measure(condition, state.layer, panel, index)[0]);
  const intact = [0, 2].map((index) => measure(0, state.layer, panel, index)[0]);
  const parts = [];
  if (!Number.isNaN(lead)) parts.push("the first key's lead is " + show(lead) + " of " + show(intact[0]) + " nats");
  if (!Number.isNaN(kept)) parts.push(show(kept) + " of " + show(intact[1]) + " nats of the order of the other keys are there");
  return parts.length ? parts.join(", ") : "no pattern";
}

function drawNumbers() {
  const rows = data.measures.map((each, index) => {
    const cells = shown().map(([of, condition, p]) => "<td data-measure='" + each.name + "' data-of='" + of + "'>" + interval(measure(condition, state.layer, p, index), each.unit) + "</td>");
    return "<tr><th scope='row'>" + each.label + ", " + each.unit + "</th>" + cells.join("") + "</tr>";
  });
  find("#numbers").innerHTML = rows.join("");
  const layer = "L" + view.layers[state.layer];
  const about = shown().slice(1).map(([of, condition, p]) => view.panels[p] + " " + leftWords(condition, p));
  find("#says").textContent = state.removed ? layer + " " + data.choices[state.removed].label + ": " + about.join("; ") + "." : layer + ": choose what to remove.";
}

function drawReadout() {
  if (!state.cell) {
    find("#readout").textContent = "Queries go down, keys to the right. Point at a cell, or focus a map and use the arrow keys.";
    return;
  }
  const [query, key] = state.cell;
  const about = view.block > 1 ? "\u2248 " : "";
  const place = (index) => about + Math.round(index * view.block + (view.block - 1) / 2);
  const isLead = key === 0 && hasLeads;
  const parts = Object.keys(maps).map((of) => of + " " + show(isLead ? firsts[of][query] : maps[of][query * view.n + key]));
  find("#readout").textContent = "query " + place(query) + ", " + (isLead ? "lead of the first key" : "key " + place(key)) + ": " + parts.join(", ") + " nats";
}

dark.addEventListener("change", draw);
new ResizeObserver(() => requestAnimationFrame(() => {
  // In a frame of a page or notebook, the frame is as high as what it holds.
  try {
    if (window.frameElement) window.frameElement.style.height = document.querySelector("main").scrollHeight + 24 + "px";
  } catch { /* a page of another origin: its frame keeps the height that it has */ }
})).observe(document.querySelector("main"));
draw();
document.body.explorer = { data, state, view, values, measure, draw };
