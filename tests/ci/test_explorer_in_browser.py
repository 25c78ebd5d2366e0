"""The explorer in a browser: every switch against the arrays."""

import json
import re
import time
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ci.chromium import needs_chromium, open_tab, opened
from support.explored import CONDITIONS, HEADS, LABELS, LAYERS, N, explorer

from nope_probe.figures.explorer import MEASURES
from nope_probe.figures.style import STOPS

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
        low, rest = seen["scale"].split("nats, 99% of cells; first key ±")
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
            np.testing.assert_allclose(shown, row, rtol=6e-3)
        if seen["removed"]:
            known = [x for x in measures[seen["removed"], [0, 2], 0] if np.isfinite(x)]
            said = re.findall(r"(\S+) of \S+ nats", seen["says"])
            np.testing.assert_allclose([*map(as_number, said)], known, rtol=6e-3)
            assert f" {LABELS[seen['removed']]}: " in seen["says"]
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
