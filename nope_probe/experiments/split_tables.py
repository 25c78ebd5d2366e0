"""The tables of exact splits: RoPE bands and offset profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.jackknife import Intervals
from nope_probe.analyses.pattern_rows import offset_profile
from nope_probe.analyses.splits import BandPattern
from nope_probe.experiments.tables import interval_columns, interval_names

MEAN = interval_names("mean")


def bands_table(patterns: Sequence[BandPattern]) -> pd.DataFrame:
    """Return the table of bands: layer, band, its pairs and wavelengths, amplitude, share.

    `first_pair` and `last_pair` count from 0; wavelengths are in positions, amplitudes in nats. The
    unrotated rest has no pairs and no wavelengths.
    """
    rows = [
        {
            "layer": each.band.layer,
            "band": each.band.name,
            "n_pairs": len(each.band.pairs),
            "first_pair": min(each.band.pairs, default=None),
            "last_pair": max(each.band.pairs, default=None),
            "shortest_wavelength": min(each.band.wavelengths, default=None),
            "longest_wavelength": max(each.band.wavelengths, default=None),
            **interval_columns(each.amplitude, "amplitude"),
            **interval_columns(each.share),
        }
        for each in patterns
    ]
    table = pd.DataFrame(rows)
    pairs = ["first_pair", "last_pair"]
    return table.astype(dict.fromkeys(pairs, "Int64"))


def offsets_table(
    terms: Mapping[str, Float[Tensor, "fold layer query_pos key_pos"]],
    counts: Int[Tensor, " fold"],
    skip_keys: int,
) -> pd.DataFrame:
    """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

    Args:
        terms: fold maps by name, nats.
        counts: sequences per fold.
        skip_keys: how many first keys to leave out.
    """
    return profiles_table(
        {name: offset_profile(folds, skip_keys, counts=counts) for name, folds in terms.items()}
    )


def profiles_table(profiles: Mapping[str, Intervals]) -> pd.DataFrame:
    """Return the table of offset profiles from those of each term, [layer, offset]."""
    n_layers = next(iter(profiles.values())).value.shape[0]
    parts = [
        _profile_rows(profile, layer).assign(layer=layer, term=name)
        for layer in range(n_layers)
        for name, profile in profiles.items()
    ]
    return pd.concat(parts, ignore_index=True)[["layer", "term", "offset", *MEAN]]


def head_offsets_table(
    per_head: Float[Tensor, "fold layer head query_pos key_pos"],
    counts: Int[Tensor, " fold"],
    skip_keys: int,
) -> pd.DataFrame:
    """Return the table of each head's offset profile of its scores: layer, head, offset, mean."""
    profile = offset_profile(per_head, skip_keys, counts=counts)
    n_layers, n_heads = profile.value.shape[:2]
    parts = [
        _profile_rows(profile, layer, head).assign(layer=layer, head=head)
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    return pd.concat(parts, ignore_index=True)[["layer", "head", "offset", *MEAN]]


def _profile_rows(profile: Intervals, *where: int) -> pd.DataFrame:
    bounds = (profile.value, profile.low, profile.high)
    columns = {name: each[where].numpy() for name, each in zip(MEAN, bounds, strict=True)}
    return pd.DataFrame({"offset": range(1, 1 + profile.value.shape[-1]), **columns})
