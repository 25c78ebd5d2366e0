// The colours of a map's cells: 256 steps between the stops that `data.colours` holds.
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

