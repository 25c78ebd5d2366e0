const root = document.currentScript.parentElement;
const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
const { n, heads, causal, looks, compared } = data; // compared: with other texts
const tokens = [...root.querySelectorAll(".text span")];
const text = root.querySelector(".text");
const readout = root.querySelector(".readout");
const chooser = root.querySelector(".chooser");

const MODES = {
  attention: "What the head looks at in this text.",
  position: "What it looks at from there in other texts, on average: position.",
  content: "Red: more than in other texts. Blue: less.",
  why: "Click a key for the terms of its score" + (looks.length > 1 ? ", and once more for a step back." : "."),
};
const STEPS = 255; // of a weight
const BAR = 12; // px of the largest relative entropy
const LEAST = 0.01; // nats: smaller ones are drawn on this scale
let [head, query] = data.first;
if (!compared) {
  delete MODES.position;
  delete MODES.content;
}
let mode = looks.length ? "why" : "attention";
let key = looks.length ? looks[0].key : 0; // whose terms are shown
let maps = null; // weights in this text, and mean weights, in steps: all queries of a key together
let content = null; // nats a query

const percent = (weight) => (weight > 0 && weight < 0.01 ? "<1" : Math.round(100 * weight)) + "%";
const share = (value) => (value === null ? "" : Math.round(100 * value) + "%");
// Isolated: a token in another direction leaves the sentence around it in order.
const token = (place) => "\u201c\u2068" + (tokens[place].dataset.mark || tokens[place].textContent) + "\u2069\u201d";
const at = (map, key) => map[key * n + query] / STEPS;
const nats = (value) => (value <= -0.005 ? "\u2212" : "+") + Math.abs(value).toFixed(2);
const lookOf = (name, query) => looks.find((look) => look.name === name && look.query === query);
const asked = () => lookOf(heads[head].name, query);
const explains = () => mode === "why" && asked(); // then tokens are keys to choose, else queries

function element(tag, className, content) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = content || "";
  return made;
}

// Colours: 256 steps between the stops of `data.colours`. Bytes: from base64.
const dark = matchMedia("(prefers-color-scheme: dark)");
const diverging = () => data.colours[dark.matches ? "divergingOnDark" : "diverging"];

const tables = new Map();
function colours(names) {
  if (!tables.has(names)) {
    const stops = names.map((name) => [1, 3, 5].map((i) => parseInt(name.slice(i, i + 2), 16)));
    tables.set(names, Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1);
      const from = Math.min(stops.length - 2, Math.floor(place));
      return stops[from].map((c, k) => Math.round(c + (place - from) * (stops[from + 1][k] - c)));
    }));
  }
  return tables.get(names);
}

function buffer(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes.buffer;
}

const switches = element("fieldset", "modes");
for (const name in MODES) {
  const label = element("label", "");
  const radio = element("input", "");
  Object.assign(radio, { type: "radio", name: "mode", value: name, defaultChecked: name === mode });
  label.append(radio, name);
  switches.append(label);
}
switches.addEventListener("change", ({ target }) => { mode = target.value; draw(); });

const panel = element("div", "terms");
root.querySelector(".reading").append(panel);

const list = element("div", "list");
list.setAttribute("role", "group");
list.setAttribute("aria-label", compared ? "heads, by position among their other keys" : "heads, from the most information to the least");
const buttons = heads.map((one, index) => {
  const button = element("button", "", one.name + " ");
  Object.assign(button, { type: "button", tabIndex: -1 });
  button.append(element("small", "", share(one.share)));
  const [r, g, b] = colours(data.colours.sequential)[Math.round(255 * Math.min(1, Math.max(0, one.share || 0)))];
  if (compared) button.style.borderLeftColor = `rgb(${r},${g},${b})`;
  button.addEventListener("click", () => choose(index));
  list.append(button);
  return button;
});
list.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  choose((head + step + heads.length) % heads.length);
  buttons[head].focus();
});
chooser.append(
  element("p", "about", compared ? "A head, with what is position among its keys after the first, the most first: its colour goes from dark (content) to yellow (position)." : "The heads with the most information come first."),
  list, switches,
);

