"""The explorer of a model: its maps in every combination of removed components."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tqdm import tqdm

from nope_probe.analyses.shapley import Condition, PlayerSet
from nope_probe.analyses.trends import query_stride
from nope_probe.components import Gain, Replacement, Substitute, removal_order
from nope_probe.data.sequences import Sequences
from nope_probe.errors import closed_choices
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.experiments.ablation.study import Inputs, as_sequences, folds_for_intervals, name_of
from nope_probe.experiments.explore.views import (
    combinations,
    pattern_view,
    stage_view,
    strongest_layer,
)
from nope_probe.figures.explorer import Explorer, SwitchedMaps
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_scores, capture_stages
from nope_probe.hooks.reading.stages import absent_stages
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.maps import ScoreMaps, StageMaps
from nope_probe.models.info import describe


@dataclass(frozen=True, kw_only=True)
class ExplorerOptions:
    """How the combinations are run.

    Attributes:
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more.
        substitute: what stands for removed weights.
        skip_keys: how many first keys the patterns leave out.
    """

    batch_size: int = 32
    n_folds: int = 8
    substitute: Substitute = field(default_factory=Substitute)
    skip_keys: int = 0


@closed_choices("replacement", "gain", "skip_keys")
def explore(
    model: HookedModel,
    tokens: Inputs,
    *,
    players: Sequence[str] | None = None,
    circuit: bool = True,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement = "identity",
    gain: Gain = "output",
    skip_keys: int | Literal["auto"] = "auto",
) -> Explorer:
    """Run a model in every combination of removed components, and return switches for a notebook.

    The model runs 2^k times for k players, once per combination for the patterns of all heads and
    once per layer for its stages. A progress bar goes to stderr. The explorer opens on the layer
    with the strongest pattern.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: sequences of equal length; vectors for a parameter-free model. Some dozens suffice.
        players: what each switch removes: components, the circuits `qk` and `ov`, unions such as
            `w_q+mlp`; `["sources"]` for the mask and the position encoding. At most 10. By default
            mask, rope, w_q, w_k and w_o, as far as the model has them.
        circuit: whether to show the stages (a) to (i) of every block too.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; by default 8, or as many
            as there are sequences (documents) if these are fewer.
        replacement: what a removed weight is replaced by.
        gain: the size of the replacements identity and random.
        skip_keys: first keys that patterns leave out; `auto`: 1 where all sequences begin with the
            same token (a BOS token, which is an attention sink), else 0.

    Returns:
        An explorer that notebooks show, and that `save` writes as a page.

    Raises:
        UserError: for players that the model lacks, or more than 10.

    Example:
        >>> from nope_probe import figures, load, sequences
        >>> loaded = load("nope-tiny", n_layers=2)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=12)
        >>> explorer = figures.explore(loaded.model, data, players=["mask", "qk"], n_folds=4)
        >>> explorer.views[0].maps.shape  # combination, layer, head and their mean, query, key
        (4, 2, 5, 12, 12)
    """
    inputs, has = as_sequences(tokens), components(model)
    name = name_of(model)
    plan = make_plan(has, players, describe(model, name).parameter_free)
    options = ExplorerOptions(
        batch_size=batch_size,
        n_folds=folds_for_intervals(inputs, n_folds),
        substitute=Substitute(replacement=replacement, gain=gain),
        skip_keys=int(inputs.bos) if skip_keys == "auto" else skip_keys,
    )
    kept_cells(inputs.inputs.shape[1], options.skip_keys)  # raises where no keys are left
    runner = CombinationRunner(model, inputs, plan.switches, options)
    views = [pattern_view(runner.scores(), options.skip_keys)]
    if circuit:
        views.append(_circuit_view(runner, model, options.skip_keys))
    return Explorer(
        title=f"The positional pattern of {name or 'a model'}, component by component",
        players={each.name: sorted(each.components) for each in runner.players.players},
        views=tuple(views),
        components=has,
        layer=strongest_layer(views[0]),
        note=note_on(len(inputs), inputs.inputs.shape[1], options),
    )


def _circuit_view(runner: CombinationRunner, model: HookedModel, skip_keys: int) -> SwitchedMaps:
    """Return the stages of every block in every combination."""
    blocks = layers_of(model)
    layers = range(len(blocks))
    absent = [absent_stages(blocks, layer) for layer in layers]
    return stage_view(runner.stages(layers), layers, absent, skip_keys)


def note_on(n_seqs: int, seq_len: int, options: ExplorerOptions) -> str:
    """Return what an explorer's maps are, in a few sentences."""
    skipped = {0: "", 1: ", the first key left out"}.get(
        options.skip_keys, f", the first {options.skip_keys} keys left out"
    )
    stride = query_stride(seq_len)
    replacement = options.substitute.replacement
    ordered = "" if stride == 1 else f" Locality is of 1 query in {stride}, counted from query 0."
    return (
        f"Means over {n_seqs} sequences of {seq_len} positions{skipped}. A switch removes its "
        f"component in every layer; a removed weight's replacement is {replacement}. "
        f"Brackets: 95% intervals.{ordered}"
    )


class CombinationRunner:
    """Runs a model in every combination of removed players.

    Args:
        model: a HookedTransformer or TransformerBridge.
        inputs: token sequences or vectors.
        players: what is removed.
        options: how the combinations are run.
    """

    def __init__(
        self, model: HookedModel, inputs: Sequences, players: PlayerSet, options: ExplorerOptions
    ) -> None:
        self.model, self.inputs, self.players, self.options = model, inputs, players, options
        self.calibration: Calibration | None = None
        if options.substitute.without(combinations(players)[-1]).needs_calibration:
            self.calibration = calibrate(
                model,
                inputs.inputs,
                batch_size=options.batch_size,
                seed=options.substitute.calibration_seed,
            )

    def scores(self) -> Iterator[ScoreMaps]:
        """Yield the score maps of all layers and heads in each combination."""
        for _ in self._combinations("patterns"):
            yield capture_scores(
                self.model,
                self.inputs.inputs,
                documents=self.inputs.documents,
                batch_size=self.options.batch_size,
                n_folds=self.options.n_folds,
                per_head=True,
            )

    def stages(self, layers: Sequence[int]) -> Iterator[list[StageMaps]]:
        """Yield the stages of some blocks in each combination."""
        for _ in self._combinations("stages"):
            yield [
                capture_stages(
                    self.model,
                    self.inputs.inputs,
                    documents=self.inputs.documents,
                    layer=layer,
                    batch_size=self.options.batch_size,
                    n_folds=self.options.n_folds,
                )
                for layer in layers
            ]

    def _combinations(self, what: str) -> Iterator[Condition]:
        """Yield each combination while the model is without it."""
        for condition in tqdm(combinations(self.players), desc=what, file=sys.stderr, leave=False):
            ablation = self.options.substitute.without(sorted(condition, key=removal_order))
            calibration = self.calibration if ablation.needs_calibration else None
            with ablated(self.model, ablation, calibration):
                yield condition
