"""Are sinks on the absolute first token, whatever it is, and on no other position?

A head's weight on a key is its mean attention over all queries that see the key. A key counts where
16 queries or more see it.
"""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go
import torch

from claims import Row, add_line, first_tokens, load_once, panels, run, share_above
from nope_probe import capture_attention, sequences

MODELS = ("smollm2-135m",)
N_SEQS, N_FOLDS, N_POS, SINK, LEAST = 24, 12, 64, 0.3, 16


def rows_of(name: str, n_pos: int = N_POS) -> Iterator[Row]:
    """Yield the share of heads above 0.3 on key 0, on any other key, and their difference."""
    loaded = load_once(name)
    inputs = {called: ("shipped", bos) for called, bos in first_tokens(loaded.tokenizer).items()}
    for called, (source, bos) in (inputs | {"random tokens": ("random", "never")}).items():
        options = {"n_seqs": N_SEQS, "seq_len": n_pos, "bos": bos}
        data = sequences(source, tokenizer=loaded.tokenizer, **options)
        weights = capture_attention(loaded, data.inputs, n_folds=N_FOLDS).weights.sum(-2)
        seen = torch.arange(n_pos, 0, -1)
        of_keys = (weights / seen)[..., seen >= LEAST].flatten(1, 2).double()
        shares = [share_above(of_key, SINK) for of_key in of_keys.unbind(-1)]
        first, other = shares[0], tuple(map(max, zip(*shares[1:], strict=True)))
        yield Row.of("sink_position", name, f"{called}: share on key 0", first)
        yield Row.of("sink_position", name, f"{called}: largest share on another key", other)
        ends = (first[0] - other[0], first[1] - other[2], first[2] - other[1])
        yield Row.of("sink_position", name, f"{called}: difference", ends, above=0)


def draw(rows: pd.DataFrame) -> go.Figure:
    """Draw the shares of heads with a sink on key 0 and on another key, a panel for each model."""
    names = rows["quantity"].str.split(": ", expand=True)
    rows = rows.assign(inputs=names[0], of=names[1])
    models = [*rows["model"].unique()]
    figure = panels(models, x="", y="share of heads above 0.3")
    for panel, model in enumerate(models):
        for of in ("share on key 0", "largest share on another key"):
            some = rows[(rows["model"] == model) & (rows["of"] == of)]
            add_line(figure, panel, of, some["inputs"], some)
    return figure.update_yaxes(range=[-0.02, 1]).update_traces(mode="markers", marker={"size": 10})


if __name__ == "__main__":
    run(rows_of, draw, MODELS)
