"""Thumbnails of all heads in a browser, by mouse and keyboard."""

import re
from pathlib import Path

import numpy as np
import pytest
from ci.chromium import needs_chromium, opened
from support.explored import OF_HEAD as N
from support.explored import patterns, table

from nope_probe.figures.explorer import head_maps
from nope_probe.reports.page import Headline, Section, page
from nope_probe.run.manifest import Manifest

SCRIPT = """<script>setTimeout(() => {
  const found = document.body.dataset;
  const press = (target, key) =>
    target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const thumbs = [...document.querySelectorAll(".thumb")];
  const read = (canvas) => canvas.getContext("2d").getImageData(0, 0, 11, 11).data;
  const pixel = (data, query, key) => [...data.slice(44 * query + 4 * key).slice(0, 4)].join();
  const title = () => document.querySelector(".large strong")?.textContent ?? "closed";
  const images = thumbs.map((thumb) => read(thumb.firstChild));
  found.labels = thumbs.map((thumb) => thumb.getAttribute("aria-label")).join("|");
  found.blank = pixel(images[0], 2, 5);
  found.drawn = images.map((data) => [4, 7].map((q) => pixel(data, q, 1)).join(";")).join("|");
  thumbs[2].click();
  const large = document.querySelector(".large");
  const map = large.querySelector(".map canvas");
  found.opened = title() + "/" + thumbs[2].getAttribute("aria-expanded");
  found.same = read(map).join() === images[2].join();
  found.ticks = [...large.querySelectorAll(".x span")].map((each) => each.textContent).join();
  found.ends = large.querySelector(".ends").textContent;
  map.focus();
  press(map, "ArrowUp");
  press(map, "ArrowRight");
  found.read = large.querySelector(".readout").textContent;
  large.querySelector("[data-step='1']").click();
  found.next = title();
  press(large, "Escape");
  found.closed = title() + "/" + thumbs.indexOf(document.activeElement);
  press(document.activeElement, "ArrowUp");
  press(document.activeElement, "ArrowRight");
  found.moved = thumbs.indexOf(document.activeElement);
  document.activeElement.click();
  found.entered = title();
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
}, 300)</script></body>"""


@needs_chromium
def test_every_head_is_drawn_enlarged_and_reached_by_keyboard(tmp_path: Path) -> None:
    given = patterns()
    maps = head_maps(given, table())
    section = Section(title="heads", caption="c", html=maps)
    html = page("title", Headline(sentence="headline"), [section], Manifest()).replace(
        "</body>", SCRIPT
    )
    elements = opened(html, tmp_path, width=500)
    result = dict(re.findall(r'data-([a-z]+)="([^"]*)"', re.findall(r"<body[^>]*>", elements)[0]))
    labels = result["labels"].split("|")
    assert labels[0] == "L0H0, 0.25 nats: enlarge"
    assert labels[4] == "L1H1, flat: within noise: enlarge"
    assert result["blank"] == "0,0,0,0"
    for map_index, pixels in enumerate(result["drawn"].split("|")):
        for query, pixel in zip((4, 7), pixels.split(";"), strict=True):
            red, _, blue, alpha = map(int, pixel.split(","))
            assert alpha == 255
            assert np.sign(red - blue) == np.sign(given.reshape(-1, N, N)[map_index, query, 1])
    assert result["opened"] == "L0H2: 2.3 nats RMS/true"
    assert result["same"] == "true"
    assert result["ticks"] == "0,5,10"
    limit = np.nanpercentile(np.abs(given[0, 2]), 99.5)
    end = result["ends"].split("0; 99% of cells are within")[1].removesuffix(" nats")
    assert float(end) == pytest.approx(limit, rel=0.1)
    assert result["read"].startswith("query 9, key 1: ")
    value = float(result["read"].split(": ")[1].removesuffix(" nats").replace("\u2212", "-"))
    assert value == pytest.approx(given[0, 2, 9, 1], rel=0.06, abs=0.05)
    assert result["next"] == "L1H0: 0.25 nats RMS"
    assert result["closed"] == "closed/3"
    assert result["moved"] == "1"
    assert result["entered"] == "L0H1: flat: within noise"
    assert int(result["overflow"]) <= 0
