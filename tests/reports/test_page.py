"""The report page: self-contained, small enough, readable by people and by machines."""

import json
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.chromium import needs_chromium, opened

from nope_probe.experiments.ablation import sections
from nope_probe.experiments.ablation.player_sections import conjunction_note
from nope_probe.figures.explorer import Explorer, SwitchedMaps
from nope_probe.figures.maps import term_maps
from nope_probe.figures.words import MEASURES
from nope_probe.reports.page import Listing, Section, page, positions
from nope_probe.runtime.folder import Run

INTACT = "mask+rope+w_q+w_k+w_o+w_v"
PARTS = ("alone", "lost", "amplification")
SOURCES = ("content", "mask", "rope", "mask_x_rope")
PLAYER_SETS = {
    "players": ("mask", "rope", "w_q", "w_k", "w_o"),
    "circuits": ("mask", "rope", "qk", "ov"),
}


def maps(layers: int, n: int) -> dict[str, np.ndarray]:
    """The same map under every name, so that even large ones take no memory."""
    below = np.arange(n) - np.arange(n)[:, None]
    one = np.where(below <= 0, 0.1 * below, np.nan).astype(np.float32)
    names = [f"score/{INTACT}", *(f"source/{name}" for name in SOURCES)]
    names += ["pattern/all", "pattern/mean_term", "pattern/covariance_term"]
    names += [f"shapley/{name}" for name in PLAYER_SETS["players"]]
    names += [f"shapley_circuits/{name}" for name in PLAYER_SETS["circuits"]]
    return {name: np.broadcast_to(one, (layers, n, n)) for name in names}


def tables(layers: int) -> dict[str, pd.DataFrame]:
    estimate = {"share": 0.25, "share_low": 0.2, "share_high": 0.3}
    rms = {"rms": 0.5, "rms_low": 0.4, "rms_high": 0.6}
    parts = {f"{of}{end}": 0.5 for of in PARTS for end in ("", "_low", "_high")}
    measures = {f"{of}{end}": 0.5 for of in MEASURES for end in ("", "_low", "_high")}
    models = ("with_mask", "without_mask", "difference")
    effects = {f"{of}{end}": 0.5 for of in models for end in ("", "_low", "_high")}
    dimensions = {"dimensions": 2.5, "dimensions_low": 2.0, "dimensions_high": 3.0}
    each = range(layers)
    rows: dict[str, list[dict[str, Any]]] = {
        "sources": [
            {"layer": i, "term": term, **rms, **estimate} for i in each for term in SOURCES
        ],
        "players": [
            {"layer": i, "player_set": player_set, "player": player, **estimate, **parts}
            for i in each
            for player_set, players in PLAYER_SETS.items()
            for player in players
        ],
        "interactions": [
            {"layer": i, "player_set": "players", "players": "mask+rope", **estimate} for i in each
        ],
        "pattern": [{"layer": i, "kept": INTACT, **measures} for i in each],
        "non_relative": [{"layer": i, "tokens": "text", **effects} for i in each],
        "controls": [
            {"layer": i, "tokens": "shuffled", "skip_keys": 1, "kept": INTACT, **measures}
            for i in each
        ],
        "mean_covariance": [
            {"layer": i, "term": term, **estimate, **rms, **dimensions}
            for i in each
            for term in ("mean", "covariance")
        ],
    }
    return {name: pd.DataFrame(each) for name, each in rows.items()}


MANIFEST = {
    "command": "python -m nope_probe.ablate --model <tiny>",
    "model": {"name": "tiny & small"},
    "data": {"name": "shipped"},
    "settings": {"n_seqs": 17, "seq_len": 11, "folds": 4},
    "conditions": [INTACT],
    "player_sets": PLAYER_SETS,
    "conjunctions": {"circuits": [1], "players": []},
    "skip_keys": 1,
}
HEADLINE = ["RoPE brings 97% of the pattern.", "W_Q & W_K < enough."]


def report(layers: int = 2, n: int = 11, explorer: Explorer | None = None, **changes: Any) -> str:
    given = {"maps": maps(layers, n), "tables": tables(layers), "manifest": MANIFEST, **changes}
    run = Run(manifest=given["manifest"], arrays={"maps": given["maps"]}, tables=given["tables"])
    return replace(sections.report(run, explorer), headline=HEADLINE).html(run.manifest)


