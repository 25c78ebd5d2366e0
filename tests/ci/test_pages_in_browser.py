"""Pages and figures in a browser: all is drawn as it is meant, and clicks do what they say."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from ci.chromium import needs_chromium, opened, told
from ci.test_pages import LINES
from support.command_line import run_command
from support.finished_runs import Finished
from support.maps import triangle

from nope_probe import attention, figures, read_run, run_attention, text_view
from nope_probe.figures.maps import term_maps, without_controls
from nope_probe.reports.page import Headline, Report, Section
from nope_probe.run.manifest import Manifest

pytestmark = needs_chromium


@pytest.mark.parametrize("name", LINES)
def test_a_browser_draws_every_figure_without_an_error(
    name: str, finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    elements = opened(finished(LINES[name]).page, tmp_path, height=12000)
    assert 'class="plot js-plotly-plot"' in elements
    hidden = r"<(details|script)\b.*?</\1>"
    unfolded = re.sub(hidden, "", elements, flags=re.DOTALL)
    assert '<div class="plot"' not in unfolded, "one is not drawn"


def test_a_folded_figure_is_drawn_when_its_section_is_opened_by_hand_or_by_a_link(
    tmp_path: Path,
) -> None:
    figure = term_maps({"mask": np.ones((3, 5, 5))}, title="maps")
    folded = {"caption": "c", "figure": figure, "folded": True}
    sections = [Section(title=name, **folded) for name in ("by hand", "by link", "never")]
    script = """
      const inMain = [...document.querySelectorAll("main [id^=section-] .fold")];
      const widths = () => inMain.map((fold) => {
        const svg = fold.querySelector(".plot .main-svg");
        return svg ? svg.clientWidth - fold.clientWidth : "none";
      }).join(" ");
      document.body.dataset.before = widths();
      inMain[0].open = true;
      location.hash = "#section-1";
      setInterval(() => { document.body.dataset.after = widths(); }, 100);
    """
    shown = Report(title="title", headline=Headline(sentence="headline"), sections=sections)
    seen = told(shown.html(Manifest()), tmp_path, script, draw_all=False)
    assert seen == {"before": "none none none", "after": "0 0 none"}


@pytest.mark.parametrize("name", ["rope", "circuit", "behaviour"])
def test_on_a_narrow_screen_panels_stand_below_each_other_and_nothing_is_wider(
    name: str, finished: Callable[[str], Finished], tmp_path: Path
) -> None:
    script = """
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
    """
    html = finished(LINES[name]).page
    seen = told(html, tmp_path, script, width=500, draw_all=False)
    assert seen == {"stacked": f"true {html.count('<figure>')}", "wider": "0"}


SMALL = ["--n-seqs", 17, "--seq-len", 61, "--folds", 5, "--layers", 2]
CLICK = """setTimeout(() => {
  const plot = document.querySelector(".plot");
  plot.emit("plotly_click", { points: [{ x: 3, y: 1 }] });
  setTimeout(() => {
    document.body.dataset.opened = document.querySelector(".readout").textContent;
  }, 2000);
}, 3000)"""


def test_a_click_on_a_head_opens_it_in_the_text(tmp_path: Path) -> None:
    run_command(attention, *SMALL, "--text", "def area(width)", "--out", tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert told(html, tmp_path, CLICK)["opened"].startswith("L1H3, query ")


TEXT = 'a "<b>" & b\n</script><script>x\u200b =\t\U0001f642 שלום 世\r'
PROBE = """setTimeout(() => {
  const view = document.querySelector(".on-text");
  const say = (name, value) => { document.body.dataset[name] = value; };
  say("text", JSON.stringify(view.querySelector(".text").textContent));
  view.querySelectorAll(".list button")[1].click();
  setTimeout(() => {
    view.querySelectorAll(".text span")[9].click();
    say("said", view.querySelector(".readout").textContent.split(":")[0]);
    const shade = () => view.querySelectorAll(".text span")[3].style.getPropertyValue("--shade");
    const shades = [shade()];
    for (const radio of [...view.querySelectorAll("input")].slice(1, 3)) {
      radio.click();
      shades.push(shade());
    }
    say("shades", shades.join(";"));
    say("label", view.querySelectorAll(".text span")[3].getAttribute("aria-label"));
  }, 2000);
}, 3000)"""


def test_a_head_and_a_query_are_chosen_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_command(attention, *SMALL, "--text", TEXT, "--out", folder)
    html = (folder / "report.html").read_text(encoding="utf-8")
    found = told(html, tmp_path, PROBE)
    assert json.loads(found["text"]) == TEXT.replace("\r", "\n")  # as HTML reads it
    run = read_run(folder)
    table = run.tables["attention"].sort_values(["others_share", "information"], ascending=False)
    row = table.iloc[1]
    assert found["said"].startswith(f"L{row['layer']:.0f}H{row['head']:.0f}, query 9 ")
    place = int(row["layer"]), int(row["head"]), 9, 3
    weight, mean = (float(run.maps[name][place]) for name in ("text_weights", "weights"))
    alphas = [float(shade.split(",")[-1].rstrip(")")) for shade in found["shades"].split(";")]
    expected = [weight**0.5, mean**0.5, abs(weight - mean) ** 0.5]
    assert alphas == pytest.approx(expected, abs=0.07)
    assert found["label"].startswith("3 ")


WHY = """setTimeout(() => {
  const view = document.querySelector(".on-text");
  const tokens = [...view.querySelectorAll(".text span")];
  const said = () => view.querySelector(".readout").textContent.split(":")[0];
  const rows = () => [...view.querySelectorAll(".terms tr")].map((row) => [
    row.cells[0].textContent, row.cells[2].textContent, row.querySelector("span").style.width,
  ]);
  const found = { first: said(), rows: [] };
  for (const key of [0, 2]) { tokens[key].click(); found.rows.push(rows()); }
  tokens[2].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true }));
  found.moved = said();
  found.focus = tokens.indexOf(document.activeElement);
  tokens.at(-1).click();
  found.unseen = view.querySelector(".readout").textContent;
  view.querySelector("input").click();
  tokens[1].click();
  view.querySelectorAll("input")[3].click();
  found.none = view.querySelector(".terms p").textContent;
  view.querySelector(".terms button").click();
  setTimeout(() => {
    found.back = said();
    document.body.dataset.found = JSON.stringify(found);
  }, 1000);
}, 3000)"""


def test_the_terms_of_a_chosen_key_stand_beside_the_text(tmp_path: Path) -> None:
    flags = ["--text", "word other word", "--why", "L1H3", "--query", 3]
    run_command(attention, *SMALL, *flags, "--out", tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    found = json.loads(told(html, tmp_path, WHY)["found"])
    table = read_run(tmp_path / "run").tables["why"]
    attended = table["key"][table["weight"].idxmax()]
    assert re.fullmatch(rf"L1H3, query 3 .*, key {attended} .*", found["first"])
    for key, rows in zip((0, 2), found["rows"], strict=True):
        own = table[table["key"] == key]
        expected = [*own["nats"], own["score"].iloc[0]]
        numbers = [float(number.replace("\u2212", "-")) for _, number, _ in rows]
        assert numbers == pytest.approx(expected, abs=0.0051)
        assert [name.split(", ")[-1] for name, _, _ in rows[4:-1]] == [*own["side"][4:]]
        widths = [float(width.rstrip("%")) for _, _, width in rows]
        sizes = np.abs(expected)
        assert widths == pytest.approx((50 * sizes / sizes.max()).tolist(), abs=0.1)
    assert ", key 1 " in found["moved"]
    assert found["focus"] == 1
    assert found["unseen"].endswith("the query does not see this key.")
    assert "--why L1H3 --query 1." in found["none"]
    assert found["back"].startswith("L1H3, query 3 ")


CLICKS = """setTimeout(() => {
  const view = document.querySelector(".on-text");
  const tokens = [...view.querySelectorAll(".text span")];
  const found = [];
  const keep = () => found.push([view.querySelector(".readout").textContent,
    [...view.querySelectorAll(".terms button")].map((button) => button.textContent)]);
  keep();
  tokens[8].click();
  setTimeout(() => {
    keep();
    view.querySelector(".terms button").click();
    setTimeout(() => { keep(); document.body.dataset.found = JSON.stringify(found); }, 500);
  }, 500);
}, 3000)"""


def test_a_second_click_on_a_key_goes_a_step_back(tmp_path: Path) -> None:
    text = "def area(width, height):\n    return width * height"
    asked = {"why": "L3H3", "query": 15, "steps": 3, "n_seqs": 17, "folds": 5}
    stepping = run_attention("rope-tiny", text=text, **asked)
    page = f"<!doctype html><meta charset=utf-8><body>{text_view(stepping).html()}</body>"
    first, back, again = json.loads(told(page, tmp_path, CLICKS, draw_all=False)["found"])
    assert first[0].startswith("L3H3, query 15 ")
    assert first[1][0].startswith("Why L1H3 moved +10.2")
    assert back[0].startswith("L1H3, query 8 ")
    assert back[1] == ["Back to L3H3, query 15"]
    assert again == first


def test_a_slider_leaves_the_maps_their_size_at_every_width(tmp_path: Path) -> None:
    figure = term_maps({"all": triangle(5), "mask": triangle(5)}, title="t")
    still = without_controls(figure)["layout"]
    tall = still["height"] - still["margin"]["t"] - still["margin"]["b"]
    script = """setTimeout(() => {
      const { _fullLayout } = document.querySelector(".js-plotly-plot");
      document.body.dataset.tall = Math.round(_fullLayout._size.h);
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      const bar = box(".infolayer .colorbar");
      document.body.dataset.apart = box(".slider-container").top - bar.bottom;
    }, 1000)"""
    for width in (700, 1000):
        seen = told(figure.to_html(), tmp_path, script, width=width, draw_all=False)
        assert seen["tall"] == f"{tall}"
        assert float(seen["apart"]) > 0


def test_a_pdf_is_one(tmp_path: Path) -> None:
    path = figures.save(figures.score_maps(triangle()), tmp_path / "x.pdf")
    assert path.read_bytes().startswith(b"%PDF")


# Names that figures would read as tags, entities, values or formulas.
MARKUP = ("<b>", "</s>", "<bos>", "<br>", '<a href="x">y</a>', "&lt;", "&amp;", "%{y}", "$x$", "a")


def test_names_are_drawn_as_they_are_spelled(tmp_path: Path) -> None:
    figure = term_maps({name: np.zeros((1, 5, 5)) for name in MARKUP}, title="t")
    page = opened(figure.to_html(full_html=False), tmp_path, draw_all=False)
    inside = re.findall(r"<text[^>]*>(.*?)</text>", page, re.DOTALL)
    assert {*MARKUP} <= {unescape(re.sub("<[^>]*>", "", text)) for text in inside}
    assert "<a " not in "".join(inside)
