"""How sentences and figures name components and terms, and how figures draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import repeat
from numbers import Real
from typing import TYPE_CHECKING

from nope_probe.figures.words import (
    PLACES,
    QUESTIONS,
    Column,
    Columns,
    column_text,
    numbers_as_text,
)
from nope_probe.files import packaged
from nope_probe.removal import (
    CIRCUITS,
    IN_HEADS,
    INTERACTION,
    NO_REPLACEMENT,
    REMOVABLE,
    UNION,
    Words,
    writer_of,
)

if TYPE_CHECKING:
    import pandas as pd

_NAMES = packaged("figures/names.toml")
TABLE = {**REMOVABLE, **{name: Words(**words) for name, words in _NAMES["terms"].items()}}
TABLE |= {UNION.join(weights): TABLE[name] for name, weights in CIRCUITS.items()}
MOST_HEADS = 4  # that are named; of more, their number
OF = {"lead": QUESTIONS["lead"], "pattern": QUESTIONS["order"]}  # in tables, what a term is of
_SIGNS = {INTERACTION: " × ", UNION: " + "}


def plain(text: str) -> str:
    """Return a text of others (a token, a run's label, a user's name) as a figure shows it.

    Figures read tags, entities, `%{...}` and formulas between dollars in their texts.

    Example:
        >>> plain("<b>"), plain("%{x}")
        ('&lt;b&gt;', '&#37;{x}')
    """
    return escape(text, quote=False).replace("%{", "&#37;{").replace("$", "&#36;")


def words(name: str) -> str:
    """Return the label of a component, circuit or term; of a union or interaction, its parts'.

    Example:
        >>> words("mask"), words("mask+w_q"), words("mask_x_rope"), words("w_q+w_k")
        ('causal mask', 'mask + W_Q', 'mask × RoPE', 'QK circuit')
    """
    return words_of(name).label


def short(name: str) -> str:
    """Return the short label of a component or term.

    Example:
        >>> short("mask"), short("covariance")
        ('mask', 'covariance')
    """
    return words_of(name).short or words(name)


def row_name(removed: str, replacement: str = NO_REPLACEMENT) -> str:
    """Return what a row of a table is of, wherever it is shown: in sentences, tables and legends.

    Args:
        removed: what is removed, `intact` for nothing.
        replacement: of the weights among it.

    Example:
        >>> row_name("mask"), row_name("w_q", "mean"), row_name("w_q", "zero")
        ('without the causal mask', 'with constant queries (W_Q)', 'with W_Q replaced by zero')
        >>> row_name("mask+rope"), row_name("intact")
        ('without mask + RoPE', 'intact')
        >>> row_name("written_null")
        'null of written position'
    """
    (everywhere, heads), rows = in_heads(removed), _NAMES["rows"]
    name: str = rows.get(f"{replacement} {everywhere}") or rows.get(replacement, rows["replaced"])
    said = words_of(everywhere).phrase or words(everywhere)
    return name.format(removed=said, replacement=replacement) + heads


def map_name(removed: str, replacement: str) -> str:
    """Return the name of the score maps of a condition in a run.

    Example:
        >>> map_name("mask", "none"), map_name("w_q", "mean")
        ('score/mask', 'score_mean/w_q')
    """
    return f"score{f'_{replacement}' * (replacement != NO_REPLACEMENT)}/{removed}"


def in_heads(name: str) -> tuple[str, str]:
    """Return what is removed, and the end of a phrase with the heads that lose it, if not all do.

    Example:
        >>> in_heads("w_q@L2H0,L2H1+w_k@L2H0,L2H1"), in_heads("mask")
        (('w_q+w_k', ' in L2H0, L2H1'), ('mask', ''))
    """
    parts = [part.partition(IN_HEADS) for part in name.split(UNION)]
    heads = parts[0][2].split(",")
    said = ", ".join(heads) if len(heads) <= MOST_HEADS else f"{len(heads)} heads"
    return UNION.join(part[0] for part in parts), f" in {said}" * bool(parts[0][2])


def named(names: Mapping[str, str], column: str, value: object) -> str:
    """Return what a value of a column is called; `names` come first."""
    text = str(value)
    if text in names:
        return names[text]
    if column == "layer":
        return f"L{value:.0f}" if isinstance(value, Real) else text
    if column == "removed":
        return row_name(text)
    return f"{value:g}" if isinstance(value, float) else words(text)


def in_words(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Return a table as text, with layers, removals and terms in the words of figures.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"layer": [1], "removed": ["w_q"], "replacement": ["mean"]})
        >>> in_words(rows, {}).to_dict("records")
        [{'layer': 'L1', 'removed': 'with constant queries (W_Q)'}]
    """
    texts = numbers_as_text(table, columns)
    for name in {"layer", "term", "of"} & {*texts}:
        called = OF if name == "of" else {}
        texts[name] = [named(called, name, value) for value in table[name]]
    if "removed" in texts:
        by = texts.pop("replacement") if "replacement" in texts else repeat(NO_REPLACEMENT)
        rows = zip(texts["removed"], by, strict=False)
        texts["removed"] = [row_name(name, replacement) for name, replacement in rows]
    return texts


