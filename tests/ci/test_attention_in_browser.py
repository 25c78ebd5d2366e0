"""Heads and texts of `attention`, chosen on its page."""

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from ci.chromium import needs_chromium, opened
from support.command_line import run_command

from nope_probe import (
    attention,
    read_run,
    run_attention,
    text_view,
)

SMALL = ["--n-seqs", 17, "--seq-len", 61, "--folds", 5, "--layers", 2]
CLICK = """<script>setTimeout(() => {
  const plot = document.querySelector(".plot");
  plot.emit("plotly_click", { points: [{ x: 3, y: 1 }] });
  setTimeout(() => {
    document.body.dataset.opened = document.querySelector(".readout").textContent;
  }, 2000);
}, 3000)</script></body>"""


@needs_chromium
def test_a_click_on_a_head_opens_it_in_the_text(tmp_path: Path) -> None:
    run_command(attention, *SMALL, "--text", "def area(width)", "--out", tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text().replace("</body>", CLICK)
    elements = opened(html, tmp_path)
    [said] = re.findall(r'<body[^>]*data-opened="([^"]*)', elements)
    assert said.startswith("L1H3, query ")


TEXT = 'a "<b>" & b\n</script><script>x\u200b =\t\U0001f642 שלום 世\r'
PROBE = """<script>setTimeout(() => {
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
}, 3000)</script></body>"""


@needs_chromium
def test_a_head_and_a_query_are_chosen_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_command(attention, *SMALL, "--text", TEXT, "--out", folder)
    html = (folder / "report.html").read_text(encoding="utf-8")
    elements = opened(html.replace("</body>", PROBE), tmp_path)
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', re.findall(r"<body[^>]*>", elements)[0]))
    assert json.loads(unescape(found["text"])) == TEXT.replace("\r", "\n")  # as HTML reads it
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


WHY = """<script>setTimeout(() => {
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
}, 3000)</script></body>"""


@needs_chromium
def test_the_terms_of_a_chosen_key_stand_beside_the_text(tmp_path: Path) -> None:
    flags = ["--text", "word other word", "--why", "L1H3", "--query", 3]
    run_command(attention, *SMALL, *flags, "--out", tmp_path / "run")
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    elements = opened(html.replace("</body>", WHY), tmp_path)
    found = json.loads(unescape(re.findall(r'data-found="([^"]*)"', elements)[0]))
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


CLICKS = """<script>setTimeout(() => {
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
}, 3000)</script></body>"""


@needs_chromium
def test_a_second_click_on_a_key_goes_a_step_back(tmp_path: Path) -> None:
    text = "def area(width, height):\n    return width * height"
    asked = {"why": "L3H3", "query": 15, "steps": 3, "n_seqs": 17, "folds": 5}
    stepping = run_attention("rope-tiny", text=text, **asked)
    page = f"<!doctype html><meta charset=utf-8><body>{text_view(stepping).html()}{CLICKS}"
    elements = opened(page, tmp_path, draw_all=False)
    first, back, again = json.loads(unescape(re.findall(r'data-found="([^"]*)"', elements)[0]))
    assert first[0].startswith("L3H3, query 15 ")
    assert first[1][0].startswith("Why L1H3 moved +10.2")
    assert back[0].startswith("L1H3, query 8 ")
    assert back[1] == ["Back to L3H3, query 15"]
    assert again == first
