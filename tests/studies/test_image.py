"""The first figure of a page as an image: which figure it is, and what is refused."""

from pathlib import Path

import plotly.graph_objects as go
import pytest
from support.command_line import run_command

from nope_probe import UserError, attention
from nope_probe.reports.page import Headline, Report, Section
from nope_probe.run.manifest import read_manifest
from nope_probe.studies import page


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
