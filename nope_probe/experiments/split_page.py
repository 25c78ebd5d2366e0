"""The report's sections of exact splits: RoPE bands and offset profiles. They need no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from nope_probe.figures.splits import band_amplitudes, offset_profiles
from nope_probe.reports.page import Section


def split_sections(tables: Mapping[str, pd.DataFrame]) -> Iterator[Section]:
    """Return the page's sections of the splits."""
    if "bands" in tables:
        yield Section(
            title="The positional pattern by RoPE band",
            figure=band_amplitudes(tables["bands"]),
            caption="A score is a sum over RoPE's pairs, so its map is a sum over bands of pairs. "
            "The strength (RMS) of each band's own positional pattern; bands can cancel, and their "
            "shares of the whole pattern (in the table) add up to 1.",
            table=tables["bands"],
        )
    if "offsets" in tables:
        yield Section(
            title="Scores by distance",
            figure=offset_profiles(tables["offsets"]),
            caption="The mean over all queries and keys at each distance, of the scores and of the "
            "positional pattern (scores less each row's mean). Shaded: 95% intervals.",
        )
