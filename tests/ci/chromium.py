"""Pages in headless Chromium, where it is installed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
DRAW_ALL = "<script>dispatchEvent(new Event('beforeprint'))</script></body>"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def opened(
    html: str, folder: Path, width: int = 1200, height: int = 6000, draw_all: bool = True
) -> str:
    """Return a page's elements after its scripts ran, which must not write to the console."""
    page = folder / "opened.html"
    page.write_text(html.replace("</body>", DRAW_ALL) if draw_all else html, encoding="utf-8")
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


KEYS = {  # what a browser calls them, their codes, and the text that they write
    "Tab": ("Tab", 9, ""),
    " ": ("Space", 32, " "),
    "Enter": ("Enter", 13, "\r"),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}


class Tab:
    """A page in a browser that is driven through its debugging pipe: keys are real keys.

    Events that a script makes do not cause what a browser does with Tab, Space or arrows.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._id = write, read, b"", 0
        self.session = ""
        self.said: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.said.append(json.dumps(answer))
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        one, _, self._rest = self._rest.partition(b"\0")
        return json.loads(one)

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get(
            "value"
        )

    def press(self, key: str) -> None:
        code, number, text = KEYS[key]
        about = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)


@contextmanager
def open_tab(page: Path) -> Iterator[Tab]:
    """Open an explorer's page in a browser of its own, and wait until its scripts have run."""
    (theirs_in, write), (read, theirs_out) = os.pipe(), os.pipe()

    def connect() -> None:  # the browser reads commands from 3 and writes answers to 4
        kept = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    flags = "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
    browser = subprocess.Popen(
        [str(CHROMIUM), *flags.split(), f"--user-data-dir={page.parent / 'profile'}"],
        preexec_fn=connect,
        close_fds=False,
        stderr=subprocess.DEVNULL,
    )
    try:
        tab = Tab(write, read)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        result = tab.call("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = result["sessionId"]
        tab.call("Runtime.enable")
        tab.call("Page.navigate", url=page.absolute().as_uri())
        while (
            tab.evaluate("document.readyState + Boolean(document.body.explorer)") != "completetrue"
        ):
            pass
        yield tab
    finally:
        browser.terminate()
        browser.wait(timeout=30)
        for item in (theirs_in, write, read, theirs_out):
            os.close(item)
