"""What `attention` runs: passes over other texts and one text, the table of heads, the terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, Unpack

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from nope_probe.analyses.attention import (
    GAP_TO_REACH,
    LARGEST_GAP,
    relative_entropy,
    split_parts,
    splits_of,
)
from nope_probe.analyses.jackknife import mean_intervals
from nope_probe.analyses.verdicts import UNIFORM
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given
from nope_probe.hooks.layers.passes import traits_of
from nope_probe.hooks.reading.attention import capture_attention
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps import MIN_KEYS
from nope_probe.maps.estimates import fold_weights
from nope_probe.maps.folds import State
from nope_probe.maps.rows import choose_rows
from nope_probe.run.folder import Run
from nope_probe.run.session import Session, input_arrays, interventions
from nope_probe.studies.attention import MAP_BYTES, SAID, Settings, report
from nope_probe.studies.attention_text import Question, read_text
from nope_probe.studies.engine import Engine, ablation_of, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.page import with_page
from nope_probe.studies.readings import read_need
from nope_probe.studies.study import (
    Pass,
    Results,
    Study,
    calibration,
    captured,
)
from nope_probe.studies.tables import ATTENTION, GAPS, attention_table, interval_names, mean_columns

if TYPE_CHECKING:
    from nope_probe.studies.options import AttentionOptions as Options

NEEDED = ("rope", "mask")  # what need is measured of, in a model with RoPE


class Attention(Study[Settings]):
    """Position and content in the attention of every head, on average and in one text."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        self.layers = settings.layers_with_maps(loaded.info)
        self.ablation = ablation_of(loaded.model, settings)
        self.text = text = read_text(settings, loaded)
        self.inputs = text.alone if text and not settings.reads_corpus else session.sequences()
        self.engine = replace(Engine.of(session, self.inputs), query_rows=settings.rows)
        self.question = Question.of(settings, text) if text and settings.why else None

    @property
    def measures_need(self) -> bool:
        """Whether the need of RoPE is measured: on other texts, of a model as it was loaded."""
        model = self.session.loaded.model
        rotaries = [of.rotary for of in traits_of(model).values() if of.rotary is not None]
        known = bool(rotaries) and all(of.pairs is not None for of in rotaries)
        changed = self.settings.remove or any(interventions(model).values())
        return known and self.settings.reads_corpus and not changed

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that average some layers at a time, or that read one text alone."""
        settings, engine, info = self.settings, self.engine, self.session.loaded.info
        yield from calibration(engine, [self.ablation])
        of_text = [] if self.question is None else [*self.question.passes(engine, self.ablation)]
        yield from of_text[:1]  # a head that cannot be explained ends the run before the others
        compared, text = settings.reads_corpus, None if self.text is None else self.text.tokens
        n = engine.inputs.shape[1]
        of_layer = 8 * info.n_heads * n * (settings.folds * settings.rows if compared else n)
        size = max(1, MAP_BYTES // of_layer)  # layers whose maps fit in memory at once
        if compared:
            validate_first_sequence(engine, f"attention-L{self.layers[0]}", self.layers)
        for start in range(0, len(self.layers), size):
            group = self.layers[start : start + size]
            capture = partial(read_heads, layers=group, text=text, compared=compared)
            n_rows = len(group) * info.n_heads * settings.rows  # weights and scores of a head
            yield Pass(
                key=f"attention-L{group[0]}",
                engine=engine,
                read=partial(captured, capture),
                ablation=self.ablation,
                maps=-(-n_rows // settings.n_rows),
            )
        if self.measures_need:
            for name in NEEDED:
                need = partial(read_need, removal=Ablation(remove=name, layers=self.layers))
                yield Pass(key=f"need_{name}", engine=engine, read=partial(captured, need))
        yield from of_text[1:]

    def analyse(self, results: Results) -> Run:
        """Return the run of the heads' attention.

        Its map `weights` is [layer, head, row, key_pos], float32; if some queries have no rows,
        `query_positions` are the queries of the rows. Of a text, `text_weights` is [layer, head,
        pos, key_pos], and `text_content` the relative entropy to the mean weights (to uniform
        weights, of a text alone), [layer, head, pos], nats.
        """
        settings, skip_keys = self.settings, self.engine.skip_keys or 0
        parts = [result for key, result in results.items() if key.startswith("attention-")]
        read = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        manifest = replace(
            self.session.manifest_of(self.inputs),
            layers=self.layers,
            removed=tuple(self.ablation.named.ordered),
            text=None if self.text is None else self.text.shown,
        )
        sizes, maps = torch.tensor(manifest.fold_sizes), State()
        arrays = {"tokens": input_arrays(self.inputs)}
        if settings.reads_corpus:
            heads = [*product(self.layers, range(self.session.loaded.info.n_heads))]
            table = attention_table(splits_of(read["parts"], read["gaps"], sizes, heads))
            notes = (*manifest.data.notes, *too_few_sequences(table, len(self.inputs)))
            manifest = replace(manifest, data=replace(manifest.data, notes=notes))
            maps["weights"] = read["weights"].float()
            if settings.rows < settings.seq_len:
                maps["query_positions"] = choose_rows(settings.seq_len, settings.rows).float()
        else:
            table = table_of_text(read, self.layers, skip_keys)
        columns = {"sink_weight": read["sinks"]}
        columns |= {key: results[key]["need"] for key in results if key.startswith("need_")}
        for name, folds in columns.items():
            if not folds.isnan().all():  # of no head
                means = mean_intervals(folds.movedim(-1, 0), fold_weights(len(sizes), sizes))
                table = table.assign(**mean_columns(name, means))
        tables = {"attention": table}
        if self.text is not None:
            maps |= {"text_weights": read["on_text"], "text_content": read["content"].float()}
        if self.question is not None:
            layer, head, query, _ = self.question.first
            of_query = read["on_text"][self.layers.index(layer), head, query]
            tables |= self.question.tables(results, of_query)
        arrays["maps"] = {name: tensor.numpy() for name, tensor in maps.items()}
        run = Run(manifest=manifest, arrays=arrays, tables=tables)
        return with_page(self.session, run, report)


def read_heads(
    engine: Engine,
    stream: Stream | None,
    *,
    layers: Sequence[int],
    text: Int[Tensor, "1 pos"] | None,
    compared: bool,
) -> State:
    """Return what every head of some layers attends to: on average, and in a text.

    `parts` and `gaps` are those of `split_parts`, `weights` its mean weights, without fold means.
    Of a text, `on_text` are its weights in it, and `content` their relative entropy to the mean
    weights, nats; of a text alone, to uniform weights.

    Raises:
        UserError: for attention that is not finite.
    """
    capture = partial(capture_attention, layers=layers, skip_keys=engine.skip_keys)
    state, of_text = State(), None
    if text is not None:
        of_text = capture(engine.model, text, query_rows=text.shape[1])
        state = {"on_text": of_text.mean.float(), "content": of_text.information[0]}
        state["visible"] = of_text.visible
    maps = engine.by_fold(capture, stream) if compared else of_text
    assert maps is not None
    for place, layer in enumerate(layers):
        if not maps.information[:, place].isfinite().all():
            raise UserError(f"non-finite attention in L{layer}")
    nothing = maps.weights.new_full(maps.weights.shape[:3], torch.nan)
    state["sinks"] = (nothing if maps.sinks is None else maps.sinks).movedim(0, -1).double()
    if not compared:
        return state
    parts, gaps = split_parts(maps)
    if text is not None:
        expected = maps.mean[..., : text.shape[1], : text.shape[1]]
        state["content"] = relative_entropy(state["on_text"], expected)
    return state | {"parts": parts, "gaps": gaps, "weights": maps.mean}


def table_of_text(read: State, layers: Sequence[int], skip_keys: int) -> pd.DataFrame:
    """Return the table of attention in a text alone: no position, and no intervals.

    Its numbers are means over the queries with enough keys.

    Args:
        read: the results of `read_heads`, of all layers.
        layers: their numbers.
        skip_keys: how many keys count as first.
    """
    weights, information = read["on_text"], read["content"]
    rows = (read["visible"].sum(-1) >= MIN_KEYS)[:, None].expand_as(information)
    numbers = {"information": information, "first_weight": weights[..., :skip_keys].sum(-1)}
    heads = pd.MultiIndex.from_product([layers, range(weights.shape[1])], names=["layer", "head"])
    means = {
        name: x.double().where(rows, torch.nan).nanmean(-1).flatten().tolist()
        for name, x in numbers.items()
    }
    columns = ["layer", "head", *interval_names(*ATTENTION), *GAPS]
    return pd.DataFrame(means, heads).reset_index().reindex(columns=columns)


def too_few_sequences(table: pd.DataFrame, n_seqs: int) -> Iterator[str]:
    """Yield a note on heads without `others_share`, and on how many sequences would do.

    Args:
        table: of attention.
        n_seqs: how many sequences the run has.
    """
    gaps = table[table["information"] >= UNIFORM]["others_share_gap"]
    n_heads = int((gaps > LARGEST_GAP).sum())
    if n_heads:
        needed = 100 * ceil(gaps.max() / GAP_TO_REACH * n_seqs / 100)
        yield SAID["few"].format(n_heads=n_heads, n_seqs=n_seqs, needed=needed)


@partial(takes_options, Settings)
def run_attention(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Split each head's attention into position and content, as the `attention` command does.

    Inside `ablated`, the ablated model is measured. `text_view` shows a run's text, and why a head
    looks where it looks in it.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.attention --help`, as in `seq_len=32`.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_attention
        >>> run = run_attention("rope-tiny", layers=2, n_seqs=64)
        >>> heads = run.tables["attention"].set_index(["layer", "head"])
        >>> layer, head = heads["positional_share"].idxmax()
        >>> f"L{layer}H{head}"
        'L1H3'
    """
    return run_of(Attention, Settings, model, inputs, out, options)
