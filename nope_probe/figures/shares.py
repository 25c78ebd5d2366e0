"""What lead and pattern lose without sources and weights, and their exact terms -> figures."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from nope_probe.figures.dots import PERCENT, Dots, interval_cells, over_layers
from nope_probe.figures.intervals import bound_columns, interval_of, interval_text, percent
from nope_probe.figures.names import symbol, words
from nope_probe.figures.style import BLANK, GUIDE, PlotlyTrace, colour_axis, draw_panels, scatter
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
            Dots(of, str(name), "lost", f"without {words(str(name))}")
            for name, of in rows.groupby("source", sort=False)
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
    fillings = {NO_REPLACEMENT: "", **dict(zip(replacements, cycle(FILLINGS), strict=False))}
    panels = {}
    for question, rows in _by_question(table).items():
        panels[f"{QUESTIONS[question]}, lost"] = [
            Dots(
                some,
                str(name),
                "lost",
                words(str(name)) + (f", {replacement}" if replacement != NO_REPLACEMENT else ""),
                marker={"symbol": symbol(str(name)) + fillings[str(replacement)]},
            )
            for (name, replacement), some in rows.groupby(["removed", "replacement"], sort=False)
        ]
    title = "Lost without each weight, per layer"
    return over_layers(panels, title=title, columns=1, same_y=[range(len(panels))])


def source_terms(
    table: pd.DataFrame, title: str = "What each source makes alone and together"
) -> go.Figure:
    """Draw each term's share of position's part, and its size, per layer.

    Args:
        table: `terms.csv`: layer, of, term, and share and size (nats) with their bounds.
        title: the figure's title.
    """
    panels = {}
    for question, rows in _by_question(table).items():
        terms = [(str(name), of_term) for name, of_term in rows.groupby("term", sort=False)]
        shares = [Dots(of, name, "share") for name, of in terms if of["share"].notna().any()]
        if shares:
            panels[f"{QUESTIONS[question]}, share"] = shares
        panels[f"{QUESTIONS[question]}, nats"] = [Dots(of, name, "size") for name, of in terms]
    return over_layers(panels, title=title, columns=2)


def mean_covariance_shares(table: pd.DataFrame) -> go.Figure:
    """Draw the exact terms' shares and sizes, per layer.

    Args:
        table: `mean_covariance.csv`: layer, of, term, and share and size (nats) with their bounds.
    """
    terms = table["term"].replace({name: f"{name}_term" for name in ("mean", "covariance")})
    return source_terms(table.assign(term=terms), "The exact terms of the scores")


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
    drawn: dict[str, list[PlotlyTrace]] = {}
    for question, rows in panels.items():
        size = rows["size"].abs()
        dots = scatter(
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
        drawn[QUESTIONS[question]] = [dots]
    figure = draw_panels(
        "What each head loses",
        drawn,
        columns=2,
        panel=340,
        x_title=titles[x],
        y_title=titles[y],
        bottom=124,
    )
    figure.add_hline(1.0, line=GUIDE).update_yaxes(tickformat=".0%")
    if x != "size":
        figure.add_vline(1.0, line=GUIDE).update_xaxes(tickformat=".0%")
    limits = float(table["layer"].min()), max(1.0, float(table["layer"].max()))
    return figure.update_layout(coloraxis=colour_axis(limits, "layer"))


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
    places, lost = ["layer", "head"], table[table["of"] == question]

    def named(rows: pd.DataFrame, column: str, name: str) -> pd.DataFrame:
        estimates = rows.set_index(places)[[column, *bound_columns(column)]]
        return estimates.set_axis([name, *bound_columns(name)], axis=1)

    heads = pattern[pattern["removed"] == "intact"]
    columns = [
        named(heads, "lead" if question == "lead" else "amplitude", "size"),
        named(heads, f"{question}_from_sources", "made"),
        *(named(rows, "lost", str(source)) for source, rows in lost.groupby("source", sort=False)),
    ]
    known = lost.dropna(subset=["lost"]).set_index(places).index
    return pd.concat(columns, axis=1).loc[lambda rows: rows.index.isin(known)].reset_index()


def _of_head(row: Mapping[Any, Any], titles: Mapping[str, str]) -> str:
    """Return the hover text of a head."""
    lines = [reader_of(row)]
    for name, title in titles.items():
        interval = interval_of(row, name)
        is_share = name != "size"
        text = (
            interval_text(percent(interval), "z.0f", "%")
            if is_share
            else interval_text(interval, "z.2f")
        )
        lines.append(f"{title}: {text}")
    return "<br>".join(lines)


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
    labels = [f"L{layer}H{head}" for layer, head in heads.to_numpy()]
    panels: dict[str, list[PlotlyTrace]] = {}
    for question, rows in _by_question(bands.dropna(subset=["lost"])).items():
        cells = rows.pivot(index=["layer", "head"], columns="source").reindex(
            index=pd.MultiIndex.from_frame(heads),
            columns=pd.MultiIndex.from_product([("lost", *bound_columns("lost")), names]),
        )
        trace = interval_cells(
            cells.to_numpy(float).reshape(len(heads), 3, -1).swapaxes(0, 1),
            f"%{{text}}, %{{x}}<br>lost %{{z:.1%}} {PERCENT}<extra></extra>",
            x=[band_label(name, ends) for name in names],
            text=[[label] * len(names) for label in labels],
        )
        panels[f"{QUESTIONS[question]}, lost"] = [trace]
    row, upright = max(5, min(CELL, MOST // len(heads))), len(names) > FEW
    figure = draw_panels(
        "What each head loses without a band",
        panels,
        columns=2,
        panel=max(160, row * len(heads)),
        bottom=230 if upright else 170,
        x_title="wavelength, tokens" if ends else "band of RoPE",
    )
    first = heads.index[~heads["layer"].duplicated()]
    figure.update_xaxes(type="category", showgrid=False, tickangle=-90 if upright else None)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        zeroline=False,
        tickvals=first.tolist(),
        ticktext=[labels[row] for row in first],
    )
    colours = colour_axis((-1.0, 1.0), "lost", tickformat=".0%")
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
