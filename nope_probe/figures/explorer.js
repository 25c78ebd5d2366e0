const data = JSON.parse(document.getElementById("data").textContent);
const find = (selector) => document.querySelector(selector);
const NARROW = 640; // px: below it the stages stand in one column

const views = data.views.map((view) => ({
  ...view,
  cells: new Int16Array(buffer(view.cells)),
  offsets: new Uint32Array(buffer(view.offsets)),
  scales: new Float32Array(buffer(view.scales)),
  measures: new Float32Array(buffer(view.measures)),
}));
const circuit = views.find((view) => view.kind === "circuit");
const state = { removed: data.removed, view: 0, layer: data.layer, panel: data.panel, cell: null };

// Of a map that is stored once, all combinations that share it know the place.
function number(view, combination, layer, panel) {
  return (combination * view.layers.length + layer) * view.panels.length + panel;
}

function values(view, combination, layer, panel) {
  const { n, cells, offsets, scales } = view;
  const at = number(view, combination, layer, panel);
  const shape = view.panels[panel].shape;
  const map = new Float64Array(n * n).fill(NaN);
  let next = offsets[at];
  for (let query = 0; query < n; query++) {
    const end = shape === "full" ? n : shape === "below" ? query : query + 1;
    for (let key = 0; key < end; key++) {
      const code = cells[next++];
      if (code === -32768) continue;
      map[query * n + key] = code * scales[at];
      if (shape === "symmetric") map[key * n + query] = code * scales[at];
    }
  }
  return map;
}

// Of the places in `whole` the maps are means over all of a run's sequences. The intact model is the
// same whatever is removed.
function places(view) {
  const [intact] = view.whole[0] || [0];
  return view.whole[state.removed] || [intact, state.removed];
}

// The maps that are shown, as [name, combination, panel]: of one panel, or of runs beside each other.
function shown(view) {
  if (data.beside) return view.panels.map((panel, p) => [panel.name, state.removed, p]);
  return places(view).map((place, i) => [["intact", "ablated"][i], place, state.panel]);
}

function measure(view, combination, layer, panel, index) {
  const start = (number(view, combination, layer, panel) * data.measures.length + index) * 3;
  return view.measures.subarray(start, start + 3);
}

// A block may lack a stage that another has.
function has(view, layer, panel) {
  return !view.absent[layer][view.panels[panel].name];
}

function percentile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// The middle of the cells, off the diagonal and of no skipped position; signed maps have 0 in it.
function limits(maps, { n, skip }, signed) {
  let low = Infinity, high = -Infinity;
  for (const map of maps) {
    const off = [];
    for (let i = 0; i < map.length; i++) {
      const [query, key] = [Math.floor(i / n), i % n];
      if (query !== key && Math.min(query, key) >= skip && !Number.isNaN(map[i])) off.push(signed ? Math.abs(map[i]) : map[i]);
    }
    if (!off.length) continue;
    const sorted = Float64Array.from(off).sort();
    low = Math.min(low, percentile(sorted, 0.05));
    high = Math.max(high, percentile(sorted, signed ? 0.99 : 0.95));
  }
  if (high === -Infinity) return [0, 1];
  if (signed) return [-(high || 1), high || 1];
  return high > low ? [low, high] : [low - 1, low + 1];
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

function toggle(player) {
  state.removed ^= 1 << player;
  draw();
}

// Switches, pickers and the cursor

const switches = data.players.map((player, index) => {
  const button = text("button", player.label, { type: "button", class: "switch", "data-player": player.name });
  button.style.setProperty("--player", player.colour);
  button.addEventListener("click", () => toggle(index));
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
range.max = views[0].layers.length - 1;
find("#layers").hidden = views[0].layers.length < 2;
range.addEventListener("input", () => { state.layer = Number(range.value); keepPresent(); draw(); });

const select = find("#panels");
select.parentElement.hidden = data.beside || views.every((view) => view.panels.length < 2) && views.length < 2;
if (!data.beside) views.forEach((view, v) => {
  const group = document.createElement("optgroup");
  group.label = view.title;
  view.panels.forEach((panel, p) => group.append(text("option", panel.label, { value: v + "," + p })));
  select.append(group);
});
select.addEventListener("change", () => choose(...select.value.split(",").map(Number)));

function choose(view, panel) {
  Object.assign(state, { view, panel });
  keepPresent();
  draw();
}

function keepPresent() {
  const view = views[state.view];
  if (!has(view, state.layer, state.panel)) state.panel = 0;
}

const columns = shown(views[0]).map(([name]) => name);
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
    const n = views[state.view].n;
    const at = (share) => Math.min(n - 1, Math.max(0, Math.floor(n * share)));
    state.cell = [at((event.clientY - box.top) / box.height), at((event.clientX - box.left) / box.width)];
    drawReadout();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const n = views[state.view].n;
    const cell = state.cell || [n - 1, 0];
    state.cell = cell.map((each, i) => Math.min(n - 1, Math.max(0, each + step[i])));
    drawReadout();
  });
}

