"""Measure and draw the page on long sequences: python docs/make_long_sequences.py.

Writes docs/long-sequences.csv (about 20 minutes on a core), and from it the page's figures and
tables. With the word `draw` it draws and prints what is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from PIL import Image

from nope_probe import figures, load, sequences
from nope_probe.analyses.behaviour import by_document, mean_interval, span_loss
from nope_probe.analyses.jackknife import Interval, mean_intervals, rms
from nope_probe.analyses.pattern_rows import bin_means, offset_bins
from nope_probe.analyses.positions import position_terms, readers
from nope_probe.figures.names import words, words_of
from nope_probe.figures.style import GUIDE, curve_in_band, panel_axes, place_panels
from nope_probe.figures.words import interval_text
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.maps.estimates import fold_weights
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.positions import PositionSums
from nope_probe.maps.rows import choose_rows
from nope_probe.studies.engine import NOTHING, Engine
from nope_probe.studies.readings import captured_losses
from nope_probe.studies.tables import writer_table

STORED = Path(__file__).parent / "long-sequences.csv"
TRAINED, N_TOKENS, FOLDS = 128, 65_536, 8
LENGTHS = (128, 256, 512, 1024, 2048)
REMOVED = {
    "nope-tiny": ("position[L1H0]", "position[ATTN1]"),
    "rope-tiny": ("rope",),
}
BANDS = {"nope-tiny": (), "rope-tiny": ("rope[7:8]",)}  # removed for the losses alone
INTACT = "nothing"
STRONGEST = {"nope-tiny": 2, "rope-tiny": 1}  # the layers with the strongest patterns
READERS = (1, 2, 3)
TERMS = ("rotation", "written_key", "written_query", "written_both", "covariance")
SPANS = (96, 192, 1536)  # first positions of the columns of losses
CALLED = {"rope[7:8]": "pair 7 of RoPE", "position[ATTN1]": "position of all heads of L1"}
DISTANCES = (1, 60, 236, 559)  # the first of their bins
LATE, SOME, MORE = "#c2410c", "#b45309", "#7c8591"
INK = {"width": 2, "color": "#1f2328"}
LINES = {  # of the losses
    "nope-tiny": {
        INTACT: INK,
        "position[L1H0]": {"width": 2, "color": SOME, "dash": "dash"},
        "position[ATTN1]": {"width": 2, "color": MORE, "dash": "dot"},
    },
    "rope-tiny": {
        INTACT: INK,
        "rope": {"width": 2, "color": words_of("rope").colour, "dash": "dash"},
        "rope[7:8]": {"width": 2, "color": LATE, "dash": "dashdot"},
    },
}
IMAGES = Path(__file__).parent / "images" / "long"
PROFILES = ((64, 128), (1024, 2048))  # of which queries profiles over distance are
NEAREST = 64  # keys, of which rows of all queries from 64 on have as many
SKIP = 1  # the BOS token is no key of the pattern
TABLE_ROWS, GROUP_ROWS = 128, 16
# The first query of each group of rows, and behind the last group.
EDGES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
WHERE = ["model", "length", "removed", "measure", "layer", "name", "first", "last", "keys"]
Row = dict[str, Any]


def measure() -> pd.DataFrame:
    """Return all estimates, a row each, in nats."""
    rows = [
        {"model": model, "length": length, **row}
        for model in REMOVED
        for length in LENGTHS
        for row in term_estimates(model, length)
    ]
    return in_order(pd.DataFrame([*rows, *loss_estimates()]))


def in_order(stored: pd.DataFrame) -> pd.DataFrame:
    """Return the rows as they are stored."""
    numbers = dict.fromkeys(("layer", "first", "last", "keys"), "Int64")
    return stored[[*WHERE, "value", "low", "high"]].astype(numbers).sort_values(WHERE)


def engine_at(model: str, length: int) -> Engine:
    """Return a model on 65,536 tokens of held-out text, with what the removals take away."""
    loaded = load(model, n_ctx=max(LENGTHS))
    n_seqs, tokenizer = N_TOKENS // length, loaded.tokenizer
    data = sequences(tokenizer=tokenizer, n_seqs=n_seqs, seq_len=length, pack=True)
    return Engine(
        model=loaded.model,
        inputs=data.inputs,
        documents=data.documents,
        batch_size=max(1, 8192 // length),
        n_folds=FOLDS,
        skip_keys=SKIP,
    )


def conditions(model: str) -> dict[str, Ablation]:
    """Return the ablations in which terms are measured, by name."""
    return {INTACT: NOTHING} | {name: Ablation(remove=[name]) for name in REMOVED[model]}


def term_estimates(model: str, length: int) -> Iterator[Row]:
    """Yield the terms, writers and profiles of a model at one length, intact and with removals."""
    engine = engine_at(model, length)
    for name, ablation in conditions(model).items():
        writers = "none" if ablation.condition else "heads"
        sums = engine.positions("positions", ablation, layers=READERS, writers=writers)
        drawn = ablation == NOTHING and length == max(LENGTHS)
        rows = list(group_rows(sums, TERMS if drawn else ()))
        if drawn:
            rows += profile_rows(sums, STRONGEST[model])
        sums = with_rows(sums, choose_rows(length, TABLE_ROWS))  # as `trace --query-rows 128`
        rows += term_rows(sums)
        if ablation == NOTHING:
            rows += writer_rows(sums)
        for row in rows:
            yield {"removed": name, **row}


def loss_estimates() -> Iterator[Row]:
    """Yield the losses by position at the greatest length, on the same documents everywhere."""
    beyond: dict[tuple[str, int], torch.Tensor] = {}
    for model, bands in BANDS.items():
        engine, losses = engine_at(model, max(LENGTHS)), dict[str, torch.Tensor]()
        removals = conditions(model) | {name: Ablation(remove=[name]) for name in bands}
        for name, ablation in removals.items():
            assert engine.documents is not None
            losses[name] = by_document(
                captured_losses(engine, "loss", ablation)["losses"], engine.documents
            )
            trained = span_loss(losses[name], 96, TRAINED)
            for first, stop in pairs(max(LENGTHS)):
                loss = span_loss(losses[name], first, stop)
                values = {"loss": loss, "beyond": loss - trained}
                if ablation == NOTHING:
                    beyond[model, first] = loss - trained
                    if model == "rope-tiny":
                        values["beyond nope-tiny"] = loss - trained - beyond["nope-tiny", first]
                else:
                    values["difference"] = loss - span_loss(losses[INTACT], first, stop)
                where = {"model": model, "length": max(LENGTHS), "removed": name}
                where |= {"first": first, "last": stop - 1}
                for measure, per_document in values.items():
                    yield {**where, "measure": measure, **asdict(mean_interval(per_document))}


def term_rows(sums: PositionSums) -> Iterator[Row]:
    """Yield the terms of every layer."""
    for where, reader in readers(sums):
        for name, term in position_terms(reader).items():
            for measure, of_term in {"rms": term.size, "part": term.part}.items():
                place = {"first": 0, "last": reader.pattern.cells.n - 1}
                estimate = asdict(of_term)
                yield {"measure": measure, **where, "name": name, **place, **estimate}


def group_rows(sums: PositionSums, terms: Sequence[str]) -> Iterator[Row]:
    """Yield the pattern of every layer and its terms by query, over all keys or near ones."""
    n = next(iter(sums.readers.values())).q.shape[1]
    longest = n == max(LENGTHS)
    for first, stop in pairs(n) if longest else [(96, TRAINED)]:
        rows = torch.linspace(first, stop - 1, min(GROUP_ROWS, stop - first)).round().long()
        for keys in (None, NEAREST) if longest and first >= NEAREST else (None,):
            for where, reader in readers(with_rows(sums, rows, keys)):
                estimates = {"all": rms(reader.square)}
                if terms:
                    split = position_terms(reader)
                    estimates |= {name: split[name].size for name in terms}
                for name, rms_of in estimates.items():
                    place = {"name": name, "first": first, "last": stop - 1, "keys": keys}
                    yield {"measure": "rms", **where, **place, **asdict(rms_of)}


def pairs(length: int) -> list[tuple[int, int]]:
    """Return the first query of each group that a length has, and the first behind it."""
    return [(first, stop) for first, stop in pairwise(EDGES) if stop <= length]


def with_rows(sums: PositionSums, rows: torch.Tensor, keys: int | None = None) -> PositionSums:
    """Return sums with the rows of some queries alone; means stay those over all positions.

    Args:
        sums: of all queries.
        rows: the queries.
        keys: how many keys before the query a row keeps; all by default.
    """
    n = next(iter(sums.readers.values())).q.shape[1]
    far = torch.arange(n) < (rows[:, None] - keys if keys else 0)
    chosen = {
        layer: replace(
            reader,
            scores=reader.scores[:, rows].masked_fill(far, torch.nan),
            query_positions=rows,
        )
        for layer, reader in sums.readers.items()
    }
    return replace(sums, readers=chosen)


def profile_rows(sums: PositionSums, layer: int) -> Iterator[Row]:
    """Yield the mean score by distance, of early and of late queries.

    The level is that of the nearest 63 keys, which all these queries have.
    """
    bins = offset_bins(max(LENGTHS))
    weights = fold_weights(len(sums.counts), sums.counts)
    for first, stop in PROFILES:
        rows = torch.linspace(first, stop - 1, 64).round().long()
        scores = with_rows(sums, rows).readers[layer].scores
        pattern = LayerMaps.of(scores, None, rows, SKIP).pattern
        means = bin_means(pattern, "scores", bins)
        intervals = mean_intervals(means - means[:, : NEAREST - 1].mean(1, True), weights)
        for at in (bins < first - SKIP).nonzero().flatten().tolist():
            end = int(bins[at + 1]) - 1
            where = {"first": int(bins[at]), "last": end, "name": f"{first}-{stop - 1}"}
            ends = {name: float(getattr(intervals, name)[at]) for name in ("value", "low", "high")}
            yield {"measure": "profile", "layer": layer, **where, **ends}


def writer_rows(sums: PositionSums) -> Iterator[Row]:
    """Yield what each writer writes of a layer's pattern into its keys, nats."""
    for row in writer_table(sums).query("of == 'pattern' and side == 'key'").to_dict("records"):
        interval = Interval(value=row["part"], low=row["part_low"], high=row["part_high"])
        yield {
            "measure": "writer",
            "layer": row["layer"],
            "name": row["writer"],
            **asdict(interval),
        }


