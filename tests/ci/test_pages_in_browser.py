"""The pages of all commands in a browser: every figure is drawn, and every switch is there."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ci.chromium import needs_chromium, opened
from ci.test_pages import LINES
from support.finished_runs import Finished

from nope_probe.figures.maps import term_maps
from nope_probe.reports.page import Headline, Report, Section
from nope_probe.run.manifest import Manifest


@needs_chromium
@pytest.mark.parametrize("name", LINES)
def test_a_browser_draws_every_figure_without_an_error(
    name: str, finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    elements = opened(finished(LINES[name]).page, tmp_path, height=12000)
    assert 'class="plot js-plotly-plot"' in elements
    hidden = r"<(details|script)\b.*?</\1>"
    unfolded = re.sub(hidden, "", elements, flags=re.DOTALL)
    assert '<div class="plot"' not in unfolded, "one is not drawn"


@needs_chromium
def test_a_folded_figure_is_drawn_when_its_section_is_opened_by_hand_or_by_a_link(
    tmp_path: Path,
) -> None:
    figure = term_maps({"mask": np.ones((3, 5, 5))}, title="maps")
    folded = {"caption": "c", "figure": figure, "folded": True}
    sections = [Section(title=name, **folded) for name in ("by hand", "by link", "never")]
    script = """<script>
      const inMain = [...document.querySelectorAll("main [id^=section-] .fold")];
      const widths = () => inMain.map((fold) => {
        const svg = fold.querySelector(".plot .main-svg");
        return svg ? svg.clientWidth - fold.clientWidth : "none";
      }).join(" ");
      document.body.dataset.before = widths();
      inMain[0].open = true;
      location.hash = "#section-1";
      setInterval(() => { document.body.dataset.after = widths(); }, 100);
    </script></body>"""
    shown = Report(title="title", headline=Headline(sentence="headline"), sections=sections)
    html = shown.html(Manifest()).replace("</body>", script)
    elements = opened(html, tmp_path, draw_all=False)
    assert 'data-before="none none none"' in elements
    assert 'data-after="0 0 none"' in elements


@needs_chromium
@pytest.mark.parametrize("name", ["rope", "circuit", "behaviour"])
def test_on_a_narrow_screen_panels_stand_below_each_other_and_nothing_is_wider(
    name: str, finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    script = """<script>
      for (const fold of document.querySelectorAll(".fold")) fold.open = true;
      dispatchEvent(new Event("beforeprint"));
      setInterval(() => {
        const panels = [...document.querySelectorAll(".plot")].map((plot) => {
          const layout = plot.layout || {};
          const domains = Object.keys(layout).filter((key) => /^yaxis/.test(key))
            .map((key) => layout[key].domain);
          const sorted = domains.sort((one, other) => one[0] - other[0]);
          const apart = sorted.every((one, at) => at === 0 || one[0] >= sorted[at - 1][1]);
          const widths = Object.keys(layout).filter((key) => /^xaxis/.test(key))
            .map((key) => layout[key].domain[1] - layout[key].domain[0]);
          return domains.length && apart && widths.every((width) => width > 0.9);
        });
        document.body.dataset.stacked = panels.every(Boolean) + " " + panels.length;
        const root = document.documentElement;
        document.body.dataset.wider = root.scrollWidth - root.clientWidth;
      }, 100);
    </script></body>"""
    html = finished(LINES[name]).page
    elements = opened(html.replace("</body>", script), tmp_path, width=500, draw_all=False)
    assert f'data-stacked="true {html.count("<figure>")}"' in elements
    assert 'data-wider="0"' in elements
