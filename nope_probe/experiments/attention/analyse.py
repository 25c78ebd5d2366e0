"""From the captured attention of every head to its table, and to the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attention import AttentionSplit, relative_entropy, split_attention
from nope_probe.errors import UserError
from nope_probe.experiments.attention.on_text import RunText, shown_pieces, text_of, text_record
from nope_probe.experiments.attention.sections import report
from nope_probe.experiments.attention.settings import Settings
from nope_probe.experiments.attention.why import (
    captured_terms,
    query_of,
    removed_components,
    why_table,
)
from nope_probe.experiments.engine import Engine, validate_first_sequence
from nope_probe.experiments.sections import with_page
from nope_probe.experiments.tables import attention_table
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.folds import State
from nope_probe.maps.rows import choose_rows
from nope_probe.runtime.folder import Run
from nope_probe.runtime.identity import input_arrays, input_record
from nope_probe.runtime.session import Session

FIELDS = tuple(field.name for field in fields(AttentionSplit))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The measured attention of every head.

    Attributes:
        splits: by layer and head.
        weights: the mean attention weights, 0 where the model masks.
        counts: sequences per fold.
        text: the run's text, if it has one.
        on_text: its attention weights; empty without a text.
        why: the terms of the scores that the run asks about, nats; empty if it asks nothing.
    """

    splits: dict[tuple[int, int], AttentionSplit]
    weights: Float[Tensor, "layer head row key_pos"]
    counts: Int[Tensor, " fold"]
    text: RunText | None
    on_text: Float[Tensor, "layer head text_pos text_pos"]
    why: State


def capture(session: Session[Settings]) -> Heads:
    """Return every head's attention, some layers at a time, without what is to be removed.

    Raises:
        UserError: for a component that the model lacks, or attention that is not finite.
    """
    settings, model = session.settings, session.loaded.model
    layers = settings.layers_of(session.loaded.info)
    size = settings.layers_at_a_time(session.loaded.info)
    groups = [layers[first : first + size] for first in range(0, len(layers), size)]
    ablation = settings.substitute.without(removed_components(settings, session.loaded))
    engine, of_run = (
        replace(Engine.of(session), query_rows=settings.rows),
        text_of(settings, session.loaded),
    )
    text = None if of_run is None else of_run.tokens
    query = None if text is None else query_of(settings, text)
    keys = [f"attention-L{group[0]}" for group in groups]
    if keys[0] not in session.checkpoint:
        validate_first_sequence(model, engine.inputs, layers)
        if settings.asked is not None and text is not None and query is not None:
            kept = settings.n_kept(session.sequences())
            alone = replace(engine, inputs=text, documents=None, query_rows=text.shape[1])
            captured_terms(alone, settings.asked, text, query, kept, None)  # or why not
    gains, asked = ["gains"] * ablation.needs_calibration, settings.asked
    steps, condition = [*gains, *keys, *["why"] * (asked is not None)], None
    session.announce(1, steps, n_seqs=len(engine.inputs))
    with session.checkpoint.progress(steps, session.n_own_seqs):
        engine, why = engine.calibrated("gains", [ablation]), {}
        condition = ablation if settings.remove else None
        parts = [
            engine.once(key, partial(measured, engine, group, text), condition)
            for key, group in zip(keys, groups, strict=True)
        ]
        if asked is not None and text is not None and query is not None:
            kept = settings.n_kept(session.sequences())
            explain = partial(captured_terms, engine, asked, text, query, kept)
            why = engine.once("why", explain, condition)
    splits, counts = torch.cat([part["splits"] for part in parts]), parts[0]["counts"]
    return Heads(
        splits={
            (layer, head): _split_of(values, fold_weights(len(counts), counts))
            for layer, of_layer in zip(layers, splits, strict=True)
            for head, values in enumerate(of_layer)
        },
        weights=torch.cat([part["weights"] for part in parts]),
        counts=counts,
        text=of_run,
        on_text=torch.cat([part["on_text"] for part in parts]),
        why=why,
    )


def measured(
    engine: Engine,
    layers: Sequence[int],
    text: Int[Tensor, "1 pos"] | None,
    stream: StreamCheckpoint | None,
) -> State:
    """Return the estimates of every head of some layers, and its mean weights, without fold means.

    `on_text` are its weights in a text; empty without a text.

    Raises:
        UserError: for attention that is not finite.
    """
    options = {"layers": layers, "skip_keys": engine.skip_keys}
    maps = engine.by_fold(capture_attention, stream, **options)
    for place, layer in enumerate(maps.layers):
        if not maps.information[:, place].isfinite().all():
            raise UserError(f"non-finite attention in L{layer}")
    splits = [
        torch.stack([getattr(split, name).values for name in FIELDS])
        for split in split_attention(maps).values()
    ]
    n_layers, n_heads = maps.weights.shape[1:3]
    on_text = maps.weights.new_empty(n_layers, n_heads, 0, 0)
    if text is not None:
        of_text = capture_attention(engine.model, text, layers=layers, query_rows=text.shape[1])
        on_text = of_text.mean.float()
    return {
        "splits": torch.stack(splits).unflatten(0, (n_layers, n_heads)),
        "weights": maps.mean,
        "counts": maps.counts,
        "on_text": on_text,
    }


def _split_of(
    values: Float[Tensor, "part one_plus_folds"], weights: Float[Tensor, " fold"]
) -> AttentionSplit:
    parts = (Estimates(values=part, weights=weights) for part in values)
    return AttentionSplit(**dict(zip(FIELDS, parts, strict=True)))


def analyse(session: Session[Settings], heads: Heads) -> Run:
    """Return the run of the heads' attention.

    Its map `weights` is [layer, head, row, key_pos], float32; if some queries have no rows,
    `query_positions` are the queries of the rows. Of a text, `text_weights` is [layer, head, pos,
    key_pos], and `text_content` the relative entropy to the mean weights, [layer, head, pos], nats.
    """
    inputs, settings = session.sequences(), session.settings
    layers: Sequence[int] = settings.layers_of(session.loaded.info)
    manifest = {
        **session.provenance(),
        **input_record(inputs, settings.n_skipped(inputs), heads.counts),
        "layers": [*layers],
        "removed": list(removed_components(settings, session.loaded)),
    }
    maps, tables = {"weights": heads.weights.float()}, {"attention": attention_table(heads.splits)}
    n = inputs.inputs.shape[1]
    if settings.rows < n:
        maps["query_positions"] = choose_rows(n, settings.rows).float()
    if heads.text is not None:
        tokenizer, n_pos = session.loaded.tokenizer, heads.text.tokens.shape[1]
        assert tokenizer is not None
        manifest["text"] = text_record(heads.text, tokenizer)
        expected = heads.weights[..., :n_pos, :n_pos]
        maps["text_weights"] = heads.on_text
        maps["text_content"] = relative_entropy(heads.on_text, expected).float()
        if settings.asked is not None:
            query, (layer, head) = query_of(settings, heads.text.tokens), settings.asked
            weights = heads.on_text[layers.index(layer), head, query]
            pieces = shown_pieces(manifest["text"])
            manifest["why"] = {"head": settings.why, "query": query}
            tables["why"] = why_table(heads.why, weights, pieces)
    run = Run(
        manifest=manifest,
        arrays={
            "tokens": input_arrays(inputs),
            "maps": {name: array.numpy() for name, array in maps.items()},
        },
        tables=tables,
    )
    return with_page(session, run, report)
