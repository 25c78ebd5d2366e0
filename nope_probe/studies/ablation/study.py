"""The `ablate` command's study: its passes and its run, and the function for Python."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.removing.components import named_bands
from nope_probe.removal import INTACT
from nope_probe.run.folder import Run
from nope_probe.run.session import Session
from nope_probe.studies.ablation.analyse import analyse
from nope_probe.studies.ablation.intact import IntactModel
from nope_probe.studies.ablation.plan import Measured, plan_of
from nope_probe.studies.ablation.settings import Settings
from nope_probe.studies.engine import Engine, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes
from nope_probe.studies.study import Pass, Results, Study, run_study


class Ablate(Study[Settings]):
    """The lead and the order of every layer without the sources, and with weights replaced."""

    command = "ablate"
    function = "run_ablations"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        bands = settings.bands if settings.removes and settings.bands != "octaves" else 0
        self.engine = Engine.of(session)
        self.plan = plan_of(
            loaded,
            session.sequences().inputs,
            settings.removed_names,
            ablations=settings.ablations,
            layers=settings.layers_with_maps(loaded.info),
            bands=named_bands(loaded.model, bands) if bands else (),
            per_head=settings.per_head,
        )
        self.intact = None
        if settings.removes:
            settings.validate_weights(self.plan.removed)
        else:
            self.intact = IntactModel(session, self.engine, self.plan.layers)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that map the scores of every condition."""
        engine, inputs = self.engine, self.session.sequences()
        if f"score/{INTACT.name}" not in self.session.checkpoint:
            validate_first_sequence(engine.model, engine.inputs, self.plan.layers)
        if self.intact is not None:
            yield from self.plan.passes(engine, also=self.intact.also)
            yield from self.intact.passes()
        else:
            is_text = inputs.kind == "text"
            shuffled = inputs.shuffled(self.settings.seed) if is_text else None
            yield from self.plan.passes(engine, shuffled)

    def analyse(self, results: Results) -> Run:
        """Measure the lead and the pattern of every layer in every condition, return the run."""
        measured = Measured.of(self.plan, results)
        return analyse(self.session, self.plan, measured, self.intact, results)


run = partial(run_study, Ablate)


@takes(Ablate)
def run_ablations(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> Run:
    """Find where a model's lead and pattern come from, and which weights they need.

    Runs the model with and without its mask, position encoding and weights, as the `ablate` command
    does. A progress bar goes to stderr.

    Raises:
        UserError: for what cannot be done, such as components that the model lacks, too few
            sequences, or a folder that holds another run.

    Example:
        >>> from nope_probe import load, run_ablations, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=64, seq_len=16)
        >>> study = run_ablations(loaded, data, remove=["w_k"], replacement="mean")
        >>> kept = study.tables["pattern"].query("layer == 2").set_index("removed")["kept"]
        >>> bool(kept["intact"] > 10 * abs(kept["w_k"]))
        True
        >>> study.maps["term/mask"].shape
        (3, 16, 16)
    """
    return run_of(Ablate, model, inputs, out, options)
