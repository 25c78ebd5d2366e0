"""`trace`: who writes position, who reads it, and what is lost without it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from nope_probe.figures.words import MEASURES, View, bound_columns, columns, with_readers
from nope_probe.maps import PRODUCT_FOLDS
from nope_probe.models.info import ModelInfo
from nope_probe.removal import OTHERS, Writer
from nope_probe.reports.page import (
    MOST_ROWS,
    Headline,
    Report,
    Section,
    captions,
    how_to_read,
    row_maps,
    sections,
)
from nope_probe.run.flags import LARGEST, Mistakes
from nope_probe.run.processes import validate_memory
from nope_probe.run.settings import RunSettings

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from nope_probe.run.folder import Run

SAID = captions("trace")
QUESTIONS = {"lead": "lead", "pattern": "order"}
MEASURED = ("relative_r2", "not_by_distance")  # of terms, as of layers
COLUMNS = {**{name: MEASURES[name] for name in MEASURED}, **columns("trace")}
VIEWS = (
    View(
        table="written",
        title="Who writes position, and who reads it",
        y=("part",),
        x="reader",
        by=("writer",),
        panels="of",
        kind="cells",
        across=2,
        names=QUESTIONS,
        caption=SAID["written"],
    ),
    View(
        table="effects",
        title="What is lost without a writer's position",
        y=("direct", "total"),
        x="writer",
        by=(),
        panels="of",
        kind="rows",
        across=2,
        names=QUESTIONS,
        caption=SAID["lost"],
    ),
)
LEAST = 0.05  # of a lead or pattern: terms and writers that make less are left out
INDENT = "· "  # before a head, whose nats its attention's row counts
ROTATION, ALIBI = "RoPE's rotation", "ALiBi"
PARTS = {  # what terms are called in the first table, in the order of their maps
    "all": "whole",
    "rotation": ROTATION,
    "alibi": ALIBI,
    **dict.fromkeys(("written_key", "written_query", "written_both"), "written"),
    "covariance": "covariance",
}


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Trace who writes the position that each layer reads.

    Splits each layer's lead of the first key, and its pattern among the other keys, exactly into
    rotation (RoPE on vectors that know nothing of position), written position and covariance.
    Splits the written position into the parts of all embeddings, heads and MLPs before the layer,
    and measures what one layer loses without the position of each.

    Attributes:
        reader: The layer (L2) or head (L2H1) that the headline, the maps and --confirm are about
            [the one with the largest lead]; a head turns --per-head on.
        writers: Whether heads write one by one, or each block's attention as a whole.
        per_head: Trace what each head reads, instead of each layer.
        confirm: How many heads lose their position, one at a time and after each earlier attention
            and MLP, to measure what is lost.
        folds: Parts of the data that intervals are made from.
    """

    command = "trace"
    function = "run_trace"
    examples = (
        "--model nope-tiny",
        "--model rope-tiny --reader L1H2 --confirm 0",
    )

    model: str = "nope-tiny"
    reader: str | None = None
    writers: Literal["heads", "layers"] = "heads"
    per_head: bool = False
    confirm: Annotated[int, Interval(ge=0, le=1000)] = 6
    folds: Annotated[int, Interval(ge=PRODUCT_FOLDS, le=LARGEST)] = 8

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        yield from super().mistakes()
        reader, depth = self.reader, self.depth
        layer, *of_layer = numbers_of(reader or "") or [0]
        named = re.fullmatch(r"L(0|[1-9][0-9]*)(H(0|[1-9][0-9]*))?", reader or "L0")
        yield not named, f"--reader {reader}: expected a layer or head, such as L2 or L2H1"
        yield (
            reader and self.per_head and not of_layer,
            f"--reader {reader}: with --per-head, readers are heads, as L2H1",
        )
        yield (
            reader and depth is not None and layer >= depth,
            f"--reader {reader} is not among the first {depth} layers: take --layers {layer + 1}",
        )

    @property
    def traces_heads(self) -> bool:
        """Whether the readers are heads, not layers."""
        return self.per_head or len(numbers_of(self.reader or "")) == 2

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield whether the reader does not exist, or a layer reads another layer's keys.

        Raises:
            UserError: for sums of all writers that do not fit into memory.
        """
        yield from super().mistakes_of(info)
        layers = self.layers_with_maps(info)
        layer, head = (*numbers_of(self.reader or "L0"), 0)[:2]
        there = ", ".join(f"L{number}" for number in layers)
        yield (
            self.reader and (layer not in layers or head >= info.n_heads),
            f"--reader {self.reader}: there are {there}, with the heads H0 to H{info.n_heads - 1}",
        )
        sources = dict(zip(info.attending, info.keys_from, strict=False))
        for number in layers:
            source = sources.get(number, number)
            yield (
                source != number,
                f"L{number} of {info.name} attends to the keys of L{source}, which are no map of "
                f"the residual stream that it reads: take --layers {number}",
            )
        fewer = ", or take --writers layers" if self.writers == "heads" else ""
        validate_memory(self.bytes_of_sums(info), f"--layers or --seq-len{fewer}")

    @property
    def removes(self) -> bool:
        """Whether writers' positions are taken away."""
        return self.confirm > 0

    def bytes_of_sums(self, info: ModelInfo) -> int:
        """Return the bytes of the writers' parts of queries and keys, by fold and position."""
        n_layers = self.depth_in(info)
        n_heads = info.n_heads if self.writers == "heads" else 1
        n_writers = (n_heads + 1) * n_layers * (n_layers - 1) // 2  # before all readers
        n_queries = info.n_heads if self.traces_heads else info.n_kv_heads
        width = (n_queries + info.n_kv_heads) * info.d_head
        return 8 * self.folds * n_writers * self.seq_len * width