def brief(
    table: pd.DataFrame,
    first: str,
    numbers: Sequence[str],
    columns: Columns,
    *,
    by: str = "",
    style: str = "z.2f",
) -> pd.DataFrame:
    """Return a small table as text: a row for each value of a column, a cell for each number.

    Args:
        table: numbers, with their bounds if they have any.
        first: the column whose values name the rows.
        numbers: the columns that are shown; of a long table the one that is.
        columns: the study's numbers, which give headings and units.
        by: of a long table, the column whose values (keys of `columns`) are the headings.
        style: the format of numbers; percents have no decimals.

    Example:
        >>> import pandas as pd
        >>> costs = pd.DataFrame({"removed": ["mask"], "cost": [1.5], "cost_low": [1.0]})
        >>> nats = {"cost": Column("cost", unit="nats")}
        >>> brief(costs.assign(cost_high=2.0), "removed", ["cost"], nats).to_dict("records")
        [{'removed': 'without the causal mask', 'cost, nats': '1.50 [1.00, 2.00]'}]
    """
    import pandas as pd

    known = {**PLACES, **columns}
    cells: dict[str, dict[str, str]] = {}
    for row in table.to_dict("records"):
        by_what = row.get("replacement", NO_REPLACEMENT)
        removed = row_name(row[first], by_what) if first == "removed" else ""
        of_row = cells.setdefault(removed or named({}, first, row[first]), {})
        for name in numbers:
            about = known[str(row[by])] if by else known[name]
            of_row[about.title] = column_text(row, name, about, "z.0f" if about.is_share else style)
    frame = pd.DataFrame.from_dict(cells, orient="index").fillna("")
    return frame.reset_index(names=known.get(first, Column(first)).label)


def words_of(name: str) -> Words:
    """Return the words, the colour and the marker of a component, circuit, term or position.

    Unions share a colour, and so do interactions; markers differ so that colour is never the only
    sign.
    """
    if name in TABLE:
        return TABLE[name]
    everywhere, heads = in_heads(name)
    if heads:
        label, brief = words(everywhere) + heads, short(everywhere) + heads
        return replace(words_of(everywhere), label=label, phrase="", short=brief)
    writer = writer_of(name)
    if writer is not None:
        label = f"position of {_NAMES['writers'].get(writer, writer)}"
        return Words(label=label, phrase=f"the {label}")
    sign, (*others, last) = parts_of(name)
    if not sign:
        return Words(label=name)
    label = _SIGNS[sign].join(short(part.strip()) for part in (*others, last))
    joined = replace(TABLE["interaction"], label=label)
    if sign == INTERACTION and last == "window":
        marker = "star" if len(others) > 1 else "x" if others == ["mask"] else "triangle-left"
        return replace(joined, colour=TABLE["window"].colour, marker=marker)
    return joined


def parts_of(name: str) -> tuple[str, list[str]]:
    """Return the sign that joins the parts of a union or interaction, and the parts.

    Example:
        >>> parts_of("mask_x_rope"), parts_of("w_q+mlp"), parts_of("mask")
        (('_x_', ['mask', 'rope']), ('+', ['w_q', 'mlp']), ('', ['mask']))
    """
    sign = next((sign for sign in (INTERACTION, UNION) if sign in name), "")
    return sign, name.split(sign) if sign else [name]