def draw(stored: pd.DataFrame) -> None:
    """Draw the page's figures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    drawn = {"terms": terms_and_loss, "near": near_keys, "profiles": profiles}
    longest = stored[stored["length"] == max(LENGTHS)]
    for name, figure in drawn.items():
        path = figures.save(figure(longest), IMAGES / f"{name}.png")
        few_colours = Image.open(path).convert("RGB").quantize(192, dither=Image.Dither.NONE)
        few_colours.save(path, optimize=True)


def terms_and_loss(longest: pd.DataFrame) -> go.Figure:
    """Draw the strongest layer's terms by query, and under them the loss by position."""
    figure = go.Figure()
    for column, (model, layer) in enumerate(STRONGEST.items()):
        own = longest[(longest["model"] == model) & (longest["first"] >= EDGES[0])]
        add_terms(figure, column, own[(own["layer"] == layer) & own["keys"].isna()])
        for removed, line in LINES[model].items():
            losses = own[(own["removed"] == removed) & (own["measure"] == "loss")]
            label = "loss" if removed == INTACT else f"loss without {called(removed)}"
            add_curve(figure, 2 + column, losses, label, line)
    titles = [f"{model}, L{layer}: terms of the pattern" for model, layer in STRONGEST.items()]
    lay_out(figure, [*titles, *(f"{model}: loss" for model in STRONGEST)], 2, "position")
    for panel in (2, 3):
        figure.update_layout({f"yaxis{panel + 1}": {"rangemode": "normal"}})
    return figure


