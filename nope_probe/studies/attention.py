"""`attention`: how much of where each head looks is position, and what it looks at in one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from nope_probe.analyses.verdicts import MOSTLY, UNIFORM, kinds_of
from nope_probe.data.documents import validate_text
from nope_probe.errors import UserError
from nope_probe.figures.names import phrase
from nope_probe.figures.words import (
    INFORMATION,
    NO_SHARE,
    SHARE,
    Column,
    listed,
    reader_of,
    with_readers,
)
from nope_probe.maps import MIN_KEYS, default_rows
from nope_probe.models.info import ModelInfo
from nope_probe.removal import Writer
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section
from nope_probe.run.flags import COUNT, LAYERS, Bounds, Mistakes
from nope_probe.run.settings import LAYERS_ARG
from nope_probe.studies.removing import RemovingSettings
from nope_probe.studies.tidy import brief

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.figures.text_view import TextView
    from nope_probe.run.folder import Run

ALL_ROWS, ROWS = 256, 128  # the maps of all heads are many times those of all layers
MAP_BYTES = 2**30  # of the heads' maps that are in memory at once
TEXT_TOKENS = 512  # of a text on the page
TEXT_LENGTH = 1_000_000  # characters of a text before it is cut into tokens
N_SEQS = 512  # of other texts
ALONE = "the text alone"  # the `data` of a run without other texts
OF_OTHERS = ("windows", "pack", "alpha", "shuffle", "seq_len", "beyond_context", "folds")
HARDLY = 0.2  # of the information among the other keys: a head with less is hardly positional
AT_AN_END = MOST_ROWS // 2  # heads in the lead's table: the most and the least positional
NUMBERS = {  # of a head in the lead's table
    "reader": Column("head"),
    "first_weight": Column("first key", unit=SHARE),
    "first": Column("first", unit="nats"),
    "others": Column("others", unit="nats"),
    "others_share": Column("position", unit=SHARE, blank=NO_SHARE),
}
ALONE_CAPTION = (
    "Only the text was read, which cannot separate position from content: --n-seqs or --data reads "
    "other texts too."
)
KINDS_SAID = (
    "Order: at least half of what a head looks at among the other keys is position. Sink: more of "
    "its position is about the first key. Content: neither."
)
COLUMNS = {
    **INFORMATION,
    "need_rope": Column(
        "need of RoPE",
        "How far attention on the same inputs is from that without RoPE in this head alone.",
        "nats",
    ),
    "need_mask": Column("need of the mask", "The same of the causal mask.", "nats"),
    "key": Column("key", "The position of the attended token in the text.", "tokens"),
    "token": Column("token", "Its token."),
    "query": Column("query", "The position of the token that looks.", "tokens"),
    "step": Column("step", "How many steps back, from 1."),
    "writer": Column("writer", "The component that wrote the term."),
    "weight": Column("weight", "The attention weight.", SHARE),
    "weight_without": Column("weight without", "The same without the moved part.", SHARE),
    "score": Column("score", "The key's score less the mean of the keys.", "nats"),
    "nats": Column("term", "The term of the score.", "nats"),
    "effect": Column("effect", "What the score loses without the moved part.", "nats"),
    "side": Column("side", "Position, or whether a writer wrote into the key or the query."),
    "moved_from": Column("moved from", "The token that the writer moved it from."),
}


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Split each head's attention into position, the same in every text, and content.

    Measures in nats how far each head's attention weights are from uniform, whether it decides
    about the first key or among the other keys, and which part of it is the same in every text.

    Attributes:
        data: Other texts, named as in `ablate` [shipped; with --text none, unless --n-seqs].
        n_seqs: How many sequences of other texts [512; with --text none, unless --data].
        query_rows: Queries of the maps: evenly spread; all up to 256 tokens, 128 above.
        text: A text of up to 512 tokens: the page shows where each head looks in it. With --n-seqs
            or --data it is compared with other texts, and has up to --seq-len tokens.
        why: A head (L1H3) of the text: why it looks where it looks from --query, exactly, by
            position and by what each earlier component wrote.
        query: The token of the text that --why asks about: its number (-1 is the last), or a word.
        steps: Steps back from --why: 2 also says from which tokens the heads that wrote the most
            attended key, or the query, moved it, and why they looked there; what each moved is
            taken out of the model too, to measure what the score loses.
    """

    command = "attention"
    function = "run_attention"
    examples = (
        "--model rope-tiny --text 'def area(width, height): return width * height'",
        "--model rope-tiny --remove rope",
    )

    # None becomes a value as soon as settings are made: a text that comes alone is read alone.
    data: str | None = None  # type: ignore[assignment]
    n_seqs: Annotated[int | None, COUNT] = None  # type: ignore[assignment]
    layers: Annotated[int | str, LAYERS, LAYERS_ARG] = "all"
    query_rows: Annotated[int | None, COUNT] = None

    text: str | None = None
    why: str | None = None
    query: int | str = -1
    steps: Annotated[int, Bounds(1, 100)] = 1

    def __post_init__(self) -> None:
        is_alone = self.text is not None and self.data is None and self.n_seqs is None
        data, n_seqs = (ALONE, 1) if is_alone else ("auto", N_SEQS)
        if self.data is None:
            object.__setattr__(self, "data", data)
        if self.n_seqs is None:
            object.__setattr__(self, "n_seqs", n_seqs)
        super().__post_init__()

    @property
    def shortest(self) -> int:
        """The fewest tokens of a sequence that has a query which is measured."""
        return MIN_KEYS

    @property
    def reads_corpus(self) -> bool:
        """Whether the run reads other texts than the one that it is given."""
        return self.data != ALONE

    def without_effect(self) -> dict[str, str]:
        """Return by name why settings have no effect next to the others."""
        if self.reads_corpus:
            return super().without_effect()
        return dict.fromkeys(OF_OTHERS, "on a text alone: --n-seqs reads other texts too")

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield from super().mistakes()
        if self.text is not None:
            yield from self._wrong_text(self.text)
        yield from self._wrong_why()

    def _wrong_text(self, text: str) -> Mistakes:
        """Yield what can be wrong with a text, and what to do."""
        size = f"has {len(text):,} characters" if text else "is empty"
        is_read = "the text is read next to the mean of every query"
        yield (
            not 0 < len(text) <= TEXT_LENGTH,
            f"the text {size}: expected one of up to {TEXT_TOKENS} tokens",
        )
        yield self.query_rows is not None, f"{is_read}: leave out --query-rows"
        yield (
            self.seq_len > TEXT_TOKENS,
            f"{is_read}: take {self.length_of(TEXT_TOKENS)} or less",
        )
        validate_text("--text", text)

    def _wrong_why(self) -> Mistakes:
        """Yield what can be wrong with a question about a head, and what to do."""
        asks, writer = self.why is not None, Writer.parse(self.why or "")
        replaced = [name for name in self.removed.ordered if name in ("w_q", "w_k")]
        for flag, is_given in (("--query", self.query != -1), ("--steps", self.steps > 1)):
            yield is_given and not asks, f"{flag} asks about a head: name it with --why"
        yield asks and self.text is None, "--why asks about a text: give it with --text"
        yield (
            asks and (writer is None or writer.head is None),
            f"--why {self.why}: expected a head, such as L1H3",
        )
        yield (
            asks and bool(replaced),
            "--why splits the queries and keys that W_Q and W_K make: it has no terms without "
            f"{' and '.join(replaced)}",
        )

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield whether the layers or the head of `why` do not exist."""
        yield from super().mistakes_of(info)
        layers, asked = self.layers_with_maps(info), Writer(self.why or f"L{info.attending[0]}H0")
        yield (
            self.why and (asked.block not in layers or (asked.head or 0) >= info.n_heads),
            f"--why {self.why}: there are L{layers[0]} to L{layers[-1]}, with the heads H0 to "
            f"H{info.n_heads - 1}",
        )

    @property
    def rows(self) -> int:
        """How many queries the maps have."""
        if self.query_rows is not None:
            return self.query_rows
        if self.text is not None:
            return self.seq_len
        return default_rows(self.seq_len) if self.seq_len <= ALL_ROWS else ROWS


def has_other_texts(run: Run) -> bool:
    """Return whether a run read other texts than the one that it shows."""
    return "weights" in run.maps


def text_view(run: Run) -> TextView:
    """Return the text of a run of `attention` with each head's attention in it.

    A notebook shows it, as the page does.

    Raises:
        UserError: for a run without a text.

    Example:
        >>> from nope_probe import run_attention, text_view
        >>> view = text_view(run_attention("rope-tiny", layers=1, text="def area(width):"))
        >>> len(view.pieces), view.weights.shape  # layer, head, query, key
        (7, (1, 4, 7, 7))
    """
    from nope_probe.figures.attention import Why
    from nope_probe.figures.text_view import TextView

    text, tables, asked, why = run.manifest.text, run.tables, run.manifest.settings, None
    if text is None:
        raise UserError("the run has no text: run_attention(model, text=...) shows one")
    if "why" in tables:
        query, steps = text.token(asked["query"]), tables.get("why_steps")
        why = Why(head=asked["why"], query=query, table=tables["why"], steps=steps)
    weights = run.maps["text_weights"]
    n = weights.shape[-1]
    return TextView(
        title=f"Attention of {run.manifest.model_name} in one text",
        pieces=text.pieces,
        names={0: text.bos} if text.bos else {},
        heads=tables["attention"],
        weights=weights,
        position=run.maps["weights"][..., :n, :n] if has_other_texts(run) else None,
        content=run.maps["text_content"],
        why=why,
    )


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the table `attention`, and the map `weights`, [layer, head, row, key_pos].
    """
    table, name = run.tables["attention"], run.manifest.model_name
    removed = [phrase(part) for part in run.manifest.removed or ()]
    sections, text = list[Section](), ""
    if run.manifest.text is not None:
        view = text_view(run)
        sections, text = [*text_sections(view)], view.sentence
    lead = Headline(sentence=text, caption=ALONE_CAPTION)
    if has_other_texts(run):
        lead = headline(f"ablated {name}" if removed else name, table, run.manifest.skip_keys)
        lead = Headline(sentence=text, also=lead.sentence) if text else lead
        sections.append(head_section(run))
    return Report(
        title="Position and content in the attention of "
        + (f"{name} without {listed(removed)}" if removed else name),
        headline=replace(lead, caption=f"{lead.caption} {sinks_line(table)}".strip()),
        sections=sections,
        how_to_read=notes.how_to_read("attention"),
    )


