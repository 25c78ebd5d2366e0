"""All heads on one map, each without a source, and the terms of one query's scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import qualitative

from nope_probe.figures.names import row_name, words_of
from nope_probe.figures.style import (
    BLANK,
    GUIDE,
    PlotlyTrace,
    axis,
    colour_axis,
    draw_panels,
    padded_range,
    reach_of,
    scatter,
)
from nope_probe.figures.words import (
    QUESTIONS,
    bound_columns,
    interval_of,
    interval_text,
    with_readers,
)
from nope_probe.removal import INTACT, SOURCES, Condition

CELL = 32  # px a layer
LARGEST, SMALLEST = 22, 5  # px across, of the head with the largest number and of any head
REST = "#9aa0a6"
MOST_TERMS = 5  # of a score, in its table of text
KINDS = {  # of heads: their colour and their name in the legend
    "sink": ("#8a6bb8", "sink: looks at the first key"),
    "order": ("#d9730d", "order: position among the other keys"),
    "content": ("#2b7bba", "content: what differs between texts"),
    "": (REST, "not classed"),
}
HOVER = (
    "L%{y}H%{x}<br>%{customdata[0]:.2f} nats above uniform attention<br>first key "
    "%{customdata[1]:.0%} of the weight<br>among the other keys %{customdata[2]:.0%} "
    "[%{customdata[3]:.0%}, %{customdata[4]:.0%}] is position"
)
NEED = "<br>need of RoPE %{customdata[5]:.3f} nats"


def attention_heads(table: pd.DataFrame, kind_of: pd.Series[str]) -> go.Figure:
    """Draw all heads, layer by head: the kind of each, and its need of RoPE.

    The area of a head is how much its attention needs RoPE; of a model without RoPE, or an ablated
    one, it is all of its information. Heads that see fewer than 8 keys at a time are left out.

    Args:
        table: `attention.csv`: layer, head, information (nats), its parts, others_share,
            first_weight, and need_rope of a model with RoPE.
        kind_of: the kind of each head, a key of `KINDS`, which colours it.
    """
    known = table.dropna(subset=["information"])
    has_need = "need_rope" in known
    area = known["need_rope" if has_need else "information"].clip(lower=0)
    sizes = SMALLEST + (LARGEST - SMALLEST) * (area / reach_of(area.to_numpy(float))) ** 0.5
    known = known.assign(kind=kind_of[known.index], size=sizes, area=area)
    shares = ["first_weight", "others_share", *bound_columns("others_share")]
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label,
            "x": rows["head"].to_numpy(int),
            "y": rows["layer"].to_numpy(int),
            "customdata": rows[["information", *shares, "area"]].to_numpy(float),
            "hovertemplate": f"{HOVER}{NEED * has_need}<extra>{kind}</extra>",
            "marker": {"size": rows["size"], "color": ink, "opacity": 1, "line_width": 0},
        }
        for kind, (ink, label) in KINDS.items()
        for rows in [known[known["kind"] == kind]]
        if len(rows)
    ]
    n_layers, n_heads = table[["layer", "head"]].nunique()
    title = "The kind of each head" + ", and its need of RoPE" * has_need
    figure = draw_panels(
        title,
        {"": traces},
        panel=max(160, CELL * n_layers),
        bottom=124,
        x_title="head",
        y_title="layer",
    )
    same = {"zeroline": False, "tickformat": "d"}
    heads, layers = table["head"], table["layer"]
    figure.update_xaxes(same, nticks=min(17, 1 + n_heads), range=[-0.7, heads.max() + 0.7])
    figure.update_yaxes(
        same, nticks=min(33, 1 + n_layers), range=[layers.max() + 0.7, layers.min() - 0.7]
    )
    return figure.update_layout(meta={"opens_heads": True}, legend={"itemsizing": "constant"})


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a head looks where it looks from one token of a text.

    Attributes:
        head: the head's name.
        query: the position of the token.
        table: `why.csv`, a row for each key and term: key, its token, attention weight and score,
            and the term's side, name and nats. The terms of a key add up to its score.
        steps: `why_steps.csv`, the terms of the most attended key, and those of the looks that
            moved them there, with what a score loses without each moved part; None of a single
            step.
    """

    head: str
    query: int
    table: pd.DataFrame = field(repr=False)
    steps: pd.DataFrame | None = field(repr=False, default=None)

    @property
    def terms(self) -> pd.DataFrame:
        """The score of the most attended key, its largest terms, and what heads moved: as text."""
        key = self.table["key"].to_numpy()[self.table["weight"].argmax()]
        rows = self.table[self.table["key"] == key]
        rows = rows.sort_values("nats", key=abs, ascending=False)[:MOST_TERMS]
        names = [label for label, _ in term_styles(rows).values()]
        cells = [{"term": "score", "nats": f"{rows['score'].iloc[0]:+.1f}"}]
        cells += [
            {"term": name, "nats": f"{x:+.1f}"} for name, x in zip(names, rows["nats"], strict=True)
        ]
        if self.steps is not None:
            moved = self.steps[(self.steps["step"] == 1) & self.steps["moved_from"].notna()]
            cells += [
                {
                    "term": f"{row['writer']}, {row['side']}, from {row['moved_from']:.0f}",
                    "nats": f"{row['nats']:+.1f}",
                    "effect": f"{row['effect']:+.1f}",
                    "weight without": f"{row['weight_without']:.0%}",
                }
                for row in moved.to_dict("records")
            ]
        return pd.DataFrame(cells).fillna("")


