"""The tables of a run, as in its CSV files: one row per layer and item, one column per number.

A table without rows keeps its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.analyses.attribution import LayerValues, MeanValue, Values
from nope_probe.analyses.jackknife import Interval, mean_intervals, rms
from nope_probe.analyses.offsets import mean_squares_by_query
from nope_probe.analyses.pattern import Measures
from nope_probe.analyses.pattern_changes import MaskEffect
from nope_probe.analyses.positions import position_terms, readers, written_terms
from nope_probe.analyses.reader import Side
from nope_probe.analyses.splits import BandPattern, MeanCovariance
from nope_probe.figures.intervals import bound_columns
from nope_probe.maps.layers import Question
from nope_probe.maps.maps import Layers
from nope_probe.maps.positions import PositionSums

TableRow = dict[str, Any]
WEIGHTS = (  # of a head's attention weights
    "information",
    "first_position",
    "first_content",
    "others_position",
    "others_content",
    "positional_share",
    "others_share",
    "first_weight",
)
ATTENTION = (*WEIGHTS, "pattern_missed")
GAPS = ("positional_share_gap", "others_share_gap")
WITHOUT_SOURCES = "without_sources"


def interval_columns(**intervals: Interval) -> TableRow:
    """Return each interval as three columns: its name, name_low, name_high."""
    numbers = [end for i in intervals.values() for end in (i.value, i.low, i.high)]
    return dict(zip(interval_names(*intervals), numbers, strict=True))


def interval_names(*names: str) -> list[str]:
    """Return the columns of some intervals.

    Example:
        >>> interval_names("share", "rms")
        ['share', 'share_low', 'share_high', 'rms', 'rms_low', 'rms_high']
    """
    return [column for name in names for column in (name, *bound_columns(name))]


def columns_of(holder: object, names: Iterable[str]) -> TableRow:
    """Return the columns of the intervals that an object has as attributes of these names."""
    return interval_columns(**{name: getattr(holder, name) for name in names})


def attention_table(
    splits: Mapping[tuple[int, int], AttentionSplit], names: Sequence[str] = ATTENTION
) -> pd.DataFrame:
    """Return the table of attention: layer, head, the parts (nats) and shares, with their bounds.

    `information` is the sum of its four parts. `positional_share`, `others_share`, `first_weight`
    and `pattern_missed` are shares. The two columns of gaps are the upper less the lower
    bound of the first two.

    Args:
        splits: the attention of each head, by layer and head.
        names: the columns.
    """
    rows: list[TableRow] = []
    for (layer, head), split in splits.items():
        parts = {name: getattr(split, name) for name in names}
        intervals = {
            name: part if isinstance(part, Interval) else split.interval(name)
            for name, part in parts.items()
        }
        gaps = {name: getattr(split, name) for name in GAPS}
        rows.append({"layer": layer, "head": head, **interval_columns(**intervals), **gaps})
    return pd.DataFrame(rows)


def text_attention_table(
    information: Float[Tensor, "layer head"],
    first_weight: Float[Tensor, "layer head"],
    layers: Sequence[int],
) -> pd.DataFrame:
    """Return the table of attention in one text alone, which knows no position and no intervals.

    Args:
        information: the information of each head, nats.
        first_weight: the weight of the first key.
        layers: the layers' numbers.
    """
    rows = [
        {"layer": layer, "head": head, "information": float(nats), "first_weight": float(weight)}
        for layer, of_heads, firsts in zip(layers, information, first_weight, strict=True)
        for head, (nats, weight) in enumerate(zip(of_heads, firsts, strict=True))
    ]
    columns = ["layer", "head", *interval_names(*ATTENTION), *GAPS]
    return pd.DataFrame(rows).reindex(columns=columns)


def pattern_table(
    measured: Iterable[tuple[TableRow, Sequence[Measures]]],
    values: Iterable[Values],
    layers: Sequence[int],
) -> pd.DataFrame:
    """Return the table of values under interventions, a row per layer, condition and replacement.

    Its columns are layer, removed, replacement, the measures and `kept`, with their bounds.

    Args:
        measured: as of `measures_table`, by `removed` and `replacement`.
        values: of every row.
        layers: the layers' numbers.
    """
    table = measures_table(measured, layers, labels=("removed", "replacement"))
    return table.join(pd.DataFrame(columns_of(of_row, ("kept",)) for of_row in values))


def head_pattern_table(heads: Iterable[LayerValues]) -> pd.DataFrame:
    """Return the table of heads' values: layer, head, removed; lead, amplitude and kept, nats."""
    return pd.DataFrame(
        {
            "layer": head.layer,
            "head": head.head,
            "removed": removed,
            **columns_of(values, ("lead", "amplitude", "kept")),
        }
        for head in heads
        for removed, values in head.conditions.items()
    )


