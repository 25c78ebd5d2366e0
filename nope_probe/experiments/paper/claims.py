"""The paper's claims about trained models, checked on the finished runs of a figure.

Figure 3 follows one block stage by stage, Figure 8 shows every layer of a NoPE model; the others
show language models (section 5.2). Signs are reported as measured: on the first keys the paper's
text, its Figure 5 and its simulation disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.runtime.folder import Run

StageMaps = Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
Maps = Literal["both", "score", "normalised"]
NEAR_ZERO = 0.1  # of the diagonal
LISTED = 6  # of more layers the extremes are named
# Which maps a figure shows.
MAPS: dict[str, Maps] = {
    "figure5": "both",
    **{f"figure{number}": "score" for number in (11, 12, 13)},
    **{f"figure{number}": "normalised" for number in (14, 15, 16)},
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper about a figure.

    Attributes:
        paper: the claim.
        reproduced: whether it holds in the run.
        evidence: the numbers of the run.
    """

    paper: str
    reproduced: bool
    evidence: str

    def __str__(self) -> str:
        verdict = "Reproduced" if self.reproduced else "Not reproduced"
        return f"the paper: {self.paper}. {verdict}: {self.evidence}."


def trained_claims(figure: str, run: Run) -> Iterator[Claim]:
    """Check the paper's claims about a figure of trained models on a finished run of one model."""
    if figure == "figure3":
        return figure3(run)
    if figure == "figure8":
        return figure8(run)
    return score_claims(run, MAPS[figure])


def figure3(run: Run) -> Iterator[Claim]:
    """Check the claims of section 4.2 about the stages (a) to (i) on a run of one block.

    Ratios leave out the first position, which the paper calls an attention sink.
    """
    yield from _gram_claims(run.maps)
    yield from _trend_claims(run.tables["stages"])


def _gram_claims(maps: StageMaps) -> Iterator[Claim]:
    ratio = off_diagonal_ratio(maps["gram/a"])
    yield Claim(
        paper="(a) inner products are close to zero off the diagonal",
        reproduced=abs(ratio) < NEAR_ZERO,
        evidence=f"their mean is {ratio:.2f} of the diagonal's",
    )
    falls = float(np.mean(np.diff(np.diagonal(maps["gram/c"])) < 0))
    yield Claim(
        paper="(c) the diagonal falls with position",
        reproduced=falls > 0.95,
        evidence=f"it does in {falls:.0%} of the steps",
    )


def _trend_claims(stages: pd.DataFrame) -> Iterator[Claim]:
    rows = {row["stage"]: interval_of(row, "locality") for _, row in stages.iterrows()}
    text = {stage: interval_text(row, "+.2f") for stage, row in rows.items()}
    low = {stage: row[1] for stage, row in rows.items()}
    yield _increases("(f) after the norm, nearer keys have more", low["f"], text["f"])
    yield Claim(
        paper="(g) the FFN and the residual invert the pattern",
        reproduced=low["f"] > 0 and rows["g"][2] < 0,
        evidence=f"rank correlation {text['f']} at (f), {text['g']} at (g)",
    )
    yield _increases("(h) after the next norm, again, nearer keys have more", low["h"], text["h"])
    yield _increases("(i) the next layer's scores increase towards the query", low["i"], text["i"])


def _increases(paper: str, low: float, text: str) -> Claim:
    return Claim(paper=paper, reproduced=low > 0, evidence=f"rank correlation {text}")


def off_diagonal_ratio(values: Float[np.ndarray, "query_pos key_pos"]) -> float:
    """Return the mean below the diagonal over the mean on it, without the first position.

    Example:
        >>> off_diagonal_ratio(np.array([[9.0, 9.0, 9.0], [9.0, 4.0, 9.0], [9.0, 1.0, 4.0]]))
        0.25
    """
    kept = values[1:, 1:]
    below = np.tril(np.ones(kept.shape, bool), -1)
    return float(kept[below].mean() / np.diagonal(kept).mean())


def score_claims(run: Run, maps: Maps) -> Iterator[Claim]:
    """Check the claims about raw scores, about diagonal-normalised ones, or about both.

    Args:
        run: a finished run of `scores`.
        maps: which maps the figure shows.
    """
    if maps != "normalised":
        yield _scale(run, "score", 10.0, "typical mean scores are within ±10 nats")
    if maps == "score":
        return
    yield _scale(run, "normalised", 1.0, "non-relative patterns are within ±1 nat")
    if len(run.tables["pattern"]) > 1:  # there is no further claim about a first layer alone
        yield from _non_relative(run.tables["pattern"])
        yield from _first_keys(run.tables["pattern"])


def figure8(run: Run) -> Iterator[Claim]:
    """Check that layers after the first have a positional pattern (section 4.2, appendix B)."""
    rows = run.tables["pattern"]
    later = rows.iloc[1:]
    if len(later):
        yield Claim(
            paper="without RoPE, layers after the first have a position-dependent pattern",
            reproduced=bool((later["amplitude_low"] > 0).all()),
            evidence=f"its RMS in nats is {_listed(later, 'amplitude')}",
        )


def _scale(run: Run, name: str, bound: float, paper: str) -> Claim:
    spans = np.array([_quantiles(each) for each in run.maps[name]])
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
