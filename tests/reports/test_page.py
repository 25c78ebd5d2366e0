"""The report page: self-contained, small enough, readable by people and machines; its image."""

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from support.command_line import run_command

from nope_probe import Run, UserError, attention, run_ablations
from nope_probe.reports.page import Headline, Report, Section, positions
from nope_probe.run.manifest import read_manifest
from nope_probe.studies import ablate, page

HEADLINE = Headline(
    sentence="RoPE brings 97% of the pattern.",
    table=pd.DataFrame({"lost without": ["W_Q & W_K < enough."], "<b>": ["1%"]}),
    caption="How to <read> it.",
)


@pytest.fixture(scope="module")
def run() -> Run:
    """A run of ablate under names that have to be escaped."""
    sizes = {"n_seqs": 16, "seq_len": 11, "folds": 4, "layers": 2}
    done = run_ablations("rope-tiny", remove="w_q", **sizes)
    model = replace(done.manifest.model, name="tiny & small")
    command = "python -m nope_probe.ablate --model <tiny>"
    return replace(done, manifest=replace(done.manifest, model=model, command=command))


@pytest.fixture(scope="module")
def html(run: Run) -> str:
    return replace(ablate.report(run), headline=HEADLINE).html(run.manifest)


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


def test_the_page_loads_nothing_and_escapes_words(html: str) -> None:
    loaders = ("src", "srcset", "href", "data", "poster", "action")
    for _, attributes in Reader(html).elements:
        for name in loaders & attributes.keys():
            assert str(attributes[name]).startswith(("#", "data:"))
    assert not re.search(r"@import|url\(", "".join(re.findall(r"<style>(.*?)</style>", html, re.S)))
    assert '<th scope="row">W_Q &amp; W_K &lt; enough.</th><td>1%</td>' in html
    assert '<th scope="col">&lt;b&gt;</th>' in html
    assert "<p>How to &lt;read&gt; it.</p>" in html
    assert "ablate --model &lt;tiny&gt;" in html
    assert "<tiny>" not in html


def test_maps_are_drawn_as_they_are_given(run: Run, html: str) -> None:
    given = run.maps["term/mask"]
    specs = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    traces = [trace for spec in specs for trace in json.loads(spec)["data"]]
    drawn = [t for t in traces if t["type"] == "heatmap" and t["name"] == "causal mask"]
    for layer, (cells, leads) in enumerate(zip(drawn[::2][:2], drawn[1::2], strict=False)):
        values = np.frombuffer(b64decode(cells["z"]["bdata"]), cells["z"]["dtype"])
        np.testing.assert_array_equal(values.reshape(11, 11)[:, 1:], given[layer, :, 1:])
        first = np.frombuffer(b64decode(leads["z"]["bdata"]), leads["z"]["dtype"])
        np.testing.assert_array_equal(first, given[layer, :, 0])


def test_every_figure_has_a_text_alternative(html: str) -> None:
    reader = Reader(html)
    plots = [item for item in reader.all("div") if item.get("class") == "plot"]
    assert len(plots) == len(reader.all("figure")) == 7
    assert all(len(str(plot["aria-label"])) > 40 for plot in plots)
    assert reader.all("html")[0]["lang"] == "en"
    assert len(reader.all("main")) == len(reader.all("h1")) == 1
    ids = {attributes.get("id") for _, attributes in reader.elements}
    assert {str(link["href"]).removeprefix("#") for link in reader.all("a")} <= ids


def test_the_more_maps_a_page_has_the_fewer_positions_each_keeps() -> None:
    assert positions(8, 4, n_points=100_000) < positions(8, 4)
    sizes = [positions(20, layers) for layers in (1, 4, 32, 80)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 256
    assert sizes[-1] >= 16


def image_of(*sections: Section) -> go.Figure:
    return Report(title="title", headline=Headline(sentence="s"), sections=sections).image()


def test_the_image_is_the_first_figure_of_the_page() -> None:
    words, figure = Section(title="Words", caption="no figure here"), go.Figure()
    later = Section(title="Later", caption="another", figure=go.Figure(layout={"height": 300}))
    assert image_of(words, Section(title="A", caption="", figure=lambda: figure), later) is figure
    with pytest.raises(UserError, match="no figure on the page"):
        image_of(words)


def test_a_command_draws_its_image_and_records_the_run_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}
    monkeypatch.setattr(page, "save", lambda figure, path: drawn.update({path: figure}))
    run = ["--n-seqs", 8, "--seq-len", 9, "--folds", 4, "--layers", 1, "--out", tmp_path / "run"]
    run_command(attention, *run, "--image", tmp_path / "figure.svg")
    assert drawn[tmp_path / "figure.svg"].data
    assert "image" not in read_manifest(tmp_path / "run").settings
