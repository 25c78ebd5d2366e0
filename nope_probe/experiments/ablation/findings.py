"""What a run of `ablate` found, one sentence per section: the headings of its page.

Each takes tables with one replacement. What has an interval around zero counts as noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from nope_probe.components import phrase, words
from nope_probe.experiments.findings import NO_PATTERN, NOISE, preferred_keys
from nope_probe.experiments.wording import capitalised, listed, numbered_layers, percents

MOST = 0.5  # of the pattern
NEEDED = 0.1  # lost without a player, at least, for the heading to name it
NAMED = 3  # players in a heading


def score_finding(pattern: pd.DataFrame, layer: int | None) -> str:
    """Return which keys get the higher scores in the layer with the strongest pattern.

    Args:
        pattern: the measures of the intact model, a row per layer.
        layer: that layer; None if no layer has a pattern that exceeds the noise.
    """
    if layer is None:
        return f"Scores of the intact model: near and far keys are {NOISE}"
    preferred = preferred_keys(_of_layer(pattern, layer).iloc[0])
    keys = f"{preferred} keys get" if preferred else "neither near nor far keys get"
    return f"Scores of the intact model: in L{layer} {keys} the higher ones"


def source_finding(sources: pd.DataFrame, layer: int | None) -> str:
    """Return which source brings most of the strongest layer's positional pattern."""
    if layer is None:
        return NO_PATTERN
    rows = _terms(_of_layer(sources, layer)).sort_values("share", ascending=False)
    most = rows[rows["share_low"] > MOST]
    if len(most):
        top = most.iloc[0]
        share = percents(top["share"])
        return f"{capitalised(phrase(top['term']))} brings {share} of L{layer}'s positional pattern"
    parts = [f"{phrase(row['term'])} {percents(row['share'])}" for _, row in rows[:2].iterrows()]
    return f"No source alone brings most of L{layer}'s positional pattern: {', '.join(parts)}"


def layers_finding(sources: pd.DataFrame) -> str:
    """Return in which layers each source brings most of the positional pattern."""
    terms = _terms(sources)
    most = terms[terms["share_low"] > MOST]
    known = {int(each) for each in terms.dropna(subset=["share"])["layer"]}
    empty = sorted({int(each) for each in terms["layer"]} - known)
    rest = sorted({int(each) for each in terms["layer"]} - {*most["layer"], *empty})
    parts = [
        f"{phrase(str(term))} in {numbered_layers(rows['layer'])}"
        for term, rows in most.groupby("term", sort=False)
    ]
    parts += [f"no source alone in {numbered_layers(rest)}"] if rest else []
    text = f"Most of the positional pattern comes from {'; '.join(parts)}" if parts else ""
    if empty:
        noise = f"{numbered_layers(empty)} {'has' if len(empty) == 1 else 'have'} no pattern"
        text = f"{text}; {noise} above the noise" if text else NO_PATTERN
    return text


def player_finding(players: pd.DataFrame, layer: int | None, player_set: str) -> str:
    """Return without which players the strongest layer keeps how much of its positional part."""
    topic = capitalised(player_set)
    if layer is None or _of_layer(players, layer)["lost"].isna().all():
        return f"{topic}: what the positional part needs is {NOISE}"
    rows = _of_layer(players, layer)
    # Of players without which nothing is kept, the first are the sources.
    lost = rows["lost"].clip(upper=1).round(2).sort_values(ascending=False, kind="stable")
    needed = rows.loc[lost.index][lambda each: each["lost_low"] > NEEDED]
    if needed.empty:
        return f"{topic}: L{layer}'s positional part needs none of them"
    first, *others = [
        (phrase(row["player"]), percents(max(0.0, 1 - row["lost"])))
        for _, row in needed[:NAMED].iterrows()
    ]
    text = f"{topic}: without {first[0]} L{layer} keeps {first[1]} of its positional part"
    return text + "".join(f", without {name} {kept}" for name, kept in others)


def interaction_finding(interactions: pd.DataFrame, layer: int | None, player_set: str) -> str:
    """Return what players of the strongest layer bring only together, or take away."""
    topic = f"Interactions of the {player_set}"
    rows = _of_layer(interactions, layer)
    clear = rows[(rows["share_low"] > 0) | (rows["share_high"] < 0)]
    if clear.empty:
        return f"{topic}: {NOISE}"
    top = _largest(clear, "share")
    name, share = words(top["players"]), percents(abs(top["share"]))
    if top["share"] > 0:
        return f"{topic}: {name} bring {share} of L{layer}'s positional part only together"
    return f"{topic}: {name} together take {share} off L{layer}'s positional part"


