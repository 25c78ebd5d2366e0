"""Draw the README's picture: python docs/make_twins_image.py OUT.html NOPE_RUN ROPE_RUN.

The runs are those of `python -m nope_probe.ablate --model nope-tiny` and `--model rope-tiny`.
"""

import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from nope_probe.analyses.pattern import row_centred
from nope_probe.runtime.folder import read_run

LAYER = 2


def main(out: str, *folders: str) -> None:
    runs = [read_run(Path(folder)) for folder in folders]
    titles = [
        f"{run.manifest['model']['name']}, L{LAYER}, {what}"
        for run in runs
        for what in ("intact", "without mask")
    ]
    figure = make_subplots(1, 4, subplot_titles=titles, horizontal_spacing=0.04)
    for index, run in enumerate(runs):
        intact = run.manifest["conditions"][0]
        pair = (intact, intact.removeprefix("mask+"))
        patterns = [pattern(run.arrays["maps"][f"score/{kept}"]) for kept in pair]
        limit = np.nanquantile(np.abs(patterns[0]), 0.99)
        for column, values in enumerate(patterns):
            bar = {"title": "nats", "x": 0.475 + 0.53 * index, "thickness": 10}
            colours = {"zmin": -limit, "zmax": limit, "colorscale": "RdBu_r", "colorbar": bar}
            trace = go.Heatmap(z=values, showscale=column == 1, **colours)
            figure.add_trace(trace, 1, 1 + 2 * index + column)
    figure.update_yaxes(autorange="reversed", constrain="domain", scaleanchor="x")
    figure.update_xaxes(title="key position", constrain="domain")
    figure.update_yaxes(title="query position", row=1, col=1)
    margin = {"t": 40, "b": 50, "l": 60, "r": 60}
    figure.update_layout(width=1200, height=330, margin=margin, template="plotly_white")
    figure.write_html(out, include_plotlyjs=True, config={"displayModeBar": False})


def pattern(score: np.ndarray) -> np.ndarray:
    return row_centred(torch.from_numpy(score[LAYER]), skip_keys=1).numpy()


if __name__ == "__main__":
    main(*sys.argv[1:])
