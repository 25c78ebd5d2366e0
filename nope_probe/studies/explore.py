"""The explorer of a model in a notebook: the model runs without each source and weight."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.analyses.attribution import conditions_of
from nope_probe.errors import closed_choices
from nope_probe.figures.explorer import Explorer
from nope_probe.hooks.layers.model import Given, layers_of, skip_keys_of
from nope_probe.hooks.layers.objects import Model
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.stand_ins import Replacement
from nope_probe.maps.centred import kept_cells
from nope_probe.maps.layers import LayerMaps
from nope_probe.models.info import LoadedModel
from nope_probe.models.parity import as_loaded
from nope_probe.removal import Condition, Gain
from nope_probe.run.processes import Progress
from nope_probe.run.sources import as_sequences, folds_for_intervals
from nope_probe.studies.ablation.plan import equivalent, plan_of
from nope_probe.studies.engine import Engine
from nope_probe.studies.explorer import explorer_of, panel_grams


@closed_choices("replacement", "gain")
def explore(
    model: Model | LoadedModel,
    tokens: Given,
    *,
    remove: Sequence[str] | None = None,
    batch_size: int = 32,
    n_folds: int | None = None,
    replacement: Replacement = "mean",
    gain: Gain = "output",
) -> Explorer:
    """Run a model without each source and weight, and return the choice for a notebook.

    The explorer shows each head's pattern, its first key's lead, and what is left of both. It opens
    on the layer with the largest lead and pattern, without the mask. A progress bar goes to stderr.

    Args:
        model: what `load` takes in memory, or returns.
        tokens: `Sequences`, or what `capture_scores` takes; vectors for a parameter-free model.
            Some dozens of sequences suffice.
        remove: what can be removed besides the sources: components, the circuits `qk` and `ov`,
            unions such as `w_q+mlp`; `["sources"]` for the sources alone. By default W_Q, W_K,
            both, and W_O, if the model has them.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that intervals are made from, 4 or more; by default 8, or as many
            as there are sequences (documents) if these are fewer.
        replacement: what a removed weight is replaced by.
        gain: the size of a replacement that is no constant output.

    Returns:
        An explorer that notebooks show, and that `save` writes as a page.

    Raises:
        UserError: for components that the model lacks.

    Example:
        >>> from nope_probe import figures, load, sequences
        >>> loaded = load("nope-tiny", n_layers=2)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=8, seq_len=12)
        >>> explorer = figures.explore(loaded.model, data, remove=["qk"], n_folds=4)
        >>> explorer.view.maps.shape  # condition, layer, head and their mean, query, key
        (3, 2, 5, 12, 12)
    """
    loaded = as_loaded(model)
    model, name = loaded.model, loaded.info.name
    data, by = as_sequences(model, tokens), Ablation(replacement=replacement, gain=gain)
    kept_cells(data.inputs.shape[1], skip_keys_of(data.inputs))  # raises where no keys are left
    layers = [layer.index for layer in layers_of(model)]
    plan = plan_of(loaded, data.inputs, remove, layers=layers, ablations=[by])
    engine = Engine(
        model=model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=batch_size,
        n_folds=folds_for_intervals(data, n_folds),
    ).calibrated("gains", plan.calibrated)
    needed = conditions_of(plan.sources, plan.removed)
    run = dict.fromkeys(equivalent(condition, by) for condition in needed)
    captured = {
        condition: _panels(engine, by, condition)
        for condition in Progress(run, desc="patterns", leave=False)
    }
    panels = {condition: captured[equivalent(condition, by)] for condition in needed}
    replaced = f" A removed weight's replacement is {replacement}." if plan.replacing else ""
    return explorer_of(
        panels,
        panel_grams(panels),
        layers=layers,
        title=f"The positional pattern of {name or 'a model'}, component by component",
        note=f"Means over {len(data.inputs):,} sequences of {data.inputs.shape[1]} positions. What "
        f"is removed is removed in every layer.{replaced} Brackets: 95% intervals.",
    )


def _panels(engine: Engine, by: Ablation, condition: Condition) -> list[list[LayerMaps]]:
    """Return the maps of each layer: the mean over heads, and each head if there are several."""
    ablation = by.without(condition) if condition else None
    maps = engine.scores(condition.name, ablation, per_head=True)
    return [[layer, *(layer.heads if len(layer.heads) > 1 else ())] for layer in maps.values()]
