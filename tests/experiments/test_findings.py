"""The headings of the ablate page: each rule against small tables, clear ones and noise."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.ablation import player_sections, sections
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


def test_the_source_of_most_of_the_strongest_layer_is_named_with_its_share() -> None:
    table = shares((1, "content", SMALL), (1, "mask", CLEAR), (1, "position", CLEAR))
    assert (
        sections.source_finding(table, 1) == "The causal mask brings 90% of L1's positional pattern"
    )


def test_no_source_is_named_where_its_interval_reaches_below_a_half() -> None:
    table = shares((1, "mask", (0.6, 0.4, 0.8)), (1, "rope", (0.4, 0.2, 0.6)))
    assert sections.source_finding(table, 1) == (
        "No source alone brings most of L1's positional pattern: the causal mask 60%, RoPE 40%"
    )


def test_without_a_pattern_above_the_noise_the_heading_says_so() -> None:
    empty = pd.DataFrame({"layer": [0], "term": ["mask"], "share": [np.nan]})
    assert "not distinguishable from noise" in sections.source_finding(empty, None)
    assert "not distinguishable from noise" in sections.control_finding(empty, empty, None, "all")


def test_layers_are_grouped_by_the_source_that_brings_most() -> None:
    table = shares(
        *((layer, "rope", CLEAR) for layer in (0, 1, 2)),
        (3, "mask", CLEAR),
        (4, "mask", NOISY),
        (5, "mask", NONE),
    )
    assert sections.layers_finding(table) == (
        "Most of the positional pattern comes from RoPE in L0 to L2; the causal mask in L3; no "
        "source alone in L4; L5 has no pattern above the noise"
    )
    assert sections.layers_finding(shares((0, "mask", NONE))) == NO_PATTERN


def lost(*given: tuple[str, Estimate]) -> pd.DataFrame:
    return rows("lost", *((1, "player", player, each) for player, each in given))


def test_what_a_layer_keeps_without_its_players_is_one_less_what_it_loses() -> None:
    table = lost(("rope", SMALL), ("mask", (0.95, 0.9, 0.99)), ("qk", (0.4, 0.2, 0.6)))
    assert player_sections.player_finding(table, 1, "circuits") == (
        "Circuits: without the causal mask L1 keeps 5% of its positional part, without the "
        "query-key circuit (W_Q with W_K) 60%"
    )


def test_a_layer_that_loses_more_than_all_keeps_nothing() -> None:
    heading = player_sections.player_finding(lost(("mask", (1.2, 1.1, 1.3))), 1, "players")
    assert heading == "Players: without the causal mask L1 keeps 0% of its positional part"


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (NOISY, "Players: L1's positional part needs none of them"),
        (NONE, "Players: what the positional part needs is not distinguishable from noise"),
    ],
)
def test_players_within_noise_are_not_called_needed(estimate: Estimate, expected: str) -> None:
    assert player_sections.player_finding(lost(("mask", estimate)), 1, "players") == expected


@pytest.mark.parametrize(
    ("estimate", "ending"),
    [
        (CLEAR, "mask + RoPE bring 90% of L1's positional part only together"),
        ((-0.5, -0.7, -0.3), "mask + RoPE together take 50% off L1's positional part"),
        (NOISY, "not distinguishable from noise"),
    ],
)
def test_interactions_add_take_or_are_noise(estimate: Estimate, ending: str) -> None:
    table = rows("share", (1, "players", "mask+rope", estimate), (1, "players", "a+b", NOISY))
    assert player_sections.interaction_finding(table, 1, "players") == (
        f"Interactions of the players: {ending}"
    )


def test_mean_and_covariance_terms() -> None:
    table = shares((1, "mean", CLEAR), (1, "covariance", SMALL))
    heading = "The mean term carries 90% of L1's positional pattern"
    assert sections.mean_covariance_finding(table, 1) == heading
    assert "not distinguishable" in sections.mean_covariance_finding(shares((1, "mean", NONE)), 1)


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
    assert sections.mask_effect_finding(table) == (
        "Non-relative part: the mask adds to it in L1 (at most +0.2 nats in L1) and takes from it "
        "in L2 (at most -0.4 nats in L2)"
    )
    assert sections.mask_effect_finding(table[:1]).endswith("not distinguishable from noise")


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
    heading = sections.control_finding(pd.DataFrame([row]), pattern, 1, "all")
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
