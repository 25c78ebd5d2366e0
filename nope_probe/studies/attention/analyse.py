"""From the captured attention of every head to its table, and to the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

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
from nope_probe.analyses.jackknife import mean_intervals
from nope_probe.data.sequences import Sequences
from nope_probe.errors import UserError
from nope_probe.figures.attention import UNIFORM
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.maps.estimates import Estimates, fold_weights
from nope_probe.maps.folds import State
from nope_probe.maps.maps import AttentionMaps
from nope_probe.maps.rows import choose_rows
from nope_probe.run.folder import Run
from nope_probe.run.identity import input_arrays
from nope_probe.run.manifest import Manifest, TooFew, written
from nope_probe.run.session import Session
from nope_probe.run.settings import MIN_KEYS
from nope_probe.studies.attention.on_text import Explained, shown_pieces
from nope_probe.studies.attention.page import report
from nope_probe.studies.attention.settings import Settings
from nope_probe.studies.attention.steps import LookSteps
from nope_probe.studies.attention.text import RunText, text_record
from nope_probe.studies.attention.why import why_tables
from nope_probe.studies.engine import Engine
from nope_probe.studies.page import with_page
from nope_probe.studies.tables import attention_table, interval_names, text_attention_table

PARTS = tuple(field.name for field in fields(AttentionSplit) if field.type == "Estimates")


def measured(
    engine: Engine,
    stream: StreamCheckpoint | None,
    *,
    layers: Sequence[int],
    text: Int[Tensor, "1 pos"] | None,
) -> State:
    """Return the estimates of every head of some layers, and its mean weights, without fold means.

    Of a text, `on_text` are its weights in it, and `content` their relative entropy to the mean
    weights, nats.

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
    of_head = maps.weights.shape[1:3]
    state = {
        "splits": torch.stack(splits).unflatten(0, of_head),
        "gaps": torch.tensor(gaps, dtype=torch.float64).unflatten(0, of_head),
        "weights": maps.mean,
        "sinks": _sinks(maps),
    }
    if text is not None:
        n = text.shape[1]
        of_text = capture_attention(engine.model, text, layers=layers, query_rows=n).mean.float()
        expected = state["weights"][..., :n, :n]
        state |= {"on_text": of_text, "content": relative_entropy(of_text, expected)}
    return state


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


def captured_text(
    engine: Engine, stream: StreamCheckpoint | None, *, layers: Sequence[int]
) -> State:
    """Return the attention of every head of some layers in one text, which is one batch.

    Raises:
        UserError: for attention that is not finite.
    """
    text, skip_keys = engine.inputs, engine.skip_keys
    maps = capture_attention(
        engine.model, text, layers=layers, query_rows=text.shape[1], skip_keys=skip_keys
    )
    if not maps.information.isfinite().all():
        raise UserError("the model's attention in the text is not finite")
    return {
        "on_text": maps.mean.float(),
        "content": maps.information[0],
        "visible": maps.visible,
        "sinks": _sinks(maps),
    }


def _sinks(maps: AttentionMaps) -> Float[Tensor, "layer head fold"]:
    """Return fold means of what each head's learned sink takes; NaN for heads without one."""
    nothing = maps.weights.new_full(maps.weights.shape[:3], torch.nan)
    return (nothing if maps.sinks is None else maps.sinks).movedim(0, -1).double()


