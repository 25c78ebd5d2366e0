"""What lead and pattern lose without sources and weights, and their exact terms -> figures."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from nope_probe.components import NO_REPLACEMENT
from nope_probe.figures.dots import Dots, over_layers
from nope_probe.figures.names import symbol, words

QUESTIONS = {"lead": "first key", "pattern": "other keys"}
FILLINGS = ("", "-open", "-dot", "-open-dot")  # of the markers of several replacements


def source_losses(table: pd.DataFrame) -> go.Figure:
    """Draw what the lead and the pattern lose without each source, per layer.

    Args:
        table: `sources.csv`: layer, of (lead or pattern), source, and lost with its bounds, a
            fraction of position's part.
    """
    panels = {
        f"{QUESTIONS[question]}, lost": [
            Dots(rows[rows["source"] == name], str(name), "lost", f"without {words(str(name))}")
            for name in rows["source"].unique()
        ]
        for question, rows in _by_question(table).items()
    }
    return over_layers(panels, title="Lost without each source", same_y=[range(len(panels))])


def weight_losses(table: pd.DataFrame) -> go.Figure:
    """Draw what the lead and the pattern lose without each weight, per layer and replacement.

    Args:
        table: `weights.csv`: layer, of, removed, replacement, and lost with its bounds. Open
            markers are of the second replacement.
    """
    replacements = [name for name in table["replacement"].unique() if name != NO_REPLACEMENT]
    panels = {}
    for question, rows in _by_question(table).items():
        panels[f"{QUESTIONS[question]}, lost"] = [
            Dots(
                some,
                str(name),
                "lost",
                words(str(name)) + (f", {replacement}" if replacement != NO_REPLACEMENT else ""),
                marker={"symbol": symbol(str(name)) + _filling(replacements, str(replacement))},
            )
            for (name, replacement), some in rows.groupby(["removed", "replacement"], sort=False)
        ]
    title = "Lost without each weight, per layer"
    return over_layers(panels, title=title, columns=1, same_y=[range(len(panels))])


def _filling(replacements: list[str], replacement: str) -> str:
    index = replacements.index(replacement) if replacement in replacements else 0
    return FILLINGS[index % len(FILLINGS)]


def source_terms(table: pd.DataFrame) -> go.Figure:
    """Draw each term's share of position's part, and its size, per layer.

    Args:
        table: `terms.csv`: layer, of, term, and share and size (nats) with their bounds.
    """
    panels = {}
    for question, rows in _by_question(table).items():
        named = {
            str(name): rows[rows["term"] == name]
            for name in rows["term"].unique()
            if rows.loc[rows["term"] == name, "share"].notna().any()
        }
        shares = [Dots(some, name, "share") for name, some in named.items()]
        if shares:
            panels[f"{QUESTIONS[question]}, share"] = shares
        panels[f"{QUESTIONS[question]}, nats"] = _by_name(rows, "size")
    return over_layers(panels, title="What each source makes alone and together", columns=2)


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the exact terms' shares and sizes, per layer.

    Args:
        table: `mean_covariance.csv`: layer, of, term, and share and size (nats) with their bounds.
    """
    panels = {}
    for question, rows in _by_question(table.assign(term=table["term"].map(term_entry))).items():
        panels[f"{QUESTIONS[question]}, share"] = _by_name(rows, "share")
        panels[f"{QUESTIONS[question]}, nats"] = _by_name(rows, "size")
    return over_layers(panels, title="The exact terms of the scores", columns=2)


def term_entry(term: str) -> str:
    """Return the name of a term of `mean_covariance.csv` in the table of components."""
    return f"{term}_term" if term in ("mean", "covariance") else term


def _by_question(table: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """Return the rows of the lead and of the pattern, as far as a table has them."""
    return {name: rows for name in QUESTIONS if len(rows := table[table["of"] == name])}


def _by_name(table: pd.DataFrame, column: str) -> list[Dots]:
    return [Dots(rows, str(name), column) for name, rows in table.groupby("term", sort=False)]
