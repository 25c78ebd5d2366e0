"""The `attention` command's run: from settings to a folder, and from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from nope_probe.components import Gain
from nope_probe.experiments.attention.settings import Settings
from nope_probe.experiments.given import RunOptions, run_of
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.runtime.folder import Run
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session

if TYPE_CHECKING:
    from nope_probe.experiments.given import Model
    from nope_probe.hooks.layers.model import Given


class AttentionOptions(RunOptions, total=False):
    """The options of `run_attention`, which are the flags of `attention`."""

    remove: str | Sequence[str]
    replacement: Replacement
    gain: Gain


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
            from nope_probe.experiments.attention.analyse import analyse, capture

            heads = capture(session)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    session.write(analyse(session, heads))
    return session.folder


def run_attention(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Unpack[AttentionOptions],
) -> Run:
    """Split each head's attention into position and content, as the `attention` command does.

    Args:
        model: a name, as the command takes it; the result of `load`; a HookedTransformer or a
            TransformerBridge. Inside `ablated`, the ablated model is measured.
        inputs: any inputs of `capture_scores`. By default the sequences that the options describe
            (`data`, `n_seqs`, `seq_len`, ...).
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, with underscores: `remove=["rope"]`, `layers=2`, ...

    Returns:
        The run, whose table `attention` has a row a head, and whose map `weights` has the mean
        weights of every head.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_attention
        >>> run = run_attention("rope-tiny", layers=2, n_seqs=64)
        >>> heads = run.tables["attention"].set_index(["layer", "head"])
        >>> layer, head = heads["positional_share"].idxmax()
        >>> f"L{layer}H{head}"
        'L1H3'
    """
    return run_of(run, Settings, model, inputs, out, options)
