"""The `ablate` command: its flags, its numbers, and how a run is shown.

The sentence and the first table are of the shown layer, or of the mean over all layers; figures and
tables are of all layers. A run of `--remove none` shows the intact model: its maps and its heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from nope_probe.errors import UserError
from nope_probe.figures.intervals import (
    column_text,
    interval_of,
    interval_text,
)
from nope_probe.figures.names import row_name
from nope_probe.figures.words import (
    ATTENTION,
    HEAD_MEASURES,
    INFORMATION,
    MEASURES,
    QUESTIONS,
    SHARE,
    Column,
    View,
)
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement
from nope_probe.models.info import ModelInfo
from nope_probe.removal import INTACT, NO_REPLACEMENT, SOURCES, Condition
from nope_probe.reports import notes
from nope_probe.reports.page import MOST_ROWS, Headline, Report, Section, explorer_section
from nope_probe.run.flags import Bounds
from nope_probe.run.manifest import Manifest
from nope_probe.run.settings import OFFSET_BINS
from nope_probe.studies.removing import NAMES, RemovingSettings, parse_removed
from nope_probe.studies.tidy import (
    above_noise,
    nats,
    no_pattern,
    preferred_keys,
    sections,
    shown_layer,
    strongest_row,
)

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.figures.explorer import Explorer
    from nope_probe.run.folder import Run

_arg = tyro.conf.arg
MOST_BANDS = 128  # rotary pairs of the widest heads


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights. Per layer it reports, in
    nats, the first key's lead without each, and how much of the order of the other keys is there.
    With the default settings, the shipped model takes about 10 seconds on two cores.

    Attributes:
        bands: Also remove each of so many bands of RoPE's pairs in turn. Without --remove, no
            weights are removed then. With --remove none, split the maps into so many bands, or
            into octaves of wavelengths.
        replacement: What a removed weight is replaced by; several are shown side by side.
        per_head: Also measure each head without each source and band; with --remove none keep each
            head's map, and measure its attention.
    """

    remove: Annotated[
        tuple[str, ...] | None,
        _arg(
            help=f"What to remove besides the sources, one at a time: {NAMES}; `sources` for the "
            "sources alone; `none` to map the intact model alone. By default w_q w_k w_q+w_k w_o."
        ),
    ] = None
    bands: Annotated[int | Literal["octaves"], Bounds(0, MOST_BANDS)] = 0
    replacement: tuple[Replacement, ...] = ("mean",)  # type: ignore[assignment]
    per_head: bool = False
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"

    @property
    def removed_names(self) -> tuple[str, ...] | None:
        """What is removed, as `make_plan` takes it."""
        if self.remove is None:
            return ("sources",) if self.bands else None
        return self.remove if self.removes else ()

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return self.remove not in ((), ("none",))

    def validate_removed(self) -> None:
        """Check what is removed besides sources and bands, where it is named."""
        if self.removed_names is not None:
            names = [name for name in self.removed_names if name != "sources"]
            self.validate_conditions([*map(parse_removed, names)])
        if self.bands == "octaves" and self.removes:
            raise UserError("--bands octaves splits maps: take it with --remove none")

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; of a head two, with half the bytes of a layer's."""
        n_layers = len(self.layers_with_maps(info))
        return n_layers * (1 + info.n_heads) if self.per_head else n_layers

    unset = (*RemovingSettings.unset, ("per_head", False))


