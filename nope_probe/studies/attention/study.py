"""The `attention` command's study: its passes and its run, and the function for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from nope_probe.errors import UserError
from nope_probe.figures.attention import Why
from nope_probe.figures.text_view import TextView
from nope_probe.hooks.layers.model import Given
from nope_probe.maps.folds import State
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import validate_reachable
from nope_probe.run.flags import settings_from
from nope_probe.run.folder import Run
from nope_probe.run.process_group import device_of_process
from nope_probe.run.session import Session
from nope_probe.run.settings import Dtype
from nope_probe.run.sources import load_first_layers
from nope_probe.studies.attention.analyse import analyse, captured_text, measured
from nope_probe.studies.attention.on_text import stored_why, text_view
from nope_probe.studies.attention.settings import MAP_BYTES, Settings
from nope_probe.studies.attention.steps import captured_looks
from nope_probe.studies.attention.text import text_of, text_record
from nope_probe.studies.attention.why import explained, query_in, steps_of
from nope_probe.studies.engine import Engine, ablation_of, validate_first_sequence
from nope_probe.studies.from_python import ModelOrName, Out, as_loaded, run_of, takes
from nope_probe.studies.study import Pass, Results, Study, calibration, captured, run_study

UNNAMED = ("format", "given")  # of a manifest's settings: no flags


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionStudy(Run):
    """The position and content in the attention of every head of a model.

    Its map `weights` has the mean attention weights of every head, [layer, head, row, key_pos];
    where only some queries have rows, `query_positions` are the queries of the rows.

    Attributes:
        model: the model that the call gave; None for a run that is read from its folder.
    """

    model: ModelOrName | None = None

    @property
    def on_text(self) -> TextView:
        """The run's text with each head's attention in it, which a notebook shows.

        Raises:
            UserError: for a run without a text.
        """
        view = text_view(self)
        if view is None:
            raise UserError("the run has no text: run_attention(model, text=...) shows one")
        return view

    def why(self, head: str, query: int | str = -1, steps: int = 1) -> Why:
        """Return why a head looks where it looks from a token of the run's text.

        The terms are exact, and computed from the run's sequences and text with the model of the
        call, or the model that the run names, loaded again. The run keeps the terms of its `why`.

        Args:
            head: the head, such as `L1H3`.
            query: the token's position in the text, -1 is the last; or a word of the text.
            steps: how many steps back to go.

        Raises:
            UserError: for a run without a text, a head or token that does not exist, a model that
                cannot be split into writers, cannot be loaded, or has other weights or another
                ablation than the run's.

        Example:
            >>> from nope_probe import run_attention
            >>> run = run_attention("rope-tiny", layers=2, n_seqs=64, text="def area(width):")
            >>> terms = run.why("L1H3", query=4).table.set_index(["key", "term"])["nats"]
            >>> terms[3].idxmax()
            'rotation'
        """
        recorded = {k: v for k, v in self.manifest.settings.items() if k not in UNNAMED}
        of_run = settings_from(Settings, recorded)
        settings = replace(of_run, why=head, query=query, steps=steps)
        place = query_in(query, self.on_text.pieces)
        kept = stored_why(self)
        is_same = of_run.steps == steps
        if kept is not None and (kept.head, kept.query) == (head, place) and is_same:
            return kept
        settings.validate()
        return explained(self, settings, self._loaded(settings))

    def _loaded(self, settings: Settings) -> LoadedModel:
        if self.model is not None and not isinstance(self.model, str):
            return as_loaded(self.model)
        if "weights" in self.manifest.given:
            raise UserError(
                "the run's model was given in memory and is not kept in its folder: call "
                "run_attention again with the model, then ask why"
            )
        validate_reachable(settings.model, settings.revision)
        dtype: Any = self.manifest.dtype
        if settings.dtype == "auto" and dtype in get_args(Dtype):
            settings = replace(settings, dtype=dtype)  # as the run's device chose
        return load_first_layers(settings, device_of_process(settings.device))


class SplitAttention(Study[Settings]):
    """Position and content in the attention of every head, on average and in one text."""

    command = "attention"
    function = "run_attention"

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded = self.settings, session.loaded
        self.layers = settings.layers_with_maps(loaded.info)
        self.ablation = ablation_of(loaded.model, settings)
        self.text = text_of(settings, loaded)
        is_alone = self.text is not None and not settings.reads_corpus
        self.inputs = self.text.alone if self.text and is_alone else session.sequences()
        self.engine = replace(Engine.of(session, self.inputs), query_rows=settings.rows)
        self.why = None
        if self.text is not None and settings.why is not None:
            pieces = text_record(self.text, session.loaded.tokenizer).pieces
            self.why = steps_of(settings, self.text.tokens, pieces)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes that average some layers at a time, or that read one text alone."""
        settings, engine, layers, text = self.settings, self.engine, self.layers, self.text
        condition, info = self.ablation if settings.remove else None, self.session.loaded.info
        tokens = None if text is None else text.tokens
        capture: Callable[..., State] = captured_text
        size = MAP_BYTES // (8 * info.n_heads * engine.inputs.shape[1] ** 2)
        if settings.reads_corpus:
            size, capture = settings.layers_at_a_time(info), partial(measured, text=tokens)
            if f"attention-L{layers[0]}" not in self.session.checkpoint:
                validate_first_sequence(engine.model, engine.inputs, layers)
                if text is not None and self.why is not None:  # or why not
                    of_text = replace(engine.with_sequences(text.alone), query_rows=len(text))
                    looks = [self.why.first]
                    captured_looks(of_text, None, looks=looks, text=text.tokens, moves=False)
        yield from calibration(engine, [self.ablation])
        for start in range(0, len(layers), max(1, size)):
            group = layers[start : start + max(1, size)]
            read = partial(captured, partial(capture, layers=group))
            key = f"attention-L{group[0]}"
            yield Pass(key=key, engine=engine, read=read, ablation=condition)
        if self.why is not None:
            yield from self.why.passes(engine, condition)

    def analyse(self, results: Results) -> Run:
        """Return the run of the heads' attention."""
        parts = [result for key, result in results.items() if key.startswith("attention-")]
        return analyse(self.session, self.inputs, parts, self.text, self.why)


run = partial(run_study, SplitAttention)


@takes(SplitAttention)
def run_attention(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Any
) -> AttentionStudy:
    """Split each head's attention into position and content, as the `attention` command does.

    Inside `ablated`, the ablated model is measured.

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
    study = run_of(SplitAttention, model, inputs, out, options)
    return AttentionStudy(**vars(study), model=model)
