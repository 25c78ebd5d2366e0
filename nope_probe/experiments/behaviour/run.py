"""The `behaviour` command's run: from settings to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nope_probe.experiments.behaviour.settings import Settings
from nope_probe.runtime.folder import Run, read_run
from nope_probe.runtime.session import Session
from nope_probe.runtime.terminal import status

if TYPE_CHECKING:
    from nope_probe.experiments.behaviour.heads import MeasuredHeads
    from nope_probe.experiments.behaviour.plan import Plan
    from nope_probe.experiments.behaviour.runner import Measured


def run(settings: Settings) -> Path:
    """Measure the model's behaviour unless that is finished, and return the run's folder.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("behaviour", settings) as session:
        if not session.finished:
            plan = plan_of(session)
            measured, heads = run_conditions(session, plan)
            if session.is_first:
                with status("analysing and writing"):
                    from nope_probe.experiments.behaviour.analyse import analyse

                    session.write(analyse(session, plan, measured, heads))
    return session.folder


def run_behaviour(model: str = "rope-tiny", **settings: Any) -> Run:
    """Measure a model's behaviour as the `behaviour` command does, and return its tables.

    The run is written to a folder, and the same call reads it from there again.

    Args:
        model: a shipped or friendly name, a Hub id or a local Hugging Face folder.
        settings: the command's flags with underscores: `measures=["loss"]`, `remove=["mask"]`, ...

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from nope_probe import run_behaviour
        >>> small = dict(n_seqs=16, seq_len=24, measures=["loss"], remove=["mlp"])
        >>> with TemporaryDirectory() as folder:
        ...     run = run_behaviour("nope-tiny", out=Path(folder, "run"), **small)
        >>> table = run.tables["behaviour"].set_index(["measure", "condition"])
        >>> bool(table.loc[("loss", "mlp"), "difference_low"] > 1)
        True
    """
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return read_run(run(Settings(model=model, **tuples)))


def plan_of(session: Session[Settings]) -> Plan:
    """Return what to measure on which sequences.

    Raises:
        UserError: for a condition that the model does not have, too few documents, or measures none
            of which the model or the data can show.
    """
    from nope_probe.experiments.behaviour.conditions import make_conditions, sources_of
    from nope_probe.experiments.behaviour.plan import (
        Plan,
        uniform_loss,
        validate_documents,
        validate_measures,
    )
    from nope_probe.experiments.behaviour.sequences import make_probes
    from nope_probe.experiments.components import validate_bands
    from nope_probe.hooks.removing.targets import components

    settings, has = session.settings, components(session.loaded.model)
    conditions = make_conditions(has, settings.remove, settings.replacement)
    settings.validate_removals(conditions)
    validate_bands(
        session.loaded.model, frozenset().union(*(c.components for c in conditions.values()))
    )
    settings.n_layers_of(session.loaded)  # refused before anything is run
    text = session.sequences()
    validate_documents(text)
    probes, skipped = make_probes(session, has)
    validate_measures(settings.measures, skipped)
    return Plan(
        conditions=conditions,
        sources=sources_of(has),
        measures=settings.measures,
        probes=probes,
        skipped=skipped,
        bos=text.bos,
        trained=settings.trained_len_of(session.loaded.info.n_ctx),
        uniform=uniform_loss(session.loaded.tokenizer),
    )


def run_conditions(session: Session[Settings], plan: Plan) -> tuple[Measured, MeasuredHeads | None]:
    """Return what was measured in all conditions, and of single heads where these are wanted.

    What the checkpoint does not have is run and saved there.
    """
    from nope_probe.experiments.behaviour.heads import HeadRunner
    from nope_probe.experiments.behaviour.runner import BehaviourRunner, RunOptions

    settings = session.settings
    options = RunOptions(
        n_layers=settings.n_layers_of(session.loaded),
        batch_size=settings.seqs_per_batch,
        n_folds=settings.folds,
        skip=settings.n_skipped(session.sequences()),
        gain=settings.gain,
        seed=settings.seed,
        position=plan.measured("position"),
        pattern=plan.measured("pattern"),
        replacement=settings.replacement[0],
        heads=settings.heads,
    )
    runner = BehaviourRunner(session.loaded.model, plan, options, session.checkpoint)
    heads = HeadRunner(runner, plan, options.skip) if settings.heads else None
    streams = runner.streams() | (heads.streams() if heads else {})
    session.announce(len(plan.conditions) + (heads.n_conditions if heads else 0), [*streams])
    with session.checkpoint.progress(streams):
        return runner.run(), heads.run(runner.calibrate()) if heads else None
