"""Figures as image files."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from nope_probe.errors import UserError
from nope_probe.figures.export import export, without_controls


def with_buttons() -> go.Figure:
    figure = go.Figure(go.Scatter(y=[1, 2, 3]))
    menu = {"type": "buttons", "buttons": [{"label": "a", "method": "skip"}]}
    figure.update_layout(updatemenus=[menu], sliders=[{"steps": []}], meta={"menu": 44})
    return figure.update_layout(height=444, margin={"t": 104})


def test_an_image_has_no_buttons_and_leaves_the_figure_as_it_was() -> None:
    figure = with_buttons()
    still = without_controls(figure)
    assert not still.layout.updatemenus
    assert still.layout.height == figure.layout.height - figure.layout.meta["menu"]
    assert len(figure.layout.updatemenus) == 1


def test_an_image_without_kaleido_or_chrome_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"ends in \.png or \.svg"):
        export(with_buttons(), tmp_path / "figure.jpg")
    monkeypatch.setattr("nope_probe.figures.export.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need kaleido: pip install 'nope-probe\[export\]'"):
        export(with_buttons(), tmp_path / "figure.png")
    monkeypatch.setattr("nope_probe.figures.export.find_spec", lambda name: object())

    def no_chrome(*args: Any, **options: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "write_image", no_chrome)
    with pytest.raises(UserError, match="need Chrome or Chromium"):
        export(with_buttons(), tmp_path / "figure.png")
