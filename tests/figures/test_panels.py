"""Groups of maps side by side: their places, scales and bars."""

from pathlib import Path

import numpy as np
from support.chromium import needs_chromium, opened

from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.reports.page import Section, page


def group(layer: int, top: float = 1.0) -> list[Panel]:
    values = np.full((5, 5), float(layer))
    return [
        Panel(name=f"L{layer}", values=values, low=0.0, high=top),
        Panel(name="ours", values=values, low=0.0, high=top),
        Panel(name="difference", values=values, low=-2.0, high=2.0, unit="steps", diverging=True),
    ]


def bars(figure) -> list[bool]:
    axes = [figure.layout[f"coloraxis{i or ''}"] for i in (0, *range(2, len(figure.data) + 1))]
    return [each.showscale for each in axes]


def test_groups_on_the_same_scales_share_a_bar_each_in_the_last_row() -> None:
    figure = panel_groups([group(layer) for layer in range(3)], title="title")
    assert bars(figure) == [False] * 6 + [True, False, True]
    narrow = figure.layout.meta["narrow"]
    assert [narrow[f"coloraxis{i}.showscale"] for i in ("", 3, 7, 9)] == [False, False, True, True]


def test_groups_on_scales_of_their_own_have_bars_of_their_own() -> None:
    figure = panel_groups([group(0), group(1, top=3.0)], title="title")
    assert bars(figure) == [True, False, True] * 2
    assert figure.layout.coloraxis4.cmax == 3.0
    assert list(figure.layout.coloraxis4.colorbar.ticktext) == ["0", "1.5", "3"]
    pooled = Panel(name="pooled", values=np.zeros((4, 4)), low=-0.0, high=1.0, positions=40)
    figure = panel_groups([[pooled]], title="title")
    assert (figure.data[0].x0, figure.data[0].dx) == (4.5, 10.0), "it spans all positions"
    assert list(figure.layout.coloraxis.colorbar.ticktext) == ["0", "0.5", "1"], "no minus zero"


@needs_chromium
def test_a_browser_draws_groups_without_a_word_on_the_console(tmp_path: Path) -> None:
    figure = panel_groups([group(0), group(1)], title="title")
    section = Section(title="Maps", caption="caption", figure=figure)
    elements = opened(page("title", ["headline"], [section], {}), tmp_path)
    assert elements.count('class="heatmaplayer') == 6
