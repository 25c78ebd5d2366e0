"""The headings of the ablate page: each rule against small tables, clear ones and noise."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.ablation.player_sections import interaction_finding, player_finding
from nope_probe.experiments.ablation.sections import (
    control_finding,
    layers_finding,
    mask_effect_finding,
    mean_covariance_finding,
    source_finding,
)
from nope_probe.experiments.sections import band_finding, offset_finding
from nope_probe.experiments.wording import NO_PATTERN, measure_finding, noisy_layers

Estimate = tuple[float, float, float]


def cells(column: str, estimate: Estimate) -> dict[str, float]:
    return dict(zip((column, f"{column}_low", f"{column}_high"), estimate, strict=True))


def rows(column: str, *given: tuple[int, str, str, Estimate]) -> pd.DataFrame:
    """A table of one estimate: each row a layer, the items' column, the item, its numbers."""
    return pd.DataFrame(
        [{"layer": layer, name: item, **cells(column, each)} for layer, name, item, each in given]
    )


def shares(*given: tuple[int, str, Estimate]) -> pd.DataFrame:
    return rows("share", *((layer, "term", term, each) for layer, term, each in given))


CLEAR = (0.9, 0.8, 1.0)
SMALL = (0.05, 0.02, 0.08)
NOISY = (0.3, -0.1, 0.7)
NONE = (np.nan, np.nan, np.nan)


def lost(*given: tuple[str, Estimate]) -> pd.DataFrame:
    return rows("lost", *((1, "player", player, each) for player, each in given))


def interaction(estimate: Estimate) -> pd.DataFrame:
    return rows("share", (1, "players", "mask+rope", estimate), (1, "players", "a+b", NOISY))


LAYERS = shares(
    *((layer, "rope", CLEAR) for layer in (0, 1, 2)),
    *((3, "mask", CLEAR), (4, "mask", NOISY), (5, "mask", NONE)),
)
MANY = lost(("rope", SMALL), ("mask", (0.95, 0.9, 0.99)), ("qk", (0.4, 0.2, 0.6)))
HEADINGS = (
    (
        source_finding(shares((1, "mask", CLEAR), (1, "position", CLEAR)), 1),
        "The causal mask brings 90% of L1's positional pattern",
    ),
    (
        source_finding(shares((1, "mask", (0.6, 0.4, 0.8)), (1, "rope", (0.4, 0.2, 0.6))), 1),
        "No source alone brings most of L1's positional pattern: the causal mask 60%, RoPE 40%",
    ),
    (source_finding(shares((0, "mask", NONE)), None), NO_PATTERN),
    (
        layers_finding(LAYERS),
        "Most of the positional pattern comes from RoPE in L0 to L2; the causal mask in L3; no "
        "source alone in L4; L5 has no pattern above the noise",
    ),
    (layers_finding(shares((0, "mask", NONE))), NO_PATTERN),
    (
        player_finding(MANY, 1, "circuits"),
        "Circuits: without the causal mask L1 keeps 5% of its positional part, without the "
        "query-key circuit (W_Q with W_K) 60%",
    ),
    (
        player_finding(lost(("mask", (1.2, 1.1, 1.3))), 1, "players"),
        "Players: without the causal mask L1 keeps 0% of its positional part",
    ),
    (
        player_finding(lost(("mask", NOISY)), 1, "players"),
        "Players: L1's positional part needs none of them",
    ),
    (
        player_finding(lost(("mask", NONE)), 1, "players"),
        "Players: what the positional part needs is not distinguishable from noise",
    ),
    (
        interaction_finding(interaction(CLEAR), 1, "players"),
        "Interactions of the players: mask + RoPE bring 90% of L1's positional part only together",
    ),
    (
        interaction_finding(interaction((-0.5, -0.7, -0.3)), 1, "players"),
        "Interactions of the players: mask + RoPE together take 50% off L1's positional part",
    ),
    (
        interaction_finding(interaction(NOISY), 1, "players"),
        "Interactions of the players: not distinguishable from noise",
    ),
    (
        mean_covariance_finding(shares((1, "mean", CLEAR), (1, "covariance", SMALL)), 1),
        "The mean term carries 90% of L1's positional pattern",
    ),
    (
        mean_covariance_finding(shares((1, "mean", NONE)), 1),
        "Mean and covariance terms: not distinguishable from noise",
    ),
)