def term_styles(table: pd.DataFrame) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the label and the colour of each term of `why.csv`, by its side and name."""
    palette, styles = iter(qualitative.Dark24[1:] * 4), dict[tuple[str, str], tuple[str, str]]()
    for side, term in dict.fromkeys(zip(table["side"], table["term"], strict=True)):
        if side == "position":
            styles[side, term] = words_of(term).label, words_of(term).colour
        else:  # of a writer, or of the other writers
            label = term if side == "other" else f"{term}, {side}"
            styles[side, term] = label, REST if " " in term else next(palette)
    return styles


def head_values(table: pd.DataFrame) -> go.Figure:
    """Draw each head's value without a source against its value in the intact model, nats.

    A panel for each source or band of RoPE, and for all sources together, of the lead and of what
    is left of the order. On the diagonal nothing is lost; on the zero line all is lost.

    Args:
        table: `head_pattern.csv`: layer, head, removed, and lead and order with their bounds, nats.
    """
    of_heads = with_readers(table).set_index("reader").groupby("removed", sort=False)
    heads = {str(removed): rows for removed, rows in of_heads}
    intact = heads.pop(INTACT.name)
    several = [name for name in heads if len(Condition.parse(name)) > 1]
    together = [name for name in several if Condition.parse(name) <= {*SOURCES}]
    shown = [*(name for name in heads if name not in several), *together[-1:]]
    panels, lines = dict[str, list[PlotlyTrace]](), list[tuple[float, float]]()
    for name, title in QUESTIONS.items():
        known = intact[intact[name].notna()]
        for condition in shown if len(known) else ():
            left = heads[condition].loc[known.index]
            panels[f"{title}, {row_name(condition)}"] = [_points(name, known, left)]
            lines.append(padded_range([*known[name], *left[name]]) or (0.0, 1.0))
    figure = draw_panels(
        "Each head's value without a source",
        panels,
        columns=max(1, min(len(shown), 4)),
        panel=300,
        x_title="intact, nats",
        y_title="without it, nats",
        bottom=124,
    )
    for place, (low, high) in enumerate(lines):
        where = {"xref": f"x{axis(place)}", "yref": f"y{axis(place)}"}
        figure.add_shape(type="line", x0=low, x1=high, y0=low, y1=high, line=GUIDE, **where)
    figure.update_yaxes(zerolinewidth=2)
    limits = float(table["layer"].min()), max(1.0, float(table["layer"].max()))
    return figure.update_layout(coloraxis=colour_axis(limits, "layer"))


def _points(name: str, intact: pd.DataFrame, left: pd.DataFrame) -> PlotlyTrace:
    """Return the points of heads, and their intervals as hover texts."""
    texts = [
        [interval_text(interval_of(row, name), "z.2f", " nats") for row in rows.to_dict("records")]
        for rows in (intact, left)
    ]
    return scatter(
        "heads",
        "%{text}",
        x=intact[name],
        y=left[name],
        text=[
            f"{reader}<br>intact: {before}<br>without it: {after}"
            for reader, before, after in zip(intact.index, *texts, strict=True)
        ],
        mode="markers",
        marker={
            "color": intact["layer"].tolist(),
            "coloraxis": "coloraxis",
            "size": 8,
            "line": {"width": 0.5, "color": BLANK},
            "opacity": 0.85,
        },
        showlegend=False,
    )
