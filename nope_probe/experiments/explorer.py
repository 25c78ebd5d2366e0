"""The explorer of a model: its maps in every combination of removed components."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from tqdm.auto import tqdm

from nope_probe.analyses.trends import query_stride
from nope_probe.components import Ablation, Gain, Replacement, Substitute
from nope_probe.errors import closed_choices
from nope_probe.experiments.ablation.plan import make_plan
from nope_probe.experiments.engine import Engine, as_sequences, folds_for_intervals, name_of
from nope_probe.experiments.explorer_views import (
    combinations,
    components_of,
    left_alone,
    pattern_view,
    stage_view,
    strongest_layer,
)
from nope_probe.experiments.removals import irreplaceable, without_effect
from nope_probe.figures.explorer import Explorer, SwitchedMaps, strongest_source
from nope_probe.hooks.layers.model import Given, blocks_of, layers_of
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.stages import absent_stages
from nope_probe.hooks.removing.targets import components
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.rows import choose_rows
from nope_probe.models.info import describe


@closed_choices("replacement", "gain", "skip_keys")
def explore(
    model: HookedModel,
    tokens: Given,
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
    with the strongest pattern, without the source that this pattern needs most.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
            Some dozens of sequences suffice.
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
    data, has, name = as_sequences(model, tokens), components(model), name_of(model)
    skipped = int(data.bos) if skip_keys == "auto" else skip_keys
    kept_cells(data.inputs.shape[1], skipped)  # raises where no keys are left
    left_out = irreplaceable(model) | without_effect(model, data.inputs, len(layers_of(model)))
    plan = make_plan(has, players, describe(model, name).parameter_free, left_out=left_out)
    players_of_switches = plan.switches
    substitute = Substitute(replacement=replacement, gain=gain)
    ablations = [substitute.without(condition) for condition in combinations(players_of_switches)]
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=batch_size,
        n_folds=folds_for_intervals(data, n_folds),
    ).calibrated(None, ablations)
    scores = (
        engine.scores(None, ablation, per_head=True) for ablation in progress(ablations, "patterns")
    )
    layers = [layer.index for layer in layers_of(model)]
    views = [pattern_view(scores, layers, skipped)]
    if circuit:
        views.append(circuit_view(engine, ablations, layers, skipped))
    players_shown = components_of(players_of_switches)
    layer = strongest_layer(views[0])
    return Explorer(
        title=f"The positional pattern of {name or 'a model'}, component by component",
        players=players_shown,
        views=tuple(views),
        components=has,
        removed=strongest_source(left_alone(views[0], layer), players_shown),
        layer=layer,
        note=note_on(engine, substitute, skipped),
    )


def circuit_view(
    engine: Engine, ablations: Sequence[Ablation], layers: Sequence[int], skip_keys: int
) -> SwitchedMaps:
    """Return the stages of some blocks without each combination of components."""
    blocks, n_layers = layers_of(engine.model), len(blocks_of(engine.model))
    by_number = {block.index: block for block in blocks}
    stages = (
        [engine.stages(None, ablation, layer=layer) for layer in layers]
        for ablation in progress(ablations, "stages")
    )
    absent = [absent_stages(by_number, layer, n_layers) for layer in layers]
    return stage_view(stages, layers, absent, skip_keys)


def progress(ablations: Sequence[Ablation], what: str) -> Iterable[Ablation]:
    """Yield ablations, and show on stderr how many are done."""
    return tqdm(ablations, desc=what, file=sys.stderr, leave=False)


def note_on(engine: Engine, substitute: Substitute, skip_keys: int) -> str:
    """Return what an explorer's maps are, in a few sentences."""
    n_seqs, n_pos = engine.inputs.shape[:2]
    n_rows = len(choose_rows(n_pos, engine.query_rows))
    skipped = {0: "", 1: ", the first key left out"}.get(
        skip_keys, f", the first {skip_keys} keys left out"
    )
    stride = query_stride(n_rows)
    ordered = "" if stride == 1 else f" Locality is of 1 query in {stride}, counted from query 0."
    return (
        f"Maps and numbers are means over {n_seqs:,} sequences of {n_pos} positions{skipped}. A "
        f"switch removes its component in every layer; a removed weight's replacement is "
        f"{substitute.replacement}. Brackets: 95% intervals.{ordered}"
    )
