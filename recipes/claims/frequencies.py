"""Do heads that attend by position use RoPE's fast pairs, and heads of content slow pairs?

A head's positional share is that of its attention to the keys after the first. Its use of the fast
half of its pairs is the share of its pattern among these keys that they make: <fast, all> / <all,
all>, each product between the means of one half of the texts and of the other.
"""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.stats import spearmanr

from claims import Row, jackknife, load_once, panels, run
from nope_probe import (
    LoadedModel,
    capture_attention,
    capture_scores,
    row_centred,
    sequences,
    split_attention,
)

MODELS = ("smollm2-135m",)
STRONG = 0.5  # a rank correlation from which a correspondence counts as strong


def uses(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return [head, 2] of the heads where both are defined: positional share, use of fast pairs."""
    cfg = loaded.model.cfg
    n_pairs = (getattr(cfg, "rotary_dim", None) or cfg.d_head) // 2
    maps = capture_attention(loaded, tokens, n_folds=8)
    fast = capture_scores(loaded, tokens, n_folds=8, per_head=True, band=f"rope[0:{n_pairs // 2}]")
    one, other, fast_one, fast_other = (
        row_centred(folds[half::2].double().mean(0), skip_keys=1).nan_to_num().flatten(2)
        for folds in (maps.scores, fast.per_head)
        for half in (0, 1)
    )
    of_fast = ((fast_one * other) + (fast_other * one)).sum(-1) / (2 * one * other).sum(-1)
    shares = [head.others_share.value for head in split_attention(maps).values()]
    both = torch.stack([torch.tensor(shares), of_fast.flatten()], 1)
    return both[both.isfinite().all(1)]


def rows_of(name: str, n_seqs: int = 96, n_pos: int = 64) -> Iterator[Row]:
    """Yield the rank correlation over heads, for each claim, and both values of every head."""
    loaded = load_once(name)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=n_seqs, seq_len=n_pos)
    heads = uses(loaded, data.inputs)
    ends = jackknife(heads, lambda some: torch.tensor(spearmanr(*some.T.numpy()).statistic))
    yield Row.of("fast_is_position", name, f"rank correlation, {len(heads)} heads", ends, above=0)
    yield Row.of("strong", name, f"rank correlation, {len(heads)} heads", ends, above=STRONG)
    for head, (share, use) in enumerate(heads.tolist()):
        yield Row.of("strong", name, f"head {head}: positional share", [share] * 3)
        yield Row.of("strong", name, f"head {head}: use of fast pairs", [use] * 3)


def draw(rows: pd.DataFrame) -> go.Figure:
    """Draw the use of fast pairs over the positional share, a dot for each head."""
    shares, uses = (rows[rows["quantity"].str.endswith(of)]["value"] for of in ("share", "pairs"))
    dots = go.Scatter(x=shares, y=uses, mode="markers", showlegend=False)
    titles = {"x": "positional share of the other keys", "y": "use of the fast half of pairs"}
    return panels([rows["model"].iloc[0]], **titles).add_trace(dots)


if __name__ == "__main__":
    run(rows_of, draw, MODELS)
