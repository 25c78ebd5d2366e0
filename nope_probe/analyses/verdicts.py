"""What numbers settle: rules from estimates with their bounds to one of a few words.

A rule asks the bounds of an estimate first. What they leave open is `unclear`, or None.
Pages ask these rules too, so they need no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from nope_probe.removal import INTACT, SOURCES, WRITTEN_NULL, Condition

if TYPE_CHECKING:
    import pandas as pd

ValueAndBounds = tuple[float, float, float]
Way = Literal["alone", "each needed", "either", "no source", "within noise"]
NUMBERS = ("lead", "order", "not_by_distance")  # of a layer
SIZES = ("not_by_distance",)  # of these: roots of squares, which say nothing within their noise
HALF = 0.5  # of the intact value
LEVEL = 0.95  # of the intervals
THIRD = 1 / 3  # of the layers: a second answer counts from here on
EIGHT_FOLDS = (1,) * 8  # the sizes of the default folds, where a run states none
UNIFORM = 0.01  # nats of information: with less, a head attends uniformly
MOSTLY = 0.5  # of the information among the other keys, with which a head is one of order


def mostly_lost(intact: ValueAndBounds, left: ValueAndBounds) -> bool | None:
    """Return whether less than half of a value is left; None if the value is within its noise.

    Args:
        intact: the intact model's value, with its bounds.
        left: the value under an intervention.

    Example:
        >>> mostly_lost((-8.0, -8.2, -7.8), (-1.0, -1.2, -0.8)), mostly_lost((2, 1, 3), (1.4, 0, 2))
        (True, False)
        >>> mostly_lost((0.1, -0.1, 0.3), (0.0, -0.1, 0.1)) is None
        True
    """
    value, low, high = intact
    if not (low > 0 or high < 0):
        return None
    return left[0] * value < HALF * value**2


@dataclass(frozen=True, kw_only=True)
class Maker:
    """What makes a number in a layer.

    Attributes:
        way: `alone`, if the number needs one source; `each needed`, if it needs several; `either`,
            if one of several is enough; `no source`, if it is there without any; `within noise`,
            if it is not there.
        sources: their names in the order of `SOURCES`.
    """

    way: Way
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What makes a number, and what carries it.

    Attributes:
        layers: what makes it in each layer.
        n_below_zero: in how many of the layers in which it exceeds its noise it is below 0: the
            first key trails.
        carriers: what else leaves less than half of it in most of these layers; `w_k alone` if it
            does not where another weight is removed too.
    """

    layers: tuple[Maker, ...]
    n_below_zero: int
    carriers: tuple[str, ...]

    @property
    def makers(self) -> dict[Maker, int]:
        """In how many layers what makes it, where it exceeds its noise; most layers first."""
        return dict(Counter(of for of in self.layers if of.way != "within noise").most_common())

    @property
    def n_layers(self) -> int:
        """The number of layers in which it exceeds its noise."""
        return sum(self.makers.values())

    @property
    def main(self) -> dict[Maker, int]:
        """What makes it in most layers, and what else makes it in a third of the layers or more."""
        first = next(iter(self.makers), None)
        return {x: n for x, n in self.makers.items() if x == first or n >= THIRD * self.n_layers}


def maker_of(values: Mapping[Condition, ValueAndBounds], sources: Collection[str]) -> Maker:
    """Return what makes a number in a layer.

    Args:
        values: by what is removed: nothing, and all combinations of the sources.
        sources: the model's.

    Example:
        >>> def around(value):
        ...     return value, value - 0.1, value + 0.1
        >>> names = {"intact": 2.5, "mask": 2.4, "rope": 3.5, "mask+rope": 3.7}
        >>> lead = {Condition.parse(name): around(value) for name, value in names.items()}
        >>> maker_of(lead, ["mask", "rope"]).way
        'no source'
        >>> maker_of(lead | {Condition(["mask", "rope"]): around(0.1)}, ["mask", "rope"])
        Maker(way='either', sources=('mask', 'rope'))
    """
    ordered = [name for name in SOURCES if name in sources]
    whole = values[INTACT]
    if mostly_lost(whole, whole) is None:
        return Maker(way="within noise")
    if not ordered or not mostly_lost(whole, values[Condition(ordered)]):
        return Maker(way="no source")
    for size in range(1, len(ordered) + 1):
        lost = [
            names
            for names in combinations(ordered, size)
            if mostly_lost(whole, values[Condition(names)])
        ]
        if lost:
            break
    named = {name for names in lost for name in names}
    way: Way = "either" if size > 1 else "each needed" if len(lost) > 1 else "alone"
    return Maker(way=way, sources=tuple(name for name in ordered if name in named))


