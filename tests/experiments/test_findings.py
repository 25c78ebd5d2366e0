"""The headings of the pages: each rule against small tables, clear ones and noise."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from nope_probe.experiments.ablation import player_sections as players
from nope_probe.experiments.ablation import sections as ablation
from nope_probe.experiments.behaviour import sections as behaviour
from nope_probe.experiments.circuit import sections as circuit
from nope_probe.experiments.scores import sections as scores
from nope_probe.experiments.sections import (
    NO_PATTERN,
    NOISE,
    band_finding,
    measure_finding,
    noisy_layers,
    offset_finding,
    query_finding,
)
from nope_probe.experiments.simulation import sections as simulation
from nope_probe.figures.curves import Curves

Estimate = tuple[float, float, float]
CLEAR = (0.9, 0.8, 1.0)
MINUS = (-0.5, -0.7, -0.3)
SMALL = (0.05, 0.02, 0.08)
NOISY = (0.3, -0.1, 0.7)
NONE = (np.nan, np.nan, np.nan)


def cells(column: str, estimate: Estimate) -> dict[str, float]:
    return dict(zip((column, f"{column}_low", f"{column}_high"), estimate, strict=True))


def rows(column: str, item: str, *given: tuple[int, str, Estimate]) -> pd.DataFrame:
    """A table of one estimate: each row a layer, an item and its numbers."""
    return pd.DataFrame(
        [{"layer": layer, item: name, **cells(column, numbers)} for layer, name, numbers in given]
    )


def shares(*given: tuple[int, str, Estimate]) -> pd.DataFrame:
    return rows("share", "term", *given)


def source(*given: tuple[str, Estimate]) -> str:
    return ablation.source_finding(shares(*((1, *term) for term in given)), 1)


def lost(*given: tuple[str, Estimate]) -> str:
    table = rows("lost", "player", *((1, *player) for player in given))
    kinds = table.groupby("player").cumcount().map({0: "identity", 1: "mean"})
    return players.player_finding(table.assign(replacement=kinds), 1, "circuits")


def interaction(estimate: Estimate) -> str:
    table = rows("share", "players", (1, "mask+rope", estimate), (1, "a+b", NOISY))
    return players.interaction_finding(table, 1, "players")


LAYERS = shares(
    *((layer, "rope", CLEAR) for layer in (0, 1, 2)),
    *((3, "mask", CLEAR), (4, "mask", NOISY), (5, "mask", NONE)),
)
MEASURES = pd.concat(
    [
        rows("locality", "kept", (0, "", CLEAR), (1, "", MINUS), (2, "", NOISY), (3, "", CLEAR)),
        rows(
            "amplitude", "kept", (0, "", CLEAR), (1, "", CLEAR), (2, "", CLEAR), (3, "", NOISY)
        ).drop(columns=["layer", "kept"]),
    ],
    axis=1,
)
EFFECTS = rows(
    "difference",
    "tokens",
    *((0, "text", NOISY), (1, "text", (0.2, 0.1, 0.3)), (2, "text", MINUS)),
    (3, "shuffled", CLEAR),
)
TERMS = shares((1, "mean", CLEAR), (1, "covariance", SMALL))
BANDS = rows(
    "amplitude", "band", (0, "4 to 8", SMALL), (2, "8 to 16", CLEAR), (3, "1 to 2", (2.0, -1.0, 5))
)
HEADINGS = (
    (source(("mask", CLEAR), ("position", CLEAR)), "causal mask brings 90% of L1's"),
    (
        source(("mask", (0.6, 0.4, 0.8)), ("rope", (0.4, 0.2, 0.6))),
        "No source alone .*L1's .*mask 60%, RoPE 40%",
    ),
    (ablation.source_finding(shares((0, "mask", NONE)), None), NO_PATTERN),
    (
        ablation.layers_finding(LAYERS),
        "RoPE in L0 to L2; the causal mask in L3; no source alone in L4; L5 has no pattern",
    ),
    (ablation.layers_finding(shares((0, "mask", NONE))), NO_PATTERN),
    (
        lost(("rope", SMALL), ("mask", (0.95, 0.9, 0.99)), ("qk", (0.4, 0.2, 0.6))),
        r"Circuits: L1's .* loses 95% without the causal mask, 40% \(identity\) without .*W_K\)$",
    ),
    (
        lost(("qk", CLEAR), ("ov", CLEAR), ("w_o", SMALL), ("qk", MINUS), ("ov", (0.4, 0.2, 0.6))),
        r"loses 90% \(identity\) or 40% \(mean\) without the value-output circuit \(W_V with "
        r"W_O\); identity and mean disagree on the query-key circuit \(W_Q with W_K\)$",
    ),
    (lost(("mask", SMALL)), "L1's positional part needs none of them"),
    (
        lost(("rope", CLEAR), ("mask", NOISY)),
        "L1's positional part loses 90% without RoPE; whether L1 needs the causal mask is unclear$",
    ),
    (lost(("mask", NOISY)), "Circuits: whether L1 needs the causal mask is unclear$"),
    (lost(("mask", NONE)), NOISE),
    (interaction(CLEAR), r"mask \+ RoPE bring 90% of L1's .*only together"),
    (interaction(MINUS), r"mask \+ RoPE together take 50% off L1's"),
    (interaction(NOISY), NOISE),
    (ablation.mean_covariance_finding(TERMS, 1), "mean term carries 90% of L1's"),
    (ablation.mean_covariance_finding(shares((1, "mean", NONE)), 1), NOISE),
    (measure_finding(MEASURES), "near keys in L0, far keys in L1, neither .* in L2$"),
    (
        ablation.mask_effect_finding(EFFECTS),
        r"adds to it in L1 \(at most \+0.2 nats in L1\) and takes from it in L2 \(at most -0.5 ",
    ),
    (ablation.mask_effect_finding(EFFECTS[:1]), NOISE),
    (band_finding(BANDS), "8 to 16 in L2 is the strongest, 0.9 nats"),
)


@pytest.mark.parametrize(("heading", "expected"), HEADINGS)
def test_a_heading_names_what_its_interval_makes_clear(heading: str, expected: str) -> None:
    assert pd.Series([heading]).str.contains(expected).all(), heading


@pytest.mark.parametrize(
    ("tokens", "estimate", "ending"),
    [
        (
            "shuffled",
            (0.45, 0.4, 0.5),
            "on shuffled tokens L1's positional pattern is 50% as strong",
        ),
        ("shuffled", NOISY, NOISE),
        ("text", (0.45, 0.4, 0.5), "with all keys L1's locality is +0.45, not +0.9"),
    ],
)
def test_controls(tokens: str, estimate: Estimate, ending: str) -> None:
    pattern = rows("amplitude", "kept", (1, "all", CLEAR))
    controls = rows("amplitude", "tokens", (1, tokens, estimate)).assign(kept="all")
    for table in (pattern, controls):
        table["locality"] = table["amplitude"]
    assert ablation.control_finding(controls, pattern, 1, "all").endswith(ending)


def test_items_within_noise_are_listed_by_layer() -> None:
    table = shares((0, "mask", CLEAR), (1, "mask", NOISY), (1, "rope", NONE), (2, "rope", SMALL))
    assert noisy_layers(table, "term", "share") == {"mask": [1], "rope": [1]}


def test_near_and_far_quarters_of_distances_are_compared() -> None:
    falling = [(1.0, 0.9, 1.1), (0.5, 0.4, 0.6), (0.0, -0.1, 0.1), (-1.0, -1.1, -0.9)]
    table = rows("mean", "term", *((0, "all", estimate) for estimate in falling))
    offsets = table.assign(offset=range(1, 5))
    assert offset_finding(offsets).endswith(
        "L0 the nearest quarter scores 2 nats above the farthest"
    )
    wide = offsets.assign(mean_low=-9.0, mean_high=9.0)
    assert offset_finding(wide).endswith("near and far keys are not distinguishable")


def test_the_drawn_model_is_the_ablated_one() -> None:
    intact = rows("locality", "stage", (0, "c", CLEAR), (0, "g", CLEAR)).assign(model="intact")
    ablated = rows("locality", "stage", (0, "c", CLEAR), (0, "g", MINUS)).assign(model="ablated")
    both = pd.concat([intact, ablated])
    assert circuit.flow_finding(both, ()) == "Near keys have larger values at (c) and (g)"
    assert circuit.flow_finding(both, ("mask",)) == (
        "Near keys have larger values at (c); far keys have larger values at (g)"
    )


@pytest.mark.parametrize(("worst", "where"), [(0, "L0 at alpha = 0"), (3, "L1 at alpha = 0.2")])
def test_the_simulation_names_the_worst_gap(worst: int, where: str) -> None:
    table = pd.DataFrame({"alpha": [0.0, 0.0, 0.2, 0.2], "layer": [0, 1, 0, 1]})
    table["gap_rms"] = [0.03 if row == worst else 0.001 for row in range(4)]
    assert simulation.gap_finding(table).endswith(f"0.03 nats RMS at most, in {where}")


def test_what_is_no_function_of_distance_is_named_where_it_exceeds_its_noise() -> None:
    maps = np.full((2, 3, 3), 0.5)
    maps[1] = -1.3
    quiet, loud = np.full((2, 3, 3), 0.5), np.full((2, 3, 3), 2.0)
    clear = simulation.rest_finding({"a": maps, "b": maps / 2}, {"a": quiet, "b": quiet})
    assert "1.2 nats RMS are no function of " in clear
    assert clear.endswith("in L1 at a")
    assert "beyond the noise" in simulation.rest_finding({"a": maps}, {"a": loud})


LAST_ROW = np.arange(1.0, 6.0)[None]
CURVES = Curves(
    x=np.arange(5.0),
    values=LAST_ROW,
    errors=np.full((1, 5), 0.5),
    theory=LAST_ROW + np.array([0.4, -0.4, 0.6, 0.0, 9.0]),
)
FLAT = pd.DataFrame({"layer": range(4), "verdict": ["flat", *["increasing"] * 3]})


def test_agreement_with_theory_is_told_beside_what_chance_would_give() -> None:
    text = simulation.expected_agreement([CURVES], 61)
    assert text.startswith("3 of 5 scores (60%) are within two standard errors of theory; about 5 ")
    assert "at d = 61 its own error, which shrinks as 1/d, exceeds the noise" in text
    exact = replace(CURVES, theory=CURVES.values)
    assert "exact only as" not in simulation.expected_agreement([exact], 61)


def test_what_is_0_in_every_head_is_largest_in_none() -> None:
    tiny = pd.DataFrame([{"layer": 0, "head": 3, **cells("induction", (2e-32, 1e-32, 3e-32))}])
    assert scores.head_finding(tiny, "induction").endswith("is 0 in every head")
    some = pd.DataFrame([{"layer": 0, "head": 3, **cells("induction", CLEAR)}])
    assert scores.head_finding(some, "induction").endswith("largest in L0H3, 0.9")


def test_empty_rows_of_behaviour_are_explained_once_for_each_reason() -> None:
    sight, copy = "the next token is in sight", "the first copy is in sight"
    given = [("loss", "mask", sight), ("in_context", "mask", sight), ("copy_text", "mask", copy)]
    table = pd.DataFrame(
        [
            {"measure": "loss", "condition": "rope", "difference": 1.0},
            {"measure": "loss", "condition": "intact", "difference": np.nan, "note": sight},
            *(
                {"measure": measure, "condition": name, "difference": np.nan, "note": note}
                for measure, name, note in given
            ),
        ]
    )
    assert [*behaviour._empty_rows(table)] == [
        "The rows without causal mask are empty at “loss” and “in-context gain”: the next token is "
        "in sight.",
        "The rows without causal mask are empty at “copy, text”: the first copy is in sight.",
    ]


@pytest.mark.parametrize(
    ("heading", "ending"),
    [
        (simulation.layers_finding("a", FLAT), "scores of L1 to L3 depend on distance"),
        (simulation.layers_finding("a", FLAT[:1]), "no score depends on distance"),
        (simulation.row_finding([CURVES]), "theory and simulation differ by 4 nats RMS"),
    ],
)
def test_headings_of_a_simulation_name_layers_and_numbers(heading: str, ending: str) -> None:
    assert heading.endswith(ending)


def test_the_first_and_the_last_queries_of_the_strongest_layer_are_named() -> None:
    queries = pd.DataFrame(
        [(1, 3, 3, 0.43), (1, 4, 7, 3.2), (2, 3, 3, 0.1), (2, 4, 7, 0.2)],
        columns=["layer", "query", "last_query", "rms"],
    ).assign(rms_low=0.05)
    title = "The positional pattern by the query's position"
    sentence = f"{title}: in L1 0.43 nats RMS at query 3, 3.2 nats RMS at queries 4 to 7"
    assert query_finding(queries) == sentence
    noise = queries.assign(rms_low=-0.1)
    assert query_finding(noise) == f"{title}: not distinguishable from noise"