async function choose(index) {
  buttons[head].setAttribute("aria-pressed", "false");
  buttons[head].tabIndex = -1;
  head = index;
  buttons[head].setAttribute("aria-pressed", "true");
  buttons[head].tabIndex = 0;
  const { offsetTop, offsetHeight } = buttons[head];
  const { scrollTop, clientHeight } = list;
  if (offsetTop < scrollTop || offsetTop + offsetHeight > scrollTop + clientHeight) list.scrollTop = offsetTop - clientHeight / 2;
  const packed = new Blob([buffer(heads[index].maps)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const codes = new Uint8Array(await new Response(packed).arrayBuffer());
  if (head !== index) return; // another head was chosen meanwhile
  maps = { attention: codes.subarray(0, n * n), position: codes.subarray(n * n) };
  content = new Float32Array(buffer(heads[index].content));
  draw();
}

function draw() {
  if (!maps) return;
  const table = colours(diverging());
  const largest = Math.max(LEAST, ...content);
  tokens.forEach((span, place) => {
    const weight = at(maps.attention, place), mean = compared ? at(maps.position, place) : 0;
    const said = compared ? `, position ${percent(mean)}` : "";
    const value = { attention: weight, why: weight, position: mean, content: weight - mean }[mode];
    const [r, g, b] = table[value < 0 ? 56 : 199];
    span.style.backgroundColor = "transparent";
    span.style.setProperty("--shade", `rgba(${r},${g},${b},${Math.sqrt(Math.abs(value)).toFixed(3)})`);
    span.style.setProperty("--height", (BAR * Math.max(0, content[place])) / largest + "px");
    span.classList.toggle("later", causal && place > query);
    span.classList.toggle("key", explains() && place === key);
    span.setAttribute("aria-pressed", place === query);
    span.setAttribute("aria-label", `${place} ${token(place)}: attention ${percent(weight)}${said}`);
    span.title = `${place}: attention ${percent(weight)}${said}; bar ${content[place].toFixed(2)} nats`;
    span.tabIndex = place === (explains() ? key : query) ? 0 : -1;
  });
  const keys = tokens.map((_, key) => key).sort((one, other) => at(maps.attention, other) - at(maps.attention, one));
  const top = keys.slice(0, 3).filter((key) => at(maps.attention, key) > 0);
  const parts = top.map((key) => `${percent(at(maps.attention, key))} to ${token(key)} (key ${key}${compared ? `; ${percent(at(maps.position, key))} in other texts` : ""})`);
  readout.textContent = `${heads[head].name}, query ${query} ${token(query)}: ${parts.join(", ")}. ` +
    `Relative entropy to ${compared ? "the mean over other texts" : "uniform weights"}: ${content[query].toFixed(2)} nats (highest bar: ${largest.toFixed(2)}). ${MODES[mode]}`;
  drawTerms();
}

function drawTerms() {
  root.classList.toggle("why", mode === "why");
  const { name } = heads[head], look = asked();
  if (mode !== "why") return;
  if (!look) {
    readout.textContent = `${name}, query ${query} ${token(query)}: darker tokens get more attention.`;
    panel.replaceChildren(element("p", "", `This page has no terms of ${name} from query ${query}. Run the command with --why ${name} --query ${query}.`));
    if (looks.length) panel.append(leading(looks[0], `${looks[0].name}, query ${looks[0].query}`));
    return;
  }
  const place = look.keys.indexOf(key);
  const cell = `${name}, query ${query} ${token(query)}, key ${key} ${token(key)}`;
  if (place < 0) {
    readout.textContent = `${cell}: ${causal && key > query ? "the query does not see this key" : "this page has no terms of this key"}.`;
    panel.replaceChildren();
    return;
  }
  const weight = percent(at(maps.attention, key));
  readout.textContent = `${cell}: ${weight} of the attention; score ${nats(look.scores[place])} nats, less the mean of the keys. ${MODES.why}`;
  const terms = look.terms.map(([label, colour, values]) => [label, colour, values[place]]);
  const rows = [...terms.filter(([, , value]) => value !== null), ["score", "currentColor", look.scores[place]]];
  const most = Math.max(LEAST, ...rows.map(([, , value]) => Math.abs(value)));
  const table = element("table", "");
  table.append(element("caption", "", `Terms of the score of key ${key} ${token(key)}, nats`));
  for (const [label, colour, value] of rows) {
    const row = table.insertRow();
    row.append(element("th", "", label));
    const bar = element("span", "");
    Object.assign(bar.style, { background: colour, width: `${(50 * Math.abs(value)) / most}%`, marginLeft: `${50 - (value < 0 ? (50 * -value) / most : 0)}%` });
    row.insertCell().append(bar);
    row.insertCell().textContent = nats(value);
    row.firstChild.scope = "row";
  }
  panel.replaceChildren(table);
  for (const move of backFrom(look)) panel.append(leading(move, `Why ${move.name} moved ${nats(move.nats)} nats from ${token(move.key)} to ${token(move.query)}; without it the score ${move.effect < 0 ? "rises" : "falls"} by ${Math.abs(move.effect).toFixed(1)}`));
  if (look !== looks[0]) panel.append(leading(looks[0], `Back to ${looks[0].name}, query ${looks[0].query}`));
}

// What heads moved to the key or to the query of a look that has terms of these heads' looks.
function backFrom(look) {
  return look.back.filter((move) => move.from === key && lookOf(move.name, move.query));
}

function go(look) {
  ({ query, key } = look);
  choose(heads.findIndex(({ name }) => name === look.name));
  tokens[key].focus();
}

function leading(look, label) {
  const button = element("button", "", label);
  button.type = "button";
  button.addEventListener("click", () => go(look));
  return button;
}

function ask(place) {
  const chosen = Math.max(0, Math.min(n - 1, place));
  const [move] = explains() && chosen === key ? backFrom(asked()) : [];
  if (move) return go(move);
  if (explains()) key = chosen;
  else query = chosen;
  draw();
}
tokens.forEach((span, place) => {
  span.setAttribute("role", "button");
  span.addEventListener("click", () => ask(place));
});
text.addEventListener("keydown", (event) => {
  const forward = getComputedStyle(text).direction === "rtl" ? -1 : 1;
  const step = { ArrowLeft: -forward, ArrowRight: forward, ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const shown = explains() ? key : query;
  ask(shown + step);
  tokens[Math.max(0, Math.min(n - 1, shown + step))].focus();
});
// A click on a head of a figure chooses it here too.
addEventListener("head", ({ detail }) => {
  const index = heads.findIndex(({ name }) => name === detail);
  if (index >= 0) choose(index);
});
dark.addEventListener("change", draw);
choose(head);
