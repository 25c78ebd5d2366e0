"""The paper's claims about language models' scores (section 5.2), checked on a scores run.

Signs are reported as measured: on the first keys the paper's text, its Figure 5 and its simulation
disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.paper.claim import Claim
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.runtime.folder import Run, read_run

Maps = Literal["both", "score", "normalised"]
# Which maps a figure shows.
MAPS: dict[str, Maps] = {
    "figure5": "both",
    **{f"figure{number}": "score" for number in (11, 12, 13)},
    **{f"figure{number}": "normalised" for number in (14, 15, 16)},
}
LISTED = 6  # of more layers the extremes are named


def score_claims(folder: Path, maps: Maps) -> Iterator[Claim]:
    """Check the claims about raw scores, about diagonal-normalised ones, or about both.

    Args:
        folder: a finished run of `scores`.
        maps: which maps the figure shows.
    """
    run = read_run(folder)
    if maps != "normalised":
        yield _scale(run, "score", 10.0, "typical mean scores are within ±10 nats")
    if maps == "score":
        return
    yield _scale(run, "normalised", 1.0, "non-relative patterns are within ±1 nat")
    if len(run.tables["pattern"]) > 1:  # there is no further claim about a first layer alone
        yield from _non_relative(run.tables["pattern"])
        yield from _first_keys(run.tables["pattern"])


def figure8(folder: Path) -> Iterator[Claim]:
    """Check that layers after the first have a positional pattern (section 4.2, appendix B)."""
    rows = read_run(folder).tables["pattern"]
    later = rows.iloc[1:]
    if len(later):
        yield Claim(
            paper="without RoPE, layers after the first have a position-dependent pattern",
            reproduced=bool((later["amplitude_low"] > 0).all()),
            evidence=f"its RMS in nats is {_listed(later, 'amplitude')}",
        )


def _scale(run: Run, name: str, bound: float, paper: str) -> Claim:
    spans = np.array([_quantiles(each) for each in run.arrays["maps"][name]])
    low, high = int(spans[:, 0].argmin()), int(spans[:, 1].argmax())
    return Claim(
        paper=paper,
        reproduced=bool((np.abs(spans) <= bound).all()),
        evidence=f"98% of a layer's cells are between {spans[low, 0]:.2g} (L{low}) and "
        f"{spans[high, 1]:.2g} nats (L{high}), with a standard error of "
        f"{np.nanmedian(run.arrays['maps']['se']):.2g} nats",
    )


def _quantiles(values: Float[np.ndarray, "query_pos key_pos"]) -> Float[np.ndarray, "2"]:
    return np.nanquantile(values, [0.01, 0.99])


def _non_relative(rows: pd.DataFrame) -> Iterator[Claim]:
    first, later = rows.iloc[:1], rows.iloc[1:]
    yield Claim(
        paper="from layer 2 (L1) on, the pattern has a part that is no function of distance",
        reproduced=bool((later["non_relative_low"] > 0).all()),
        evidence=f"its RMS in nats is {_listed(later, 'non_relative')}",
    )
    smallest = later["non_relative_low"].min()
    yield Claim(
        paper="layer 1 (L0) has none (here: less than every later layer)",
        reproduced=bool(first["non_relative_high"].item() < smallest),
        evidence=f"its RMS in nats is {_listed(first, 'non_relative')}",
    )


def _first_keys(rows: pd.DataFrame) -> Iterator[Claim]:
    later = rows.iloc[1:]
    contrast = f"the first keys differ from the rest by {_listed(later, 'edge_contrast')} nats"
    yield Claim(
        paper="less the diagonals' means, the first keys are emphasised (positive in Figure 5)",
        reproduced=bool((later["edge_contrast_low"] > 0).all()),
        evidence=contrast,
    )
    yield Claim(
        paper="this is as in the simulation (negative in Figure 4)",
        reproduced=bool((later["edge_contrast_high"] < 0).all()),
        evidence=f"{contrast}, of which softmax acts on {_listed(later, 'edge_contrast_visible')}",
    )


def _listed(rows: pd.DataFrame, name: str) -> str:
    """Return each layer's value with its interval, or of many layers the smallest and largest."""
    many = len(rows) > LISTED
    if many:
        rows = rows.loc[[rows[name].idxmin(), rows[name].idxmax()]]
    values = [
        f"{interval_text(interval_of(row, name), '+.2g')} (L{row['layer']:.0f})"
        for _, row in rows.iterrows()
    ]
    return (" to " if many else ", ").join(values)