def near_keys(longest: pd.DataFrame) -> go.Figure:
    """Draw the terms of the pattern on the nearest keys by query."""
    figure, near = go.Figure(), longest[longest["keys"] == NEAREST]
    panels = list(product(STRONGEST, READERS))
    for panel, (model, layer) in enumerate(panels):
        own = near[(near["model"] == model) & (near["layer"] == layer)]
        add_terms(figure, panel, own)
        for name in REMOVED[model]:
            without = own[own["removed"] == name]
            label = f"whole pattern without {called(name)}"
            add_curve(figure, panel, without, label, LINES[model][name])
    lay_out(figure, [f"{model}, L{layer}" for model, layer in panels], 3, "query position")
    figure.update_xaxes(range=np.log10([NEAREST, max(LENGTHS)]).tolist())
    return figure


def profiles(longest: pd.DataFrame) -> go.Figure:
    """Draw the mean score by distance, of early and of late queries."""
    figure = go.Figure()
    rows = longest[(longest["measure"] == "profile") & (longest["removed"] == INTACT)]
    for panel, (model, layer) in enumerate(STRONGEST.items()):
        own = rows[(rows["model"] == model) & (rows["layer"] == layer)]
        for (first, stop), ink in zip(PROFILES, (words_of("intact").colour, LATE), strict=True):
            some = own[own["name"] == f"{first}-{stop - 1}"]
            add_curve(
                figure,
                panel,
                some,
                f"queries {first:,} to {stop - 1:,}",
                {"color": ink, "width": 2},
            )
    titles = [f"{model}, L{layer}" for model, layer in STRONGEST.items()]
    lay_out(figure, titles, 2, "distance from query to key")
    figure.update_xaxes(range=[0, float(np.log10(PROFILES[1][0]))])
    figure.update_yaxes(rangemode="normal")
    return figure


