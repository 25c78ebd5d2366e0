"""The `behaviour` command's run: from settings to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nope_probe.experiments.behaviour.settings import Settings
from nope_probe.runtime.folder import Run, read_run
from nope_probe.runtime.session import Session
from nope_probe.runtime.terminal import status


def run(settings: Settings) -> Path:
    """Measure the model's behaviour unless that is finished, and return the run's folder.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("behaviour", settings) as session:
        if not session.finished:
            from nope_probe.experiments.behaviour.analyse import analyse
            from nope_probe.experiments.behaviour.capture import capture
            from nope_probe.experiments.behaviour.plan import make_plan

            plan = make_plan(session)
            measured = capture(session, plan)
            if session.is_first:
                with status("analysing and writing"):
                    session.write(analyse(session, plan, measured))
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
