"""The `behaviour` command's run: from settings to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from nope_probe.components import Gain
from nope_probe.experiments.behaviour.settings import Measure, Settings
from nope_probe.experiments.given import RunOptions, run_of
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session

if TYPE_CHECKING:
    from nope_probe.experiments.given import Model
    from nope_probe.hooks.layers.model import Given


class BehaviourOptions(RunOptions, total=False):
    """The options of `run_behaviour`, which are the flags of `behaviour`."""

    measures: Measure | Sequence[Measure]
    remove: str | Sequence[str] | None
    prefix: int | None
    gain: Gain
    replacement: Replacement | Sequence[Replacement]
    heads: bool
    trained_len: int | None
    max_len: int


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
            from nope_probe.experiments.behaviour.analyse import analyse
            from nope_probe.experiments.behaviour.plan import capture, make_plan

            plan = make_plan(session)
            measured = capture(session, plan)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, plan, measured))
    return session.folder


def run_behaviour(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Unpack[BehaviourOptions],
) -> Run:
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
        options: the command's flags, with underscores: `measures=["loss"]`, `remove=["mask"]`, ...

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
    return run_of(run, Settings, model, inputs, out, options)
