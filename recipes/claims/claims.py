"""What the scripts of claims share: estimates with intervals, verdicts, and their command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import pandas as pd
import plotly.graph_objects as go
import torch
import tyro
from jaxtyping import Float
from plotly.subplots import make_subplots
from scipy.special import stdtrit
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nope_probe import Measures, load
from nope_probe.errors import UserError
from nope_probe.figures.maps import export

Verdict = Literal["holds", "fails", "undecided", ""]
Ends: TypeAlias = tuple[float, float, float]  # a value, and the ends of its interval
Measure: TypeAlias = "Callable[[str], Iterable[Row]]"
Draw: TypeAlias = Callable[[pd.DataFrame], go.Figure]
COLOURS = ("#1f77b4", "#c2410c", "#2b9a58", "#7d6be0", "#7c8591", "#b45309", "#0e7490")
load_once = cache(load)


@dataclass(frozen=True, kw_only=True)
class Row:
    """An estimate for a claim, with its 95% interval.

    Attributes:
        claim: the claim's name in papers.toml.
        model: the model's name.
        quantity: what was measured, and where.
        value, low, high: the estimate and the ends of its interval.
        verdict: on the claim's inequality; empty where the claim has none for this quantity.
    """

    claim: str
    model: str
    quantity: str
    value: float
    low: float
    high: float
    verdict: Verdict = ""

    @classmethod
    def of(
        cls,
        claim: str,
        model: str,
        quantity: str,
        ends: Iterable[float],
        *,
        above: float | None = None,
        below: float | None = None,
    ) -> Row:
        """Return the row of a value and the ends of its interval, judged if there is a bound."""
        value, low, high = ends
        verdict = judge(low, high, above=above, below=below)
        names = {"claim": claim, "model": model, "quantity": quantity}
        return cls(**names, value=value, low=low, high=high, verdict=verdict)


def judge(low: float, high: float, *, above: float | None, below: float | None) -> Verdict:
    """Return whether all of an interval is on the claimed side of a bound.

    Example:
        >>> judge(1.2, 1.4, above=1, below=None), judge(0.9, 1.4, above=1, below=None)
        ('holds', 'undecided')
    """
    if above is None and below is None:
        return ""
    if below is not None:
        return judge(-high, -low, above=-below, below=None)
    return "holds" if low > above else "fails" if high <= above else "undecided"


def mean(units: Float[Tensor, " unit"]) -> Tensor:
    """Return the mean over units."""
    return units.mean()


def jackknife(
    units: Float[Tensor, "unit *shape"], statistic: Callable[[Tensor], Tensor] = mean
) -> Ends:
    """Return a statistic of independent units with the ends of its 95% jackknife interval.

    Args:
        units: sequences, or heads.
        statistic: takes some of the units.

    Example:
        >>> jackknife(torch.tensor([1.0, 2.0, 3.0]))[0]
        2.0
    """
    n = len(units)
    every = torch.arange(n)
    without = torch.stack([statistic(units[every != unit]) for unit in range(n)]).double()
    error = ((n - 1) / n * (without - without.mean()).square().sum()).sqrt()
    value, half = float(statistic(units)), float(stdtrit(n - 1, 0.975) * error)
    return value, value - half, value + half


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the ways to begin a text, and what `sequences` calls them: any token, special ones."""
    special = [token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)]
    return {"any token first": "never"} | {f"{token} first": token for token in special}


def typical(measures: Sequence[Measures], name: str) -> Ends:
    """Return the layer with the median of a measure, of the upper two if there are two."""
    intervals = sorted((getattr(layer, name) for layer in measures), key=lambda each: each.value)
    middle = intervals[len(intervals) // 2]
    return middle.value, middle.low, middle.high


def share_above(weights: Float[Tensor, "fold head"], threshold: float) -> Ends:
    """Return the share of heads with a mean weight above a threshold.

    The ends of the interval count the heads of which the interval's lower or upper end is above.
    """
    n = len(weights)
    half = float(stdtrit(n - 1, 0.975)) * weights.std(0) / n**0.5
    value, low, high = (weights.mean(0) + sign * half > threshold for sign in (0, -1, 1))
    return tuple(float(above.double().mean()) for above in (value, low, high))


def table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a table with the columns of docs/claims.csv."""
    return pd.DataFrame([asdict(row) for row in rows])


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim from those on its inequalities: `depends` if some fail.

    Example:
        >>> overall(["holds", "", "holds"]), overall(["holds", "fails"])
        ('holds', 'depends')
    """
    given = {verdict for verdict in verdicts if verdict}
    if {"holds", "fails"} <= given:
        return "depends"
    return given.pop() if len(given) == 1 else "undecided"


def panels(titles: Sequence[str], *, x: str, y: str, columns: int = 2) -> go.Figure:
    """Return an empty figure with a panel for each title."""
    rows = -(-len(titles) // columns)
    figure = make_subplots(rows, min(columns, len(titles)), subplot_titles=titles)
    figure.update_xaxes(title=x).update_yaxes(title=y)
    return figure.update_layout(
        template="plotly_white",
        height=340 * rows + 80,
        margin={"l": 70, "r": 20, "t": 40, "b": 60},
        font={"size": 15},
        colorway=COLOURS,
    )


def add_line(
    figure: go.Figure, panel: int, name: str, x: Sequence[object], rows: pd.DataFrame
) -> None:
    """Add estimates with their intervals to a panel as a line that has one colour in all panels."""
    names = list(dict.fromkeys([*(trace.name for trace in figure.data), name]))
    ink, columns = COLOURS[names.index(name) % len(COLOURS)], len(figure._grid_ref[0])
    line = go.Scatter(
        x=list(x),
        y=rows["value"],
        error_y={
            "array": rows["high"] - rows["value"],
            "arrayminus": rows["value"] - rows["low"],
            "thickness": 1,
        },
        name=name,
        legendgroup=name,
        showlegend=name not in [trace.name for trace in figure.data],
        line={"color": ink},
    )
    figure.add_trace(line, row=panel // columns + 1, col=panel % columns + 1)


def run(measure: Measure, draw: Draw, models: tuple[str, ...]) -> None:
    """Measure a claim on the models of the command line, print its rows, and draw it if asked."""

    def main(model: tuple[str, ...] = models, image: Path | None = None) -> None:
        rows = table([row for name in model for row in measure(name)])
        print(rows.to_string(index=False, float_format="{:.3g}".format))
        for claim, of_claim in rows.groupby("claim", sort=False):
            print(f"{claim}: {overall(list(of_claim['verdict']))}")
        if image is not None:
            export(draw(rows), image)

    try:
        tyro.cli(main, description=sys.modules["__main__"].__doc__)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
