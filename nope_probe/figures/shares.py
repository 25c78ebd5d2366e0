"""What lead and pattern lose without sources and weights, and their exact terms -> figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import PERCENT, Dots, over_layers
from nope_probe.figures.intervals import bound_columns, interval_of, interval_text, percent
from nope_probe.figures.names import symbol, words
from nope_probe.figures.style import (
    BLANK,
    DIVERGING,
    GUIDE,
    SEQUENTIAL,
    colour_bar,
    panel_axes,
    place_panels,
    scatter,
)
from nope_probe.figures.words import reader_of
from nope_probe.removal import NO_REPLACEMENT, SOURCES

QUESTIONS = {"lead": "first key", "pattern": "other keys"}
FILLINGS = ("", "-open", "-dot", "-open-dot")  # of the markers of several replacements
EDGES = (-1.0, 2.0)  # losses of heads beyond these are drawn there
CELL, MOST = 18, 1400  # px: a head's row at most, and all rows
FEW = 4  # bands whose names are written along the axis


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


def head_losses(table: pd.DataFrame, pattern: pd.DataFrame) -> go.Figure:
    """Draw what each head's lead and pattern lose without the first two sources, a point a head.

    The size of a point grows with the head's lead or pattern. Heads whose lead or pattern does not
    exceed its noise are left out. For a model of one source the axes are the size, and how much of
    it the source makes. Points beyond `EDGES` are drawn there.

    Args:
        table: `head_sources.csv`: layer, head, of (lead or pattern), source, and lost with its
            bounds, a fraction of position's part.
        pattern: `head_pattern.csv`: layer, head, removed, lead and amplitude (nats) and how much of
            each the sources make, with their bounds.
    """
    sources = [str(name) for name in table["source"].unique() if name in SOURCES]
    panels = {question: heads_with(table, pattern, question) for question in QUESTIONS}
    panels = {question: rows for question, rows in panels.items() if len(rows)}
    x, y = sources[:2] if len(sources) > 1 else ("size", "made")
    titles = {name: f"lost without {words(name)}" for name in sources}
    maker = words(sources[0]) if len(sources) == 1 else "all sources"
    titles |= {"size": "size, nats", "made": f"made by {maker}"}
    figure = place_panels(
        "What each head loses",
        [QUESTIONS[question] for question in panels],
        columns=2,
        panel=340,
        x_title=titles[x],
        y_title=titles[y],
        bottom=124,
    )
    for panel, rows in enumerate(panels.values()):
        size = rows["size"].abs()
        figure.add_trace(
            scatter(
                panel,
                "heads",
                "%{text}",
                x=rows[x].clip(*EDGES) if x in sources else rows[x],
                y=rows[y].clip(*EDGES),
                text=[_of_head(row, titles) for row in rows.to_dict("records")],
                mode="markers",
                marker={
                    "color": rows["layer"],
                    "coloraxis": "coloraxis",
                    "size": 5 + 13 * (size / size.max()) ** 0.5,
                    "line": {"width": 0.5, "color": BLANK},
                    "opacity": 0.85,
                },
                showlegend=False,
            )
        )
    figure.add_hline(1.0, line=GUIDE).update_yaxes(tickformat=".0%")
    if x != "size":
        figure.add_vline(1.0, line=GUIDE).update_xaxes(tickformat=".0%")
    limits = {"cmin": int(table["layer"].min()), "cmax": max(1, int(table["layer"].max()))}
    colours = {"colorscale": SEQUENTIAL, "colorbar": colour_bar("layer"), **limits}
    return figure.update_layout(coloraxis=colours)


def heads_with(table: pd.DataFrame, pattern: pd.DataFrame, question: str) -> pd.DataFrame:
    """Return a row for each head whose lead or pattern exceeds its noise.

    Args:
        table: `head_sources.csv`.
        pattern: `head_pattern.csv`.
        question: lead or pattern.

    Returns:
        layer, head, `size` in nats, `made` (by the sources) and what is lost without each source,
        with their bounds.
    """
    places = ["layer", "head"]
    named = {"lead" if question == "lead" else "amplitude": "size"}
    named |= {f"{question}_from_sources": "made"}
    heads = pattern[pattern["removed"] == "intact"].set_index(places)
    columns = [heads[[old, *bound_columns(old)]] for old in named]
    renamed = [[new, *bound_columns(new)] for new in named.values()]
    columns = [of.set_axis(new, axis=1) for of, new in zip(columns, renamed, strict=True)]
    for source, rows in table[table["of"] == question].groupby("source", sort=False):
        lost = rows.set_index(places)[["lost", *bound_columns("lost")]]
        columns.append(lost.set_axis([str(source), *bound_columns(str(source))], axis=1))
    known = table[(table["of"] == question) & table["lost"].notna()]
    return (
        pd.concat(columns, axis=1)
        .loc[lambda rows: rows.index.isin(pd.MultiIndex.from_frame(known[places]))]
        .reset_index()
    )


def _of_head(row: Mapping[Any, Any], titles: Mapping[str, str]) -> str:
    """Return the hover text of a head."""
    numbers = [
        interval_text(interval_of(row, name), "z.2f")
        if name == "size"
        else interval_text(percent(interval_of(row, name)), "z.0f", "%")
        for name in titles
    ]
    lines = [f"{title}: {number}" for title, number in zip(titles.values(), numbers, strict=True)]
    return "<br>".join([reader_of(row), *lines])


def head_bands(
    table: pd.DataFrame, wavelengths: Mapping[str, tuple[float, float]] | None = None
) -> go.Figure:
    """Draw what each head's lead and pattern lose without each band of RoPE.

    A head whose lead or pattern does not exceed its noise stays blank.

    Args:
        table: `head_sources.csv`, see `head_losses`; bands of RoPE are among its sources.
        wavelengths: the shortest and the longest wavelength of each band, in tokens.
    """
    ends, bands = wavelengths or {}, table[~table["source"].isin(SOURCES)]
    heads = bands[["layer", "head"]].drop_duplicates().reset_index(drop=True)
    names = [str(name) for name in bands["source"].unique()]
    labels = [band_label(name, ends) for name in names]
    panels = {
        question: rows
        for question, rows in _by_question(bands).items()
        if rows["lost"].notna().any()
    }
    row, upright = max(5, min(CELL, MOST // len(heads))), len(names) > FEW
    figure = place_panels(
        "What each head loses without a band",
        [f"{QUESTIONS[question]}, lost" for question in panels],
        columns=2,
        panel=max(160, row * len(heads)),
        bottom=230 if upright else 170,
        x_title="wavelength, tokens" if ends else "band of RoPE",
        phone={"row_gap": 170},
    )
    first = heads.index[~heads["layer"].duplicated()]
    for panel, rows in enumerate(panels.values()):
        cells = rows.pivot(index=["layer", "head"], columns="source")
        cells = cells.reindex(pd.MultiIndex.from_frame(heads))
        z, *bounds = (
            cells[column][names].to_numpy(float) for column in ("lost", *bound_columns("lost"))
        )
        figure.add_trace(
            {
                "type": "heatmap",
                **panel_axes(panel),
                "z": z,
                "x": labels,
                "customdata": np.stack(bounds, -1),
                "text": [[f"L{at.layer}H{at.head}"] * len(names) for at in heads.itertuples()],
                "coloraxis": "coloraxis",
                "hoverongaps": False,
                "hovertemplate": f"%{{text}}, %{{x}}<br>lost %{{z:.1%}} {PERCENT}<extra></extra>",
            }
        )
    figure.update_xaxes(type="category", showgrid=False, tickangle=-90 if upright else None)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickvals=first.tolist(),
        ticktext=[f"L{layer}H{head}" for layer, head in heads.loc[first].to_numpy()],
    )
    bar = {**colour_bar("lost"), "tickformat": ".0%"}
    colours = {"colorscale": DIVERGING, "cmin": -1.0, "cmax": 1.0, "colorbar": bar}
    return figure.update_layout(coloraxis=colours, plot_bgcolor=BLANK)


def band_label(name: str, wavelengths: Mapping[str, tuple[float, float]]) -> str:
    """Return a band of RoPE by its wavelengths in tokens, or by its name where they are unknown.

    Example:
        >>> band_label("rope[0:2]", {"rope[0:2]": (6.283, 9.004)}), band_label("rope_high", {})
        ('6.3–9', 'rope_high')
    """
    if name not in wavelengths:
        return words(name)
    return "–".join(f"{float(f'{x:.2g}'):,g}" for x in dict.fromkeys(wavelengths[name]))


def _by_question(table: pd.DataFrame) -> Mapping[str, pd.DataFrame]:
    """Return the rows of the lead and of the pattern, if a table has them."""
    return {name: rows for name in QUESTIONS if len(rows := table[table["of"] == name])}


def _by_name(table: pd.DataFrame, column: str) -> list[Dots]:
    return [Dots(rows, str(name), column) for name, rows in table.groupby("term", sort=False)]