def answer_of(
    layers: Sequence[Mapping[Condition, ValueAndBounds]], sources: Collection[str]
) -> Answer:
    """Return what makes a number in most layers, and what carries it.

    Args:
        layers: the number in each layer by what is removed; `maker_of` says what there must be.
        sources: the model's.
    """
    makers = tuple(maker_of(of, sources) for of in layers)
    above = [of for of, maker in zip(layers, makers, strict=True) if maker.way != "within noise"]
    n_lost = {
        other: sum(bool(mostly_lost(of[INTACT], of[other])) for of in above)
        for other in (above[0] if above else ())
        if not other & {*SOURCES, WRITTEN_NULL}
    }
    carriers = [other for other, n in n_lost.items() if is_carrier(other) and 2 * n > len(above)]
    stays = [other for other, n in n_lost.items() if 2 * n < len(above)]
    return Answer(
        layers=makers,
        n_below_zero=sum(of[INTACT][0] < 0 for of in above),
        carriers=tuple(
            other.name + " alone" * any(other < union for union in stays) for other in carriers
        ),
    )


def is_carrier(condition: Condition) -> bool:
    """Return whether a condition removes one thing that is no source and no control.

    Example:
        >>> [is_carrier(Condition.parse(name)) for name in ("w_k", "rope", "w_q+w_k", "intact")]
        [True, False, False, False]
    """
    return len(condition) == 1 and not condition & {*SOURCES, WRITTEN_NULL}


def values_by_layer(
    pattern: pd.DataFrame, number: str, conditions: Collection[str]
) -> dict[int, dict[Condition, ValueAndBounds]]:
    """Return a number of each layer, with its bounds, by what is removed.

    Args:
        pattern: `pattern.csv`; of several replacements of a weight, the first counts.
        number: its column.
        conditions: the names of the rows that count.
    """
    layers: dict[int, dict[Condition, ValueAndBounds]] = {}
    for row in pattern[pattern["removed"].isin([*conditions])].to_dict("records"):
        of_layer = layers.setdefault(int(row["layer"]), {})
        of_layer.setdefault(Condition.parse(str(row["removed"])), value_of(row, number))
    return layers


def value_of(row: Mapping[Any, Any], number: str) -> ValueAndBounds:
    """Return a number of a row of `pattern.csv` with its bounds; 0 for a size within its noise."""
    value, low, high = (float(row[f"{number}{end}"]) for end in ("", "_low", "_high"))
    return 0.0 if number in SIZES and low <= 0 else value, low, high


def answers(
    pattern: pd.DataFrame, conditions: Collection[str], sources: Collection[str]
) -> dict[str, Answer]:
    """Return the answer for each of the three numbers; without a first key there is no lead.

    Args:
        pattern: as `values_by_layer` takes it, with the conditions.
        conditions: the names of the rows that count.
        sources: the model's.
    """
    return {
        number: answer_of([*values_by_layer(pattern, number, conditions).values()], sources)
        for number in NUMBERS
        if number != "lead" or pattern[number].notna().any()
    }


