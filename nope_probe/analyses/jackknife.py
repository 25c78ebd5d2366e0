"""95% jackknife intervals of estimates from folds of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from nope_probe.analyses.differences import errors_of, freedom_of, rms_differences
from nope_probe.errors import UserError, as_tuple
from nope_probe.maps import MIN_FOLDS
from nope_probe.maps.estimates import Estimates, leave_one_out

Place = TypeVar("Place", int, tuple[int, int])  # a layer, or a layer and a head
Of = TypeVar("Of", bound="HasIntervals")
MOST_ROWS = 40  # that are shown of a table


@dataclass(frozen=True, kw_only=True, repr=False)
class Interval:
    """An estimate with its 95% interval; all NaN where the estimate is undefined.

    Attributes:
        value: the estimate, in its unit.
        low, high: the ends of its interval.
        replicates: the estimate on all folds, then without each; None where nothing is known of
            them, and of a difference of two RMS, whose jackknife is too narrow near 0.
    """

    value: float
    low: float
    high: float
    replicates: Estimates | None = field(default=None, compare=False)

    @property
    def ends(self) -> tuple[float, float, float]:
        """The estimate, and the lower and the upper end of its interval."""
        return self.value, self.low, self.high

    def columns(self, name: str) -> dict[str, float]:
        """Return the estimate and the ends of its interval by their columns in tables."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __repr__(self) -> str:
        """Return the value and the ends of its interval, to three digits."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


UNDEFINED = Interval(value=float("nan"), low=float("nan"), high=float("nan"))


class HasIntervals(Protocol):
    """The intervals of a layer or head: by name, in every row that a table has of it."""

    def rows(self) -> Iterable[tuple[dict[str, str], Mapping[str, Interval]]]:
        """Yield what names a row, beyond its layer and head, and the row's intervals."""


class ByLayer(dict[Place, Of]):
    """Values of layers, as `values[3]`, or of heads, as `values[3, 4]`, by number.

    A notebook shows them as their table, with units.
    """

    def __missing__(self, place: object) -> NoReturn:
        first, *_, last = [*self, *self]
        raise UserError(f"no layer or head {place}; there are {first} to {last}")

    def _rows(self) -> Iterator[tuple[dict[str, object], Mapping[str, Interval]]]:
        for place, of_place in self.items():
            numbers = dict(zip(("layer", "head"), as_tuple(place), strict=False))
            for names, values in of_place.rows():
                yield numbers | names, values

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer or head, and condition, with the columns of the CSV files."""
        rows = []
        for row, values in self._rows():
            for name, interval in values.items():
                row |= interval.columns(name)
            rows.append(row)
        return pd.DataFrame(rows)

    def _shown(self) -> pd.DataFrame:
        words = import_module("nope_probe.figures.words")
        known = words.MEASURES | words.INFORMATION  # the values of `attribute` are nats
        return pd.DataFrame(
            names
            | {f"{x}, {known[x].unit if x in known else 'nats'}": i for x, i in values.items()}
            for names, values in self._rows()
        )

    def __repr__(self) -> str:
        return self._shown().to_string(index=False, max_rows=MOST_ROWS)

    def _repr_html_(self) -> str:
        return self._shown().to_html(index=False, border=0, max_rows=MOST_ROWS)


def jackknife(estimates: Estimates) -> Interval:
    """Return an estimate with its 95% jackknife interval.

    The variance is that of the delete-m jackknife for folds of unequal sizes (Busing, Meijer and
    van der Leeden 1999), the usual jackknife for equal folds. The half width is its root times the
    quantile .975 of t with 1 / (sum of squared weights) - 1 degrees of freedom, F - 1 for equal
    folds. A large fold lowers this number, because most of the variance then comes from few folds.

    Raises:
        UserError: for fewer than 4 folds.
    """
    n_folds = len(estimates.weights)
    if n_folds < MIN_FOLDS:
        raise UserError(f"expected at least {MIN_FOLDS} folds, got {n_folds}")
    error, value = float(errors_of(*_as_row(estimates))[0]), float(estimates.values[0])
    half = t_quantile(estimates.weights) * error
    return Interval(value=value, low=value - half, high=value + half, replicates=estimates)


def _as_row(estimates: Estimates) -> tuple[Float[np.ndarray, "1 _"], Float[np.ndarray, "1 fold"]]:
    """Return the values and the weights of estimates as a row of arrays."""
    both = (estimates.values, estimates.weights)
    values, weights = (array.double().cpu().numpy()[None] for array in both)
    return values, weights


def t_quantile(weights: Float[Tensor, " fold"]) -> float:
    """Return how many standard errors half a 95% interval from folds of these weights has."""
    return float(stdtrit(freedom_of(weights[None].cpu().numpy()), 0.975)[0])


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Means over all sequences, cell by cell, with their 95% intervals; NaN for a single fold.

    Attributes:
        value: the means.
        low, high: the ends of their intervals.
        replicates: the means, then those without each fold.
        weights: the share of all sequences that each fold holds.
    """

    value: Float[Tensor, "*map"]
    low: Float[Tensor, "*map"]
    high: Float[Tensor, "*map"]
    replicates: Float[Tensor, "one_plus_folds *map"]
    weights: Float[Tensor, " fold"]


