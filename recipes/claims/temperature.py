"""Does a model go beyond its length if its scores are multiplied, without other change?

The loss is that of the last quarter of a text that is longer than the model's context, in nats.
"""

from collections.abc import Iterator
from functools import partial

import pandas as pd
import plotly.graph_objects as go
import torch

from claims import Row, add_line, jackknife, load_once, panels, run
from nope_probe import LoadedModel, capture_losses, sequences

MODELS = ("nope-tiny", "rope-tiny")
FACTORS = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
N_SEQS, N_POS = 16, 512


def losses(loaded: LoadedModel, tokens: torch.Tensor, factor: float) -> torch.Tensor:
    """Return [seq]: the mean loss of the last quarter, with scores times a factor."""
    layers = range(loaded.model.cfg.n_layers)
    hooks = [(f"blocks.{n}.attn.hook_attn_scores", partial(times, factor)) for n in layers]
    with loaded.model.hooks(hooks):
        return capture_losses(loaded, tokens)[:, -(tokens.shape[1] // 4) :].mean(1)


def times(factor: float, scores: torch.Tensor, hook: object) -> torch.Tensor:
    """Return scores times a factor."""
    return factor * scores


def gain(curves: torch.Tensor) -> torch.Tensor:
    """Return how far the best factor above 1 lowers the mean loss of [seq, factor], nats."""
    mean = curves.mean(0)
    return mean[FACTORS.index(1.0)] - mean[FACTORS.index(1.0) + 1 :].min()


def rows_of(name: str, n_pos: int = N_POS) -> Iterator[Row]:
    """Yield the loss at each factor, and what the best factor above 1 gains."""
    loaded, is_beyond = load_once(name), n_pos > load_once(name).info.n_ctx
    if is_beyond:
        loaded = load_once(name, n_ctx=n_pos)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=N_SEQS, seq_len=n_pos)
    curves = torch.stack([losses(loaded, data.inputs, factor) for factor in FACTORS], 1)
    has_rope = any(loaded.info.rope_layers)
    claim = "not_with_rope" if has_rope else "nope_scales"
    for factor, of_factor in zip(FACTORS, curves.T, strict=True):
        yield Row.of(claim, name, f"{n_pos} tokens: scores times {factor}", jackknife(of_factor))
    bound = {"below" if has_rope else "above": 0.0} if is_beyond else {}
    yield Row.of(claim, name, f"{n_pos} tokens: gain", jackknife(curves, gain), **bound)


def draw(rows: pd.DataFrame) -> go.Figure:
    """Draw the loss over the factor, a line for each model."""
    rows = rows[rows["quantity"].str.contains("times")]
    figure = panels([""], x="factor of the scores", y="loss of the last quarter, nats")
    for model, of_model in rows.groupby("model", sort=False):
        factors = of_model["quantity"].str.split("times ").str[1].astype(float)
        add_line(figure, 0, str(model), factors, of_model)
    return figure


if __name__ == "__main__":
    run(rows_of, draw, MODELS)