def add_terms(figure: go.Figure, panel: int, rows: pd.DataFrame) -> None:
    """Draw the RMS of the intact pattern and of its terms by query."""
    rms = rows[(rows["removed"] == INTACT) & (rows["measure"] == "rms")]
    for name, label in {"all": "whole pattern", **{name: words(name) for name in TERMS}}.items():
        ink = "intact" if name == "all" else name
        of_name = rms[(rms["name"] == name) & (rms["first"] >= EDGES[0])]
        add_curve(figure, panel, of_name, label, {"color": words_of(ink).colour, "width": 2})


def add_curve(figure: go.Figure, panel: int, rows: pd.DataFrame, label: str, line: Row) -> None:
    """Add estimates by position, at the geometric middle of each group."""
    rows = rows.sort_values("first")
    estimates = rows[["value", "low", "high"]].to_numpy(float).T
    x = np.sqrt(rows["first"] * rows["last"]).to_numpy(float)
    known = {trace.name for trace in figure.data}
    curve = curve_in_band(
        x, estimates, label=label, hover="%{y:.3g}", line=line, showlegend=label not in known
    )
    figure.add_traces([trace | panel_axes(panel) for trace in curve])


def lay_out(figure: go.Figure, titles: list[str], columns: int, x_title: str) -> None:
    """Place panels whose logarithmic axes have a line at the trained length."""
    placed = place_panels(
        "",
        titles,
        columns=columns,
        panel=240,
        row_gap=70,
        bottom=125,
        x_title=x_title,
        y_title="nats",
    ).add_traces(figure.data)
    ticks = [2**power for power in range(12)]
    shown = np.log10([EDGES[0], max(LENGTHS)]).tolist()
    placed.update_xaxes(type="log", tickvals=ticks, range=shown)
    placed.update_yaxes(rangemode="tozero")
    figure.update_layout(placed.add_vline(TRAINED, line=GUIDE).layout)


