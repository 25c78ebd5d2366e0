"""What the pages of all commands have in common: one sentence, one small table, titled figures."""

import re
from collections.abc import Callable
from html import unescape
from textwrap import wrap

import pytest
from support.finished_runs import Finished

TWINS = ("ablate --model nope-tiny", "ablate --model rope-tiny")
LINES = {
    "ablate": TWINS[0],
    "rope": TWINS[1],
    "noise": "ablate --data random --remove sources",
    "intact": "ablate --model rope-tiny --remove none --per-head",
    "circuit": "circuit --remove mask mlp",
    "attention": "attention --model rope-tiny --remove rope --text 'a b' --why L1H3 --steps 2",
    "trace": "trace --model nope-tiny --layers 3 --confirm 2",
    "rotation": "trace --model rope-tiny --confirm 0",
    "behaviour": "behaviour --model rope-tiny --remove mask rope w_q",
}


def texts(html: str, element: str) -> list[str]:
    """Return the texts of all elements of a kind, without their tags."""
    inside = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", html, re.DOTALL)
    return [unescape(re.sub("<[^>]*>", " ", text)).strip() for text in inside]


def lines_of(cell: str) -> list[str]:
    """Return the lines of a cell in a terminal, where names are wrapped."""
    return [line for part in cell.split("\n") for line in wrap(part, 27)] or [""]


def assert_short(html: str) -> None:
    [headline] = re.findall(r'<section class="headline"[^>]*>(.*?)</section>', html, re.DOTALL)
    for table in re.findall(r"<table>(.*?)</table>", headline, re.DOTALL):
        rows = [texts(row, "t[hd]") for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
        # Intact, the combinations of mask and RoPE, written position, four weights.
        assert len(rows) <= 1 + 9
        cells = zip(*rows, strict=True)
        columns = [[line for text in of for line in lines_of(text)] for of in cells]
        widths = [max(map(len, column)) for column in columns]
        assert sum(widths) + 2 * (len(widths) - 1) <= 80, "the table is wider than a terminal"
        assert len(widths) <= 6, "more columns than one looks at"
    shown = re.findall(r'<section id="section-\d+"[^>]*>(.*?)</section>', html, re.DOTALL)
    assert shown
    for section in shown:
        [title] = texts(section, "h2")
        assert 1 <= len(title.split()) <= 8, title
        assert not re.search(r"\d", title), title
    where = [html.index(part) for part in ('class="headline"', 'id="section-0"', 'class="notes"')]
    assert where == sorted(where)


@pytest.mark.parametrize("name", LINES)
def test_a_page_is_a_small_table_and_figures_with_short_titles(
    name: str, finished: Callable[[str], Finished]
) -> None:
    assert_short(finished(LINES[name]).page)


def test_a_comparison_is_as_short(finished: Callable[[str], Finished]) -> None:
    one, other = (finished(line).folder for line in TWINS)
    assert_short(finished(f"compare {one} {other}").page)
