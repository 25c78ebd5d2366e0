"""The explorer: its bytes, its page, and in a browser every switch against the arrays."""

import json
import re
import time
from base64 import b64decode
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chromium import needs_chromium, open_tab, opened

from nope_probe.figures.explorer import (
    MEASURES,
    Explorer,
    SwitchedMaps,
    fitted,
    strongest_source,
)
from nope_probe.figures.packed import pack, quantise, script
from nope_probe.figures.style import STOPS

N, LAYERS, HEADS = 7, 2, 3
PLAYERS = {"mask": ["mask"], "rope": ["rope"], "ov": ["w_o", "w_v"]}


def view(n: int = N, layers: int = LAYERS, players: int = 3) -> SwitchedMaps:
    """Return random patterns below the diagonal."""
    generator = np.random.default_rng(7)
    panels = tuple(f"H{head}" for head in range(HEADS))
    maps = generator.normal(size=(2**players, layers, len(panels), n, n))
    maps[..., ~np.tri(n, k=-1, dtype=bool)] = np.nan
    measures = generator.normal(size=(*maps.shape[:3], len(MEASURES), 3))
    measures[0, 0, 0, 2] = np.nan
    return SwitchedMaps(layers=tuple(range(layers)), panels=panels, maps=maps, measures=measures)


def explorer(**changes: Any) -> Explorer:
    return Explorer(**{"title": "<title>", "players": PLAYERS, "view": view(), **changes})


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
    assert len(pack(same)["cells"]) == pytest.approx(len(pack(maps)["cells"]) / 8, rel=0.05)


def test_maps_that_are_too_many_are_pooled_and_the_page_says_so() -> None:
    players, large = {name: [name] for name in ("mask", "rope")}, view(40, 2, 2)
    html = explorer(players=players, view=large, max_bytes=33_000).html()
    assert len(html) < 34_000
    assert "A cell is a mean over 2 × 2 positions" in unescape(html)
    shown, packed = fitted(large, 20_000)
    assert shown.block == 2
    assert len(packed["cells"]) < 20_000
    expected = large.maps[3, 0, 1, 8:10, 4:6].mean()
    np.testing.assert_allclose(shown.maps[3, 0, 1, 4, 2], expected, rtol=1e-6)


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


# Walks through all combinations in Gray code with real presses of switches, and through all layers
# and maps, and writes down what is shown.
WALK = """<script>
addEventListener("load", () => setTimeout(() => {
  const find = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const seen = [];
  const pick = (element, value, type) => {
    element.value = value;
    element.dispatchEvent(new Event(type));
  };
  for (let step = 0; step < 8; step++) {
    if (step) all(".switch")[Math.log2(step & -step)].click();
    for (const layer of [0, 1]) {
      pick(find("#layers input"), layer, "input");
      for (const option of all("#panels option")) {
        pick(find("#panels"), option.value, "change");
        const { explorer } = document.body;
        const panel = Number(option.value);
        const canvas = find("canvas[data-of=ablated]");
        explorer.state.cell = null;
        const cells = [];
        for (const key of ["ArrowUp", "ArrowUp", "ArrowRight"]) {
          canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
          cells.push(find("#readout").textContent);
        }
        const map = explorer.values(explorer.state.removed, layer, panel);
        seen.push({
          removed: Number(document.body.dataset.removed), layer, panel, cells,
          says: find("#says").textContent,
          pressed: all(".switch").map((each) => each.getAttribute("aria-pressed")),
          map: [...map].map((each) => (Number.isNaN(each) ? null : each)),
          numbers: all("#numbers td").map(({ dataset, textContent }) =>
            [dataset.measure, dataset.of, textContent]),
        });
      }
    }
  }
  const pre = document.createElement("pre");
  pre.id = "seen";
  const requests = performance.getEntriesByType("resource").length;
  pre.textContent = JSON.stringify({ seen, requests });
  document.body.append(pre);
}, 100));
</script></body>"""


def truth(seen: dict[str, Any]) -> np.ndarray:
    return explorer().view.maps[seen["removed"], seen["layer"], seen["panel"]]


def as_number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace("–", "nan"))


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    html = explorer().html().replace("</body>", WALK)
    elements = opened(html, tmp_path_factory.mktemp("browser"), height=1500)
    [matches] = re.findall(r'<pre id="seen">(.*?)</pre>', elements, re.DOTALL)
    walk = json.loads(unescape(matches))
    assert walk["requests"] == 0
    return walk["seen"]


@needs_chromium
def test_every_switch_leads_to_the_maps_of_its_combination(
    walked: list[dict[str, Any]],
) -> None:
    shown = [seen["removed"] for seen in walked]
    assert list(dict.fromkeys(shown)) == [0, 1, 3, 2, 6, 7, 5, 4]
    assert len(shown) == 8 * 2 * HEADS
    for seen in walked:
        removed = seen["removed"]
        ablated, intact = truth(seen), truth({**seen, "removed": 0})
        drawn = np.array([np.nan if cell is None else cell for cell in seen["map"]])
        step = np.nanmax(np.abs(ablated)) / 32767
        np.testing.assert_allclose(drawn.reshape(N, N), ablated, rtol=0, atol=0.51 * step)
        assert seen["pressed"] == [str(not removed >> k & 1).lower() for k in range(3)]
        for (query, key), text in zip([(5, 0), (4, 0), (4, 1)], seen["cells"], strict=True):
            assert text.startswith(f"query {query}, key {key}: intact ")
            cells = re.findall(r"(?:intact|ablated|difference) (\S+?),? ", text)
            expected = [intact[query, key], ablated[query, key]]
            expected.append(expected[1] - expected[0])
            np.testing.assert_allclose([*map(as_number, cells)], expected, rtol=6e-3, atol=3e-4)


