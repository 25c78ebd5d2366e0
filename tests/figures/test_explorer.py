"""The explorer: its bytes and its page."""

import re
from base64 import b64decode
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from support.explored import N, explorer, view

from nope_probe.figures.explorer import fitted, pack, quantise, script


def test_maps_are_stored_once_to_half_a_step_and_only_cells_with_numbers() -> None:
    values = np.random.default_rng(0).normal(size=(5, 5))
    codes, scale = quantise(values.ravel())
    assert np.abs(codes * scale - values.ravel()).max() <= 0.5001 * scale
    assert scale == pytest.approx(np.abs(values).max() / 32767, rel=1e-6)
    assert quantise(np.full(3, np.nan))[0].tolist() == [-32768] * 3
    assert quantise(np.zeros(2))[0].tolist() == [0, 0]
    maps = view().maps
    n_cells = maps[..., 0, 0].size * N * (N - 1) // 2
    assert len(b64decode(pack(maps)["cells"])) == 2 * n_cells
    same = np.broadcast_to(maps[:1], maps.shape)
    assert len(pack(same)["cells"]) == pytest.approx(len(pack(maps)["cells"]) / 5, rel=0.05)


def test_maps_that_are_too_many_are_pooled_and_the_page_says_so() -> None:
    large = view(40, 2)
    html = explorer(view=large, max_bytes=47_000).html()
    assert len(html) < 52_000, "leads and measures come on top"
    assert "A cell is a mean over 2 × 2 positions" in unescape(html)
    shown, packed = fitted(large, 25_000)
    assert shown.block == 2
    assert len(packed["cells"]) < 25_000
    expected = large.maps[3, 0, 1, 8:10, 4:6].mean()
    np.testing.assert_allclose(shown.maps[3, 0, 1, 4, 2], expected, rtol=1e-6)
    np.testing.assert_allclose(
        shown.leads[3, 0, 1, 4], large.leads[3, 0, 1, 8:10].mean(), rtol=1e-6
    )


def test_a_page_loads_nothing_and_reads_the_same_in_every_encoding_file_and_notebook(
    tmp_path: Path,
) -> None:
    assert script("explorer.js").isascii()  # no character reference helps within a script
    one = explorer(title="<κ × 2>", note="≈ 1")
    html = one.html()
    assert html.isascii()
    assert "<title>&lt;κ × 2&gt;</title>" in re.sub(r"&#(\d+);", lambda m: chr(int(m[1])), html)
    assert "≈ 1" in unescape(html)
    assert one.save(tmp_path / "page.html").read_text() == html
    [framed] = re.findall(r'srcdoc="([^"]*)"', one._repr_html_())
    assert unescape(framed) == html
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    loaders = r"@import|url\(|fetch\(|XMLHttp|https?://(?!www\.w3\.org/2000/svg)"
    assert not re.search(loaders, html)
