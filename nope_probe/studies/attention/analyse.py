"""From the captured attention of every head to its table, and to the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nope_probe.analyses.attention import (
    GAP_TO_REACH,
    LARGEST_GAP,
    AttentionSplit,
    relative_entropy,
    split_attention,
)
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.figures.attention import UNIFORM
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.folds import State
from nope_probe.maps.rows import choose_rows
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.manifest import Manifest, TooFew, written
from nope_probe.run.session import Session
from nope_probe.studies.attention.on_text import Explained, shown_pieces
from nope_probe.studies.attention.page import report
from nope_probe.studies.attention.settings import MIN_KEYS, Settings
from nope_probe.studies.attention.steps import LookSteps
from nope_probe.studies.attention.text import RunText, text_record
from nope_probe.studies.attention.why import why_tables
from nope_probe.studies.engine import Engine
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import attention_table, text_attention_table

PARTS = tuple(field.name for field in fields(AttentionSplit) if field.type == "Estimates")


@dataclass(frozen=True, kw_only=True)
class HeadAttention:
    """The measured attention of every head.

    Attributes:
        estimates: of the parts of each head's attention, by `PARTS`, nats.
        gaps: of the bounds of position at the first key and among the other keys, nats.
        weights: the mean attention weights, 0 where the model masks.
        counts: sequences per fold.
        text: the run's text, if it has one.
        on_text: its attention weights; empty without a text.
        why: the steps back from the look that the run asks about; None if it asks nothing.
    """

    estimates: Float[Tensor, "layer head part one_plus_folds"]
    gaps: Float[Tensor, "layer head two"]
    weights: Float[Tensor, "layer head row key_pos"]
    counts: Int[Tensor, " fold"]
    text: RunText | None
    on_text: Float[Tensor, "layer head text_pos text_pos"]
    why: LookSteps | None


def head_attention(
    parts: Sequence[State], text: RunText | None, why: LookSteps | None
) -> HeadAttention:
    """Return the attention of every head from that of some layers at a time."""
    return HeadAttention(
        estimates=torch.cat([part["splits"] for part in parts]),
        gaps=torch.cat([part["gaps"] for part in parts]),
        weights=torch.cat([part["weights"] for part in parts]),
        counts=parts[0]["counts"],
        text=text,
        on_text=torch.cat([part["on_text"] for part in parts]),
        why=why,
    )


def measured(
    engine: Engine,
    stream: StreamCheckpoint | None,
    *,
    layers: Sequence[int],
    text: Int[Tensor, "1 pos"] | None,
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
    heads = split_attention(maps).values()
    splits = [torch.stack([getattr(head, part).values for part in PARTS]) for head in heads]
    gaps = [[head.first_gap, head.others_gap] for head in heads]
    n_layers, n_heads = maps.weights.shape[1:3]
    on_text = maps.weights.new_empty(n_layers, n_heads, 0, 0)
    if text is not None:
        of_text = capture_attention(engine.model, text, layers=layers, query_rows=text.shape[1])
        on_text = of_text.mean.float()
    return {
        "splits": torch.stack(splits).unflatten(0, (n_layers, n_heads)),
        "gaps": torch.tensor(gaps, dtype=torch.float64).unflatten(0, (n_layers, n_heads)),
        "weights": maps.mean,
        "counts": maps.counts,
        "on_text": on_text,
    }


def splits_of(
    estimates: Float[Tensor, "layer head part one_plus_folds"],
    gaps: Float[Tensor, "layer head two"],
    counts: Int[Tensor, " fold"],
    layers: Sequence[int],
) -> dict[tuple[int, int], AttentionSplit]:
    """Return the parts of each head's attention by layer and head, from a run's estimates."""
    weights = fold_weights(len(counts), counts)
    splits = {}
    for place, layer in enumerate(layers):
        for head, (of_head, ends) in enumerate(zip(estimates[place], gaps[place], strict=True)):
            parts = (Estimates(values=part, weights=weights) for part in of_head)
            first, others = ends.tolist()
            splits[layer, head] = AttentionSplit(
                **dict(zip(PARTS, parts, strict=True)), first_gap=first, others_gap=others
            )
    return splits


def analyse(session: Session[Settings], heads: HeadAttention) -> Run:
    """Return the run of the heads' attention.

    Its map `weights` is [layer, head, row, key_pos], float32; if some queries have no rows,
    `query_positions` are the queries of the rows. Its arrays `estimates` are what `splits_of`
    reads, so that `compare` tests changes fold by fold. Of a text, `text_weights` is [layer, head,
    pos, key_pos], and `text_content` the relative entropy to the mean weights, [layer, head, pos],
    nats.
    """
    inputs, settings = session.sequences(), session.settings
    maps = {"weights": heads.weights.float()}
    layers = settings.layers_with_maps(session.loaded.info)
    splits = splits_of(heads.estimates, heads.gaps, heads.counts, layers)
    tables = {"attention": attention_table(splits)}
    n = inputs.inputs.shape[1]
    if settings.rows < n:
        maps["query_positions"] = choose_rows(n, settings.rows).float()
    manifest = _manifest(session, inputs, heads.counts, heads.text, heads.why)
    if heads.text is not None:
        n_pos = heads.text.tokens.shape[1]
        expected = heads.weights[..., :n_pos, :n_pos]
        maps["text_weights"] = heads.on_text
        maps["text_content"] = relative_entropy(heads.on_text, expected).float()
        tables |= _why(manifest, heads.on_text, heads.why)
    too_few = too_few_sequences(tables["attention"], len(inputs))
    kept = {"estimates": {"estimates": heads.estimates, "gaps": heads.gaps}}
    manifest = replace(manifest, too_few=too_few)
    return _run(session, inputs, manifest, {"maps": maps, **kept}, tables)


def captured_text(
    engine: Engine, stream: StreamCheckpoint | None, *, layers: Sequence[int], size: int
) -> State:
    """Return the attention of every head in one text, some layers at a time.

    Args:
        engine: the model on the text.
        stream: unused: one text is one batch.
        layers: the numbers of the layers.
        size: of how many layers the maps fit into memory.

    Raises:
        UserError: for attention that is not finite.
    """
    text = engine.inputs
    capture = partial(
        capture_attention, engine.model, text, query_rows=len(text[0]), skip_keys=engine.skip_keys
    )
    groups = [layers[first : first + size] for first in range(0, len(layers), size)]
    parts = [capture(layers=group) for group in groups]
    information = torch.cat([part.information[0] for part in parts])
    if not information.isfinite().all():
        raise UserError("the model's attention in the text is not finite")
    return {
        "weights": torch.cat([part.mean for part in parts]),
        "information": information,
        "visible": torch.cat([part.visible for part in parts]),
    }


def analyse_text(
    session: Session[Settings], text: RunText, read: State, why: LookSteps | None
) -> Run:
    """Return the run of a text alone: where each head looks, and why if that is asked.

    Its maps are `text_weights`, [layer, head, pos, key_pos], and `text_content`, here the relative
    entropy to uniform weights, [layer, head, pos], nats.
    """
    settings, inputs = session.settings, text.alone
    weights, information = read["weights"].float(), read["information"]
    rows = (read["visible"].sum(-1) >= MIN_KEYS)[:, None].expand_as(information)
    first = weights[..., : settings.skip_keys_of(inputs)].sum(-1)
    nats, share = (x.double().where(rows, torch.nan).nanmean(-1) for x in (information, first))
    manifest = _manifest(session, inputs, torch.ones(1, dtype=torch.long), text, why)
    maps = {"text_weights": weights, "text_content": information.float()}
    tables = {"attention": text_attention_table(nats, share, manifest.layers)}
    tables |= _why(manifest, weights, why)
    return _run(session, inputs, manifest, {"maps": maps}, tables)


def _manifest(
    session: Session[Settings],
    inputs: Sequences,
    counts: Int[Tensor, " fold"],
    text: RunText | None,
    why: LookSteps | None,
) -> Manifest:
    """Return the manifest, with the text and the look that the run explains."""
    settings, loaded, shown = session.settings, session.loaded, None
    if text is not None:
        assert loaded.tokenizer is not None
        shown = text_record(text, loaded.tokenizer)
    return replace(
        session.manifest_of(inputs, settings.skip_keys_of(inputs), counts),
        layers=settings.layers_with_maps(loaded.info),
        removed=tuple(settings.removed.ordered),
        text=shown,
        results=written(Explained(why=None if why is None else why.asked)),
    )


def _why(
    manifest: Manifest,
    weights: Float[Tensor, "layer head text_pos text_pos"],
    why: LookSteps | None,
) -> dict[str, pd.DataFrame]:
    """Return the tables of the run's `why`, if it was asked."""
    if why is None or manifest.text is None:
        return {}
    look = why.first
    of_query = weights[manifest.layers.index(look.name.block), look.head, look.query]
    return why_tables(why, of_query, shown_pieces(manifest.text))


def _run(
    session: Session[Settings],
    inputs: Sequences,
    manifest: Manifest,
    tensors: dict[str, State],
    tables: dict[str, pd.DataFrame],
) -> Run:
    """Return the run with its page."""
    arrays = {
        group: {name: tensor.numpy() for name, tensor in of_group.items()}
        for group, of_group in tensors.items()
    }
    kept = {"tokens": input_arrays(inputs), **arrays}
    return with_page(session, Run(manifest=manifest, arrays=kept, tables=tables), report)


def too_few_sequences(table: pd.DataFrame, n_seqs: int) -> TooFew | None:
    """Return how many heads have no share, and how many sequences would do; None if all have one.

    Args:
        table: of attention.
        n_seqs: how many sequences the run has.
    """
    informed = table[table["information"] >= UNIFORM]
    gaps = informed["positional_share_gap"]
    if not (gaps > LARGEST_GAP).any():
        return None
    needed = gaps.max() / GAP_TO_REACH * n_seqs
    rounded = math.ceil(needed / 100) * 100
    return TooFew(n_heads=int((gaps > LARGEST_GAP).sum()), n_seqs=rounded)
