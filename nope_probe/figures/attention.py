"""All heads on one map, each without a source, and in a text: its tokens by where a head looks.

The view of a text is one piece of HTML, which needs no kernel, library or network. It holds the
weights as bytes, and the text as text: it can be copied, and is never read as HTML. Without
scripts, as in a notebook that is not trusted, the first head and query stay as a still picture.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from unicodedata import category

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import hex_to_rgb, qualitative

from nope_probe.figures.names import row_name, words_of
from nope_probe.figures.style import (
    BLANK,
    GUIDE,
    STOPS,
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
from nope_probe.files import JsonObject, template
from nope_probe.removal import INTACT, OTHERS, SOURCES, Condition

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
MAX_BYTES = 5_200_000  # of all heads; with plotly and the heads' mean maps a page has 12 MB
MOST_LOOKS = 5  # in a table
LOOK = ["layer", "head", "query"]  # the columns that name a look
STEPS = 255  # a weight is stored as a multiple of 1/255
MARKS = {"\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", " ": "\u2423"}
WITHIN = "\u22ef"  # in place of a token that ends within a character
TextWeights = Float[np.ndarray, "layer head query_pos key_pos"]


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
        names = ["score", *(label for label, _ in term_styles(rows).values())]
        nats = [rows["score"].iloc[0], *rows["nats"]]
        cells = [{"term": name, "nats": f"{x:+.1f}"} for name, x in zip(names, nats, strict=True)]
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


@dataclass(frozen=True, kw_only=True)
class TextView:
    """A text and each head's attention in it; a notebook shows it.

    Attributes:
        title: the title, of a notebook's output.
        pieces: the part of the text that each token adds; nothing for BOS, and for a token that
            ends within a character.
        names: what to show in place of pieces that cannot be seen, by the token's position; by
            default a sign for each space, and code points.
        why: the terms of the scores of one head and query, which the view opens with.
        heads: `attention.csv`: layer, head, information (nats) and others_share.
        weights: the attention weights in the text.
        position: the mean weights over other texts at the same positions; None without other texts.
        content: the relative entropy of the weights to the mean weights, nats; without other texts,
            to uniform weights.
    """

    title: str
    pieces: Sequence[str] = field(repr=False)
    heads: pd.DataFrame = field(repr=False)
    weights: TextWeights = field(repr=False)
    position: TextWeights | None = field(repr=False)
    content: Float[np.ndarray, "layer head query_pos"] = field(repr=False)
    names: dict[int, str] = field(default_factory=dict, repr=False)
    why: Why | None = None

    def html(self, max_bytes: int = MAX_BYTES) -> str:
        """Return the view as an element of a page, with as many heads as fit.

        Args:
            max_bytes: how many characters the heads may take; the heads with the most
                information come first, and a line says how many are left out.
        """
        n_heads, n, looks = len(self.heads), len(self.pieces), self._looks()
        packed = self._packed(max_bytes, [look["name"] for look in looks])
        head, (query, _) = next(
            (head, look) for head, look in self.strongest_looks().items() if head in packed
        )
        weights = self.weights.reshape(n_heads, n, n)[self.readers.index(head), query]
        data = {
            "colours": STOPS,
            "causal": not np.triu(self.weights, 1).any(),
            "first": [[*packed].index(head), query],
            "compared": self.position is not None,
            "n": n,
            "heads": [*packed.values()],
            "looks": looks,
        }
        return template("figures", "text_view.html").render(
            n_heads=n_heads,
            packed=packed,
            tokens=[*zip(self.pieces, self.marks, weights**0.5, strict=True)],
            ink=",".join(map(str, hex_to_rgb(STOPS["diverging"][8]))),
            head=head,
            query=query,
            data=data,
        )

    def _packed(self, max_bytes: int, asked: Sequence[str]) -> dict[str, JsonObject]:
        """Return heads as the script reads them, as many as fit.

        Those with the most position among the other keys come first; without shares, those with
        the most information.

        Args:
            max_bytes: how many characters the heads may take.
            asked: the heads that stay.
        """
        n_heads, n, size = len(self.heads), len(self.pieces), 0
        kept = [x.reshape(n_heads, n, n) for x in (self.weights, self.position) if x is not None]
        content, packed = self.content.reshape(n_heads, n), dict[str, JsonObject]()
        heads = self.heads.reset_index(drop=True).assign(
            name=self.readers, free=[name not in asked for name in self.readers]
        )
        by_size = heads.sort_values(["free", "information"], ascending=[True, False], kind="stable")
        for place, row in zip(by_size.index, by_size.to_dict("records"), strict=True):
            codes = np.rint(STEPS * np.stack([x[place].T for x in kept])).astype(np.uint8)
            maps = b64encode(zlib.compress(codes.tobytes(), 6)).decode()
            of_queries = b64encode(content[place].astype("<f4").tobytes()).decode()
            size += len(maps) + len(of_queries)
            if packed and size > max_bytes and row["free"]:
                break
            share = None if np.isnan(row["others_share"]) else round(float(row["others_share"]), 3)
            of_head = {"share": share, "maps": maps, "content": of_queries}
            packed[row["name"]] = {"name": row["name"], **of_head}
        shown = heads.sort_values(["others_share", "information"], ascending=False, kind="stable")
        return {name: packed[name] for name in shown["name"] if name in packed}

    def _repr_html_(self) -> str:
        return f"<h3>{escape(self.title)}</h3>{self.html()}"

    @property
    def readers(self) -> list[str]:
        """The names of the heads in the table."""
        return [*with_readers(self.heads)["reader"]]

    @property
    def marks(self) -> list[str]:
        """What to show in place of each piece that cannot be seen; nothing for other pieces."""
        return [self.names.get(place, mark_of(piece)) for place, piece in enumerate(self.pieces)]

    def _looks(self) -> list[JsonObject]:
        """Return the looks whose terms are known: the asked one, and those of its steps back."""
        if self.why is None:
            return []
        table, steps = self.why.table, self.why.steps
        key = int(table["key"].to_numpy()[table["weight"].argmax()])
        asked = self.why.head, self.why.query
        looks = {asked: _look(*asked, table, key)}
        for _, rows in () if steps is None else steps.groupby(LOOK, sort=False):
            is_moved = rows["moved_from"].notna()
            adds_up = rows["side"].isin(["key", "query", "position"]) | rows["writer"].eq(OTHERS)
            terms = rows[adds_up & ~is_moved].rename(columns={"writer": "term"})
            layer, head, query = rows[LOOK].to_numpy(int)[0].tolist()
            name = f"L{layer}H{head}", query
            look = looks.setdefault(name, _look(*name, terms))
            look["back"] = [
                {
                    "name": row["writer"],
                    "query": row[row["side"]],
                    "nats": row["nats"],
                    "effect": row["effect"],
                    "key": int(row["moved_from"]),
                    "from": row["key"],
                }
                for row in rows[is_moved].to_dict("records")
            ]
        return [*looks.values()]

    def strongest_looks(self) -> dict[str, tuple[int, int]]:
        """Return the query and the key of the asked look, and of each head's strongest, by head.

        A head's strongest look is its query with the largest relative entropy to other texts, and
        the key with the most weight. Without other texts, the weight itself is the largest, of a
        key after the first and before the query. The heads with the strongest looks come first.
        """
        n_heads, n, readers = len(self.heads), len(self.pieces), self.readers
        looks, weights = dict[str, tuple[int, int]](), self.weights.reshape(n_heads, n, n)
        if self.why is not None:
            query, of_head = self.why.query, weights[readers.index(self.why.head)]
            looks[self.why.head] = query, int(of_head[query].argmax())
        if self.position is None:
            earlier = np.tri(n, k=-1, dtype=bool) & (np.arange(n) > 0)
            weights = np.where(earlier, weights, -1)
            of_queries = weights.max(-1)
        else:
            of_queries = self.content.reshape(n_heads, n)
        for place in np.argsort(-of_queries.max(-1), kind="stable").tolist():
            query = int(of_queries[place].argmax())
            looks.setdefault(readers[place], (query, int(weights[place, query].argmax())))
        return looks

    @property
    def looks(self) -> pd.DataFrame:
        """The looks of the first heads of `strongest_looks`, as text."""
        rows, readers = [], self.readers
        for head, (query, key) in [*self.strongest_looks().items()][:MOST_LOOKS]:
            at = *divmod(readers.index(head), self.weights.shape[1]), query, key
            row = {"head": head, "query": self._named(query), "key": self._named(key)}
            row["weight"] = percent(float(self.weights[at]))
            if self.position is not None:
                row["in other texts"] = percent(float(self.position[at]))
            rows.append(row)
        return pd.DataFrame(rows)

    def _named(self, token: int) -> str:
        """Return a token's number, and the token with signs for what cannot be seen."""
        return f"{token} “{self.marks[token] or self.pieces[token]}”"


