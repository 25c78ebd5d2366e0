"""The explorer: its bytes, its page, and in a browser every switch against the arrays."""

import json
import re
import time
from base64 import b64decode
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
    RemovedMaps,
    fitted,
)
from nope_probe.figures.packed import pack, quantise, script
from nope_probe.figures.style import STOPS

N, LAYERS, HEADS = 7, 2, 3
CONDITIONS = ("intact", "mask", "rope", "mask+rope", "w_o+w_v")
LABELS = ("nothing", "causal mask", "RoPE", "mask + RoPE", "OV")


def view(n: int = N, layers: int = LAYERS) -> RemovedMaps:
    """Return random patterns below the diagonal, without a first key, and random leads."""
    generator = np.random.default_rng(7)
    panels = tuple(f"H{head}" for head in range(HEADS))
    maps = generator.normal(size=(len(CONDITIONS), layers, len(panels), n, n))
    maps[..., ~np.tri(n, k=-1, dtype=bool)] = np.nan
    maps[..., 0] = np.nan
    leads = 50 * generator.normal(size=maps.shape[:4])
    leads[..., :2] = np.nan
    measures = generator.normal(size=(*maps.shape[:3], len(MEASURES), 3))
    measures[0, :, :, [1, 3]] = np.nan  # nothing is lost where nothing is removed
    return RemovedMaps(
        conditions=CONDITIONS,
        labels=LABELS,
        layers=tuple(range(layers)),
        panels=panels,
        maps=maps,
        leads=leads,
        measures=measures,
    )


def explorer(**changes: Any) -> Explorer:
    return Explorer(**{"title": "<title>", "view": view(), **changes})


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


# Presses each choice in turn, goes through all layers and maps, and writes down what is shown.
WALK = """<script>
addEventListener("load", () => setTimeout(() => {
  const find = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const seen = [];
  const pick = (element, value, type) => {
    element.value = value;
    element.dispatchEvent(new Event(type));
  };
  for (const choice of all(".choice")) {
    choice.click();
    for (const layer of [0, 1]) {
      pick(find("#layers input"), layer, "input");
      for (const option of all("#panels option")) {
        pick(find("#panels"), option.value, "change");
        const { explorer } = document.body;
        const panel = Number(option.value);
        const canvas = find("canvas[data-of=without]");
        explorer.state.cell = null;
        const cells = [];
        for (const key of ["ArrowUp", "ArrowUp", "ArrowRight"]) {
          canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
          cells.push(find("#readout").textContent);
        }
        const map = explorer.values(explorer.state.removed, layer, panel);
        seen.push({
          name: document.body.dataset.removed, removed: explorer.state.removed, layer, panel, cells,
          says: find("#says").textContent, scale: find(".scale").textContent,
          checked: all(".choice").map((each) => each.getAttribute("aria-checked")),
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
def test_every_choice_leads_to_its_maps_and_leads(walked: list[dict[str, Any]]) -> None:
    shown = explorer().view
    assert list(dict.fromkeys(seen["name"] for seen in walked)) == [*CONDITIONS]
    assert len(walked) == len(CONDITIONS) * LAYERS * HEADS
    for seen in walked:
        place = seen["layer"], seen["panel"]
        maps, leads = (x[:, *place] for x in (shown.maps, shown.leads))
        drawn = np.array([np.nan if cell is None else cell for cell in seen["map"]])
        step = np.nanmax(np.abs(maps[seen["removed"]])) / 32767
        np.testing.assert_allclose(
            drawn.reshape(N, N), maps[seen["removed"]], rtol=0, atol=0.51 * step
        )
        assert seen["checked"] == [
            str(place == seen["removed"]).lower() for place in range(len(CONDITIONS))
        ]
        for (query, key), text in zip([(5, 0), (4, 0), (4, 1)], seen["cells"], strict=True):
            where = "lead of the first key" if key == 0 else f"key {key}"
            assert text.startswith(f"query {query}, {where}: intact ")
            cells = re.findall(r"(?:intact|without|difference) (\S+?),? ", text)
            values = leads[:, query] if key == 0 else maps[:, query, key]
            expected = [values[0], values[seen["removed"]]]
            expected.append(expected[1] - expected[0])
            np.testing.assert_allclose([*map(as_number, cells)], expected, rtol=6e-3, atol=3e-4)


@needs_chromium
def test_leads_and_patterns_have_scales_of_their_own(walked: list[dict[str, Any]]) -> None:
    for seen in walked:
        low, rest = seen["scale"].split("nats; first key ±")
        assert as_number(low) > -9, "leads of 50 nats are not among the patterns' colours"
        assert rest.startswith(("1", "2", "3", "4", "5", "6", "7", "8", "9"))


@needs_chromium
def test_the_numbers_and_the_sentence_are_those_of_the_choice(
    walked: list[dict[str, Any]],
) -> None:
    names = [measure["name"] for measure in MEASURES]
    for seen in walked:
        measures = explorer().view.measures[:, seen["layer"], seen["panel"]]
        expected_names = list(product(names, ("intact", "without")))
        for (name, of, text), expected in zip(seen["numbers"], expected_names, strict=True):
            assert (name, of) == expected
            row = measures[0 if of == "intact" else seen["removed"], names.index(name)]
            if np.isnan(row[0]):
                assert text == "–"
                continue
            shown = [as_number(member) for member in re.findall(r"[^\s\[\],%]+", text)]
            is_loss = name.endswith("lost")
            assert ("%" in text) == is_loss
            # A loss is a whole number of percent.
            times, rounded = (100, 0.51) if is_loss else (1, 0.0)
            np.testing.assert_allclose(shown, times * row, rtol=6e-3, atol=rounded)
        if seen["removed"]:
            lead, pattern = measures[seen["removed"], [1, 3], 0]
            said = re.findall(r"(\S+)% of the", seen["says"])
            np.testing.assert_allclose(
                [*map(as_number, said)], [100 * lead, 100 * pattern], atol=0.51
            )
            assert f"without {LABELS[seen['removed']]}" in seen["says"]
        else:
            assert seen["says"].endswith("choose what to remove.")


@needs_chromium
def test_an_explorer_is_used_by_keyboard_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(explorer().html())
    look = """(() => {
      const at = document.activeElement;
      const { removed, layer, panel } = document.body.explorer.state;
      return { at: at.dataset.removed || at.id || at.tagName, removed, layer, panel };
    })()"""
    with open_tab(page) as tab:

        def press(key: str) -> dict[str, Any]:
            tab.press(key)
            return tab.evaluate(look)

        assert press("Tab")["at"] == "intact"
        assert press("ArrowRight") == {"at": "mask", "removed": 1, "layer": 0, "panel": 0}
        assert press("ArrowDown")["removed"] == 2, "arrows choose"
        assert press("ArrowLeft")["at"] == "mask"
        assert [press("ArrowLeft")["removed"] for _ in range(2)] == [0, 4], "arrows go round"
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
        ".getImageData(4, 5, 1, 1).data[0]"
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