def mean_intervals(folds: Float[Tensor, "fold *map"], weights: Float[Tensor, " fold"]) -> Intervals:
    """Return the mean over all sequences with its 95% jackknife interval, cell by cell.

    Args:
        folds: fold means.
        weights: the share of all sequences that each fold holds.
    """
    folds = folds.double()
    value = torch.einsum("f,f...->...", weights, folds)
    # For a mean over sequences, the jackknife's standard error equals that of the fold means.
    half = t_quantile(weights) * standard_error(folds, weights)
    return Intervals(
        value=value,
        low=value - half,
        high=value + half,
        replicates=leave_one_out(folds, weights),
        weights=weights,
    )


def standard_error(
    folds: Float[Tensor, "fold *map"], weights: Float[Tensor, " fold"]
) -> Float[Tensor, "*map"]:
    """Return the standard error, cell by cell, of the mean over all sequences.

    Args:
        folds: fold means.
        weights: the share of all sequences that each fold holds.
    """
    weights = weights.to(folds.dtype)
    mean = torch.einsum("f,f...->...", weights, folds)
    spread = torch.einsum("f,f...->...", weights / (1 - weights), (folds - mean).square())
    return (spread / len(folds)).sqrt()


def signed_root(x: float) -> float:
    """Return sign(x) sqrt(|x|): the RMS of an unbiased square, which noise can make negative."""
    return abs(x) ** 0.5 if x >= 0 else -(abs(x) ** 0.5)


def squared(roots: Estimates) -> Estimates:
    """Return the mean squares of RMS, the inverse of `signed_root`."""
    return roots.with_values(roots.values * roots.values.abs())


def rms(squares: Estimates) -> Interval:
    """Return the RMS with its interval, from estimates of the mean square."""
    square, values = jackknife(squares), squares.values
    return Interval(
        value=signed_root(square.value),
        low=signed_root(square.low),
        high=signed_root(square.high),
        replicates=squares.with_values(values.sign() * values.abs().sqrt()),
    )


def rms_difference(one: Estimates, other: Estimates) -> Interval:
    """Return RMS one - RMS other with its interval; see `rms_differences`.

    Args:
        one: estimates of the first mean square.
        other: those of the other, paired with them.
    """
    values, weights = _as_row(one)
    value, low, high = rms_differences(values, _as_row(other)[0], weights)[0].tolist()
    return Interval(value=value, low=low, high=high)


def share(part: Estimates, whole: Estimates) -> Interval:
    """Return part / whole with its interval; undefined if the whole does not exceed its noise."""
    return jackknife(part / whole) if jackknife(whole).low > 0 else UNDEFINED


def along(part: Estimates, whole: Estimates) -> Estimates | None:
    """Return part / sqrt(whole): the nats of a pattern P that a map T has, <T, P> / sqrt(<P, P>).

    None if the whole does not exceed its noise.

    Args:
        part: <T, P>, squared nats.
        whole: <P, P>, squared nats.
    """
    if not jackknife(whole).low > 0:
        return None
    roots = whole.values.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return part / whole.with_values(roots)
