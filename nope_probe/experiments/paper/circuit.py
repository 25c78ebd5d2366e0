"""The paper's claims about its Figure 3, stage by stage, checked on a circuit run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.experiments.paper.claim import Claim
from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.runtime.folder import read_run

Maps = Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
NEAR_ZERO = 0.1  # of the diagonal


def figure3(folder: Path) -> Iterator[Claim]:
    """Check the claims of section 4.2 about the stages (a) to (i) on a finished run of one block.

    Ratios leave out the first position, which the paper calls an attention sink.
    """
    run = read_run(folder)
    yield from _gram_claims(run.arrays["maps"])
    yield from _trend_claims(run.tables["stages"])


def _gram_claims(maps: Maps) -> Iterator[Claim]:
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