def terms_table(
    layers: Iterable[tuple[TableRow, Mapping[Question, Mapping[str, Interval]]]],
) -> pd.DataFrame:
    """Return the table of terms: the columns that name the layer or head, of, term, size (nats).

    The terms' maps add up to the intact map; `without_sources` is what is left without any source.

    Args:
        layers: the sizes of the terms of each layer, or head.
    """
    return pd.DataFrame(
        {**named, "of": question, "term": term, **interval_columns(size=size)}
        for named, terms in layers
        for question, sizes in terms.items()
        for term, size in sizes.items()
    )


def mean_table(
    means: Iterable[tuple[TableRow, Mapping[str, MeanValue]]],
) -> pd.DataFrame:
    """Return the table of the means over layers, a row per condition and replacement.

    Of lead and kept it has the mean with its bounds (nats), the number of layers that have one, and
    of those in which less than half of the intact value is left (`lead_below_half`).

    Args:
        means: of `lead` and `kept`, by `removed` and `replacement`.
    """
    return pd.DataFrame(
        {
            **named,
            **{
                column: value
                for name, of in values.items()
                for column, value in (
                    *interval_columns(**{name: of.mean}).items(),
                    (f"{name}_layers", of.n_layers),
                    (f"{name}_below_half", of.n_below_half),
                )
            },
        }
        for named, values in means
    )


def non_relative_table(
    effects: Mapping[str, Sequence[MaskEffect]], layers: Sequence[int]
) -> pd.DataFrame:
    """Return the table of the non-relative part's RMS with and without the mask, nats, paired.

    Args:
        effects: per kind of tokens (text, shuffled), the effect in each layer.
        layers: the layers' numbers.
    """
    names = ("with_mask", "without_mask", "difference")
    rows = [
        {"layer": layer, "tokens": tokens, **interval_columns(**vars(effect))}
        for tokens, of_tokens in effects.items()
        for layer, effect in zip(layers, of_tokens, strict=True)
    ]
    return pd.DataFrame(rows, columns=["layer", "tokens", *interval_names(*names)])


def measures_table(
    measured: Iterable[tuple[TableRow, Sequence[Measures]]],
    layers: Sequence[int],
    labels: Sequence[str] = ("removed",),
) -> pd.DataFrame:
    """Return the table of pattern measures: layer, the labels, and each measure with its bounds.

    Args:
        measured: groups of layers, each with its values of the labels.
        layers: the layers' numbers.
        labels: the columns that name the groups.
    """
    names = tuple(Measures.__dataclass_fields__)
    rows = [
        {"layer": layer, **values, **interval_columns(**vars(measures))}
        for values, of_group in measured
        for layer, measures in zip(layers, of_group, strict=True)
    ]
    return pd.DataFrame(rows, columns=["layer", *labels, *interval_names(*names)])


