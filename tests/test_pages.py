"""What the pages of all commands have in common: one sentence, one small table, short words."""

import re
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.command_line import run_command

from nope_probe import (
    ablate,
    attention,
    behaviour,
    circuit,
    compare,
    reproduce,
    simulate,
    trace,
)
from nope_probe.studies.page import NAMES, columns_that_fit

pytestmark = pytest.mark.usefixtures("unenforced", "undrawn")

RUN = ["--n-seqs", 20, "--seq-len", 24, "--folds", 5]
DEEP = [*RUN, "--layers", "2"]
NO_WEIGHTS = ["--remove", "sources"]
LINES: dict[str, tuple[ModuleType, list[Any]]] = {
    "ablate": (ablate, ["--model", "rope-tiny", *DEEP]),
    "sources": (ablate, ["--model", "nope-tiny", *DEEP, *NO_WEIGHTS]),
    "noise": (ablate, ["--data", "random", *DEEP, *NO_WEIGHTS]),
    "intact": (
        ablate,
        ["--model", "rope-tiny", *DEEP, "--remove", "none", "--per-head", "--bands", 2],
    ),
    "circuit": (circuit, [*RUN]),
    "ablated circuit": (circuit, [*RUN, "--remove", "mask", "mlp"]),
    "attention": (attention, ["--model", "rope-tiny", *DEEP]),
    "text": (
        attention,
        [
            "--model",
            "rope-tiny",
            *DEEP,
            "--remove",
            "rope",
            "--text",
            "a b",
            "--why",
            "L1H3",
            "--steps",
            2,
        ],
    ),
    "trace": (trace, ["--model", "nope-tiny", *RUN, "--layers", "3", "--confirm", 2]),
    "trace of rotation": (trace, ["--model", "rope-tiny", *DEEP, "--confirm", 0]),
    "behaviour": (behaviour, ["--model", "rope-tiny", *RUN, "--remove", "mask", "rope", "w_q"]),
    "simulate": (simulate, ["--n-samples", 64, "--seq-len", 9, "--d-model", 8]),
    "figure 1": (reproduce, ["figure1"]),
    "figure 2": (reproduce, ["figure2", "--n-samples", 64]),
    "figure 8": (reproduce, ["figure8", "--model", "nope-tiny", "--n-seqs", 8]),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def page_of(folder: Path, command: ModuleType, *arguments: Any) -> str:
    if not folder.exists():
        run_command(command, *arguments, "--out", folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def texts(html: str, element: str) -> list[str]:
    """Return the texts of all elements of a kind, without their tags."""
    inside = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", html, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", " ", text)).strip() for text in inside]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def check(html: str) -> None:
    [headline] = re.findall(r'<section class="headline"[^>]*>(.*?)</section>', html, re.DOTALL)
    first, *caption = texts(headline, "p")
    said, *second = sentences(first)
    assert 4 <= len(said.split()) <= 25, first
    assert len(second) <= 1, first  # of the weights
    assert len(" ".join(second).split()) <= 35, first
    rows = [texts(row, "t[hd]") for row in re.findall(r"<tr>(.*?)</tr>", headline, re.DOTALL)]
    assert len(rows) <= 1 + 8
    widths = [max(min(len(text), NAMES) for text in column) for column in zip(*rows, strict=True)]
    assert len(columns_that_fit(widths)) <= 1, "the table is wider than a terminal"
    assert len(widths) <= 6, "more columns than one looks at"
    shown = re.findall(r'<section id="section-\d+"[^>]*>(.*?)</section>', html, re.DOTALL)
    assert shown
    for section in shown:
        [title] = texts(section, "h2")
        assert 1 <= len(title.split()) <= 8, title
        assert not re.search(r"\d", title), title
        caption += texts(section, "figcaption") + texts(section.split("</iframe>")[-1], "p")
    for text in caption:
        assert len(text.split()) <= 45, text
    for text in [*caption, *texts(html.split('class="notes"')[1].split("</ul>")[0], "li")]:
        for sentence in sentences(text):
            assert len(sentence.split()) <= 25, sentence
    where = [html.index(part) for part in ('class="headline"', 'id="section-0"', 'class="notes"')]
    assert where == sorted(where)


@pytest.mark.parametrize("name", LINES)
def test_a_page_is_a_short_sentence_a_small_table_and_figures_with_short_words(
    name: str, pages: Path
) -> None:
    command, arguments = LINES[name]
    check(page_of(pages / name.replace(" ", "-"), command, *arguments))


@pytest.mark.parametrize("pair", [("ablate", "sources"), ("trace", "trace of rotation")])
def test_a_comparison_is_as_short(pair: tuple[str, str], pages: Path) -> None:
    folders = [pages / name.replace(" ", "-") for name in pair]
    for folder, name in zip(folders, pair, strict=True):
        command, arguments = LINES[name]
        page_of(folder, command, *arguments)
    check(page_of(pages / f"compared-{pair[0]}", compare, *folders))
