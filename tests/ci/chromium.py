"""Pages in headless Chromium, where it is installed."""

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--enable-logging=stderr --virtual-time-budget=20000 --dump-dom"
)
# On a busy machine headless Chromium may end before its first frame, in which figures come into
# view: they are drawn as for a printer, all at once.
DRAW_ALL = "<script>dispatchEvent(new Event('beforeprint'))</script>"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def opened(
    html: str,
    folder: Path,
    script: str = "",
    *,
    width: int = 1200,
    height: int = 6000,
    draw_all: bool = True,
) -> str:
    """Return a page's elements after its scripts ran, which must not write to the console."""
    page = folder / "opened.html"
    more = f"<script>{script}</script>" * bool(script) + DRAW_ALL * draw_all
    page.write_text(html.replace("</body>", f"{more}</body>"), encoding="utf-8")
    options = [f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"]
    run = subprocess.run(
        [str(CHROMIUM), *FLAGS.split(), *options, page.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return run.stdout


def told(html: str, folder: Path, script: str, **options: Any) -> dict[str, str]:
    """Return what a script left in the data attributes of a page's body."""
    [body] = re.findall(r"<body[^>]*>", opened(html, folder, script, **options))
    return {name: unescape(text) for name, text in re.findall(r'data-(\w+)="([^"]*)"', body)}