COLUMNS = {
    **MEASURES,
    **ATTENTION,
    **INFORMATION,
    "lead": replace(MEASURES["lead"], label=QUESTIONS["lead"]),
    "kept": Column(
        QUESTIONS["kept"],
        "How much of the intact model's pattern among the other keys is there; of the intact "
        "model, the pattern's strength.",
        "nats",
        blank="no pattern",
        signed=True,
    ),
    "size": Column("size", "The mean lead, or the RMS of the pattern, of a term.", "nats"),
    "with_mask": replace(MEASURES["non_relative"], label="non-relative part"),
    "without_mask": replace(MEASURES["non_relative"], label="non-relative, without the mask"),
    "difference": Column(
        "with less without", "With the mask less without it, paired.", "nats", signed=True
    ),
    "mean": Column("mean score", "The mean over all queries and keys at a distance.", "nats"),
    "rms": replace(MEASURES["amplitude"], label="pattern"),
    "share": Column(
        "share", "The band's part of the pattern; a layer's add up to 1.", SHARE, signed=True
    ),
    "edge_contrast": Column(
        "edge contrast",
        "The mean of the first 5% of the keys less that of the others, of scores less the mean of "
        "their diagonal.",
        "nats",
        signed=True,
    ),
    "offset": Column("distance i - j", "From query to key.", "tokens"),
    "query": Column("query position", "The first query of a group.", "tokens"),
    "band": Column(
        "wavelength",
        "The band of RoPE's pairs, by number or wavelength.",
        "tokens",
        names_rows=True,
    ),
    "last_offset": Column("last distance", "The last distance of a row's mean.", "tokens"),
    "last_query": Column("last query", "The last query of a group.", "tokens"),
    "n_pairs": Column("pairs", "How many rotary pairs the band has."),
    "first_pair": Column("first pair", "Its first rotary pair, from 0."),
    "last_pair": Column("last pair", "Its last rotary pair."),
    **{
        f"{name}_wavelength": Column(f"{name} wavelength", "Of the band's pairs.", "tokens")
        for name in ("shortest", "longest")
    },
    **{
        f"{name}_{end}": Column(f"layers, {of}", f"In how many layers {title} is {of}.")
        for name, title in QUESTIONS.items()
        for end, of in (("layers", "known"), ("below_half", "below half of the intact value"))
    },
}
LEAD_AND_ORDER = View(
    table="pattern",
    title="Lead and order in every layer",
    y=("lead", "kept"),
    by=("removed", "replacement"),
    kind="lines",
    across=1,
    caption="Above: the first key's lead over the others. Below: how much of the intact model's "
    "pattern among the other keys is there; of the intact model, its strength. A removed weight is "
    "replaced by its mean: queries, keys or what attention writes are constant.",
)
SHAPE = View(
    table="pattern",
    title="Measures of the pattern's shape",
    y=tuple(MEASURES),
    folded=True,
    caption=notes.MEASURES,
)
CONTROL = View(
    table="controls",
    title="Control: shuffled tokens",
    y=("lead", "amplitude", "locality", "non_relative"),
    by=("removed", "tokens"),
    across=2,
    folded=True,
    caption="A pattern that remains on shuffled tokens (open markers) does not come from word "
    "order.",
)
BY_PLACE = (
    View(
        table="bands",
        title="The pattern by RoPE band",
        y=("amplitude",),
        x="band",
        by=(),
        panels="layer",
        across=4,
        same_scale=True,
        caption="A score is a sum over RoPE's pairs, so its map is a sum over bands: the strength "
        "of each band's pattern. Bands can cancel; their shares add up to 100%.",
    ),
    View(
        table="offsets",
        title="Scores by distance",
        y=("mean",),
        x="offset",
        by=("term",),
        panels="layer",
        across=4,
        kind="curves",
        names={"score": "scores", "pattern": "positional pattern"},
        caption="The mean over all queries and keys at each distance, of the scores and of the "
        "positional pattern. Shaded: 95% intervals.",
    ),
    View(
        table="queries",
        title="The pattern by the query's position",
        y=("rms",),
        x="query",
        by=(),
        panels="layer",
        across=4,
        kind="curves",
        caption="The strength of the pattern in the rows of neighbouring queries. A later row has "
        "more keys. Dotted lines: the lengths that the model states. Shaded: 95% intervals.",
    ),
)
NON_RELATIVE = View(
    table="non_relative",
    title="What the mask adds beyond distance",
    y=(("with_mask", "without_mask"), "difference"),
    by=("tokens",),
    across=2,
    folded=True,
    caption="The part of the positional pattern that is no function of distance, with the mask and "
    "without. Right: the paired difference; above zero, the mask adds.",
)
HEADS = tuple(
    View(
        table="heads",
        title=f"Heads: {COLUMNS[name].label}",
        y=(name,),
        x="head",
        by=("layer",),
        kind="cells",
        folded=True,
        caption=COLUMNS[name].meaning,
    )
    for name in (*HEAD_MEASURES, *ATTENTION)
)
VIEWS = (LEAD_AND_ORDER, SHAPE, NON_RELATIVE, CONTROL, *BY_PLACE, *HEADS)
KEYS = {"near": "near keys", "far": "far keys", "neither": "neither near nor far keys"}


