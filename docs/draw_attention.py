"""Draw SmolLM2's heads, and a text as two of them read it: draw_attention.py FOLDER.

FOLDER is that of `make_findings.py`, with the finished run `attention`. It needs Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from findings_in_python import IMAGES, save_small
from make_findings import COMMANDS, finished

from nope_probe import figures, text_view
from nope_probe.figures.attention import TextView

POSITIONAL, CONTENT, QUERY = (16, 0), (18, 6), 14  # two heads, and the token that they look from
WIDTH, HEIGHT = 810, 224  # px of the picture of the text
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=9000"
STYLE = """.chooser { display: none }
body { margin: 0 8px; font: 15px system-ui, sans-serif; background: #fff; color: #1d1d1f }"""
# The views draw once their weights are unpacked: then the query is chosen.
ASK = f"""setTimeout(() => document.querySelectorAll(".text").forEach((text) => {{
  text.children[{QUERY}].click();
  const said = text.parentElement.querySelector(".readout");
  said.textContent = said.textContent.split(", ").slice(0, 2).join(", ").split("; ").join(", ");
}}), 500);"""


def main(folder: str) -> None:
    run = finished(Path(folder).resolve(), COMMANDS["attention"], "attention")
    save_small(
        figures.of_run(run)["All heads: sinks, order and content"], IMAGES / "heads_smollm2.png"
    )
    view = text_view(run)
    views = "".join(of_head(view, *head).html() for head in (POSITIONAL, CONTENT))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        page, image = place / "text.html", IMAGES / "text_smollm2.png"
        page.write_text(
            f"<!doctype html><meta charset='utf-8'><style>{STYLE}</style>{views}"
            f"<script>{ASK}</script>",
            encoding="utf-8",
        )
        browser = shutil.which("chromium") or shutil.which("chromium-browser") or "google-chrome"
        size = [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=2"]
        where = [f"--user-data-dir={place / 'profile'}", f"--screenshot={image}", page.as_uri()]
        command = [browser, *FLAGS.split(), *size, *where]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def of_head(view: TextView, layer: int, head: int) -> TextView:
    """Return the view of one head alone."""
    rows = view.heads[(view.heads["layer"] == layer) & (view.heads["head"] == head)]
    cells = slice(layer, layer + 1), slice(head, head + 1)
    return replace(
        view,
        why=None,
        heads=rows,
        weights=view.weights[cells],
        position=view.position[cells],
        content=view.content[cells],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
