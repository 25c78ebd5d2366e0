"""The tables of a run, as in its CSV files: one row per layer and item, one column per number.

A table without rows keeps its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_args

import pandas as pd

from nope_probe.analyses.attention import AttentionSplit
from nope_probe.analyses.attribution import (
    Grams,
    contrast_grams,
    contrast_map,
    mean_over_layers,
    patterns_of,
    source_terms,
    values_in,
)
from nope_probe.analyses.behaviour import cost_of
from nope_probe.analyses.jackknife import (
    Interval,
    Intervals,
    jackknife,
    mean_intervals,
    rms_difference,
    squared,
)
from nope_probe.analyses.pattern import Measures, measure_pattern
from nope_probe.analyses.pattern_rows import (
    bin_means,
    offset_bins,
)
from nope_probe.analyses.positions import position_terms, readers, written_terms
from nope_probe.analyses.reader import Side
from nope_probe.analyses.verdicts import mostly_lost, value_of
from nope_probe.figures.names import map_name
from nope_probe.figures.words import INFORMATION, NUMBERS, bound_columns
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.maps import Layers, heads_of
from nope_probe.maps.positions import PositionSums
from nope_probe.removal import INTACT, MASK, NO_REPLACEMENT, Condition, Writer
from nope_probe.run.folder import REPLICATES

TableRow = dict[str, Any]
GAPS = ("positional_share_gap", "others_share_gap")
ATTENTION = tuple(name for name in INFORMATION if name not in (*GAPS, "sink_weight"))  # with bounds
WEIGHTS = tuple(name for name in ATTENTION if name != "pattern_missed")  # from weights alone


class Row(NamedTuple):
    """A row of the tables of removals: what is removed, and what the weights among it become."""

    removed: Condition = INTACT
    replacement: str = NO_REPLACEMENT

    @classmethod
    def of(cls, ablation: Ablation) -> Row:
        """Return the row of what an ablation removes, with the heads that lose it."""
        by = str(ablation.replacement) if ablation.condition.weights else NO_REPLACEMENT
        return cls(ablation.named, by)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that name it."""
        return {"removed": self.removed.name, "replacement": self.replacement}

    @property
    def maps(self) -> str:
        """The name of its score maps in a run: `score/mask`, `score_mean/w_q`."""
        return map_name(self.removed.name, self.replacement)


Maps = dict[Row, Layers]


def interval_columns(**intervals: Interval) -> TableRow:
    """Return each interval as columns: its name, name_low, name_high, and its replicates.

    A run takes the columns of replicates out of its tables, and keeps them in a file.
    """
    columns: TableRow = {}
    for name, interval in intervals.items():
        columns |= interval.columns(name)
    replicates = {f"{name}{REPLICATES}": i.replicates for name, i in intervals.items()}
    return columns | {name: kept for name, kept in replicates.items() if kept is not None}


