"""The `circuit` command's run: from settings to a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from nope_probe.components import WEIGHTS
from nope_probe.conditions import Condition, validate_components
from nope_probe.errors import TooFewLayersError, UserError
from nope_probe.hooks.removing.removals import Substitute, validate_replacements, without_weights
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.runtime.processes import status, validate_one_process
from nope_probe.runtime.session import Session
from nope_probe.runtime.settings import (
    COUNT,
    LARGEST,
    LAYERS,
    SEQ_LEN,
    Bounds,
    GainFlag,
    ModelFlag,
    RunSettings,
    validate_effects,
)

if TYPE_CHECKING:
    from nope_probe.experiments.circuit.analyse import Stages
    from nope_probe.figures.explorer import Explorer
    from nope_probe.models.info import ModelInfo
    from nope_probe.models.load import LoadedModel

_arg = tyro.conf.arg
N_STAGES = 9


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Follow one block from its input to the next block's scores (the paper's Figure 3).

    Writes the mean Gram or score map of each stage, (a) to (i), with standard errors, into a
    folder with manifest.json, stages.csv and report.html.
    """

    model: ModelFlag = "nope-tiny"
    layer: Annotated[
        int,
        Bounds(0, LAYERS.high - 1),
        _arg(help="Which block, from 0; the last one has (a) to (g)."),
    ] = 0
    remove: Annotated[
        tuple[str, ...],
        _arg(
            help="What to remove in every block, for a comparison with the intact model: of mask "
            "rope w_q w_k w_o w_v mlp pos_embed, the circuits qk ov, or norms (the weights of the "
            "norms before attention and MLP)."
        ),
    ] = ()
    replacement: Annotated[Replacement, _arg(help="What a removed weight is replaced by.")] = (
        "identity"
    )
    gain: GainFlag = "output"
    n_seqs: Annotated[int, COUNT, _arg(help="How many sequences.")] = 1000
    seq_len: Annotated[int, SEQ_LEN, _arg(help="Tokens in a sequence.")] = 50
    explore: Annotated[
        int,
        Bounds(0, LARGEST),
        _arg(
            help="The cost of the page's explorer, which removes every combination of components: "
            "together at most so many times the run's sequences, and all of these once more "
            "without each source; 0 leaves it out."
        ),
    ] = 2
    layers: Annotated[int | Literal["all"], tyro.conf.Suppress] = "all"
    unrecorded: ClassVar[tuple[str, ...]] = (*RunSettings.unrecorded, "layers")

    def validate(self) -> None:
        """Check the settings that need no model."""
        validate_one_process()
        super().validate()
        validate_replacements((self.replacement,), self.gain)
        if not self.removed & {*WEIGHTS}:
            validate_effects(self, without_weights(("gain", "replacement")))

    @property
    def removed(self) -> Condition:
        """The components to remove, circuits as their weights.

        Raises:
            UserError: for a name that does not exist, or names that share a component.
        """
        if self.remove.count("norms") > 1:
            raise UserError("--remove: norms is named twice")
        try:
            return Condition.parse(name for name in self.remove if name != "norms")
        except ValueError as error:
            raise UserError(f"--remove: {error}") from error

    def load_model(self, device: str) -> LoadedModel:
        """Load the blocks up to the one after the block under study, if there is one.

        Raises:
            UserError: if the model does not have the block.
        """
        try:
            return self.load_layers(device, self.layer + 2)
        except TooFewLayersError as error:
            if error.depth == self.layer + 1:
                return self.load_layers(device, self.layer + 1)
            raise UserError(
                f"{error.source} has {error.depth} layers, L0 to L{error.depth - 1}; "
                f"there is no --layer {self.layer}"
            ) from error

    def validate_layers(self, info: ModelInfo) -> None:
        """Check that the block attends.

        Raises:
            UserError: if the block does not attend.
        """
        if self.layer in info.not_attending:
            named = ", ".join(f"L{layer}" for layer in info.attending)
            raise UserError(f"--layer {self.layer} of {info.name} does not attend; {named} do")

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds: stages (a) to (i), intact and ablated."""
        return N_STAGES * (1 + bool(self.remove))

    @property
    def substitute(self) -> Substitute:
        """The replacement of removed weights."""
        return Substitute(replacement=self.replacement, gain=self.gain, seed=self.seed)


def run(settings: Settings) -> Path:
    """Capture a block's stages unless the run is finished, and return the run's folder.

    Raises:
        UserError: for settings that the model or the data cannot satisfy.
    """
    with Session("circuit", settings) as session:
        if not session.finished:
            stages = capture(session)
            explorer = explorer_of(session, stages)
            with status("analysing and writing", in_logs=True):
                from nope_probe.experiments.circuit.analyse import analyse

                session.write(analyse(session, stages, explorer))
    return session.folder


def capture(session: Session[Settings]) -> Stages:
    """Return the stages of the intact model and, with an ablation, of the ablated model.

    Raises:
        UserError: for a component that the model lacks, or a stage with a non-finite value.
    """
    from nope_probe.experiments.circuit.analyse import Stages
    from nope_probe.experiments.engine import Engine, validate_finite_stages

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
    from nope_probe.experiments.circuit.analyse import block_explorer, explored
    from nope_probe.experiments.engine import Engine
    from nope_probe.hooks.removing.targets import components

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
    from nope_probe.experiments.engine import validate_removable
    from nope_probe.hooks.removing.targets import components

    wanted = session.settings.removed
    validate_components(wanted, components(session.loaded.model))
    validate_removable(session.loaded.model, wanted)
    norms = {"norms"} & {*session.settings.remove}
    return tuple(Condition(wanted | norms).ordered)