def report(run: Run, explorer: Explorer | None = None, heads: str = "") -> Report:
    """Return a run's report.

    Args:
        run: its tables, and maps [n_layers, query_pos, key_pos] in nats; tables that a run lacks
            may be missing or empty.
        explorer: the patterns of all conditions, if the page shows them.
        heads: the patterns of all heads of a run that removes nothing, if the page shows them.
    """
    from nope_probe.studies.ablate_page import intact_map_sections, lengths_of

    manifest = run.manifest
    if not manifest.results.get("positional_sources"):
        views = [*BY_PLACE, replace(SHAPE, folded=False), *HEADS]
        return Report(
            title=f"The attention scores of {manifest.model_name} by position",
            headline=headline_of_intact(run),
            sections=[
                *intact_map_sections(run, heads),
                *sections(views, run.tables, COLUMNS, {"queries": lengths_of(run)}),
            ],
            how_to_read=notes.how_to_read("scores"),
        )
    return Report(
        title=f"The sources of the positional pattern of {manifest.model_name}",
        headline=headline(run),
        sections=[*explorer_section(explorer), *removal_sections(run)],
        how_to_read=[
            *notes.how_to_read("scores"),
            *(
                f"Replaced by {kind}: {STAND_INS[kind].note}."
                for kind in manifest.results.get("replacements", ())
            ),
        ],
    )