def numbers_of(reader: str) -> list[int]:
    """Return the numbers in a reader's name: the layer's and, of a head, the head's.

    Example:
        >>> numbers_of("L2H1"), numbers_of("L2")
        ([2, 1], [2])
    """
    return [int(number) for number in re.findall(r"\d+", reader)]


def report(run: Run) -> Report:
    """Return the report of a run.

    Args:
        run: tables `terms`, `writers` and `effects`; maps such as `L1/rotation`, nats; its `reader`
            (None if no layer reads position), and `kept_positions`: how many first positions keep
            what removed writers write there.
    """
    reader = run.manifest.results["reader"]
    shown = {**run.tables, "written": written_parts(run.tables["writers"])}
    terms = Section(
        title="The exact terms of lead and pattern",
        figure=partial(draw_terms, run, reader) if reader else None,
        caption=SAID["terms"],
        table=run.tables["terms"].filter(regex="^(?!relative_r2)"),
        columns=COLUMNS,
    )
    return Report(
        title=f"Who writes position in {run.manifest.model_name}",
        headline=headline(run),
        sections=[terms, *sections(VIEWS, shown, COLUMNS)],
        how_to_read=how_to_read("trace"),
    )


def draw_terms(run: Run, reader: str) -> go.Figure:
    """Draw the terms of a reader's lead and pattern that count, on one scale."""
    from nope_probe.figures.maps import term_maps

    rows = with_readers(run.tables["terms"])
    rows = rows[rows["reader"] == reader]
    sizes = rows.pivot(index="term", columns="of", values="size").abs()
    counts = (sizes >= LEAST * sizes.loc["all"]).any(axis=1)
    terms = [term for term in PARTS if counts.get(term, False)]
    maps = {term: row_maps(run, run.maps[f"{reader}/{term}"][None]) for term in terms}
    return term_maps(maps, title=f"The terms of {reader}", layers=[numbers_of(reader)[0]])


def written_parts(writers: pd.DataFrame) -> pd.DataFrame:
    """Return what the writers that count make of each reader's lead and pattern, nats.

    The parts in keys and in queries are added up, with bounds that hold however they are
    correlated.

    Args:
        writers: `writers.csv`.
    """
    numbers = [end for name in ("part", "from_first_key") for end in (name, *bound_columns(name))]
    rows = with_readers(writers.query("writer != 'bias'")).dropna(subset="part")
    rows = rows.groupby(["writer", "reader", "of"], sort=False)[numbers].sum(min_count=1)
    sizes = rows["part"].abs()
    counts = sizes.groupby(["writer", "of"]).transform("max") >= LEAST * sizes.max()
    rows = rows[counts].reset_index()
    places = rows["writer"].map(lambda name: Writer(name).order)
    return rows.loc[places.sort_values(kind="stable").index]


def made_of(tables: Mapping[str, pd.DataFrame], reader: str | None, question: str) -> pd.DataFrame:
    """Return what makes a reader's lead or pattern, and what it loses, nats.

    Returns:
        A row for the whole, for each term (as `PARTS` calls it), for each writer, and for each
        attention whose heads write one by one: `part`; `against`, the sum of the parts in it whose
        sign is not that of the whole; and `total`, what is lost on all paths. `part` and `total`
        have bounds. No rows where the lead or pattern does not exceed its noise.
    """
    import pandas as pd

    terms, writers, effects = (
        rows[(rows["reader"] == reader) & (rows["of"] == question)]
        for rows in (with_readers(tables[name]) for name in ("terms", "writers", "effects"))
    )
    columns = ["part", *bound_columns("part")]
    if terms.loc[terms["term"] == "all", "part"].isna().all():
        return pd.DataFrame()
    made = terms.groupby(terms["term"].map(PARTS), sort=False)[columns].sum()
    single = writers.groupby("writer", sort=False)[columns].sum()
    for rows in (made, single):
        rows["against"] = rows["part"].where(rows["part"] * made["part"]["whole"] < 0, 0.0)
    made.loc["written", "against"] = single["against"].sum()
    made.loc["whole", "against"] = made["against"].sum()
    whole = single.index.map(lambda name: str(Writer(name).whole))
    attentions = single[whole != single.index].groupby(whole[whole != single.index]).sum()
    lost = effects.set_index("writer")[["total", *bound_columns("total")]]
    return pd.concat([made, single, attentions]).join(lost, how="outer")