// What is shown

let maps = {};

function draw() {
  const start = performance.now();
  const view = views[state.view];
  maps = Object.fromEntries(shown(view).map(([name, place, panel]) => [name, values(view, place, state.layer, panel)]));
  if (!data.beside) maps.difference = difference(maps.ablated, maps.intact);
  switches.forEach((each, i) => each.setAttribute("aria-pressed", !(state.removed >> i & 1)));
  range.value = state.layer;
  find("#layers output").textContent = "L" + view.layers[state.layer];
  [...select.options].forEach((option) => {
    const [v, p] = option.value.split(",").map(Number);
    option.disabled = !has(views[v], state.layer, p);
  });
  select.value = state.view + "," + state.panel;
  drawMaps(view);
  drawNumbers(view);
  drawReadout();
  if (circuit) drawCircuit();
  document.body.dataset.removed = state.removed;
  document.body.dataset.milliseconds = (performance.now() - start).toFixed(1);
}

function drawMaps(view) {
  const signed = view.kind === "pattern";
  // A run has a scale of its own, that of its intact map and of what is left.
  const ofRun = (place, of) => limits([values(view, 0, state.layer, place), maps[of]], view, signed);
  const both = data.beside ? null : limits([maps.intact, maps.ablated], view, signed);
  canvases.forEach((canvas, place) => {
    const of = canvas.dataset.of;
    const change = !data.beside && of === "difference";
    const scale = change && !signed ? limits([maps.difference], view, true) : both || ofRun(place, of);
    const names = change || signed ? diverging() : data.colours.sequential;
    paint(canvas, maps[of], view.n, scale, names);
    const figure = canvas.parentElement;
    canvas.setAttribute("aria-label", of + ": " + view.panels[data.beside ? place : state.panel].label + " of L" + view.layers[state.layer]);
    figure.querySelector(".bar").style.background = "linear-gradient(to right, " + names.join(", ") + ")";
    figure.querySelector(".scale").innerHTML = "<span>" + show(scale[0]) + "</span><span>" + view.panels[state.panel].unit + "</span><span>" + show(scale[1]) + "</span>";
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

function drawNumbers(view) {
  const panel = view.panels[state.panel];
  const rows = data.measures.map((each, index) => {
    const cells = shown(view).map(([of, combination, p], i) => "<td data-measure='" + each.name + "' data-of='" + (data.beside ? i : of) + "'>" + interval(measure(view, combination, state.layer, p, index), each.name) + "</td>");
    const unit = each.name === "amplitude" ? panel.unit : each.unit;
    return "<tr><th scope='row'>" + each.label + (unit ? ", " + unit : "") + "</th>" + cells.join("") + "</tr>";
  });
  find("#numbers").innerHTML = rows.join("");
  const kept = ([, combination, p]) => keptWords(measure(view, combination, state.layer, p, data.measures.length - 1));
  const left = data.beside ? shown(view).map((run) => run[0] + ": " + kept(run)).join("; ") : kept(shown(view)[1]);
  const sequences = view.nSeqs && "; means over " + view.nSeqs[state.removed in view.whole ? 1 : 0].toLocaleString("en") + " sequences" + (state.removed in view.whole ? "" : ", the intact model over " + view.nSeqs[1].toLocaleString("en"));
  const where = "L" + view.layers[state.layer] + (data.beside ? "" : ", " + panel.label) + (sequences || "");
  find("#says").textContent = state.removed ? removedWords() + ", " + left + " (" + where + ")." : removedWords() + " (" + where + "): press a switch" + (circuit ? " or an operation on an arrow." : ".");
}

function drawReadout() {
  const view = views[state.view];
  if (!state.cell) {
    find("#readout").textContent = "Queries go down, keys to the right. Point at a cell, or focus a map and use the arrow keys.";
    return;
  }
  const [query, key] = state.cell;
  const about = view.block > 1 ? "\u2248 " : "";
  const place = (index) => about + Math.round(index * view.block + (view.block - 1) / 2);
  const parts = Object.keys(maps).map((of) => of + " " + show(maps[of][query * view.n + key]));
  find("#readout").textContent = "query " + place(query) + ", key " + place(key) + ": " + parts.join(", ") + " " + view.panels[state.panel].unit;
}

// The circuit: panels and arrows at the places that the layout names

const box = find("#circuit");
const playerOf = {};
data.players.forEach((player, index) => player.components.forEach((each) => { playerOf[each] = index; }));
let laidOut = "";

function layOut() {
  const width = box.clientWidth;
  const flow = data.flows[width < NARROW ? "narrow" : "wide"];
  const key = width + "," + state.layer;
  if (key === laidOut) return;
  laidOut = key;
  const focused = document.activeElement && document.activeElement.dataset.key;
  box.style.height = flow.height + "px";
  const point = ([x, y]) => [x * width, y];
  box.replaceChildren(arrows(flow, point), ...words(flow, point), ...stages(flow, width));
  if (focused) { const again = box.querySelector('[data-key="' + focused + '"]'); if (again) again.focus(); }
}

function arrows(flow, point) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const parts = [];
  for (const name in flow.paths) {
    const points = flow.paths[name].map(point);
    const [[x0, y0], [x1, y1]] = points.slice(-2);
    const [across, down] = [Math.sign(x1 - x0), Math.sign(y1 - y0)];
    const corner = (side) => (x1 - 8 * across + 4 * side * down) + "," + (y1 - 8 * down + 4 * side * across);
    const line = "M" + points.map((each) => each.join(",")).join(" L");
    const players = [...new Set(data.operations[name].map(([, each]) => playerOf[each]).filter((each) => each !== undefined))];
    const hit = players.length === 1 ? '<path class="hit" data-toggle="' + players[0] + '" d="' + line + '"/>' : "";
    const [[mx, my], [nx, ny]] = points;
    parts.push('<g data-arrow="' + name + '"><path d="' + line + '"/><polygon points="' + x1 + "," + y1 + " " + corner(1) + " " + corner(-1) + '"/>' + hit + '<text class="cross" x="' + (mx + nx) / 2 + '" y="' + (my + ny) / 2 + '">\u2715</text></g>');
  }
  for (const [x, y] of flow.joins.map(point)) parts.push('<text x="' + x + '" y="' + y + '">\u2295</text>');
  const [x, y] = point(flow.x);
  svg.innerHTML = parts.join("") + '<text x="' + x + '" y="' + y + '"><tspan font-weight="bold" font-size="16">X</tspan></text>';
  svg.addEventListener("click", (event) => { if (event.target.dataset.toggle) toggle(Number(event.target.dataset.toggle)); });
  return svg;
}

function words(flow, point) {
  const shift = { left: "0", center: "-50%", right: "-100%", top: "0", middle: "-50%", bottom: "-100%" };
  return Object.keys(flow.labels).filter((name) => data.operations[name].length && !gone(name)).map((name) => {
    const [at, across, down] = flow.labels[name];
    const [x, y] = point(at);
    const holder = text("div", "", { class: flow.separator === " " ? "words across" : "words" });
    Object.assign(holder.style, { left: x + "px", top: y + "px", transform: "translate(" + shift[across] + ", " + shift[down] + ")" });
    for (const [label, component] of data.operations[name]) holder.append(operation(name, label, playerOf[component]));
    return holder;
  });
}

function operation(name, label, player) {
  if (player === undefined) return text("span", label);
  const button = text("button", label, { type: "button", "data-toggle": player, "data-key": name + player });
  button.setAttribute("aria-label", data.players[player].label + ", on the arrow to (" + name.slice(-1) + ")");
  button.addEventListener("click", () => toggle(player));
  return button;
}

function gone(arrow) {
  return Boolean(circuit.absent[state.layer][arrow.slice(-1)]);
}

function stages(flow, width) {
  return circuit.panels.map((panel, index) => {
    const [left, right] = flow.columns[panel.name];
    const size = Math.min((right - left) * width, flow.panel);
    const reason = circuit.absent[state.layer][panel.name];
    const holder = text(reason ? "div" : "button", "<b>" + panel.formula + "</b>" + (reason ? '<span class="absent">' + reason + "</span>" : "<canvas></canvas><small></small>"), { class: "stage", "data-stage": panel.name, "data-key": "stage" + panel.name });
    Object.assign(holder.style, { left: (left + right) / 2 * width - size / 2 + "px", top: flow.tops[panel.name] - 22 + "px", width: size + "px" });
    if (!reason) {
      holder.type = "button";
      holder.addEventListener("click", () => choose(views.indexOf(circuit), index));
    }
    return holder;
  });
}

function drawCircuit() {
  box.hidden = find("#changes").hidden = false;
  layOut();
  const change = find("#changes input").checked;
  circuit.panels.forEach((panel, index) => {
    if (!has(circuit, state.layer, index)) return;
    const holder = box.querySelector('[data-stage="' + panel.name + '"]');
    const [intact, ablated] = places(circuit).map((place) => values(circuit, place, state.layer, index));
    const shown = change ? difference(ablated, intact) : ablated;
    const scale = limits(change ? [shown] : [intact, ablated], circuit, change);
    paint(holder.querySelector("canvas"), shown, circuit.n, scale, change ? diverging() : data.colours.sequential);
    holder.setAttribute("aria-pressed", views[state.view] === circuit && state.panel === index);
    const [before, now] = places(circuit).map((place) => show(measure(circuit, place, state.layer, index, 1)[0]));
    holder.querySelector("small").innerHTML = "locality <span>" + now + "</span>" + (state.removed ? "<br>intact " + before : "");
  });
  for (const button of box.querySelectorAll("button[data-toggle]")) button.setAttribute("aria-pressed", !(state.removed >> button.dataset.toggle & 1));
  for (const arrow of box.querySelectorAll("[data-arrow]")) {
    const cut = data.operations[arrow.dataset.arrow].some(([, each]) => playerOf[each] !== undefined && state.removed >> playerOf[each] & 1) && !gone(arrow.dataset.arrow);
    arrow.setAttribute("class", (cut ? "gone " : "") + (gone(arrow.dataset.arrow) ? "faint" : ""));
    arrow.querySelector(".cross").style.display = cut ? "" : "none";
  }
}

find("#changes input").addEventListener("change", draw);
dark.addEventListener("change", draw);
new ResizeObserver(() => {
  if (circuit) drawCircuit();
  // In a frame of a page or notebook, the frame is as high as what it holds.
  try {
    if (window.frameElement) window.frameElement.style.height = document.querySelector("main").scrollHeight + 24 + "px";
  } catch { /* a page of another origin: its frame keeps the height that it has */ }
}).observe(document.querySelector("main"));
draw();
document.body.explorer = { data, state, views, values, measure, draw };
