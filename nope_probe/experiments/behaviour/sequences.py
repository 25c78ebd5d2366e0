"""The sequences of a run: text windows and what is made of them, random and long ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nope_probe.components import Component
from nope_probe.errors import UserError
from nope_probe.experiments.behaviour.probes import (
    Probe,
    documents_of,
    repeated,
    segment_length,
    text_probes,
)
from nope_probe.experiments.finite import validate_first_sequence
from nope_probe.runtime.session import Session

if TYPE_CHECKING:
    from nope_probe.experiments.behaviour.settings import Settings

# The sequences that a measure needs beside the text windows.
PROBES = {
    "copy": ("copy_text", "copy_random"),
    "order": ("order",),
    "bos": ("without_bos", "other_first"),
    "extrapolation": ("long",),
}


def make_probes(
    session: Session[Settings], has: Sequence[Component]
) -> tuple[dict[str, Probe], dict[str, str]]:
    """Return the sequences that the measures need, and which measures are skipped and why.

    Args:
        session: the run.
        has: the components that the model has.
    """
    settings, text = session.settings, session.sequences()
    skipped: dict[str, str] = {}
    segment = segment_length(settings.seq_len, text.bos)
    length = int(text.bos) + segment
    random = session.sequences("random", settings=settings.random_segments(length))
    probes = text_probes(
        Probe(tokens=text.inputs, documents=documents_of(text), prefix=settings.prefix_len),
        text.bos,
        random.inputs[:, -1],
        settings.seed,
    )
    probes["copy_random"] = Probe(
        tokens=repeated(random.inputs, segment, text.bos),
        documents=documents_of(random),
        prefix=length,
    )
    if not text.bos:
        skipped["bos"] = "sequences begin without a BOS token"
    if "extrapolation" in settings.measures:
        _add_long_windows(session, has, probes, skipped)
    if "pattern" in settings.measures:
        _check_pattern(session, skipped)
    wanted = {"text"}.union(*(PROBES.get(measure, ()) for measure in settings.measures))
    return {name: each for name, each in probes.items() if name in wanted}, skipped


def _add_long_windows(
    session: Session[Settings],
    has: Sequence[Component],
    probes: dict[str, Probe],
    skipped: dict[str, str],
) -> None:
    """Add windows beyond the trained context, or the reason why there are none."""
    settings, n_ctx = session.settings, session.loaded.info.n_ctx
    trained, length = settings.trained_len_of(n_ctx), settings.extrapolated_len(n_ctx)
    if "pos_embed" in has:
        skipped["extrapolation"] = "positions are learned: there are none beyond the context"
    elif length <= trained:
        skipped["extrapolation"] = (
            f"the trained context of {trained} tokens is not shorter than --max-len "
            f"{settings.max_len}"
        )
    elif settings.prefix_len > trained - trained // 4:
        skipped["extrapolation"] = (
            f"the prefix of {settings.prefix_len} tokens reaches into the last quarter of the "
            f"trained context of {trained}"
        )
    else:
        try:
            long = session.sequences("long", settings=settings.long_windows(n_ctx))
        except UserError as error:
            skipped["extrapolation"] = f"no windows of {length} tokens: {error}"
            return
        probes["long"] = Probe(
            tokens=long.inputs, documents=documents_of(long), prefix=settings.prefix_len
        )


def _check_pattern(session: Session[Settings], skipped: dict[str, str]) -> None:
    """Find on one sequence whether all layers' patterns can be measured."""
    try:
        validate_first_sequence(
            session.loaded.model,
            session.sequences().inputs,
            session.settings.n_layers_of(session.loaded),
        )
    except UserError as error:
        skipped["pattern"] = str(error)
