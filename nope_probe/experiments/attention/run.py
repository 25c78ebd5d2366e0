"""The `attention` command's run: from settings to a folder, and from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.errors import UserError
from nope_probe.experiments.attention.analyse import analyse, capture
from nope_probe.experiments.attention.on_text import text_view
from nope_probe.experiments.attention.settings import Settings
from nope_probe.experiments.given import Model, run_of, takes
from nope_probe.figures.text_view import TextView
from nope_probe.hooks.layers.model import Given
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session


def run(settings: Settings, call: Call | None = None) -> Path:
    """Measure the heads' attention unless the run is finished, and return the run's folder.

    Args:
        settings: the command's settings.
        call: the model and sequences of a call from Python.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("attention", settings, call) as session:
        if not session.finished:
            heads = capture(session)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, heads))
    return session.folder


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionStudy(Run):
    """The position and content in the attention of every head of a model.

    Its map `weights` has the mean attention weights of every head, [layer, head, row, key_pos];
    where only some queries have rows, `query_positions` are the queries of the rows.
    """

    @property
    def attention(self) -> pd.DataFrame:
        """Per head: information and its four parts (nats), positional share, first key's weight."""
        return self.tables["attention"]

    @property
    def on_text(self) -> TextView:
        """The run's text with each head's attention in it, which a notebook shows.

        Raises:
            UserError: for a run without a text.
        """
        view = text_view(self)
        if view is None:
            raise UserError("the run has no text: run_attention(model, text=...) shows one")
        return view

    @property
    def why(self) -> pd.DataFrame:
        """The terms of the scores of the query that the run asks about, by key, nats.

        Raises:
            UserError: for a run that asks nothing.
        """
        if "why" not in self.tables:
            raise UserError(
                'the run asks about no head: run_attention(model, text=..., why="L1H3")'
            )
        return self.tables["why"]


@takes(Settings)
def run_attention(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> AttentionStudy:
    """Split each head's attention into position and content, as the `attention` command does.

    Args:
        model: a name, as the command takes it; the result of `load`; a HookedTransformer or a
            TransformerBridge. Inside `ablated`, the ablated model is measured.
        inputs: any inputs of `capture_scores`. By default the sequences that the options describe
            (`data`, `n_seqs`, `seq_len`, ...).
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, as below; a single value or a list may stand for a tuple.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_attention
        >>> run = run_attention("rope-tiny", layers=2, n_seqs=64)
        >>> heads = run.attention.set_index(["layer", "head"])
        >>> layer, head = heads["positional_share"].idxmax()
        >>> f"L{layer}H{head}"
        'L1H3'
    """
    return run_of(AttentionStudy, run, Settings, model, inputs, out, options)