def analyse(
    session: Session[Settings],
    inputs: Sequences,
    parts: Sequence[State],
    text: RunText | None,
    why: LookSteps | None,
) -> Run:
    """Return the run of the heads' attention.

    Its map `weights` is [layer, head, row, key_pos], float32; if some queries have no rows,
    `query_positions` are the queries of the rows. Its arrays `estimates` are what `splits_of`
    reads, so that `compare` tests changes fold by fold. Of a text, `text_weights` is [layer, head,
    pos, key_pos], and `text_content` the relative entropy to the mean weights (to uniform weights,
    of a text alone), [layer, head, pos], nats.

    Args:
        session: the run in progress.
        inputs: its sequences, or its text alone.
        parts: what was measured, some layers at a time.
        text: the run's text, if it has one.
        why: the steps back from the look that the run asks about; None if it asks nothing.
    """
    read = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    manifest, settings = _manifest(session, inputs, text, why), session.settings
    maps, arrays = State(), {"tokens": input_arrays(inputs)}
    if settings.reads_corpus:
        splits = read["splits"], read["gaps"], torch.tensor(manifest.fold_sizes)
        table = attention_table(splits_of(*splits, manifest.layers))
        manifest = replace(manifest, too_few=too_few_sequences(table, len(inputs)))
        maps["weights"] = read["weights"].float()
        if settings.rows < settings.seq_len:
            maps["query_positions"] = choose_rows(settings.seq_len, settings.rows).float()
        estimates = {"estimates": read["splits"], "gaps": read["gaps"]}
        arrays["estimates"] = {name: tensor.numpy() for name, tensor in estimates.items()}
    else:
        table = _text_table(manifest, read)
    tables = {"attention": with_sinks(table, read["sinks"], manifest.fold_sizes)}
    if manifest.text is not None:
        maps |= {"text_weights": read["on_text"], "text_content": read["content"].float()}
        if why is not None:
            place = manifest.layers.index(why.first.name.block)
            of_query = read["on_text"][place, why.first.head, why.first.query]
            tables |= why_tables(why, of_query, shown_pieces(manifest.text))
    arrays["maps"] = {name: tensor.numpy() for name, tensor in maps.items()}
    return with_page(session, Run(manifest=manifest, arrays=arrays, tables=tables), report)


def _manifest(
    session: Session[Settings], inputs: Sequences, text: RunText | None, why: LookSteps | None
) -> Manifest:
    """Return the manifest, with the text and the look that the run explains."""
    settings, loaded, shown = session.settings, session.loaded, None
    if text is not None:
        assert loaded.tokenizer is not None
        shown = text_record(text, loaded.tokenizer)
    return replace(
        session.manifest_of(inputs),
        layers=settings.layers_with_maps(loaded.info),
        removed=tuple(settings.removed.ordered),
        text=shown,
        results=written(Explained(why=None if why is None else why.asked)),
    )


def _text_table(manifest: Manifest, read: State) -> pd.DataFrame:
    """Return the table of attention in a text alone: the means of queries with enough keys."""
    weights, information = read["on_text"], read["content"]
    rows = (read["visible"].sum(-1) >= MIN_KEYS)[:, None].expand_as(information)
    first = weights[..., : manifest.skip_keys].sum(-1)
    nats, share = (x.double().where(rows, torch.nan).nanmean(-1) for x in (information, first))
    return text_attention_table(nats, share, manifest.layers)


def with_sinks(
    table: pd.DataFrame, folds: Float[Tensor, "layer head fold"], sizes: Sequence[int]
) -> pd.DataFrame:
    """Return the table of attention with the share that each head's learned sink takes.

    The share is of the attention before the weights are renormalised, a mean over queries. The
    table of a model without sinks is returned as it is.

    Args:
        table: a row per layer and head.
        folds: fold means of the share; NaN for heads without a sink.
        sizes: sequences per fold.
    """
    if folds.isnan().all():
        return table
    weights = fold_weights(len(sizes), torch.tensor(sizes))
    taken = mean_intervals(folds.movedim(-1, 0), weights)
    columns = zip(interval_names("sink_weight"), (taken.value, taken.low, taken.high), strict=True)
    return table.assign(**{name: values.flatten().numpy() for name, values in columns})


def too_few_sequences(table: pd.DataFrame, n_seqs: int) -> TooFew | None:
    """Return how many heads have no `others_share`, and how many sequences would do; or None.

    Args:
        table: of attention.
        n_seqs: how many sequences the run has.
    """
    informed = table[table["information"] >= UNIFORM]
    gaps = informed["others_share_gap"]
    if not (gaps > LARGEST_GAP).any():
        return None
    needed = gaps.max() / GAP_TO_REACH * n_seqs
    rounded = math.ceil(needed / 100) * 100
    return TooFew(n_heads=int((gaps > LARGEST_GAP).sum()), n_seqs=rounded)
