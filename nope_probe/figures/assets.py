"""The scripts and styles of explorers and head maps, which are files of this package."""

from __future__ import annotations

from importlib import resources


def asset(name: str) -> str:
    """Return the text of a file in this folder, such as `explorer.css`."""
    return resources.files("nope_probe.figures").joinpath(name).read_text("utf-8")


def script(name: str) -> str:
    """Return a script after the colours of maps, in a scope of its own: several share a page."""
    return f'"use strict";\n(() => {{\n{asset("colours.js")}{asset(name)}}})();\n'