def table_of(rows: Iterable[TableRow] | pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a table with some columns, if it has rows or not, and their replicates."""
    table = pd.DataFrame(rows)
    replicates = [name for name in table if str(name).endswith(REPLICATES)]
    return table.reindex(columns=[*columns, *replicates])


def mean_columns(name: str, means: Intervals) -> dict[str, list[Any]]:
    """Return means over sequences as columns, a row for each: see `interval_columns`."""
    ends = zip(interval_names(name), (means.value, means.low, means.high), strict=True)
    values = means.replicates.flatten(1).T
    replicates = [Estimates(values=row, weights=means.weights) for row in values]
    columns: dict[str, list[Any]] = {column: end.flatten().tolist() for column, end in ends}
    return {**columns, f"{name}{REPLICATES}": replicates}


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
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            **columns_of(split, names),
            **{name: getattr(split, name) for name in GAPS},
        }
        for (layer, head), split in splits.items()
    )


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

    There is a row for each side, keys and queries, in the order in which writers write. The rows of
    a lead or pattern add up to its three written terms; see `written_terms`.
    """
    return pd.DataFrame(
        {
            **{**names, "of": asked.question, "side": side, "writer": writer},
            **interval_columns(**vars(terms[writer])),
        }
        for names, reader in readers(sums)
        for asked in reader.questions()
        for side in get_args(Side)
        for terms in [written_terms(asked, side)]
        for writer in sorted(terms, key=lambda name: Writer(name).order)
    )


def pattern_table(maps: Maps, layer: int, grams: Grams[Row]) -> pd.DataFrame:
    """Return the measures of a layer's lead and pattern in each row, and the order, nats.

    `mask_adds` of the row without the mask is the part not by distance (RMS) with the mask, less
    that without it, paired (the paper's section 5).

    Args:
        maps: of each row; with the mask's, the intact model's.
        layer: its number.
        grams: the inner products of the layer's rows, for the order; if empty, `order` is
            left out.
    """
    measured = {row: measure_pattern(of_row[layer].pattern) for row, of_row in maps.items()}
    return pd.DataFrame(
        {
            "layer": layer,
            **row.columns,
            **interval_columns(**vars(measures)),
            **(columns_of(values_in(grams, row, Row()), ("order",)) if grams else {}),
            **(mask_adds(measured[Row()], measures) if row == Row(MASK) else {}),
        }
        for row, measures in measured.items()
    )


def mask_adds(intact: Measures, unmasked: Measures) -> TableRow:
    """Return the columns of the difference of a layer's part that is not by distance, paired."""
    parts = [of.not_by_distance.replicates for of in (intact, unmasked)]
    with_mask, without = (squared(part) for part in parts if part is not None)
    return interval_columns(mask_adds=rms_difference(with_mask, without))


def means_table(
    pattern: pd.DataFrame, rows: Iterable[Row], losses: Mapping[Row, Estimates]
) -> pd.DataFrame:
    """Return the means over layers of the three numbers in each row, and what removal costs, nats.

    A row has each mean with its bounds, the number of layers whose intact value exceeds its noise
    (`lead_layers`), and of those in which less than half of it is left (`lead_below_half`); see
    `mostly_lost`. For `cost` and its parts see `cost_of`.

    Args:
        pattern: of all layers, with replicates.
        rows: which of its rows.
        losses: the mean loss in rows that have one, and in their nulls.
    """
    by_row = pattern.groupby(["removed", "replacement"], sort=False)
    records = {names: of_row.to_dict("records") for names, of_row in by_row}
    means, intact = list[TableRow](), records[INTACT.name, NO_REPLACEMENT]
    for row in rows:
        of_layers = records[row.removed.name, row.replacement]
        means.append(row.columns)
        for name in NUMBERS:
            replicates = [of_layer.get(f"{name}{REPLICATES}") for of_layer in of_layers]
            known = [of_layer for of_layer in replicates if isinstance(of_layer, Estimates)]
            if known:
                pairs = zip(intact, of_layers, strict=True)
                lost = [mostly_lost(*(value_of(of, name) for of in pair)) for pair in pairs]
                means[-1] |= interval_columns(**{name: mean_over_layers(known)})
                means[-1] |= {f"{name}_layers": len(lost) - lost.count(None)}
                means[-1] |= {f"{name}_below_half": lost.count(True)}
        if row in losses:
            null = row._replace(removed=row.removed.null)
            of_null = None if null == row else losses[null]
            cost = {"loss": losses[row]} | cost_of(losses[row], losses[Row()], of_null)
            means[-1] |= interval_columns(**{name: jackknife(of) for name, of in cost.items()})
    return pd.DataFrame(means)


def terms_table(sources: Sequence[str], layer: int, grams: Grams[Row]) -> pd.DataFrame:
    """Return the sizes of the exact sum of a layer's lead and pattern: of, term, size, nats."""
    terms = {
        name: {Row(condition): times for condition, times in contrast.items()}
        for name, contrast in source_terms(sources).items()
    }
    return pd.DataFrame(
        {"layer": layer, "of": question, "term": name, **interval_columns(size=gram.size(term))}
        for question, gram in grams.items()
        for name, term in terms.items()
    )


def head_pattern_table(maps: Maps, layer: int) -> pd.DataFrame:
    """Return lead, amplitude and order of each head of a layer without sources, nats."""
    of_sources = {row: of_row for row, of_row in maps.items() if row.removed.are_sources}
    heads = {row: heads_of({layer: of_row[layer]}) for row, of_row in of_sources.items()}
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            **row.columns,
            **columns_of(values_in(grams, row, Row()), ("lead", "amplitude", "order")),
        }
        for layer, head in heads[Row()]
        for grams in [contrast_grams(patterns_of(heads, (layer, head)))]
        for row in heads
    )


def offsets_table(sources: Sequence[str], maps: Maps, layer: int) -> pd.DataFrame:
    """Return a layer's offset profiles: term, offset, and the mean with its bounds, nats.

    The terms are `score`, `pattern` and those of `source_terms`, which add up to `pattern`. Offsets
    beyond the layer's window have no row. Where some distances share a row, `offset` is the first
    and `last_offset` the last of them.
    """
    terms, pattern = source_terms(sources), maps[Row()][layer].pattern
    n_offsets = pattern.maps.n - 1 - pattern.maps.skip_keys
    bins, parts = offset_bins(n_offsets), list[pd.DataFrame]()
    offsets = {"offset": bins.tolist()}
    if len(bins) < n_offsets:
        offsets["last_offset"] = [*(bins[1:] - 1).tolist(), n_offsets]
    of_conditions = {  # on the cells that the intact model sees
        condition: bin_means(replace(pattern, maps=maps[Row(condition)][layer]), "pattern", bins)
        for condition in dict.fromkeys([INTACT, *chain.from_iterable(terms.values())])
    }
    means = {
        "score": bin_means(pattern, "scores", bins),
        "pattern": of_conditions[INTACT],
        **{name: contrast_map(term, of_conditions) for name, term in terms.items()},
    }
    for name, folds in means.items():
        columns = mean_columns("mean", mean_intervals(folds, pattern.maps.weights))
        table = pd.DataFrame({"layer": layer, "term": name, **offsets, **columns})
        parts.append(table.dropna(subset=["mean"]))
    return pd.concat(parts, ignore_index=True)
