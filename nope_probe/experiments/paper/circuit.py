"""What the paper says of its Figure 3, stage by stage, and whether a circuit run shows it too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from nope_probe.experiments.paper.claim import Claim
from nope_probe.runtime.folder import read_run

Maps = Mapping[str, Float[np.ndarray, "query_pos key_pos"]]
NEAR_ZERO = 0.1  # of the diagonal


def figure3(folder: Path) -> Iterator[Claim]:
    """Check what section 4.2 says of stages (a) to (i) on a finished run of one block.

    Ratios leave the first position out, which the paper calls an attention sink.
    """
    run = read_run(folder)
    maps = {letter: run.arrays["maps"][f"gram/{letter}"] for letter in "abcdefghi"}
    ratio = {letter: off_diagonal_ratio(values) for letter, values in maps.items()}
    yield Claim(
        paper="(a) inner products are close to zero off the diagonal",
        seen=abs(ratio["a"]) < NEAR_ZERO,
        number=f"their mean is {ratio['a']:.2f} of the diagonal's",
    )
    diagonal = np.diagonal(maps["c"])
    falls = float(np.mean(np.diff(diagonal) < 0))
    yield Claim(
        paper="(c) the diagonal falls with position",
        seen=falls > 0.95,
        number=f"it does in {falls:.0%} of the steps",
    )
    rows = run.tables["stages"].set_index("stage")
    span = {
        stage: f"{row['locality']:+.2f} [{row['locality_low']:+.2f}, {row['locality_high']:+.2f}]"
        for stage, row in rows.iterrows()
    }
    low, high = rows["locality_low"].to_dict(), rows["locality_high"].to_dict()
    yield _nearer(low, span, "f", "after the norm")
    yield Claim(
        paper="(g) the FFN and the residual turn the pattern over",
        seen=low["f"] > 0 and high["g"] < 0,
        number=f"rank correlation {span['f']} at (f), {span['g']} at (g)",
    )
    yield _nearer(low, span, "h", "after the next norm, again")
    yield Claim(
        paper="(i) the next layer's scores increase towards the query",
        seen=low["i"] > 0,
        number=f"rank correlation {span['i']}",
    )


def _nearer(low: Mapping[Any, float], span: Mapping[Any, str], letter: str, where: str) -> Claim:
    return Claim(
        paper=f"({letter}) {where}, nearer keys have more",
        seen=low[letter] > 0,
        number=f"rank correlation {span[letter]}",
    )


def off_diagonal_ratio(values: Float[np.ndarray, "query_pos key_pos"]) -> float:
    """Give the mean below the diagonal over the mean on it, the first position left out.

    Example:
        >>> off_diagonal_ratio(np.array([[9.0, 9.0, 9.0], [9.0, 4.0, 9.0], [9.0, 1.0, 4.0]]))
        0.25
    """
    kept = values[1:, 1:]
    below = np.tril(np.ones(kept.shape, bool), -1)
    return float(kept[below].mean() / np.diagonal(kept).mean())
