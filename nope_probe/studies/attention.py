"""`attention`: how much of where each head looks is position, and what it looks at in one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import nan
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from nope_probe.analyses.verdicts import UNIFORM, kinds_of
from nope_probe.data.documents import validate_text
from nope_probe.errors import UserError
from nope_probe.figures.names import brief, row_name
from nope_probe.figures.words import INFORMATION, columns, with_readers
from nope_probe.maps import MIN_KEYS, default_rows
from nope_probe.models.info import ModelInfo
from nope_probe.removal import Condition, Writer
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section, captions, how_to_read
from nope_probe.run.flags import COUNT, Mistakes, without_effect
from nope_probe.run.settings import Layers
from nope_probe.studies.conditions import RemovingSettings

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.figures.attention import TextView
    from nope_probe.run.folder import Run

ALL_ROWS, ROWS = 256, 128  # the maps of all heads are many times those of all layers
MAP_BYTES = 2**30  # of the heads' maps that are in memory at once
TEXT_TOKENS = 512  # of a text on the page
TEXT_LENGTH = 1_000_000  # characters of a text before it is cut into tokens
N_SEQS = 512  # of other texts
ALONE = "the text alone"  # the `data` of a run without other texts
OF_OTHERS = ("windows", "pack", "alpha", "shuffle", "seq_len", "beyond_context", "folds")
AT_AN_END = MOST_ROWS // 2  # heads in the lead's table: the most and the least positional
NUMBERS = columns("mean_head")  # of a head in the lead's table
SAID = captions("attention")
COLUMNS = {**INFORMATION, **columns("attention")}


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
    layers: Layers = "all"
    query_rows: Annotated[int | None, COUNT] = None

    text: str | None = None
    why: str | None = None
    query: int | str = -1
    steps: Annotated[int, Interval(ge=1, le=100)] = 1

    shortest = MIN_KEYS

    def __post_init__(self) -> None:
        is_alone = self.text is not None and self.data is None and self.n_seqs is None
        data, n_seqs = (ALONE, 1) if is_alone else ("auto", N_SEQS)
        if self.data is None:
            object.__setattr__(self, "data", data)
        if self.n_seqs is None:
            object.__setattr__(self, "n_seqs", n_seqs)
        super().__post_init__()

    @property
    def reads_corpus(self) -> bool:
        """Whether the run reads other texts than the one that it is given."""
        return self.data != ALONE

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield from super().mistakes()
        if not self.reads_corpus:
            reason = "on a text alone: --n-seqs reads other texts too"
            yield from without_effect(self, OF_OTHERS, reason)
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
        if self.why is None:
            for flag, is_given in (("--query", self.query != -1), ("--steps", self.steps > 1)):
                yield is_given, f"{flag} asks about a head: name it with --why"
            return
        writer = Writer.parse(self.why)
        replaced = [name for name in self.removed.ordered if name in ("w_q", "w_k")]
        is_head = writer is not None and writer.head is not None
        yield self.text is None, "--why asks about a text: give it with --text"
        yield not is_head, f"--why {self.why}: expected a head, such as L1H3"
        yield (
            bool(replaced),
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
    from nope_probe.figures.attention import TextView, Why

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
        position=run.maps["weights"][..., :n, :n] if "weights" in run.maps else None,
        content=run.maps["text_content"],
        why=why,
    )


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: the table `attention`, and the map `weights`, [layer, head, row, key_pos].
    """
    table, manifest = run.tables["attention"], run.manifest
    name, removed = manifest.model_name, Condition(manifest.removed or ())
    where = f"{name} {row_name(removed.name)}" if removed else name
    leads, sections = list[Headline](), list[Section]()
    if manifest.text is not None:
        view = text_view(run)
        leads, sections = [*text_headlines(view)], [*text_sections(view)]
    if "weights" in run.maps:  # other texts than the one that it shows were read
        leads.append(headline(where, table, manifest.skip_keys))
        sections.append(head_section(run))
    return Report(
        title=f"Position and content in the attention of {where}",
        headline=reduce(lambda then, lead: replace(lead, then=then), reversed(leads)),
        sections=sections,
        how_to_read=how_to_read("attention"),
    )


def headline(model: str, table: pd.DataFrame, skip_keys: int = 1) -> Headline:
    """Return what the first key gets, and how much is position among the other keys.

    Args:
        model: its name.
        table: `attention.csv`.
        skip_keys: how many keys count as first.
    """
    rows = first_table(table, skip_keys)
    if rows.empty:
        return Headline(sentence=SAID["unmeasured"].format(model=model))
    first, share = (
        rows.iloc[0].get(NUMBERS[name].title, "none") for name in ("first_weight", "others_share")
    )
    sentence = SAID["first"].format(model=model, first=first, share=share)
    return Headline(sentence=sentence, table=rows, caption=SAID["numbers"])


def first_table(table: pd.DataFrame, skip_keys: int = 1) -> pd.DataFrame:
    """Return the first table: the mean of all measured heads, then those at both ends, as text.

    Args:
        table: `attention.csv`.
        skip_keys: how many keys count as first.
    """
    import pandas as pd

    known = table.dropna(subset=["information"]).assign(
        first=table["first_position"] + table["first_content"],
        others=table["others_position"] + table["others_content"],
    )
    if known.empty:
        return known
    shares = known[known["information"] >= UNIFORM].dropna(subset=["others_share"])
    ordered = shares.sort_values("others_share", ascending=False, kind="stable")
    ends = with_readers(ordered.drop(index=ordered.index[AT_AN_END:-AT_AN_END]))
    mean = known.mean(numeric_only=True)
    mean["others_share"] = mean["others_position"] / mean["others"] if len(shares) else nan
    numbers = [name for name in NUMBERS if name in known][0 if skip_keys else 2 :]
    of_all = pd.DataFrame([{"head": "mean", **mean[numbers]}])
    of_ends = ends.assign(head=ends["reader"])
    return pd.concat(
        [brief(rows, "head", numbers, NUMBERS) for rows in (of_all, of_ends)], ignore_index=True
    )


def head_section(run: Run) -> Section:
    """Return the map of all heads of a run that read other texts."""
    from nope_probe.figures.attention import attention_heads

    table = run.tables["attention"]
    return Section(
        title="All heads: sinks, order and content",
        figure=partial(attention_heads, table, kinds_of(table)),
        caption=SAID["kinds"],
        table=table.dropna(axis=1, how="all"),
        columns=COLUMNS,
    )


def text_headlines(view: TextView) -> Iterator[Headline]:
    """Yield where heads look in the run's text, and the terms of the asked look."""
    looks = view.looks
    sentence = SAID["look"].format(**looks.iloc[0])
    yield Headline(sentence=sentence, table=looks, caption=SAID["looks"])
    if view.why is not None:
        terms = view.why.terms
        sentence = SAID["why"].format(score=terms["nats"][0], **terms.iloc[1])
        yield Headline(sentence=sentence, table=terms, caption=SAID["terms"])


def text_sections(view: TextView) -> Iterator[Section]:
    """Yield the sections on the run's text, and on the head that the run asks about."""
    why, steps = (None, None) if view.why is None else (view.why.table, view.why.steps)
    section = partial(Section, columns=COLUMNS)
    title = "Attention on your text"
    yield section(title=title, html=view.html(), caption=SAID["text"], table=why)
    if steps is not None:
        yield section(title="Why, steps back", caption=SAID["steps"], table=steps)