def headline(run: Run) -> Headline:
    """Return what makes most of a reader's lead or order, and what else makes it.

    Args:
        run: its tables `terms`, `writers` and `effects`, and its manifest with the `reader`.
    """
    reader, n = run.manifest.results["reader"], run.manifest.seq_len
    asked = ((question, made_of(run.tables, reader, question)) for question in QUESTIONS)
    made = {question: rows for question, rows in asked if len(rows)}
    if not made:
        return Headline(sentence=SAID["nothing" if reader else "no_pattern"].format(reader=reader))
    table = first_table(made)
    of, most = largest_part(made, table.index[1:])
    part, whole = table[of][[most, "whole"]]
    sentence = SAID["first"].format(reader=reader, of=of, most=most, part=part, whole=whole)
    heads = {name: INDENT + name for name in table.index if re.fullmatch(r"L\d+H\d+", name)}
    table = table.rename(heads).reset_index(names=SAID["heading"].format(reader=reader, n=n))
    return Headline(sentence=sentence, table=table, caption=SAID["numbers"])


def largest_part(made: Mapping[str, pd.DataFrame], names: Iterable[str]) -> tuple[str, str]:
    """Return the label of the lead or order, whichever is larger, and what makes most of it.

    Args:
        made: what `made_of` returns, by question.
        names: of the parts that are shown.
    """
    parts = {question: rows["part"] for question, rows in made.items()}
    question = max(parts, key=lambda question: abs(parts[question]["whole"]))
    shares = parts[question] / parts[question]["whole"]
    return QUESTIONS[question], str(shares[[name for name in names if name in shares]].idxmax())


def first_table(made: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the first table, whose rows but those of heads add up to the whole.

    Args:
        made: what `made_of` returns, by question.
    """
    import pandas as pd

    sizes = [(rows["part"] / rows["part"]["whole"]).abs() for rows in made.values()]
    shown = pd.concat(sizes, axis=1).max(axis=1)
    encodings = [term for term in (ROTATION, ALIBI) if shown.get(term, 0.0) >= LEAST / 10]
    top = _shown_writers(made, MOST_ROWS - 3 - len(encodings))
    wholes = [writer for writer in top if Writer(writer).whole == writer]
    columns = {}
    for question, rows in made.items():
        for name, end in (("part", ""), ("against", ",\nagainst")):
            others = rows[name]["written"] - rows[name].reindex(wholes).sum()
            column = pd.concat([rows[name], pd.Series({OTHERS: others})])
            columns[f"{QUESTIONS[question]}{end}"] = column
        if rows["total"].notna().any():
            columns[f"{QUESTIONS[question]},\nlost"] = rows["total"]
    names = ["whole", *encodings, *top, OTHERS, "covariance"]
    table = pd.DataFrame(columns).reindex(names)
    return table.map(lambda number: "" if isnan(number) else f"{number:z.2f}")


def _shown_writers(made: Mapping[str, pd.DataFrame], n_rows: int) -> list[str]:
    """Return the strongest writers, as they write, with the attention of a head before it.

    A writer's strength is the larger of its part and of what is lost, over the size of the whole;
    only what has a clear sign counts.
    """
    import pandas as pd

    clear = pd.concat(
        [
            rows[name].abs().where(rows[low] * rows[high] > 0, 0.0) / abs(rows["part"]["whole"])
            for rows in made.values()
            for name in ("part", "total")
            for low, high in [bound_columns(name)]
        ],
        axis=1,
    )
    strongest = clear.max(axis=1).drop([*PARTS.values(), "bias"], errors="ignore")
    top = set[str]()
    for writer in strongest[strongest >= LEAST].sort_values(ascending=False).index:
        with_whole = {*top, writer, str(Writer(writer).whole)}
        top = with_whole if len(with_whole) <= n_rows else top
    ordered = sorted(top, key=lambda name: Writer(name).order)
    return sorted(ordered, key=lambda name: (Writer(name).whole.order, name != Writer(name).whole))
