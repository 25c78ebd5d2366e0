"""The `circuit` command's run: from settings to a folder."""

from __future__ import annotations

from pathlib import Path

from nope_probe.conditions import Condition, validate_components
from nope_probe.errors import TooFewLayersError, UserError
from nope_probe.experiments.circuit.analyse import Stages, analyse, block_explorer, explored
from nope_probe.experiments.circuit.settings import Settings
from nope_probe.experiments.engine import Engine, validate_finite_stages, validate_removable
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.removing.targets import components
from nope_probe.models.info import LoadedModel
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Session
from nope_probe.runtime.sources import load_layers


def run(settings: Settings) -> Path:
    """Capture a block's stages unless the run is finished, and return the run's folder.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("circuit", settings, load=load_blocks) as session:
        if not session.finished:
            stages = capture(session)
            explorer = explorer_of(session, stages)
            with status("analysing and writing", in_logs=True):
                session.write(analyse(session, stages, explorer))
    return session.folder


def load_blocks(settings: Settings, device: str) -> LoadedModel:
    """Load the blocks up to the one after the block under study, if there is one.

    Raises:
        UserError: if the model does not have the block.
    """
    layer = settings.layer
    try:
        return load_layers(settings, device, layer + 2)
    except TooFewLayersError as error:
        if error.depth == layer + 1:
            return load_layers(settings, device, layer + 1)
        raise UserError(
            f"{error.source} has {error.depth} layers, L0 to L{error.depth - 1}; "
            f"there is no --layer {layer}"
        ) from error


def capture(session: Session[Settings]) -> Stages:
    """Return the stages of the intact model and, with an ablation, of the ablated model.

    Raises:
        UserError: for a component that the model lacks, or a stage with a non-finite value.
    """
    layer, removed = session.settings.layer, removed_components(session)
    ablation, engine = session.settings.substitute.without(removed), Engine.of(session)
    gains = ["gains"] * ablation.needs_calibration
    keys = ["intact", *gains, *["ablated"] * bool(removed)]
    session.announce(1 + bool(removed), keys, n_seqs=len(engine.inputs))
    with session.checkpoint.progress(keys, session.n_own_seqs):
        intact, without = engine.stages("intact", layer=layer), None
        validate_finite_stages(intact, "the intact model")
        engine = engine.calibrated("gains", [ablation])
        if removed:
            without = engine.stages("ablated", ablation, layer=layer)
            validate_finite_stages(without, "the ablated model")
    return Stages(layer=layer, intact=intact, ablated=without, removed=removed)


def explorer_of(session: Session[Settings], stages: Stages) -> Explorer | None:
    """Return the page's explorer; None if the run's sequences do not suffice."""
    settings, inputs = session.settings, session.sequences()
    has = components(session.loaded.model)
    first = explored(inputs, len(has), settings.explore, settings.folds)
    if first is None:
        return None
    passes = [f"explorer/{number}" for number in range(2 ** len(has))]
    session.announce(len(passes), passes, n_seqs=len(first), what="explorer combination")
    return block_explorer(
        Engine.of(session),
        first,
        stages,
        substitute=settings.substitute,
    )


def removed_components(session: Session[Settings]) -> tuple[str, ...]:
    """Return the components to remove, circuits as their weights, in the order of the components.

    Raises:
        UserError: for a component or band that the model lacks.
    """
    wanted = session.settings.removed
    validate_components(wanted, components(session.loaded.model))
    validate_removable(session.loaded.model, wanted)
    norms = {"norms"} & {*session.settings.remove}
    return tuple(Condition(wanted | norms).ordered)
