// What draws maps: bytes from base64, and colours, 256 steps between the stops of `data.colours`.
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

function paint(canvas, map, width, height, [low, high], names) {
  const table = colours(names);
  if (canvas.width !== width) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < map.length; i++) {
    if (Number.isNaN(map[i])) continue; // the background shows
    const step = Math.round((255 * (map[i] - low)) / (high - low));
    const [r, g, b] = table[Math.min(255, Math.max(0, step))];
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