def _look(head: str, query: int, terms: pd.DataFrame, key: int | None = None) -> JsonObject:
    """Return the terms of a head's scores from a query, key by key, as the script reads them."""
    styles = term_styles(terms)
    table = terms.pivot(index=["side", "term"], columns="key", values="nats").loc[[*styles]]
    keys: list[int] = table.columns.to_numpy(int).tolist()
    values = table.round(4).astype(object).where(table.notna(), None).to_numpy().tolist()
    return {
        "name": head,
        "query": query,
        "key": keys[0] if key is None else key,
        "keys": keys,
        "scores": table.sum().round(4).tolist(),
        "terms": [(*style, row) for style, row in zip(styles.values(), values, strict=True)],
        "back": [],
    }


def percent(weight: float) -> str:
    """Return a weight in percent, as the script of the view shows what is stored of it.

    Example:
        >>> percent(0.99506), percent(0.003), percent(0.0)
        ('100%', '<1%', '0%')
    """
    stored = round(STEPS * float(weight)) / STEPS
    return "<1%" if 0 < stored < 0.01 else f"{stored:.0%}"


def mark_of(piece: str) -> str:
    r"""Return what to show in place of a piece that cannot be seen; nothing for other pieces.

    Example:
        >>> [mark_of(piece) for piece in (" cat", "\n ", "\u200b", "")]
        ['', '↵␣', 'U+200B', '⋯']
    """
    if any(category(character)[0] not in "CZ" for character in piece):
        return ""
    return "".join(MARKS.get(c, f"U+{ord(c):04X}") for c in piece) or WITHIN