def shapley_finding(
    players: pd.DataFrame, layer: int | None, player_set: str, conjunctions: Sequence[int]
) -> str:
    """Return which player adds most on average, or that all are needed.

    Args:
        players: one player set's rows.
        layer: the layer with the strongest pattern, if there is one.
        player_set: the set's name.
        conjunctions: layers in which all players have about the same share.
    """
    topic, rows = f"Shapley maps of the {player_set}", _of_layer(players, layer)
    clear = rows[rows["share_low"] > 0]
    if clear.empty:
        return f"{topic}: {NOISE}"
    if layer in conjunctions:
        return f"{topic}: L{layer} needs all of them, so each has about 1/{len(rows)}"
    top = _largest(clear, "share")
    share = percents(top["share"])
    return f"{topic}: {phrase(top['player'])} adds most to L{layer}'s positional part, {share}"


def mean_covariance_finding(table: pd.DataFrame, layer: int | None) -> str:
    """Return which of the two terms carries the strongest layer's positional pattern."""
    rows = _of_layer(table, layer).set_index("term")
    if rows.empty or rows["share"].isna().all():
        return f"Mean and covariance terms: {NOISE}"
    for name, row in rows.iterrows():
        if row["share_low"] > MOST:
            share = percents(row["share"])
            return f"The {name} term carries {share} of L{layer}'s positional pattern"
    parts = [f"{name} term {percents(row['share'])}" for name, row in rows.iterrows()]
    return f"No term alone carries L{layer}'s positional pattern: {', '.join(parts)}"


def mean_covariance_map_finding(table: pd.DataFrame, layer: int | None) -> str:
    """Return how strong the two terms' maps are in the strongest layer."""
    rows = _of_layer(table, layer)
    sizes = [
        f"{row['term']} term {row['rms']:.2g} nats"
        if row["rms_low"] > 0
        else f"{row['term']} term within noise"
        for _, row in rows.iterrows()
    ]
    where = f"L{layer}'s {' and '.join(sizes)}" if sizes else NOISE
    return f"Maps of the mean and covariance terms: {where}"


def mask_effect_finding(non_relative: pd.DataFrame) -> str:
    """Return where the mask adds to the part of the pattern that is no function of distance."""
    topic = "Non-relative part"
    rows = non_relative[non_relative["tokens"] == non_relative["tokens"].iloc[0]]
    more, less = rows[rows["difference_low"] > 0], rows[rows["difference_high"] < 0]
    parts = []
    for verb, some in (("adds to it", more), ("takes from it", less)):
        if len(some):
            top = _largest(some, "difference")
            size = f"{top['difference']:+.2g} nats in L{top['layer']:.0f}"
            parts.append(f"{verb} in {numbered_layers(some['layer'])} (at most {size})")
    if not parts:
        return f"{topic}: the mask's effect is {NOISE}"
    return f"{topic}: the mask {listed(parts)}"


def control_finding(
    controls: pd.DataFrame, pattern: pd.DataFrame, layer: int | None, intact: str
) -> str:
    """Return how strong the strongest layer's pattern is on shuffled tokens, or with all keys.

    Args:
        controls: `controls.csv`.
        pattern: the measures of the intact model, a row per layer.
        layer: the layer with the strongest pattern, if there is one.
        intact: what the intact model keeps.
    """
    if layer is None:
        return f"Controls: the positional pattern is {NOISE} in any layer"
    whole = float(_of_layer(pattern, layer).iloc[0]["amplitude"])
    rows = _of_layer(controls[controls["kept"] == intact], layer)
    shuffled = rows[rows["tokens"] == "shuffled"]
    if shuffled.empty:
        all_keys = float(rows.iloc[0]["amplitude"])
        return f"Controls: with no key skipped L{layer} has {all_keys:.2g} nats, not {whole:.2g}"
    row = shuffled.iloc[0]
    if not row["amplitude_low"] > 0:
        return f"Controls: on shuffled tokens L{layer}'s positional pattern is {NOISE}"
    kept = percents(row["amplitude"] / whole)
    return f"Controls: on shuffled tokens L{layer}'s positional pattern is {kept} as strong"


def noisy_layers(table: pd.DataFrame, name: str, column: str) -> dict[str, list[int]]:
    """Return per item of a table the layers in which its estimate does not exceed the noise.

    Args:
        table: `layer`, the items' column, and the estimate with its bounds.
        name: the items' column.
        column: the estimate; an item is above the noise where its interval excludes zero.
    """
    low, high = table[f"{column}_low"], table[f"{column}_high"]
    flat = table[~((low > 0) | (high < 0))]
    return {
        str(item): [int(each) for each in flat[flat[name] == item]["layer"]]
        for item in table[name].unique()
    }


def _of_layer(table: pd.DataFrame, layer: int | None) -> pd.DataFrame:
    return table[table["layer"] == (-1 if layer is None else layer)]


def _largest(table: pd.DataFrame, column: str) -> pd.Series:
    """Return the row with the largest absolute value."""
    return table.iloc[int(np.argmax(table[column].abs().to_numpy(float)))]


def _terms(sources: pd.DataFrame) -> pd.DataFrame:
    return sources[sources["term"] != "position"]