@needs_chromium
def test_the_numbers_and_the_sentence_are_those_of_the_combination(
    walked: list[dict[str, Any]],
) -> None:
    for seen in walked:
        measures = explorer().view.measures[:, seen["layer"], seen["panel"]]
        names = list(product(MEASURES, ("intact", "ablated")))
        for (name, of, text), expected in zip(seen["numbers"], names, strict=True):
            assert (name, of) == expected
            row = measures[0 if of == "intact" else seen["removed"], MEASURES.index(name)]
            if np.isnan(row[0]):
                assert text == "no pattern"
            elif name == "amplitude" and row[1] <= 0:
                assert text == "within noise"
            else:
                shown = [as_number(member) for member in re.findall(r"[^\s\[\],%]+", text)]
                assert ("%" in text) == (name == "share")
                # A share is a whole number of percent.
                times, rounded = (100, 0.51) if name == "share" else (1, 0.0)
                np.testing.assert_allclose(shown, times * row, rtol=6e-3, atol=rounded)
    said = [seen for seen in walked if seen["removed"] == 5]
    for seen in said:
        measures = explorer().view.measures
        share, low, high = measures[5, seen["layer"], seen["panel"], 2]
        left = "nothing" if low <= 0 <= high else f"{share:.0%}".replace("-", "\N{MINUS SIGN}")
        assert seen["says"].startswith(f"Without causal mask and OV circuit, {left}")
    assert {"noise" in seen["says"] for seen in said} == {True, False}


def test_the_strongest_source_is_that_without_which_least_is_left_whatever_weights_do() -> None:
    left = np.array([0.5, 0.25, 0.0])
    assert strongest_source(left, PLAYERS) == ["rope"]
    assert strongest_source(left, {"w_q": ["w_q"], "w_k": ["w_k"], "ov": ["w_o", "w_v"]}) == ["ov"]
    assert strongest_source(left * np.nan, PLAYERS) == [], "there is no pattern"


@needs_chromium
def test_colours_leave_out_the_first_keys(tmp_path: Path) -> None:
    shown = replace(view(), skip_keys=2)
    shown.maps[..., 1] = np.where(np.isnan(shown.maps[..., 1]), np.nan, 500.0)  # a sink
    with open_tab(explorer(view=shown).save(tmp_path / "page.html")) as tab:
        scale = tab.evaluate("document.querySelector('.scale').textContent")
    assert as_number(scale.split("nats")[1]) < 9, "the sink is beyond the colours"


@needs_chromium
def test_an_explorer_is_used_by_keyboard_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(explorer().html())
    look = """(() => {
      const at = document.activeElement;
      const { removed, layer, panel } = document.body.explorer.state;
      return { at: at.dataset.player || at.id || at.tagName, removed, layer, panel };
    })()"""
    with open_tab(page) as tab:

        def press(key: str) -> dict[str, Any]:
            tab.press(key)
            return tab.evaluate(look)

        assert press("Tab")["at"] == "mask"
        assert press(" ")["removed"] == 1, "Space flips a switch"
        assert press("ArrowRight")["at"] == "rope", "arrows move between the switches"
        assert press("Enter")["removed"] == 3, "Enter flips a switch"
        assert press("ArrowLeft")["at"] == "mask"
        assert press("ArrowLeft")["at"] == "reset", "arrows go round"
        assert press("Enter")["removed"] == 0
        assert press("Tab")["at"] == "INPUT"
        assert press("ArrowRight")["layer"] == 1, "arrows move the layer"
        assert press("Tab")["at"] == "panels"
        result = [press("ArrowDown")["panel"] for _ in range(HEADS)]
        assert result == [1, 2, 2], "the last head is the end"
        assert tab.said == []


@needs_chromium
def test_zero_is_light_on_paper_and_dark_on_a_dark_screen(tmp_path: Path) -> None:
    page = explorer().save(tmp_path / "page.html")
    red = (  # of a cell, in the difference of the intact model to itself
        'document.querySelector("canvas[data-of=difference]").getContext("2d")'
        ".getImageData(1, 3, 1, 1).data[0]"
    )
    with open_tab(page) as tab:
        for scheme, stops in (("light", "diverging"), ("dark", "divergingOnDark")):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            tab.call("Emulation.setEmulatedMedia", features=features)
            zero = int(STOPS[stops][5][1:3], 16)
            end = time.monotonic() + 20  # the page is drawn again with the browser's next frame
            while abs(tab.evaluate(red) - zero) > 3:
                assert time.monotonic() < end, (scheme, tab.evaluate(red))
                time.sleep(0.05)
        assert not tab.said
