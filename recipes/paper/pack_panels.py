"""Pack the paper's published panels, read off its figures, into this folder's data file.

    python recipes/paper/pack_panels.py panels.safetensors

A panel of 50 x 50 cells is kept as the number of each cell's colour in its colour bar, from 0 to
255, which is exact; one of Figure 5 as means of 3 x 3 pixels, since its 312 pixels are blurred.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

TARGET = Path(__file__).with_name("panels.safetensors")
PROVENANCE = (
    "Kim et al., Behind RoPE: How Does Causal Mask Encode Positional Information?, arXiv "
    "2509.21042v1: colours of the published figures, turned back into values with each panel's "
    "own colour bar. Values outside a bar were clipped by the paper."
)
BLOCK = 3  # pixels
COLOURS = 256


def pack(source: Path, target: Path = TARGET) -> None:
    """Write the panels of `source` into this folder's data file."""
    arrays, about = {}, {}
    with safe_open(source, "numpy") as file:
        given = json.loads(file.metadata()["panels"])
        for key in sorted(file.keys()):
            values, panel = file.get_tensor(key).astype(float), given[key]
            arrays[key] = (
                means(values)
                if key.startswith("figure5")
                else codes(values, panel["low"], panel["high"])
            )
            about[key] = {name: panel[name] for name in ("low", "high", "kind")}
            about[key]["causal"] = bool(np.isnan(values[0, -1]))
    save_file(arrays, target, {"panels": json.dumps(about), "provenance": PROVENANCE})


def codes(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the number of each cell's colour; 0 where nothing is drawn."""
    found = np.round((values - low) / ((high - low) / COLOURS) - 0.5)
    return np.nan_to_num(found).clip(0, COLOURS - 1).astype(np.uint8)


def means(values: np.ndarray) -> np.ndarray:
    """Return the means of blocks of pixels, of those that hold a number."""
    blocks = values.reshape(len(values) // BLOCK, BLOCK, -1, BLOCK).swapaxes(1, 2)
    known = np.isfinite(blocks)
    sums, counts = np.where(known, blocks, 0).sum((2, 3)), known.sum((2, 3))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float16)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