def called(removed: str) -> str:
    """Return what is removed as the page names it."""
    return CALLED.get(removed) or words(removed)


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the page's tables in Markdown."""
    longest = stored[stored["length"] == max(LENGTHS)]
    losses = [losses_by_position(longest, model) for model in REMOVED]
    return [*losses, strengths_by_query(longest), scores_by_distance(longest)]


def losses_by_position(longest: pd.DataFrame, model: str) -> str:
    """Return a model's table of losses by position, and how removals change them."""
    rows = longest[(longest["model"] == model) & longest["first"].isin(SPANS)]

    def line(measure: str, style: str, removed: str = INTACT) -> list[str]:
        own = rows[(rows["measure"] == measure) & (rows["removed"] == removed)]
        return cells(own, "first", style)

    lines = {"loss": line("loss", ".2f"), "less that of 96 to 127": line("beyond", "+.2f")}
    if model == "rope-tiny":
        lines["that less nope-tiny's"] = line("beyond nope-tiny", "+.2f")
    for name in (*REMOVED[model], *BANDS[model]):
        lines[f"without {called(name)}, change"] = line("difference", "+.2f", name)
    return markdown(f"{model}, position", span_names(), lines)


def strengths_by_query(longest: pd.DataFrame) -> str:
    """Return the table of the pattern's strength by query, over all keys and over near ones."""
    rows = longest[(longest["measure"] == "rms") & (longest["name"] == "all")]
    rows, lines = rows[rows["first"].isin(SPANS)], dict[str, list[str]]()
    for model, layer in STRONGEST.items():
        own = rows[(rows["model"] == model) & (rows["layer"] == layer)]
        for removed in (INTACT, REMOVED[model][0]):
            some = own[own["removed"] == removed]
            without = "" if removed == INTACT else f" without {called(removed)}"
            where = f"{model} L{layer}{without}"
            lines[f"{where}, all keys"] = cells(some[some["keys"].isna()], "first", ".2f")
            if removed == INTACT:
                near = some[some["keys"] == NEAREST]
                lines[f"{where}, nearest {NEAREST} keys"] = cells(near, "first", ".2f")
    return markdown("nats RMS, query", span_names(), lines)


def scores_by_distance(longest: pd.DataFrame) -> str:
    """Return the table of mean scores by distance, of early and of late queries."""
    rows = longest[(longest["measure"] == "profile") & longest["first"].isin(DISTANCES)]
    lines = {}
    for (model, layer), (first, stop) in product(STRONGEST.items(), PROFILES):
        own = rows[(rows["model"] == model) & (rows["name"] == f"{first}-{stop - 1}")]
        values = cells(own[own["layer"] == layer], "first", ".1f")
        values += [""] * (len(DISTANCES) - len(values))
        lines[f"{model} L{layer}, queries {first:,} to {stop - 1:,}"] = values
    late = rows[rows["name"] == f"{PROFILES[1][0]}-{PROFILES[1][1] - 1}"]
    ends = late.groupby("first")["last"].first().astype(int)
    names = [f"{at}" if ends[at] == at else f"{at} to {ends[at]}" for at in DISTANCES]
    return markdown("nats, distance", names, lines)


def span_names() -> list[str]:
    ends = dict(pairs(max(LENGTHS)))
    return [f"{first:,} to {ends[first] - 1:,}" for first in SPANS]


def cells(rows: pd.DataFrame, by: str, style: str) -> list[str]:
    """Return estimates with their intervals as cells of a table, in order."""
    ordered = rows.sort_values(by)[["value", "low", "high"]]
    return [interval_text(tuple(row), style) for row in ordered.to_numpy().tolist()]


def markdown(corner: str, columns: list[str], lines: dict[str, list[str]]) -> str:
    header = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*header, *(f"| {name} | {' | '.join(row)} |" for name, row in lines.items())])


def main(*arguments: str) -> None:
    if "draw" not in arguments:
        measure().to_csv(STORED, index=False, float_format="%.5g")
    stored = pd.read_csv(STORED)
    draw(stored)
    for table in tables(stored):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
