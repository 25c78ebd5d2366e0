"""How sentences and figures name components and terms, and how figures draw them."""

from __future__ import annotations

from dataclasses import replace
from html import escape

from nope_probe.components import REMOVABLE, Entry
from nope_probe.conditions import Writer

TABLE: dict[str, Entry] = {
    "intact": Entry(label="intact model", phrase="the intact model"),
    "all": Entry(label="whole pattern"),
    "without_sources": Entry(label="without any source", colour="#7a7a7a"),
    **REMOVABLE,
    "interaction": Entry(label="interaction", colour="#ab3e98", marker="cross"),
    "mean_term": Entry(
        label="mean term", phrase="the mean term", colour="#535dba", marker="square"
    ),
    "covariance_term": Entry(
        label="covariance term", phrase="the covariance term", colour="#8d6620"
    ),
    "rotation": Entry(
        label="rotation", phrase="RoPE's rotation alone", colour="#0070e3", marker="diamond"
    ),
    "written_key": Entry(
        label="written into keys",
        phrase="position written into keys",
        colour="#18753a",
        marker="triangle-down",
    ),
    "written_query": Entry(
        label="written into queries",
        short="into queries",
        phrase="position written into queries",
        colour="#1da2a5",
        marker="triangle-up",
    ),
    "written_both": Entry(
        label="written into both",
        short="into both",
        phrase="position written into queries and keys",
        colour="#8952a0",
        marker="hexagon",
    ),
    "norm": Entry(label="norm's scale", short="norm", phrase="the norm's scale by position"),
}
_WRITERS = {"embed": "the token embeddings", "pos_embed": "the learned embeddings"}


def plain(text: str) -> str:
    """Return a text of others (a token, a run's label, a user's name) as a figure shows it.

    Figures read tags, entities, `%{...}` and formulas between dollars in their texts.

    Example:
        >>> plain("<b>"), plain("%{x}")
        ('&lt;b&gt;', '&#37;{x}')
    """
    return escape(text, quote=False).replace("%{", "&#37;{").replace("$", "&#36;")


def words(name: str) -> str:
    """Return the label of a component or term; of a union or interaction, its parts'.

    Example:
        >>> words("mask"), words("mask+w_q"), words("mask_x_rope")
        ('causal mask', 'mask + W_Q', 'mask × RoPE')
    """
    for sign, between in (("_x_", " × "), ("+", " + ")):
        if sign in name:
            return between.join(short(part) for part in name.split(sign))
    writer = Writer.removed_by(name)
    if writer is not None:
        return f"position of {_WRITERS.get(writer, writer)}"
    return TABLE[name].label if name in TABLE else name


def short(name: str) -> str:
    """Return the short label of a component or term.

    Example:
        >>> short("mask"), short("written_both"), short("covariance")
        ('mask', 'into both', 'covariance')
    """
    return (TABLE[name].short if name in TABLE else "") or words(name)


def phrase(name: str) -> str:
    """Return a component or term as a sentence names it.

    Example:
        >>> phrase("mask"), phrase("w_q+mlp"), phrase("mask_x_rope")
        ('the causal mask', 'W_Q + MLP', 'mask and RoPE together')
        >>> phrase("position[L1H0]")
        'the position of L1H0'
    """
    if Writer.removed_by(name) is not None:
        return f"the {words(name)}"
    if "_x_" in name:
        *others, last = (short(part) for part in name.split("_x_"))
        return f"{', '.join(others)} and {last} together"
    return (TABLE[name].phrase if name in TABLE else "") or words(name)


def colour(name: str) -> str:
    """Return a component's colour, the same in every figure; unions and interactions share two."""
    return _drawn_as(name).colour


def symbol(name: str) -> str:
    """Return a component's marker, so that colour is never the only sign."""
    return _drawn_as(name).marker


def _drawn_as(name: str) -> Entry:
    *others, last = name.split("_x_")
    if others and last == "window":
        marker = "star" if len(others) > 1 else "x" if others == ["mask"] else "triangle-left"
        return replace(TABLE["interaction"], colour=TABLE["window"].colour, marker=marker)
    if others or "+" in name:
        return TABLE["interaction"]
    return TABLE.get(name, Entry(label=name))
