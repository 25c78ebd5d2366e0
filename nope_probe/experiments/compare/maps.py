"""The runs' positional patterns, and their differences to the first run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from nope_probe.analyses.jackknife import Interval, standard_error
from nope_probe.analyses.pattern_changes import pattern_difference
from nope_probe.errors import UserError
from nope_probe.experiments.compare.members import Map, Member, share_sequences
from nope_probe.figures.intervals import interval_text
from nope_probe.maps.centred import kept_cells, row_centred
from nope_probe.maps.folds import unpack_triangle


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one map's pattern to the first run's.

    Attributes:
        values: the other pattern less the first, nats (inner products for a Gram map).
        rms: its RMS, corrected for noise; bounds are NaN where the runs kept no fold maps.
        noise: the typical standard error of a cell; NaN if it is not known.
        paired: whether it was taken fold by fold.
    """

    values: Map
    rms: Interval
    noise: float
    paired: bool

    @property
    def is_significant(self) -> bool | None:
        """Whether it exceeds the noise; None if that is not known."""
        return None if np.isnan(self.rms.low) else self.rms.low > 0

    def __str__(self) -> str:
        if self.is_significant is False:
            return "no difference beyond noise"
        if self.is_significant is None:
            return f"{self.rms.value:.3g}"
        return interval_text((self.rms.value, self.rms.low, self.rms.high), ".3g")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One map in all runs.

    Attributes:
        name: its name, such as `L2` or `(f)`.
        patterns: by run, the map less each row's mean over the kept keys.
        differences: by run but the first.
    """

    name: str
    patterns: dict[str, Map]
    differences: dict[str, Difference]


def compare_maps(members: Sequence[Member]) -> list[Compared]:
    """Return the maps that all runs have, with their differences.

    Raises:
        UserError: if they have no map in common, though some have maps.
    """
    names = [name for name in members[0].maps if all(name in each.maps for each in members)]
    if not names and any(each.maps for each in members):
        raise UserError("the runs have no maps in common")
    found = [_compare(name, members) for name in names if _is_whole(name, members)]
    return found


def _is_whole(name: str, members: Sequence[Member]) -> bool:
    """Return whether no run hides keys before the query in this map, as a sliding window does."""
    return all(
        np.isfinite(each.maps[name][kept_cells(len(each.maps[name])).numpy()]).all()
        for each in members
    )


def _compare(name: str, members: Sequence[Member]) -> Compared:
    skip_keys = members[0].skip_keys
    patterns = {
        each.label: row_centred(torch.from_numpy(each.maps[name]).double(), skip_keys).numpy()
        for each in members
    }
    return Compared(
        name=name,
        patterns=patterns,
        differences={
            each.label: _difference(name, members[0], each, patterns) for each in members[1:]
        },
    )


def _difference(name: str, base: Member, other: Member, patterns: dict[str, Map]) -> Difference:
    values = patterns[other.label] - patterns[base.label]
    paired = share_sequences([base, other])
    one, two = (each.folds(name) for each in (other, base))
    if one is None or two is None:
        rms, noise = _without_folds(name, base, other, values)
        return Difference(values=values, rms=rms, noise=noise, paired=False)
    x, y = (unpack_triangle(torch.from_numpy(each)) for each in (one, two))
    paired = paired and x.shape == y.shape
    n_x, n_y = (
        None if each.fold_sizes is None else torch.tensor(each.fold_sizes) for each in (other, base)
    )
    rms = pattern_difference(x, y, skip_keys=base.skip_keys, paired=paired, counts=(n_x, n_y))
    parts = (
        [standard_error(x - y, n_x)] if paired else [standard_error(x, n_x), standard_error(y, n_y)]
    )
    noise = float(np.sqrt(sum(float(each.square().nanmean()) for each in parts)))
    return Difference(values=values, rms=rms, noise=noise, paired=paired)


def _without_folds(
    name: str, base: Member, other: Member, values: Float[np.ndarray, "query_pos key_pos"]
) -> tuple[Interval, float]:
    """Return the RMS of a difference less its noise, from the standard errors of single cells."""
    errors = [each.errors(name) for each in (base, other)]
    square, noise = float(np.nanmean(values**2)), float("nan")
    if errors[0] is not None and errors[1] is not None:
        noise = float(np.sqrt(sum(np.nanmean(each**2) for each in errors if each is not None)))
        square -= noise**2
    rms = float(np.sign(square) * abs(square) ** 0.5)
    return Interval(value=rms, low=float("nan"), high=float("nan")), noise
