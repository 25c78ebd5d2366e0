"""Do heads of layers 0 and 1 look at the first token? A curve over lengths and thresholds.

A head's weight is its mean attention to key 0 over all queries of a text, query 0 included.
"""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from claims import Row, add_line, first_tokens, jackknife, load_once, panels, run, share_above
from nope_probe import capture_attention, sequences

MODELS = ("smollm2-135m", "rope-tiny", "nope-tiny")
LAYERS, LENGTHS, N_SEQS, N_FOLDS = [0, 1], (16, 32, 64, 128), 48, 12
SINK, THRESHOLDS = 0.3, (0.1, 0.2, 0.3, 0.4, 0.5)


def rows_of(name: str) -> Iterator[Row]:
    """Yield the largest weight at each length, and the share of heads above each threshold."""
    loaded = load_once(name)
    for called, bos in first_tokens(loaded.tokenizer).items():
        options = {"n_seqs": N_SEQS, "seq_len": max(LENGTHS), "bos": bos}
        data = sequences(tokenizer=loaded.tokenizer, **options)
        maps = capture_attention(loaded, data.inputs, layers=LAYERS, n_folds=N_FOLDS)
        for n in LENGTHS:
            weights = maps.weights[..., :n, 0].mean(-1).flatten(1).double()
            where = f"{called}: {n} tokens"
            ends = jackknife(weights, lambda folds: folds.mean(0).max())
            yield Row.of("early_sinks", name, f"{where}: largest weight", ends, below=SINK)
            for threshold in THRESHOLDS:
                ends = share_above(weights, threshold)
                yield Row.of("early_sinks", name, f"{where}: share above {threshold}", ends)


def draw(rows: pd.DataFrame) -> go.Figure:
    """Draw the largest weight of a head by length, a panel for each model."""
    names = rows["quantity"].str.split(": ", expand=True)
    rows = rows.assign(first=names[0], n=names[1].str.split().str[0].astype(int), of=names[2])
    rows, models = rows[rows["of"] == "largest weight"], [*rows["model"].unique()]
    figure = panels(models, x="tokens", y="largest weight on key 0", columns=3)
    for panel, model in enumerate(models):
        for first, of_first in rows[rows["model"] == model].groupby("first", sort=False):
            add_line(figure, panel, str(first), of_first["n"], of_first)
    figure.update_xaxes(type="log", tickvals=LENGTHS).update_yaxes(range=[0, 0.75])
    return figure.add_hline(SINK, line={"dash": "dot", "color": "black"})


if __name__ == "__main__":
    run(rows_of, draw, MODELS)