def answer_table(found: Mapping[str, Answer]) -> pd.DataFrame:
    """Return answers as a table: a row for each number and what makes it, most layers first.

    The columns are `number`, `made_by` (sources, joined by `+`), `way`, `layers` (in how many),
    `of_layers` (in how many it exceeds its noise), `below_zero` and `carried_by`.
    """
    import pandas as pd

    return pd.DataFrame(
        {
            "number": number,
            "made_by": "+".join(maker.sources),
            "way": maker.way,
            "layers": n,
            "of_layers": answer.n_layers,
            "below_zero": answer.n_below_zero,
            "carried_by": ", ".join(answer.carriers),
        }
        for number, answer in found.items()
        for maker, n in (answer.makers or {Maker(way="within noise"): 0}).items()
    )


def exceeds_noise(
    amplitude: float, low: float, n_patterns: int, fold_sizes: Sequence[int] = ()
) -> bool:
    """Return whether a pattern's amplitude is above 0, as one of several that were looked at.

    The interval of its square is widened so that the chance of a bound above 0 holds for all of
    them together (Bonferroni).

    Args:
        amplitude: its RMS, nats.
        low: the lower bound of its 95% interval, nats.
        n_patterns: number of layers or heads that were looked at.
        fold_sizes: sequences per fold, which the interval's degrees of freedom follow from.

    Example:
        >>> exceeds_noise(0.01, 0.002, 1), exceeds_noise(0.01, 0.002, 24)
        (True, False)
        >>> exceeds_noise(2.6, 2.5, 24)
        True
    """
    from scipy.special import stdtrit

    square, lowest = amplitude * abs(amplitude), low * abs(low)
    beyond, sizes = (1 - LEVEL) / 2, fold_sizes or EIGHT_FOLDS
    freedom = sum(sizes) ** 2 / sum(size**2 for size in sizes) - 1
    wider = stdtrit(freedom, 1 - beyond / n_patterns) / stdtrit(freedom, 1 - beyond)
    return bool(square > wider * (square - lowest))


def above_noise(rows: pd.DataFrame, fold_sizes: Sequence[int] = ()) -> pd.Series[bool]:
    """Return which rows have an amplitude that exceeds the noise of all rows.

    Args:
        rows: one model's layers, or its heads.
        fold_sizes: sequences per fold.
    """
    import pandas as pd

    ends = rows[["amplitude", "amplitude_low"]].to_numpy(float).tolist()
    clear = [exceeds_noise(value, low, len(rows), fold_sizes) for value, low in ends]
    return pd.Series(clear, rows.index, dtype=bool)


def strongest_row(rows: pd.DataFrame, fold_sizes: Sequence[int] = ()) -> pd.Series | None:
    """Return the row that pages show first, of all commands: the one with the largest lead.

    Only rows whose pattern exceeds the noise count (see `above_noise`); where no key is first, the
    row with the largest pattern is returned.

    Args:
        rows: `lead` and `amplitude` (nats) with their bounds, of the intact model.
        fold_sizes: sequences per fold.

    Returns:
        None if no pattern exceeds the noise.
    """
    above = rows[above_noise(rows, fold_sizes)]
    if above.empty:
        return None
    has_lead = "lead" in above and above["lead"].notna().any()
    sizes = above["lead"].abs().fillna(0.0) if has_lead else above["amplitude"]
    return above.iloc[int(sizes.argmax())]


def kinds_of(table: pd.DataFrame) -> pd.Series[str]:
    """Return the kind of each head: sink, order or content; empty if it is not classed.

    A head is a sink if more of its position is about the first key than about the others. Of the
    others, a head is one of order if half of its information among the other keys, or more, is
    position. All else looks by content. A head that attends uniformly is not classed, nor one of
    too few texts or of one text.

    Args:
        table: `attention.csv`.
    """
    import numpy as np
    import pandas as pd

    share, first = table["others_share"], table["first_position"]
    is_sink = first > table["others_position"].clip(lower=0)
    known = (table["information"] >= UNIFORM) & (is_sink | share.notna())
    kinds = np.select([~known, is_sink, share >= MOSTLY], ["", "sink", "order"], "content")
    return pd.Series(kinds, table.index)
