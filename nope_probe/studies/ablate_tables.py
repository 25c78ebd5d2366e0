"""The tables of a run of `ablate`, as in its CSV files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import pandas as pd
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, split_attention
from nope_probe.analyses.attribution import (
    Values,
    mean_over_layers,
    patterns_of,
    values_in,
)
from nope_probe.analyses.contrasts import Grams, contrast_grams, contrast_map, source_terms
from nope_probe.analyses.jackknife import (
    jackknife,
    mean_intervals,
    rms_difference,
    squared,
)
from nope_probe.analyses.pattern import (
    Measures,
    measure,
    measure_heads,
)
from nope_probe.analyses.pattern_rows import (
    bin_means,
    offset_bins,
    pattern_distance_sums,
    score_distance_sums,
)
from nope_probe.analyses.verdicts import mostly_lost
from nope_probe.figures.intervals import interval_of
from nope_probe.figures.words import HEAD_MEASURES, NUMBERS
from nope_probe.hooks.reading.attention import attention_maps
from nope_probe.maps.estimates import Estimates
from nope_probe.maps.folds import State
from nope_probe.maps.maps import heads_of
from nope_probe.removal import INTACT, MASK, NO_REPLACEMENT, Condition
from nope_probe.run.folder import REPLICATES
from nope_probe.studies.ablate_plan import (
    INTACT_ROW,
    Maps,
    Plan,
    Reading,
    Row,
    named,
)
from nope_probe.studies.head_scores import (
    head_columns,
    means_of,
)
from nope_probe.studies.tables import (
    WEIGHTS,
    TableRow,
    attention_table,
    columns_of,
    interval_columns,
    mean_columns,
)

UNMASKED_ROW: Row = (MASK, NO_REPLACEMENT)


def pattern_table(
    maps: Maps, layers: Sequence[int], values: Sequence[Mapping[Row, Values]] = ()
) -> pd.DataFrame:
    """Return the measures of lead and pattern of each layer and row, and what is kept, nats.

    `mask_adds` of the row without the mask is the non-relative part (RMS) with the mask less that
    without it, paired (the paper's section 5).

    Args:
        maps: of each row.
        layers: the layers' numbers.
        values: of each layer, for what is kept; without them it is left out.
    """
    measured = {row: measure(of_row).values() for row, of_row in maps.items()}
    kept = values or [{}] * len(layers)
    return pd.DataFrame(
        {
            "layer": layer,
            **named(row),
            **interval_columns(**vars(measures)),
            **(columns_of(of_layer[row], ("kept",)) if of_layer else {}),
            **(mask_adds(intact, measures) if row == UNMASKED_ROW else {}),
        }
        for row, of_row in measured.items()
        for layer, measures, intact, of_layer in zip(
            layers, of_row, measured[INTACT_ROW], kept, strict=True
        )
    )


def controls_table(controls: Iterable[tuple[str, Maps]], layers: Sequence[int]) -> pd.DataFrame:
    """Return the measures of the controls: of nulls, and on shuffled tokens.

    Args:
        controls: what the tokens are, and the maps of each row. The maps of nulls begin with the
            intact model's, of whose pattern they keep something.
        layers: the layers' numbers.
    """
    tables = list[pd.DataFrame]()
    for tokens, maps in controls:
        of_null = any(condition.null == condition and condition.of_blocks for condition, _ in maps)
        grams = [contrast_grams(patterns_of(maps, layer)) for layer in layers] if of_null else []
        values = [{row: values_in(of, row, INTACT_ROW) for row in maps} for of in grams]
        table = pattern_table(maps, layers, values)
        if of_null:
            table = table[table["removed"] != INTACT.name]
        table.insert(1, "tokens", tokens)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def mask_adds(intact: Measures, unmasked: Measures) -> TableRow:
    """Return the columns of the difference of a layer's non-relative part, paired."""
    parts = [of.non_relative.replicates for of in (intact, unmasked)]
    with_mask, without = (squared(part) for part in parts if part is not None)
    return interval_columns(mask_adds=rms_difference(with_mask, without))


def means_table(pattern: pd.DataFrame, losses: Mapping[Row, Estimates]) -> pd.DataFrame:
    """Return the means over layers of the three numbers in each row, and what removal costs, nats.

    A row has each mean with its bounds, the number of layers whose intact value exceeds its noise
    (`lead_layers`), and of those in which less than half of it is left (`lead_below_half`); see
    `mostly_lost`. `cost` is the loss less the intact model's, paired.

    Args:
        pattern: of all layers and rows, with replicates.
        losses: the mean loss in rows that have one.
    """
    rows, intact = list[TableRow](), pattern[pattern["removed"] == INTACT.name].to_dict("records")
    for (removed, replacement), table in pattern.groupby(["removed", "replacement"], sort=False):
        of_layers = table.to_dict("records")
        rows.append({"removed": removed, "replacement": replacement})
        for name in NUMBERS:
            replicates = [row.get(f"{name}{REPLICATES}") for row in of_layers]
            known = [of_layer for of_layer in replicates if isinstance(of_layer, Estimates)]
            if known:
                pairs = zip(intact, of_layers, strict=True)
                lost = [mostly_lost(*(interval_of(row, name) for row in pair)) for pair in pairs]
                rows[-1] |= interval_columns(**{name: mean_over_layers(known)})
                rows[-1] |= {f"{name}_layers": len(lost) - lost.count(None)}
                rows[-1] |= {f"{name}_below_half": lost.count(True)}
        loss = losses.get((Condition.parse(str(removed)), str(replacement)))
        if loss is not None:
            cost = loss - losses[INTACT_ROW]
            rows[-1] |= interval_columns(loss=jackknife(loss), cost=jackknife(cost))
    return pd.DataFrame(rows)


def terms_table(plan: Plan, grams: Sequence[Grams[Row]]) -> pd.DataFrame:
    """Return the sizes of the exact sum of each layer's lead and pattern: of, term, size, nats."""
    terms = {
        name: {(condition, NO_REPLACEMENT): times for condition, times in contrast.items()}
        for name, contrast in source_terms(plan.sources).items()
    }
    return pd.DataFrame(
        {"layer": layer, "of": question, "term": name, **interval_columns(size=gram.size(term))}
        for layer, of_layer in zip(plan.layers, grams, strict=True)
        for question, gram in of_layer.items()
        for name, term in terms.items()
    )


def head_pattern_table(plan: Plan, maps: Maps) -> pd.DataFrame:
    """Return lead, amplitude and kept of each head without sources, nats."""
    rows = [row for row in maps if plan.keeps_heads(row[0])]
    heads = {row: heads_of(maps[row]) for row in rows}
    return pd.DataFrame(
        {
            "layer": layer,
            "head": head,
            **named(row),
            **columns_of(values_in(grams, row, INTACT_ROW), ("lead", "amplitude", "kept")),
        }
        for layer, head in heads[INTACT_ROW]
        for grams in [contrast_grams(patterns_of(heads, (layer, head)))]
        for row in rows
    )


def heads_table(
    reading: Reading, induction: State, fold_of: Tensor, fold_of_copies: Tensor
) -> pd.DataFrame:
    """Return each head's lead and three measures of its pattern, and its attention's measures.

    Args:
        reading: of the intact model.
        induction: fold means of induction attention.
        fold_of: the fold of each sequence.
        fold_of_copies: the fold of each sequence of repeated tokens.
    """
    rows = pd.DataFrame(
        {"layer": layer, "head": head, **named(INTACT_ROW), **columns_of(measures, HEAD_MEASURES)}
        for (layer, head), measures in measure_heads(reading.maps).items()
    )
    means = means_of(reading.heads, fold_of)
    attended = head_columns((means, fold_of), (induction, fold_of_copies))
    splits: dict[tuple[int, int], AttentionSplit] = {}
    for sums in reading.attention:  # a layer at a time: the fold means are in memory once
        splits |= split_attention(attention_maps([sums]))
    split = attention_table(splits, WEIGHTS).drop(columns=["layer", "head"])
    return pd.concat([rows, attended, split], axis=1)


def offsets_table(plan: Plan, maps: Maps) -> pd.DataFrame:
    """Return offset profiles: layer, term, offset, and the mean with its bounds, nats.

    The terms are `score`, `pattern` and those of `source_terms`, which add up to `pattern`. Offsets
    beyond a layer's window have no row. Where some distances share a row, `offset` is the first and
    `last_offset` the last of them.
    """
    intact, terms = maps[INTACT_ROW], source_terms(plan.sources)
    n_offsets = next(iter(intact.values())).n_offsets
    bins, parts = offset_bins(n_offsets), list[pd.DataFrame]()
    offsets = {"offset": bins.tolist()}
    if len(bins) < n_offsets:
        offsets["last_offset"] = [*(bins[1:] - 1).tolist(), n_offsets]
    for layer, of_layer in intact.items():
        pattern = of_layer.pattern  # on the cells that the intact model sees
        of_conditions = {
            condition: bin_means(
                replace(pattern, maps=maps[condition, NO_REPLACEMENT][layer]),
                pattern_distance_sums,
                bins,
            )
            for condition in dict.fromkeys([INTACT, *chain.from_iterable(terms.values())])
        }
        means = {
            "score": bin_means(pattern, score_distance_sums, bins),
            "pattern": of_conditions[INTACT],
            **{name: contrast_map(term, of_conditions) for name, term in terms.items()},
        }
        for name, folds in means.items():
            columns = mean_columns("mean", mean_intervals(folds, of_layer.weights))
            table = pd.DataFrame({"layer": layer, "term": name, **offsets, **columns})
            parts.append(table.dropna(subset=["mean"]))
    return pd.concat(parts, ignore_index=True)
