"""The `behaviour` command's run: from settings to a folder, and from Python."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.experiments.behaviour.analyse import analyse, first_page
from nope_probe.experiments.behaviour.plan import MeasuredBehaviour, Plan, capture, make_plan
from nope_probe.experiments.behaviour.settings import Settings
from nope_probe.experiments.given import Model, run_of, takes
from nope_probe.hooks.layers.model import Given
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import SHORT, Call, Session


def run(settings: Settings, call: Call | None = None) -> Path:
    """Measure the model's behaviour unless that is finished, and return the run's folder.

    Args:
        settings: the command's.
        call: the model and sequences of a Python call.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("behaviour", settings, call) as session:
        if not session.finished:
            plan = make_plan(session)
            soonest = time.monotonic() + SHORT
            measured = capture(session, plan, partial(show_first, session, plan, soonest))
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, plan, measured))
    return session.folder


def show_first(
    session: Session[Settings], plan: Plan, soonest: float, measured: MeasuredBehaviour
) -> None:
    """Write the page of loss and copying without each source, unless it is too early.

    Args:
        session: the run.
        plan: its plan.
        soonest: the time from which a page is worth its drawing; see `Session.wants_first_page`.
        measured: the measurements of `plan.first`.
    """
    if session.wants_first_page(soonest):
        session.write_first_page(first_page(session, plan, measured))


@dataclass(frozen=True, kw_only=True, repr=False)
class BehaviourStudy(Run):
    """What a model can no longer do without its mask, position encoding or weights.

    Its `tables` are those of the run's CSV files: `behaviour`, `loss_by_position`, `extrapolation`,
    `decodability`, `bridge`, `heads`, `correlations`.
    """

    @property
    def behaviour(self) -> pd.DataFrame:
        """Per measure and condition, its value and its difference to the intact model."""
        return self.tables["behaviour"]


@takes(Settings)
def run_behaviour(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Any,
) -> BehaviourStudy:
    """Measure a model's behaviour as the `behaviour` command does, and return its tables.

    Args:
        model: a name, as the command takes it; what `load` returns; a HookedTransformer or a
            TransformerBridge, with its tokenizer.
        inputs: text, as `capture_losses` takes it; the sequences of one text are one document only
            where `sequences` cut them. By default the sequences that the options describe (`data`,
            `n_seqs`, `seq_len`, ...). Extrapolation needs windows of its own, so it is measured
            without inputs alone.
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, as below; a single value or a list may stand for a tuple.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_behaviour
        >>> small = dict(n_seqs=16, seq_len=24, measures=["loss"], remove=["mlp"])
        >>> run = run_behaviour("nope-tiny", **small)
        >>> table = run.tables["behaviour"].set_index(["measure", "condition"])
        >>> bool(table.loc[("loss", "mlp"), "difference_low"] > 1)
        True
    """
    return run_of(BehaviourStudy, run, Settings, model, inputs, out, options)
