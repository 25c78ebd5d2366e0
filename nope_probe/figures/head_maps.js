const root = document.currentScript.parentElement;
const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
const { n, block, layers, n_heads: nHeads, amplitudes, noise } = data;

const cells = new Int8Array(buffer(data.cells));
const scales = new Float32Array(buffer(data.scales)); // nats per code
const limits = new Float32Array(buffer(data.limits));
const size = (n * (n + 1)) / 2;
const top = Math.max(...limits);

// Noise is drawn on the scale of the strongest head, so that it is as flat as it is.
const same = root.querySelector("input");
const limit = (map) => (same.checked || noise[map] ? top : limits[map]);
const name = (map) => "L" + layers[Math.floor(map / nHeads)] + "H" + (map % nHeads);
const nats = (value) => String(Number(value.toPrecision(2))).replace("-", "\u2212") + " nats";
const strength = (map) => (noise[map] ? "flat: within noise" : nats(amplitudes[map]));

function values(map) {
  const found = new Float64Array(n * n).fill(NaN);
  let next = map * size;
  for (let query = 0; query < n; query++) for (let key = 0; key <= query; key++) {
    const code = cells[next++];
    if (code !== -128) found[query * n + key] = code * scales[map];
  }
  return found;
}

const draw = (canvas, map) => paint(canvas, values(map), n, n, [-limit(map), limit(map)], diverging());

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text || "";
  return made;
}

const thumbs = [];
layers.forEach((layer, index) => {
  const row = element("div", "row");
  root.append(element("h3", "", "L" + layer), row);
  for (let head = 0; head < nHeads; head++) {
    const map = index * nHeads + head;
    const thumb = element("button", "thumb");
    Object.assign(thumb, { type: "button", tabIndex: map ? -1 : 0 });
    thumb.setAttribute("aria-expanded", "false");
    thumb.setAttribute("aria-label", name(map) + ", " + strength(map) + ": enlarge");
    thumb.append(document.createElement("canvas"), element("span", "", "H" + head), element("small", "", strength(map)));
    thumb.addEventListener("click", () => (open === map ? close() : enlarge(map)));
    thumb.addEventListener("keydown", (event) => move(event, map));
    thumbs.push(thumb);
    row.append(thumb);
  }
});

// Thumbnails are painted when they come near the window: a thousand at once would stall the page.
const paintAll = () => thumbs.forEach((thumb, map) => draw(thumb.firstChild, map));
if (thumbs.length <= 64) paintAll();
const watcher = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) draw(target.firstChild, thumbs.indexOf(target));
}, { rootMargin: "300px" });
thumbs.forEach((thumb) => watcher.observe(thumb));
addEventListener("beforeprint", paintAll);

let open = null;
const large = element("div", "large");
large.setAttribute("role", "region");
large.innerHTML = '<header><strong aria-live="polite"></strong><button type="button" data-step="-1" aria-label="previous head">\u2190</button>' +
  '<button type="button" data-step="1" aria-label="next head">\u2192</button><button type="button" data-step="0" aria-label="close">\u2715</button></header>' +
  '<div class="plot"><span class="yname">query position</span><div class="ticks y"></div><div class="map"><canvas tabindex="0" role="img"></canvas></div>' +
  '<div class="ticks x"></div><span class="xname">key position</span><div class="bar"><canvas></canvas><div class="ends"></div></div></div><p class="readout"></p>';
const [big, bar] = large.querySelectorAll("canvas");
for (const button of large.querySelectorAll("[data-step]")) button.addEventListener("click", () => {
  const step = Number(button.dataset.step);
  if (step) enlarge((open + step + thumbs.length) % thumbs.length);
  else close();
});
large.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });

function ticks() {
  const length = data.n_positions;
  const rough = length / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough));
  const at = Array.from({ length: Math.ceil(length / step) }, (_, i) => i * step);
  const span = (position, side) => '<span style="' + side + ":" + (100 * (position + 0.5)) / (n * block) + '%">' + position + "</span>";
  large.querySelector(".y").innerHTML = at.map((position) => span(position, "top")).join("");
  large.querySelector(".x").innerHTML = at.map((position) => span(position, "left")).join("");
  bar.width = 256;
  bar.height = 1;
  const image = bar.getContext("2d").createImageData(256, 1);
  colours(diverging()).forEach((colour, i) => image.data.set([...colour, 255], 4 * i));
  bar.getContext("2d").putImageData(image, 0, 0);
}

function enlarge(map) {
  if (open !== null) thumbs[open].setAttribute("aria-expanded", "false");
  open = map;
  thumbs[map].setAttribute("aria-expanded", "true");
  thumbs[map].parentElement.append(large);
  large.querySelector("strong").textContent = name(map) + ": " + strength(map) + (noise[map] ? "" : " " + data.measure);
  big.setAttribute("aria-label", name(map) + ", " + data.what);
  const end = nats(limit(map));
  large.querySelector(".ends").innerHTML = ["\u2212" + end, "0; 99% of cells are within", end].map((text) => "<span>" + text + "</span>").join("");
  large.querySelector(".readout").textContent = "Point at a cell, or use the arrow keys on the map.";
  ticks();
  draw(big, map);
  large.scrollIntoView({ block: "nearest" });
}

function close() {
  const thumb = thumbs[open];
  thumb.setAttribute("aria-expanded", "false");
  open = null;
  large.remove();
  focus(thumb);
}

function focus(thumb) {
  thumbs.forEach((each) => { each.tabIndex = each === thumb ? 0 : -1; });
  thumb.focus();
}

// Arrow keys go through the heads; down and up change the layer.
function move(event, map) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -nHeads, ArrowDown: nHeads };
  if (event.key === "Escape" && open !== null) close();
  if (!(event.key in steps)) return;
  event.preventDefault();
  const next = map + steps[event.key];
  if (next >= 0 && next < thumbs.length) focus(thumbs[next]);
}

// A click on a head of a figure opens its map.
addEventListener("head", ({ detail }) => {
  const map = thumbs.findIndex((_, index) => name(index) === detail);
  if (map >= 0) enlarge(map);
});

let cell = [n - 1, 0];
function read(query, key) {
  cell = [query, key];
  const at = (index) => (block > 1 ? "\u2248 " : "") + Math.min(data.n_positions - 1, Math.floor((index + 0.5) * block));
  const shown = values(open)[query * n + key];
  const text = Number.isNaN(shown) ? "no value" : nats(shown);
  large.querySelector(".readout").textContent = "query " + at(query) + ", key " + at(key) + ": " + text;
}

big.addEventListener("pointermove", ({ offsetX, offsetY }) => {
  const index = (offset) => Math.max(0, Math.min(n - 1, Math.floor((offset * n) / big.clientWidth)));
  read(index(offsetY), index(offsetX));
});
big.addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const [query, key] = cell.map((index, i) => Math.max(0, Math.min(n - 1, index + steps[event.key][i])));
  read(query, key);
});
function repaint() {
  paintAll();
  if (open !== null) enlarge(open);
}
same.addEventListener("change", repaint);
dark.addEventListener("change", repaint);
