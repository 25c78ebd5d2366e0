"""The rules of verdicts against numbers: what both bounds settle, and what they leave open."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from nope_probe.analyses.verdicts import (
    Maker,
    answer_of,
    answer_table,
    answers,
    exceeds_noise,
    maker_of,
    strongest_row,
)
from nope_probe.removal import Condition

Estimate = tuple[float, float, float]


def around(value: float, half: float = 0.01) -> Estimate:
    return value, value - half, value + half


def test_a_bound_above_zero_is_asked_of_all_layers_that_were_looked_at_together() -> None:
    # Squares: 4 with a lower bound of 1.5, so 2.5 = 2.365 s at 7 degrees of freedom. The quantile
    # for two layers is 2.841 (t at .9875) and for 24 it is 4.800 (t at .99896).
    ends = 2.0, 1.5**0.5
    assert exceeds_noise(*ends, 1)
    assert exceeds_noise(*ends, 2)  # 2.5 * 2.841 / 2.365 = 3.0
    assert not exceeds_noise(*ends, 24)  # 2.5 * 4.800 / 2.365 = 5.1
    assert exceeds_noise(2.0, 3.1**0.5, 24)  # 0.9 * 2.03 = 1.8
    # Unequal folds, with fewer degrees of freedom: 1 / (.5² + 5 * .1²) - 1 = 2.33.
    assert exceeds_noise(*ends, 3)
    assert not exceeds_noise(*ends, 3, [5, 1, 1, 1, 1, 1])
    assert not exceeds_noise(-0.5, -2.0, 1)
    assert not exceeds_noise(0.0, 0.0, 1)


def test_the_shown_layer_has_the_largest_lead_of_those_with_a_pattern() -> None:
    rows = amplitudes((0, 0, around(1.2)), (1, 0, around(0.9)), (2, 0, around(0.0)))
    assert strongest_row(rows.assign(lead=[0.1, 6.2, 9.0]))["layer"] == 1, "L2 has no pattern"
    assert strongest_row(rows.assign(lead=[0.1, -6.2, 9.0]))["layer"] == 1, "whichever way it leads"
    assert strongest_row(rows.assign(lead=[2.0, 2.1, 0.0]))["layer"] == 1, "whatever its pattern"
    assert strongest_row(rows.assign(lead=np.nan))["layer"] == 0


def amplitudes(*numbers: tuple[int, int, Estimate]) -> pd.DataFrame:
    columns = ["layer", "head", "amplitude", "amplitude_low", "amplitude_high"]
    return pd.DataFrame(
        [(layer, head, *numbers) for layer, head, numbers in numbers], columns=columns
    )


def layer(half: float = 0.1, **values: float) -> dict[Condition, Estimate]:
    """Return a number by what is removed, `mask_rope` for both."""
    spelled = {
        name.replace("_", "+") if "w_" not in name else name: v for name, v in values.items()
    }
    return {Condition.parse(name): around(value, half) for name, value in spelled.items()}


@pytest.mark.parametrize(
    ("values", "maker"),
    [
        # The lead of SmolLM2's L3: without the mask the first key trails, so nothing is left of it.
        ({"intact": 6.2, "mask": -1.0, "rope": 4.0, "mask_rope": 0.0}, ("alone", "mask")),
        ({"intact": 2.6, "mask": 2.6, "rope": 0.0, "mask_rope": 0.0}, ("alone", "rope")),
        ({"intact": 2.0, "mask": 0.9, "rope": 0.9, "mask_rope": 0.9}, ("each needed", "mask rope")),
        ({"intact": 2.0, "mask": 1.1, "rope": 1.5, "mask_rope": 0.9}, ("either", "mask rope")),
        # rope-tiny's lead, and the same where the two would cancel: without all it is there.
        ({"intact": 2.5, "mask": 2.4, "rope": 3.5, "mask_rope": 3.7}, ("no source", "")),
        ({"intact": 2.0, "mask": 0.1, "rope": 0.2, "mask_rope": 1.0}, ("no source", "")),
        ({"intact": 0.1, "mask": 0.0, "rope": 0.0, "mask_rope": 0.0}, ("within noise", "")),
        # A key that trails: half of -8.2 is -4.1, and one that leads instead is lost.
        ({"intact": -8.2, "mask": -1.0}, ("alone", "mask")),
        ({"intact": -8.2, "mask": -4.2}, ("no source", "")),
        ({"intact": -8.2, "mask": 9.0}, ("alone", "mask")),
        ({"intact": 1.0, "mask": 0.5}, ("no source", "")),
        ({"intact": 1.0, "alibi": 0.1, "mask": 0.9, "mask_alibi": 0.1}, ("alone", "alibi")),
        ({"intact": 1.0}, ("no source", "")),  # a model without any source
    ],
)
def test_a_source_makes_what_is_less_than_half_without_it(
    values: dict[str, float], maker: tuple[Any, str]
) -> None:
    sources = sorted({name for removed in values for name in removed.split("_")} - {"intact"})
    found = maker_of(layer(**values), sources)
    assert found == Maker(way=maker[0], sources=tuple(maker[1].split()))


def test_of_three_sources_the_smallest_set_that_must_go_is_named() -> None:
    left = {"intact": 1.0, "mask": 0.9, "pos+embed": 0.8, "window": 0.9}
    values = {Condition.parse(x.replace("pos+", "pos_")): around(v) for x, v in left.items()}
    pairs = {("mask", "pos_embed"): 0.9, ("mask", "window"): 0.1, ("pos_embed", "window"): 0.7}
    values |= {Condition(names): around(value) for names, value in pairs.items()}
    values[Condition(["mask", "pos_embed", "window"])] = around(0.0)
    found = maker_of(values, ["window", "pos_embed", "mask"])
    assert found == Maker(way="either", sources=("mask", "window"))
    values[Condition(["window"])] = around(0.4)
    found = maker_of(values, ["window", "pos_embed", "mask"])
    assert found == Maker(way="alone", sources=("window",))


def test_layers_are_counted_where_the_number_exceeds_its_noise() -> None:
    by_rope = layer(intact=1.0, rope=0.1, mask=0.9, mask_rope=0.0) | layer(w_k=0.1, w_q=0.9)
    by_mask = layer(intact=-1.0, rope=-0.9, mask=0.1, mask_rope=0.0) | layer(w_k=-0.2, w_q=-0.9)
    noise = layer(intact=0.05, rope=0.0, mask=0.0, mask_rope=0.0) | layer(w_k=0.9, w_q=0.0)
    rope, mask = (Maker(way="alone", sources=(name,)) for name in ("rope", "mask"))
    found = answer_of([by_mask, by_rope, noise, by_rope], ["mask", "rope"])
    assert dict(found.makers) == {rope: 2, mask: 1}
    assert (found.n_layers, found.n_below_zero, found.carriers) == (3, 1, ("w_k",))
    assert found.main == {rope: 2, mask: 1}, "a third of the layers"
    found = answer_of([by_mask, *[by_rope] * 3], ["mask", "rope"])
    assert found.main == {rope: 3}, "a fourth"
    half = answer_of([by_rope, by_rope | layer(w_k=0.6)], ["mask", "rope"])
    assert half.carriers == (), "half of the layers is not most"
    kept = layer(**{"w_q+w_k": 0.9})
    assert answer_of([by_rope | kept] * 2, ["mask", "rope"]).carriers == ("w_k alone",)
    found = answer_of([by_rope | kept, by_rope | layer(**{"w_q+w_k": 0.1})], ["mask", "rope"])
    assert found.carriers == ("w_k",), "half of the layers is not most"
    with_source = answer_of([by_rope | layer(**{"rope+w_k": 0.9})], ["mask", "rope"])
    assert with_source.carriers == ("w_k",), "not a weight"
    nothing = answer_of([noise], ["mask", "rope"])
    assert (dict(nothing.makers), nothing.n_layers, nothing.carriers) == ({}, 0, ())


def test_an_answer_is_read_from_the_pattern_table_and_is_a_table_itself() -> None:
    rows = []
    for removed, replacement, lead, kept, rest in [
        ("intact", "none", -3.0, 2.0, 0.4),
        ("mask", "none", -2.0, 0.1, 0.3),
        ("w_k", "mean", -0.1, 1.9, 0.4),
        ("w_k", "zero", -3.0, 0.0, 0.0),  # another replacement does not count
        ("written", "none", -3.0, 0.2, 0.0),
        ("shuffled", "none", 0.0, 0.0, 0.0),  # nor does a control
    ]:
        row = {"layer": 7, "removed": removed, "replacement": replacement}
        # The size without the mask, 0.3, is within its noise, so nothing is left of it.
        for name, value, half in [
            ("lead", lead, 0.1),
            ("order", kept, 0.1),
            ("not_by_distance", rest, 0.35),
        ]:
            row |= {name: value, f"{name}_low": value - half, f"{name}_high": value + half}
        rows.append(row)
    conditions = ["intact", "mask", "w_k", "written"]
    table = answer_table(answers(pd.DataFrame(rows), conditions, ["mask"]))
    assert table.set_index("number").to_dict("index") == {
        "lead": of("", "no source", 1, "w_k"),
        "order": of("mask", "alone", 0, "written"),
        "not_by_distance": of("mask", "alone", 0, "written"),
    }
    without_lead = pd.DataFrame(rows).assign(lead=np.nan, order_low=-9.0, order_high=9.0)
    found = answer_table(answers(without_lead, conditions, ["mask"]))
    assert found["number"].tolist() == ["order", "not_by_distance"]
    assert found.loc[0, ["way", "layers", "of_layers"]].tolist() == ["within noise", 0, 0]


def of(made_by: str, way: str, below_zero: int, carried_by: str) -> dict[str, Any]:
    counts = {"layers": 1, "of_layers": 1, "below_zero": below_zero}
    return {"made_by": made_by, "way": way, **counts, "carried_by": carried_by}