@pytest.mark.parametrize(("heading", "expected"), HEADINGS)
def test_a_heading_names_what_its_interval_makes_clear(heading: str, expected: str) -> None:
    assert heading == expected


def test_preferences_count_only_layers_with_a_pattern() -> None:
    localities = [CLEAR, (-0.5, -0.6, -0.4), NOISY, CLEAR]
    amplitudes = [CLEAR, CLEAR, CLEAR, NOISY]
    table = pd.DataFrame(
        [
            {"layer": layer, **cells("locality", each), **cells("amplitude", amplitudes[layer])}
            for layer, each in enumerate(localities)
        ]
    )
    assert measure_finding(table) == (
        "Measures: attention prefers near keys in L0, far keys in L1, neither near nor far keys "
        "in L2"
    )


def test_the_masks_effect_is_named_where_its_interval_leaves_zero_out() -> None:
    table = rows(
        "difference",
        (0, "tokens", "text", NOISY),
        (1, "tokens", "text", (0.2, 0.1, 0.3)),
        (2, "tokens", "text", (-0.4, -0.5, -0.3)),
        (3, "tokens", "shuffled", CLEAR),
    )
    assert mask_effect_finding(table) == (
        "Non-relative part: the mask adds to it in L1 (at most +0.2 nats in L1) and takes from it "
        "in L2 (at most -0.4 nats in L2)"
    )
    assert mask_effect_finding(table[:1]).endswith("not distinguishable from noise")


@pytest.mark.parametrize(
    ("tokens", "estimate", "ending"),
    [
        (
            "shuffled",
            (0.45, 0.4, 0.5),
            "on shuffled tokens L1's positional pattern is 50% as strong",
        ),
        ("shuffled", NOISY, "pattern is not distinguishable from noise"),
        ("text", (0.45, 0.4, 0.5), "with no key skipped L1 has 0.45 nats, not 0.9"),
    ],
)
def test_controls(tokens: str, estimate: Estimate, ending: str) -> None:
    pattern = pd.DataFrame([{"layer": 1, **cells("amplitude", CLEAR)}])
    row = {"layer": 1, "tokens": tokens, "kept": "all", **cells("amplitude", estimate)}
    heading = control_finding(pd.DataFrame([row]), pattern, 1, "all")
    assert heading.startswith("Controls: ")
    assert heading.endswith(ending)


def test_items_within_noise_are_listed_by_layer() -> None:
    table = shares((0, "mask", CLEAR), (1, "mask", NOISY), (1, "rope", NONE), (2, "rope", SMALL))
    assert noisy_layers(table, "term", "share") == {"mask": [1], "rope": [1]}


def test_bands_and_distances() -> None:
    bands = pd.DataFrame(
        [
            {"layer": 0, "band": "4 to 8", **cells("amplitude", SMALL)},
            {"layer": 2, "band": "8 to 16", **cells("amplitude", CLEAR)},
            {"layer": 3, "band": "1 to 2", **cells("amplitude", (2.0, -1.0, 5.0))},
        ]
    )
    assert band_finding(bands).endswith("8 to 16 in L2 is the strongest, 0.9 nats")
    falling = [(1.0, 0.9, 1.1), (0.5, 0.4, 0.6), (0.0, -0.1, 0.1), (-1.0, -1.1, -0.9)]
    offsets = pd.DataFrame(
        [
            {"layer": 0, "term": term, "offset": 1 + at, **cells("mean", each)}
            for term in ("all", "score")
            for at, each in enumerate(falling)
        ]
    )
    assert offset_finding(offsets).endswith(
        "in L0 the nearest quarter scores 2 nats above the farthest"
    )
    wide = offsets.assign(mean_low=-9.0, mean_high=9.0)
    assert offset_finding(wide).endswith("near and far keys are not distinguishable")
