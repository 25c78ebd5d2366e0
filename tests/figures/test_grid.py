"""The places of panels."""

import pytest

from nope_probe.figures.grid import Grid


def test_panels_fill_the_width_and_never_overlap() -> None:
    domains = Grid(columns=3, panel=100).domains(5)
    assert domains[0][0][0] == 0
    assert domains[2][0][1] == pytest.approx(1)
    assert domains[0][0][1] < domains[1][0][0]
    assert domains[3][1][1] < domains[0][1][0], "the second row stands below the first"