def headline(run: Run) -> Headline:
    """Return the values of the shown layer, or the means over all, in every condition."""
    from nope_probe.studies.ablate_page import intact_rows

    tables, manifest = run.tables, run.manifest
    intact, sizes = intact_rows(tables["pattern"]), manifest.fold_sizes
    layer = shown_layer(intact, sizes)
    if layer is None:
        heads = tables.get("head_pattern")
        of_heads = None if heads is None else intact_rows(heads)
        return no_pattern(manifest.model_name, intact, of_heads, sizes)
    answer = Answer.of(tables, manifest, layer)
    caption = "Order: how much of the intact model's pattern among the other keys is there."
    if answer.is_mean:
        caption += " Below half: the layers with less than half of their intact value."
    elif len(intact) > 1:
        layers = notes.layers_of_run(manifest)
        caption += f" L{layer} has the largest lead and pattern of {layers}."
    return Headline(sentence=answer.sentence(), table=answer.table(), caption=caption)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The lead and the order of the other keys in every condition, of a layer or over layers.

    Attributes:
        place: of which layer, such as `L3`, or `30 layers`.
        seq_len: tokens in a sequence.
        rows: a row per condition and replacement, the intact model first: `removed`,
            `replacement`, `lead` and `kept` with their bounds (nats); of means over layers also in
            how many layers less than half of the intact value is left (`lead_below_half`).
        is_mean: whether the rows are means over layers.
    """

    place: str
    seq_len: int
    rows: list[dict[Any, Any]]
    is_mean: bool = False

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame], manifest: Manifest, layer: int) -> Answer:
        """Return the answer of one layer, or over all layers if the run is of all (`--layers all`).

        Args:
            tables: the run's `pattern`, and `over_layers` of several layers.
            manifest: the run's.
            layer: the layer that is shown.
        """
        is_mean = manifest.settings.get("layers") == "all" and "over_layers" in tables
        table = tables["over_layers" if is_mean else "pattern"]
        return cls(
            place=f"{len(manifest.layers)} layers" if is_mean else f"L{layer}",
            seq_len=manifest.seq_len,
            rows=(table if is_mean else table[table["layer"] == layer]).to_dict("records"),
            is_mean=is_mean,
        )

    @property
    def questions(self) -> list[str]:
        """`lead` where the first key has one, and `kept`."""
        intact = self.rows[0]
        return [name for name in QUESTIONS if name in intact and intact[name] == intact[name]]

    def sentence(self) -> str:
        """Return the values without each source and without all, in words."""
        rows = zip(self.rows, self.names, strict=True)
        of_sources = [(x, name) for x, name in rows if Condition.parse(x["removed"]) <= {*SOURCES}]
        (intact, _), *others = of_sources
        has_lead, parts = "lead" in self.questions, []
        if has_lead:
            lead = intact["lead"]
            has = f"leads by {lead:.1f}" if lead > 0 else f"has a lead of {lead:.1f}"
            mean, single = f"In the mean of {self.place}, the first", f"{self.place}'s first"
            left = ", ".join(f"{row['lead']:z.1f} {name}" for row, name in others)
            parts.append(f"{mean if self.is_mean else single} key {has} nats: {left}.")
        if "kept" in self.questions:
            there, *rest = (f"{row['kept']:z.2f} {{}}{name}" for row, name in others)
            left = ", ".join([there.format("is there "), *(text.format("") for text in rest)])
            whose = "the" if self.is_mean else "its" if has_lead else f"{self.place}'s"
            keys = f"{whose} {'other ' * has_lead}keys"
            parts.append(f"Of the order of {keys}, {intact['kept']:.2f} nats strong, {left}.")
        return " ".join(parts)

    @property
    def names(self) -> list[str]:
        """The name of each row in words."""
        removed = [str(row["removed"]) for row in self.rows]
        by = [str(row.get("replacement", NO_REPLACEMENT)) for row in self.rows]
        return [row_name(*row, removed) for row in zip(removed, by, strict=True)]

    def table(self) -> pd.DataFrame:
        """Return the values of every condition with their intervals, nats."""
        import pandas as pd

        first = f"{'mean of ' * self.is_mean}{self.place} at {self.seq_len:,} tokens, nats"
        cells = {first: self.names}
        for name in self.questions:
            cells[QUESTIONS[name]] = [
                interval_text(interval_of(row, name), "z.2f") for row in self.rows
            ]
            if self.is_mean:
                cells[f"{QUESTIONS[name].split()[0 if name == 'kept' else -1]} below half"] = [
                    f"{row[f'{name}_below_half']:.0f} of {row[f'{name}_layers']:.0f}"
                    for row in self.rows
                ]
        return pd.DataFrame(cells)


def removal_sections(run: Run) -> Iterator[Section]:
    """Yield the sections of a run that removes components."""
    import pandas as pd

    from nope_probe.studies.ablate_page import (
        head_sections,
        lengths_of,
        score_section,
        term_section,
    )

    tables = {name: table for name, table in run.tables.items() if len(table)}
    pattern, sources = tables["pattern"], run.manifest.results.get("positional_sources", ())
    yield from head_sections(run)
    yield from sections([LEAD_AND_ORDER], tables, COLUMNS)
    yield replace(term_section(run), columns=COLUMNS)
    shown = [INTACT.name, *sources, Condition(sources).name]
    if "controls" in tables:
        compared = {*tables["controls"]["removed"]}
        in_order = pattern[pattern["removed"].isin(compared)].assign(tokens="in order")
        in_order = in_order.reindex(columns=tables["controls"].columns)
        tables["controls"] = pd.concat([in_order, tables["controls"]], ignore_index=True)
    shape = replace(SHAPE, rows=f"removed in {shown}")
    folded = [shape, NON_RELATIVE, CONTROL, *(replace(view, folded=True) for view in BY_PLACE)]
    yield from sections(folded, tables, COLUMNS, {"queries": lengths_of(run)})
    yield score_section(run)


def headline_of_intact(run: Run) -> Headline:
    """Return the layer with the strongest pattern, and the strongest layers with their keys."""
    import pandas as pd

    manifest, pattern, heads = run.manifest, run.tables["pattern"], run.tables.get("heads")
    folds, name = manifest.fold_sizes, manifest.model_name
    best = strongest_row(pattern, folds)
    if best is None:
        return no_pattern(name, pattern, heads, folds)
    above = pattern[above_noise(pattern, folds)].nlargest(MOST_ROWS, "amplitude")
    rows = above.sort_values("layer").to_dict("records")
    table = {
        "": [f"L{row['layer']}" for row in rows],
        "first key, nats": [column_text(row, "lead", COLUMNS["lead"], "z.2f") for row in rows],
        "pattern, nats": [nats(row, "amplitude") for row in rows],
        "prefers": [preferred_keys(interval_of(row, "locality")) for row in rows],
        "by distance": [
            column_text(row, "relative_r2", COLUMNS["relative_r2"], "z.0f") for row in rows
        ],
    }
    if heads is not None:
        top = heads[above_noise(heads, folds)].sort_values("amplitude").groupby("layer").tail(1)
        strongest = {
            row["layer"]: f"H{row['head']:.0f}, {row['amplitude']:.2g} nats"
            for row in top.to_dict("records")
        }
        table["top head"] = [strongest.get(row["layer"], "") for row in rows]
    lead = best["lead"]
    leads = f"the first key {'leads' if lead > 0 else 'trails'} by {abs(lead):.2g}, the others'"
    return Headline(
        sentence=f"In {name} ({notes.layers_of_run(manifest)}), L{best['layer']:.0f} is "
        f"strongest: {leads if lead == lead else 'its'} pattern is {best['amplitude']:.2g} nats, "
        f"for {KEYS[preferred_keys(interval_of(best, 'locality'))]}.",
        table=pd.DataFrame(table),
        caption="Pattern: RMS among the other keys. By "
        "distance: the share of it that depends on the distance of query and key alone.",
    )