def headline(subject: str, table: pd.DataFrame, skip_keys: int = 1) -> Headline:
    """Return what the first key gets, and how much is position among the other keys.

    Args:
        subject: the model.
        table: `attention.csv`.
        skip_keys: how many keys count as first.
    """
    known = table.dropna(subset=["information"]).assign(
        first=table["first_position"] + table["first_content"],
        others=table["others_position"] + table["others_content"],
    )
    informed = known[known["information"] >= UNIFORM]
    share, mean = informed["others_share"], known.mean(numeric_only=True)
    for is_so, sentence in (
        (known.empty, f"No query of {subject} sees 8 keys, so no head is measured."),
        (
            informed.empty,
            f"All {len(known)} heads of {subject} attend uniformly: their weights are at most "
            f"{known['information'].max():.1g} nats above uniform, and no head is classed.",
        ),
        (
            share.isna().all(),
            f"These sequences are too few to say how much of {subject}'s attention is position.",
        ),
    ):
        if is_so:
            return Headline(sentence=sentence)
    keys = "key gets" if skip_keys <= 1 else f"{skip_keys} keys get"
    first = (
        f"The first {keys} {mean['first_weight']:.0%} of the attention of {subject}'s heads, and "
        f"{mean['first']:.2f} of its {mean['information']:.2f} nats above uniform. "
    )
    uniform = len(known) - len(informed)
    ordered = informed.dropna(subset=["others_share"]).sort_values(
        "others_share", ascending=False, kind="stable"
    )
    ends = ordered.drop(index=ordered.index[AT_AN_END:-AT_AN_END])
    return Headline(
        sentence=f"{first * bool(skip_keys)}Among the other keys, "
        f"{mean['others_position'] / mean['others']:z.0%} of the information "
        f"({mean['others_position']:z.2f} of {mean['others']:.2f} nats) is position: "
        f"{(share >= MOSTLY).sum()} of {len(known)} heads at {MOSTLY:.0%} or more, "
        f"{(share < HARDLY).sum()} below {HARDLY:.0%}{f', {uniform} uniform' * (uniform > 0)}.",
        table=brief(with_readers(ends), "reader", [*NUMBERS][1:], NUMBERS),
        caption="The heads whose attention among the other keys is most and least position, the "
        "same in every text. Weight and nats above uniform of the first key; nats of the other "
        "keys, and how much of them is position.",
    )


