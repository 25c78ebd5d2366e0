"""One text's attention in one piece of HTML: its tokens, shaded by where a head looks.

The page holds the weights as bytes and needs no kernel, library or network. The text itself stands
in the page as text: it can be copied, and is never read as HTML. Without scripts, as in a notebook
that is not trusted, the first head and query stay as a still picture.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from unicodedata import category

import numpy as np
import pandas as pd
from jaxtyping import Float

from nope_probe.figures.attention import Why, term_styles
from nope_probe.figures.names import OTHERS
from nope_probe.figures.style import STOPS
from nope_probe.figures.words import reader_of, with_readers
from nope_probe.files import JsonObject

MAX_BYTES = 5_200_000  # of all heads; with plotly and the heads' mean maps a page has 12 MB
MOST_LOOKS = 5  # in a table
STEPS = 255  # a weight is stored as a multiple of 1/255
MARKS = {"\n": "\u21b5", "\r": "\u240d", "\t": "\u21e5", " ": "\u2423"}
WITHIN = "\u22ef"  # in place of a token that ends within a character

TextWeights = Float[np.ndarray, "layer head query_pos key_pos"]


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
        packed = self._packed(max_bytes, {self._place(look["name"]) for look in looks})
        places = self._by_share(packed)
        strongest, (query, _) = next(iter(self.strongest_looks(places).items()))
        head = self._place(strongest)
        content = {
            "colours": STOPS,
            "causal": not np.triu(self.weights, 1).any(),
            "first": [places.index(head), query],
            "compared": self.position is not None,
            "n": n,
            "heads": [packed[place] for place in places],
            "looks": looks,
        }
        data = json.dumps(content, separators=(",", ":"))
        fewer = f"<p>The {len(places)} heads with the most information, of {n_heads}.</p>"
        still = self.weights.reshape(n_heads, n, n)[head, query]
        return (
            f'<div class="on-text"><style>{asset("text_view.css")}</style>'
            f"{fewer if len(places) < n_heads else ''}"
            '<form class="chooser"></form><div class="reading">'
            '<p class="text" dir="auto" style="white-space:pre-wrap">'
            f"{self._tokens(still)}</p></div>"
            f'<p class="readout" aria-live="polite">{strongest}, query {query}: darker tokens get '
            "more attention.</p>"
            f'<script type="application/json">{data}</script>'
            f'<script>"use strict";(() => {{{asset("text_view.js")}}})();</script></div>'
        )

    def _packed(self, max_bytes: int, asked: Collection[int]) -> dict[int, JsonObject]:
        """Return heads as the script reads them, by their places, as many as fit.

        Args:
            max_bytes: how many characters the heads may take.
            asked: the places of heads that come first, and stay.
        """
        n_heads, n, size = len(self.heads), len(self.pieces), 0
        kept = [x.reshape(n_heads, n, n) for x in (self.weights, self.position) if x is not None]
        packed: dict[int, JsonObject] = {}
        for place in sorted(self.order, key=lambda place: place not in asked):
            codes = np.rint(STEPS * np.stack([x[place].T for x in kept])).astype(np.uint8)
            maps = b64encode(zlib.compress(codes.tobytes(), 6)).decode()
            of_queries = self.content.reshape(n_heads, n)[place].astype("<f4")
            content = b64encode(of_queries.tobytes()).decode()
            size += len(maps) + len(content)
            if packed and size > max_bytes and place not in asked:
                break
            row = self.heads.iloc[place]
            share = None if np.isnan(row["others_share"]) else round(float(row["others_share"]), 3)
            of_head = {"share": share, "maps": maps, "content": content}
            packed[place] = {"name": reader_of(row), **of_head}
        return packed

    def _repr_html_(self) -> str:
        return f"<h3>{escape(self.title)}</h3>{self.html()}"

    @property
    def order(self) -> list[int]:
        """The places of the heads in the table, from the most information to the least."""
        information = self.heads["information"].to_numpy(float)
        return np.argsort(-np.nan_to_num(information, nan=-1), kind="stable").tolist()

    def _by_share(self, places: Collection[int]) -> list[int]:
        """Return places of heads by position among the other keys; without shares, in order."""
        shares = self.heads["others_share"].fillna(-1)
        return sorted([x for x in self.order if x in places], key=lambda x: -shares.iloc[x])

    def _place(self, head: str) -> int:
        return [reader_of(row) for row in self.heads.to_dict("records")].index(head)

    def _looks(self) -> list[JsonObject]:
        """Return the looks whose terms are known: the asked one, and those of its steps back."""
        if self.why is None:
            return []
        table, steps = self.why.table, self.why.steps
        key = int(table["key"].to_numpy()[table["weight"].argmax()])
        asked = self.why.head, self.why.query
        looks = {asked: _look(*asked, table, key)}
        if steps is None:
            return [*looks.values()]
        adds_up = steps["side"].isin(["key", "query", "position"]) | (steps["writer"] == OTHERS)
        terms = steps[(steps["step"] > 1) & steps["moved_from"].isna() & adds_up]
        terms = terms.rename(columns={"writer": "term"})
        for _, rows in terms.groupby(["layer", "head", "query"], sort=False):
            layer, head, query = rows[["layer", "head", "query"]].to_numpy(int)[0].tolist()
            look = f"L{layer}H{head}", query
            looks[look] = _look(*look, rows)
        for row in steps[steps["moved_from"].notna()].to_dict("records"):
            moved = {"name": row["writer"], "query": row[row["side"]], "nats": row["nats"]}
            moved["effect"] = row["effect"]
            move = {**moved, "key": int(row["moved_from"]), "from": row["key"]}
            looks[f"L{row['layer']}H{row['head']}", row["query"]]["back"].append(move)
        return [*looks.values()]

    def strongest_looks(self, places: Sequence[int] | None = None) -> dict[str, tuple[int, int]]:
        """Return the query and the key of the asked look, and of each head's strongest, by head.

        A head's strongest look is its query with the largest relative entropy to other texts, and
        the key with the most weight. Without other texts, the weight itself is the largest, of a
        key after the first and before the query. The heads with the strongest looks come first.

        Args:
            places: of heads in the table; all by default.
        """
        n_heads, n = len(self.heads), len(self.pieces)
        names, looks = [*with_readers(self.heads)["reader"]], dict[str, tuple[int, int]]()
        weights = sizes = self.weights.reshape(n_heads, n, n)
        if self.why is not None:
            query = self.why.query
            looks[self.why.head] = query, int(weights[self._place(self.why.head), query].argmax())
        if self.position is None:
            earlier = np.tri(n, k=-1, dtype=bool)
            earlier[:, 0] = False
            weights = sizes = np.where(earlier, weights, -1)
        else:
            sizes = self.content.reshape(n_heads, n, 1)
        of_queries = sizes.max(-1)
        for place in np.argsort(-of_queries.max(-1), kind="stable").tolist():
            if places is None or place in places:
                query = int(of_queries[place].argmax())
                looks.setdefault(names[place], (query, int(weights[place, query].argmax())))
        return looks

    @property
    def looks(self) -> pd.DataFrame:
        """The looks of the first heads of `strongest_looks`, as text."""
        rows = []
        for head, (query, key) in [*self.strongest_looks().items()][:MOST_LOOKS]:
            at = *divmod(self._place(head), self.weights.shape[1]), query, key
            row = {"head": head, "query": self._named(query), "key": self._named(key)}
            row["weight"] = percent(float(self.weights[at]))
            if self.position is not None:
                row["in other texts"] = percent(float(self.position[at]))
            rows.append(row)
        return pd.DataFrame(rows)

    def _named(self, token: int) -> str:
        """Return a token's number, and the token with signs for what cannot be seen."""
        piece = self.pieces[token]
        return f"{token} “{self.names.get(token, mark_of(piece)) or piece}”"

    def _tokens(self, weights: Float[np.ndarray, " key_pos"]) -> str:
        """Return the tokens as HTML, shaded as the script does it on a light screen."""
        red, green, blue = (int(STOPS["diverging"][8][i : i + 2], 16) for i in (1, 3, 5))
        tokens = []
        for place, (piece, weight) in enumerate(zip(self.pieces, weights, strict=True)):
            mark = self.names.get(place, mark_of(piece))
            shown = f' data-mark="{escape(mark)}"' if mark else ""
            colour = f"rgba({red},{green},{blue},{weight**0.5:.2f})"
            style = f"background-color:{colour}"
            tokens.append(f'<span{shown} style="{style}">{escape(piece)}</span>')
        return "".join(tokens)


def asset(name: str) -> str:
    """Return the text of a file in this folder, such as `text_view.css`."""
    return resources.files("nope_probe.figures").joinpath(name).read_text("utf-8")


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