def mean_covariance_table(
    layers: Sequence[MeanCovariance], terms: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return the table of the mean and covariance terms: layer, of, term, size (nats).

    Args:
        layers: the two terms of each layer's pattern.
        terms: the exact terms of the leads and patterns of the same layers (`term_table`), which
            replace the two terms: the mean term's row is then the sum of the four before it.
    """
    columns = ["layer", "of", "term", *interval_names("size")]
    if terms is not None:
        exact = terms[~terms["term"].isin(("all", "alibi"))].reindex(columns=columns)
        return exact.reset_index(drop=True)
    rows = [
        {"layer": layer.layer, "of": "pattern", "term": name, **interval_columns(size=size)}
        for layer in layers
        for name, size in (("mean", layer.mean), ("covariance", layer.covariance))
    ]
    return pd.DataFrame(rows, columns=columns)


def term_table(sums: PositionSums) -> pd.DataFrame:
    """Return the terms of the lead and of the pattern of every reader, a row each.

    A reader is a layer, or a head if heads were kept.
    """
    return pd.DataFrame(
        {**names, "of": asked.question, "term": name, **interval_columns(**vars(term))}
        for names, reader in readers(sums)
        for asked in reader.questions()
        for name, term in position_terms(asked).items()
    )


def writer_table(sums: PositionSums) -> pd.DataFrame:
    """Return what each writer brings to the written terms of every lead and pattern.

    There is a row for each side, keys and queries. The rows of a lead or pattern add up to its
    three written terms; see `written_terms`.
    """
    return pd.DataFrame(
        {
            **names,
            "of": asked.question,
            "side": side,
            "writer": writer,
            **interval_columns(**vars(x)),
        }
        for names, reader in readers(sums)
        for asked in reader.questions()
        for side in get_args(Side)
        for writer, x in written_terms(asked, side).items()
    )


def bands_table(patterns: Sequence[BandPattern]) -> pd.DataFrame:
    """Return the table of bands: layer, band, its pairs and wavelengths, amplitude, share.

    `first_pair` and `last_pair` count from 0; wavelengths are in positions, amplitudes in nats. The
    unrotated rest has no pairs and no wavelengths.
    """
    rows = [
        {
            "layer": pattern.band.layer,
            "band": pattern.band.name,
            "n_pairs": len(pattern.band.pairs),
            "first_pair": min(pattern.band.pairs, default=None),
            "last_pair": max(pattern.band.pairs, default=None),
            "shortest_wavelength": min(pattern.band.wavelengths, default=None),
            "longest_wavelength": max(pattern.band.wavelengths, default=None),
            **interval_columns(amplitude=pattern.amplitude, share=pattern.share),
        }
        for pattern in patterns
    ]
    return pd.DataFrame(rows).astype({"first_pair": "Int64", "last_pair": "Int64"})


def offsets_table(
    means: Mapping[Any, Float[Tensor, "fold layer bin"]],
    layers: Layers,
    bins: Int[Tensor, " bin"],
    label: str = "term",
) -> pd.DataFrame:
    """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

    Offsets beyond a layer's window have no row. Where some distances share a row, `offset` is the
    first and `last_offset` the last of them.

    Args:
        means: fold means by term, nats; see `bin_means`.
        layers: the maps of the layers, of which the means are.
        bins: the first distance of each bin.
        label: the column of the terms' names.
    """
    first = next(iter(layers.values()))
    profiles = {name: mean_intervals(of_term, first.weights) for name, of_term in means.items()}
    offsets = {"offset": bins.tolist()}
    if len(bins) < first.n_offsets:
        offsets["last_offset"] = [*(bins[1:] - 1).tolist(), first.n_offsets]
    parts = [
        pd.DataFrame(
            {
                "layer": layer,
                label: name,
                **offsets,
                "mean": profile.value[place].numpy(),
                "mean_low": profile.low[place].numpy(),
                "mean_high": profile.high[place].numpy(),
            }
        ).dropna(subset=["mean"])
        for place, layer in enumerate(layers)
        for name, profile in profiles.items()
    ]
    return pd.concat(parts, ignore_index=True)


def queries_table(layers: Layers) -> pd.DataFrame:
    """Return the table of the pattern's strength by the query's position.

    Args:
        layers: the scores of each layer by its number, nats.

    Returns:
        layer, the first and the last query of a group, and the RMS of the pattern in the rows of
        the group, nats, with its bounds.
    """
    rows = []
    for layer, maps in layers.items():
        for (first, last), square in mean_squares_by_query(maps.pattern):
            where = {"layer": layer, "query": first, "last_query": last}
            rows.append({**where, **interval_columns(rms=rms(square))})
    return pd.DataFrame(rows)
