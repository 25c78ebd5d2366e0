"""The report's sections of exact splits: RoPE bands and offset profiles. They need no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from nope_probe.figures.shares import band_amplitudes, offset_profiles
from nope_probe.reports.page import Section


def band_finding(bands: pd.DataFrame) -> str:
    """Return which RoPE band has the strongest positional pattern, and in which layer."""
    title = "The positional pattern by RoPE band"
    clear = bands[bands["amplitude_low"] > 0]
    if clear.empty:
        return f"{title}: not distinguishable from noise"
    top = clear.sort_values("amplitude").iloc[-1]
    return (
        f"{title}: {top['band']} in L{top['layer']} is the strongest, {top['amplitude']:.2g} nats"
    )


def offset_finding(offsets: pd.DataFrame) -> str:
    """Return where near and far keys differ most, the nearest and farthest quarter of distances.

    They differ where the mean interval of one quarter ends before that of the other begins.
    """
    title, largest = "Scores by distance", (0.0, "near and far keys are not distinguishable")
    whole = offsets[offsets["term"].isin(["all"])]
    for layer, rows in whole.groupby("layer"):
        quarter = -(-len(rows) // 4)
        means = rows.sort_values("offset")[["mean", "mean_low", "mean_high"]].to_numpy(float)
        near, far = means[:quarter].mean(axis=0), means[-quarter:].mean(axis=0)
        step = near[0] - far[0]
        if (near[1] > far[2] or near[2] < far[1]) and abs(step) > largest[0]:
            side = "above" if step > 0 else "below"
            text = (
                f"in L{layer} the nearest quarter scores {abs(step):.2g} nats {side} the farthest"
            )
            largest = abs(step), text
    return f"{title}: {largest[1]}"


def split_sections(tables: Mapping[str, pd.DataFrame]) -> Iterator[Section]:
    """Return the page's sections of the splits."""
    if "bands" in tables:
        yield Section(
            title=band_finding(tables["bands"]),
            figure=band_amplitudes(tables["bands"]),
            caption="A score is a sum over RoPE's pairs, so its map is a sum over bands of pairs. "
            "The strength (RMS) of each band's own positional pattern; bands can cancel, and their "
            "shares of the whole pattern (in the table) add up to 1.",
            table=tables["bands"],
        )
    if "offsets" in tables:
        yield Section(
            title=offset_finding(tables["offsets"]),
            figure=offset_profiles(tables["offsets"]),
            caption="The mean over all queries and keys at each distance, of the scores and of the "
            "positional pattern (scores less each row's mean). Shaded: 95% intervals.",
        )
