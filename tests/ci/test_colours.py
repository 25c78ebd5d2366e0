"""Colours, markers and places of panels, for colour-blind readers and dark pages."""

import numpy as np
import pytest

from nope_probe.analyses.attribution import source_terms
from nope_probe.figures.names import TABLE, words_of
from nope_probe.figures.style import DIVERGING, ON_DARK, STOPS
from nope_probe.removal import INK

TOGETHER = (
    ("without_sources", "mask", "rope", "interaction"),
    ("without_sources", "mask", "pos_embed", "interaction"),
    ("without_sources", "mask", "rope", "window", "interaction"),
    ("without_sources", "mask", "alibi", "window", "interaction"),
    ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp"),
    ("mask", "pos_embed", "w_q", "w_k", "w_o", "w_v", "mlp"),
    ("mask", "rope", "qk", "ov", "mlp"),
    ("without_sources", "mask", "rope", "interaction", "written", "w_q", "w_k", "w_o", "qk"),
)
# Machado, Oliveira, Fernandes 2009, full severity, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    ),
    "deutan": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    ),
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.clip(to_xyz @ rgb, 1e-4, None) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("names", TOGETHER)
@pytest.mark.parametrize("sight", SIGHT)
def test_components_shown_together_differ_for_colour_blind_readers(
    names: tuple[str, ...], sight: str
) -> None:
    seen = {name: lab(SIGHT[sight] @ linear(TABLE[name].colour)) for name in names}
    for index, one in enumerate(names):
        for other in names[:index]:
            same_marker = TABLE[one].marker == TABLE[other].marker
            assert not same_marker, (one, other)
            assert np.linalg.norm(seen[one] - seen[other]) > 10, (one, other)


def test_the_terms_of_a_model_with_a_window_differ_by_marker() -> None:
    terms = [*source_terms(["mask", "rope", "window"])][:-1]
    assert len({words_of(name).marker for name in terms}) == len(terms) == 7


@pytest.mark.parametrize("paper", ["#ffffff", "#14161a"])
def test_every_component_stands_out_on_light_and_dark_paper(paper: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    for name, entry in TABLE.items():
        if entry.colour != INK:
            light, dark = sorted([weights @ linear(entry.colour), weights @ linear(paper)])[::-1]
            assert (light + 0.05) / (dark + 0.05) >= 3, name


@pytest.mark.parametrize(
    ("stops", "zero_is"), [("diverging", "light"), ("divergingOnDark", "dark")]
)
def test_signed_colours_leave_their_paper_on_both_sides_of_zero(stops: str, zero_is: str) -> None:
    lightness = [lab(linear(stop))[0] for stop in STOPS[stops]]
    below, above = lightness[5::-1], lightness[5:]
    for side in (below, above):
        steps = np.diff(side) * (-1 if zero_is == "light" else 1)
        assert (steps > 5).all()
    np.testing.assert_allclose(below, above, atol=10)  # neither sign is the louder one
    assert lightness[5] < 10 if zero_is == "dark" else lightness[5] > 95


def test_a_dark_screen_replaces_each_signed_colour_by_that_of_the_same_value() -> None:
    dark = [ON_DARK[stop] for _, stop in DIVERGING]
    assert dark == STOPS["divergingOnDark"]
    assert not ON_DARK.keys() & set(ON_DARK.values())  # else one would be replaced twice
