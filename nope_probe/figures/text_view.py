"""One text's attention in one piece of HTML: its tokens, shaded by where a head looks.

The page holds the weights as bytes and needs no kernel, library or network. The text itself stands
in the page as text: it can be copied, and is never read as HTML. Without scripts, as in a notebook
that is not trusted, the first head and query stay as a still picture.
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
from jaxtyping import Float

from nope_probe.figures.attention import Why, term_styles
from nope_probe.figures.style import STOPS
from nope_probe.figures.words import with_readers
from nope_probe.files import JsonObject, template
from nope_probe.removal import OTHERS

MAX_BYTES = 5_200_000  # of all heads; with plotly and the heads' mean maps a page has 12 MB
MOST_LOOKS = 5  # in a table
LOOK = ["layer", "head", "query"]  # the columns that name a look
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
        red, green, blue = (int(STOPS["diverging"][8][i : i + 2], 16) for i in (1, 3, 5))
        return template("figures", "text_view.html").render(
            n_heads=n_heads,
            packed=packed,
            tokens=[*zip(self.pieces, self.marks, weights**0.5, strict=True)],
            ink=f"{red},{green},{blue}",
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
            if name not in looks:
                looks[name] = _look(*name, terms)
            looks[name]["back"] = [
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