def sinks_line(table: pd.DataFrame) -> str:
    """Return a sentence on what learned sinks take, which the weights leave out; "" if none do."""
    if "sink_weight" not in table or not table["sink_weight"].any():
        return ""
    most = table.iloc[int(table["sink_weight"].argmax())]
    return (
        "Attention weights are renormalised without the learned sinks, which take "
        f"{table['sink_weight'].mean():.0%} of a head's attention on average, and at most "
        f"{most['sink_weight']:.0%} ({reader_of(most)})."
    )


def head_section(run: Run) -> Section:
    """Return the map of all heads of a run that read other texts."""
    from nope_probe.figures.attention import attention_heads

    table = run.tables["attention"]
    area = "how much its attention needs RoPE" if "need_rope" in table else "all its information"
    opens = " A click on a head opens it in the text." * (run.manifest.text is not None)
    return Section(
        title="All heads: sinks, order and content",
        figure=partial(attention_heads, table, kinds_of(table)),
        caption=f"{KINDS_SAID} Area: {area}, nats.{opens}",
        table=table.dropna(axis=1, how="all"),
        columns=COLUMNS,
    )


def text_sections(view: TextView) -> Iterator[Section]:
    """Yield the sections on the run's text, and on the head that the run asks about."""
    why, bar, terms = view.why, "from other texts' mean", "position, and "
    if view.position is None:
        bar, terms = "above uniform weights", ""
    yield Section(
        title="Attention on your text",
        html=view.html(),
        caption=f"It opens on the head and token of the sentence above. Click a token to shade its "
        f"keys. Bars: nats {bar}. "
        + f"Terms of a score, less the keys' mean: {terms}what earlier components wrote into key "
        "and query." * (why is not None),
        table=None if why is None else why.table,
        columns=COLUMNS,
    )
    if why is not None and why.steps is not None:
        yield Section(
            title="Why, steps back",
            caption="Terms of the score of the most attended key, and of the looks by which heads "
            f"moved what they wrote, nats. {why.moved} "
            "The term is direct; with its effect, all later blocks respond.",
            table=why.steps,
            columns=COLUMNS,
        )