class Reader(HTMLParser):
    """Collects elements, what they load, and the text under headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.headings: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("h1", "h2"):
            self.headings.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("h1", "h2") and not self.headings[-1]:
            self.headings[-1] = data

    def all(self, tag: str) -> list[Mapping[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return report()


def test_the_page_loads_nothing(html: str) -> None:
    reader = Reader(html)
    loaded = [
        value
        for _, attributes in reader.elements
        for name, value in attributes.items()
        if name in ("src", "srcset", "href", "data", "poster", "action")
    ]
    assert all(str(each).startswith(("#", "data:")) for each in loaded)
    assert not re.search(r"@import|url\(", "".join(re.findall(r"<style>(.*?)</style>", html, re.S)))


def test_words_are_escaped(html: str) -> None:
    assert "W_Q &amp; W_K &lt; enough." in html
    assert "ablate --model &lt;tiny&gt;" in html
    assert "<tiny>" not in html


def test_sections_go_from_sources_over_weights_to_controls_and_say_what_was_found(
    html: str,
) -> None:
    claims = {  # what a heading is about, and what it found
        "The sources of the positional pattern": "tiny & small",
        "No source alone": "the content of the text 25%, the causal mask 25%",
        "Most of the positional pattern": "no source alone in L0, L1",
        "Circuits: ": "without the query-key circuit (W_Q with W_K) 50%",
        "Players: ": "without the causal mask L1 keeps 50%",
        "Interactions of the players": "mask + RoPE bring 25%",
        "Shapley maps of the circuits": "",
        "Shapley maps of the players": "",
        "Maps of the mean and the covariance term": "",
        "No term alone": "mean term 25%, covariance term 25%",
        "Measures": "near keys in L0, L1",
        "Non-relative part": "+0.5 nats in L0",
        "Controls": "100% as strong",
        "Scores of the intact model": "",
        "How to read the figures": "",
        "What was run, in full": "",
    }
    for heading, (about, found) in zip(Reader(html).headings, claims.items(), strict=True):
        assert heading.startswith(about)
        assert found in heading
    where = [html.index(part) for part in ("RoPE brings 97%", "<figure>", 'id="manifest"')]
    assert where == sorted(where)


def test_only_what_answers_the_question_is_open(html: str) -> None:
    folded = re.findall(r'<section id="section-(\d+)"[^>]*><details class="fold">', html)
    assert [int(each) for each in folded] == list(range(2, 13))


def test_maps_are_drawn_as_they_are_given() -> None:
    given = maps(2, 11)
    generator = np.random.default_rng(0)
    given["source/mask"] = np.full((2, 11, 11), np.nan, np.float32)
    below = np.tril_indices(11, -1)
    given["source/mask"][:, *below] = generator.normal(5, 1, (2, len(below[0])))
    html = report(maps=given)
    [sources] = [spec for spec in figures(html) if "content" in trace_names(spec)]
    drawn = [trace for trace in sources["data"] if trace["name"] == "causal mask"]
    assert len(drawn) == 2
    for layer, trace in enumerate(drawn):
        np.testing.assert_array_equal(decoded(trace["z"]), given["source/mask"][layer])


def figures(html: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    return [json.loads(each) for each in found]


def trace_names(spec: dict[str, Any]) -> list[str]:
    return [trace["name"] for trace in spec["data"] if trace["type"] == "heatmap"]


def decoded(values: dict[str, str]) -> np.ndarray:
    shape = tuple(map(int, values["shape"].split(",")))
    return np.frombuffer(b64decode(values["bdata"]), values["dtype"]).reshape(shape)


def test_every_figure_has_a_text_alternative(html: str) -> None:
    reader = Reader(html)
    plots = [each for each in reader.all("div") if each.get("class") == "plot"]
    assert len(plots) == len(reader.all("figure")) == 13
    assert all(len(str(each["aria-label"])) > 40 for each in plots)
    assert reader.all("html")[0]["lang"] == "en"
    assert len(reader.all("main")) == len(reader.all("nav")) == len(reader.all("h1")) == 1
    ids = {attributes.get("id") for _, attributes in reader.elements}
    assert {str(link["href"]).removeprefix("#") for link in reader.all("a")} <= ids


def test_a_run_of_the_sources_alone_has_a_page() -> None:
    kept = ("score", "source", "pattern/all")
    few = {name: each for name, each in maps(2, 11).items() if name.startswith(kept)}
    none = dict.fromkeys(("players", "interactions", "mean_covariance"), pd.DataFrame())
    html = report(maps=few, tables=tables(2) | none, manifest=MANIFEST | {"player_sets": {}})
    assert len(Reader(html).all("figure")) == 6


def test_equal_shares_are_called_a_conjunction_and_no_measurement() -> None:
    circuits = PLAYER_SETS["circuits"]
    assert conjunction_note(circuits, [0, 1]) == (
        "In L0, L1 each of causal mask, RoPE, QK circuit, OV circuit has a Shapley share of about "
        "1/4: the signature of “all are needed”, not a measurement of equal weight."
    )
    assert conjunction_note(circuits, [0, 1, 2, 3, 6, 7]).startswith("In L0 to L3, L6, L7 each")
    assert conjunction_note(circuits, []) == "Shapley shares of all players add up to 1."


@pytest.mark.parametrize(("layers", "n"), [(1, 1024), (32, 1024)])
def test_the_page_stays_under_15_megabytes(layers: int, n: int) -> None:
    assert len(report(layers, n).encode()) < 15_000_000


def test_the_more_maps_a_page_has_the_fewer_positions_each_keeps() -> None:
    assert positions(8, 4, n_points=100_000) < positions(8, 4)
    sizes = [positions(20, layers) for layers in (1, 4, 32, 80)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 256
    assert sizes[-1] >= 16


def test_reading_a_finished_run_needs_no_torch() -> None:
    shown = ("ablation", "scores", "circuit", "simulation")
    modules = [f"nope_probe.experiments.{name}.sections" for name in shown]
    code = f"import sys, {', '.join(modules)}\nprint({{'torch', 'scipy'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@needs_chromium
@pytest.mark.parametrize("layers", [2, 5])
def test_a_browser_draws_every_figure_without_an_error(layers: int, tmp_path: Path) -> None:
    elements = opened(report(layers), tmp_path, height=12000)
    assert elements.count('class="plot js-plotly-plot"') == elements.count("<figure>") == 13
    ranges = [each for each in Reader(elements).all("input") if each.get("type") == "range"]
    assert {each["max"] for each in ranges} == {str(layers - 1)}


def test_the_contents_list_the_sections_that_are_not_folded() -> None:
    sections = [
        Section(title="Open one", caption="a"),
        Section(title="Folded one", caption="b", folded=True),
    ]
    reader = Reader(page("title", ["headline"], sections, {}))
    assert [each["href"] for each in reader.all("a")] == [
        "#main",
        "#section-0",
        "#how",
        "#manifest",
    ]
    assert "Folded one" in reader.headings


@needs_chromium
def test_a_folded_figure_is_drawn_when_its_section_is_opened_by_hand_or_by_a_link(
    tmp_path: Path,
) -> None:
    figure = term_maps({"mask": np.ones((3, 5, 5))}, title="maps")
    folded = {"caption": "c", "figure": figure, "folded": True}
    sections = [Section(title=name, **folded) for name in ("by hand", "by link", "never")]
    script = """<script>
      const inMain = [...document.querySelectorAll("main .fold")];
      const widths = () => inMain.map((fold) => {
        const svg = fold.querySelector(".plot .main-svg");
        return svg ? svg.clientWidth - fold.clientWidth : "none";
      }).join(" ");
      document.body.dataset.before = widths();
      inMain[0].open = true;
      location.hash = "#section-1";
      setInterval(() => { document.body.dataset.after = widths(); }, 100);
    </script></body>"""
    html = page("title", ["headline"], sections, {}).replace("</body>", script)
    elements = opened(html, tmp_path, draw_all=False)
    assert 'data-before="none none none none"' in elements
    assert 'data-after="0 0 none none"' in elements


@needs_chromium
def test_a_report_shows_its_explorer_first_in_a_frame_that_is_as_high_as_it(tmp_path: Path) -> None:
    below = np.where(np.tri(11, k=-1) > 0, np.arange(11.0), np.nan)
    view = SwitchedMaps(
        kind="pattern",
        layers=(0, 1),
        panels=("mean",),
        maps=np.stack([below, 0 * below])[:, None, None].repeat(2, axis=1),
        measures=np.ones((2, 2, 1, 3, 3)),
    )
    explorer = Explorer(title="t", players={"mask": ["mask"]}, views=(view,), components=())
    html = report(explorer=explorer)
    assert Reader(html).headings[1] == "Try it: switch components off"
    script = """<script>setTimeout(() => {
      const frame = document.querySelector("iframe.explorer");
      const inside = frame.contentDocument;
      inside.querySelector("[data-player=mask]").click();
      document.body.dataset.removed = inside.body.dataset.removed;
      document.body.dataset.missing = inside.documentElement.scrollHeight - frame.clientHeight;
    }, 500)</script></body>"""
    elements = opened(html.replace("</body>", script), tmp_path, height=12000)
    assert 'data-removed="1"' in elements
    assert int(re.findall(r'data-missing="(-?\d+)"', elements)[0]) <= 0


def test_a_phone_shows_the_name_of_each_cells_column() -> None:
    listing = Listing(columns=("what", "<of>"), rows=[("a", "1")], labelled=True)
    assert '<tr><td>a</td><td data-label="&lt;of&gt;">1</td></tr>' in listing.html()
