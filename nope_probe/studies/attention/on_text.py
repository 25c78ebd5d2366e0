"""What a run of `attention` says of its text: the view, and the look that it explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from nope_probe.figures.attention import Why
from nope_probe.figures.text_view import TextView, mark_of
from nope_probe.run.folder import Run
from nope_probe.run.manifest import ShownText


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The look that a run explains.

    Attributes:
        head: the head, such as `L1H3`.
        query: the position of the token in the text.
    """

    head: str
    query: int


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What a run says of its `why`.

    Attributes:
        why: what it was asked; None if nothing.
    """

    why: Asked | None = None


def shown_pieces(record: ShownText) -> list[str]:
    """Return each token as readable text, with symbols for whitespace.

    Args:
        record: the result of `text_record`.
    """
    pieces = [mark_of(piece) or piece.strip() for piece in record.pieces]
    return [record.bos or pieces[0], *pieces[1:]]


def stored_why(run: Run) -> Why | None:
    """Return the terms that a run was asked for and keeps; None if it was asked nothing."""
    asked = run.manifest.results_as(Explained).why
    return None if asked is None else why_of(asked, run.tables)


def why_of(asked: Asked, tables: Mapping[str, pd.DataFrame]) -> Why:
    """Return the terms of a look.

    Args:
        asked: the look.
        tables: `why`, and `why_steps` if there is one.
    """
    return Why(
        head=asked.head,
        query=asked.query,
        table=tables["why"],
        steps=tables.get("why_steps"),
    )


def has_other_texts(run: Run) -> bool:
    """Return whether a run read other texts than the one that it shows."""
    return "weights" in run.maps


def text_view(run: Run) -> TextView | None:
    """Return the view of a run's text; None for a run without a text.

    Args:
        run: the table `attention`, and the maps `text_weights`, `text_content` and, if other texts
            were read, `weights`.
    """
    record = run.manifest.text
    if record is None:
        return None
    weights = run.maps["text_weights"]
    n = weights.shape[-1]
    return TextView(
        title=f"Attention of {run.manifest.name} in one text",
        pieces=record.pieces,
        names={0: record.bos} if record.bos else {},
        heads=run.tables["attention"],
        weights=weights,
        position=run.maps["weights"][..., :n, :n] if has_other_texts(run) else None,
        content=run.maps["text_content"],
        why=stored_why(run),
    )
