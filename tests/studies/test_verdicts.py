"""The rules of verdicts against numbers: what both bounds settle, and what they leave open."""

import numpy as np
import pandas as pd
import pytest

from nope_probe.analyses.verdicts import exceeds_noise, main_writers, most_of
from nope_probe.studies.tidy import strongest_row

Estimate = tuple[float, float, float]


def around(value: float, half: float = 0.01) -> Estimate:
    return value, value - half, value + half


@pytest.mark.parametrize(
    ("shares", "most"),
    [
        (
            {"rotation": around(0.55), "written": around(0.95), "covariance": around(-0.5)},
            "written",
        ),
        ({"rotation": around(0.6, 2.6), "written": around(0.4, 2.6)}, None),
        ({"rotation": around(0.55, 0.06), "written": around(0.45)}, None),
        ({"rotation": around(0.8, 0.2), "written": around(0.7, 0.1)}, None),
        ({"rotation": around(0.51, 0.0), "written": around(0.49)}, "rotation"),
        ({"rotation": around(1.03)}, "rotation"),
        ({"rotation": around(np.nan), "written": around(np.nan)}, None),
    ],
)
def test_a_term_is_most_of_the_pattern_where_it_surely_exceeds_half_and_every_other(
    shares: dict[str, Estimate], most: str | None
) -> None:
    assert most_of(shares) == most
    assert most_of(dict(reversed(shares.items()))) == most, "whatever the order"


def test_a_writer_is_main_by_its_keys_and_queries_together_and_by_its_lower_bound() -> None:
    both = around(-0.05, 0.05)
    shares = {
        "cancels": both,
        "clear": around(0.8, 0.1),  # the lower bound is 0.7, half of it 0.35
        "half": around(0.4, 0.05),
        "below": around(0.4, 0.06),
        "noise": around(2.0, 2.5),
        "against": around(-0.9),
    }
    assert main_writers(shares) == ["clear", "half"]
    assert main_writers({"noise": shares["noise"], "cancels": both}) == []
    assert main_writers({}) == []


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


def test_the_strongest_layer_is_that_of_lead_and_pattern_together() -> None:
    rows = amplitudes((0, 0, around(1.2)), (1, 0, around(0.9)), (2, 0, around(0.0)))
    assert strongest_row(rows.assign(lead=[0.1, 6.2, 9.0]))["layer"] == 1, "L2 has no pattern"
    assert strongest_row(rows.assign(lead=[0.1, -6.2, 9.0]))["layer"] == 1, "whichever way it leads"
    assert strongest_row(rows.assign(lead=np.nan))["layer"] == 0


def amplitudes(*numbers: tuple[int, int, Estimate]) -> pd.DataFrame:
    columns = ["layer", "head", "amplitude", "amplitude_low", "amplitude_high"]
    return pd.DataFrame(
        [(layer, head, *numbers) for layer, head, numbers in numbers], columns=columns
    )
