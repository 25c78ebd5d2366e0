"""What Findings measures and draws in Python: what no single command prints.

Functions return rows of findings.csv: those of `MEASURED` of a run, those of `BY_NAME` of none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from PIL import Image
from plotly.subplots import make_subplots

from nope_probe import (
    Ablation,
    ScoreMaps,
    ablated,
    attribute,
    calibrate,
    capture_losses,
    capture_scores,
    figures,
    load,
    read_run,
    sequences,
)
from nope_probe.analyses.behaviour import by_document, cost_of, mean_interval
from nope_probe.analyses.verdicts import kinds_of
from nope_probe.run.folder import Run

IMAGES = Path(__file__).parent / "images"
NUMBERS = ("lead", "order", "not_by_distance")
ASKED = ["first_weight", "information", "first", "others", "others_position", "half", "fifth"]
SHARES = ["positional_share", "others_share"]
NEEDS = {  # the runs that order heads by need
    **{f"need {n}": f"code, {n} tokens" for n in (32, 128, 512)},
    "attention": "code, 64 tokens",
    "attention prose": "prose, 64 tokens",
}
SPANS = {"1 to 15": (0, 15), "16 to 31": (15, 31), "32 to 47": (31, 47), "48 to 63": (47, 63)}
SPANS |= {"later half": (31, 63), "all": (0, 63)}
COSTLY = {"text": "text", "copy_random": "second copy of random tokens"}
ADDENDS = {
    "pattern/intact": "intact",
    "term/rope": "= RoPE",
    "term/mask": "+ mask",
    "term/mask_x_rope": "+ both together",
    "term/without_sources": "+ neither",
}
SUMS = {
    "sum.png": {"first layers": ("SmolLM2, L3", 3), "nope-tiny": ("nope-tiny, L2", 2)},
    "twins.png": {"rope-tiny": ("rope-tiny, L2", 2), "nope-tiny": ("nope-tiny, L2", 2)},
}


def of_heads(run: Run) -> pd.DataFrame:
    """Return what attention is about, of all heads, and the needs of the kinds of heads."""
    table = run.tables["attention"]
    table = table.assign(
        name=kinds_of(table),
        heads=1,
        first=table["first_position"] + table["first_content"],
        others=table["others_position"] + table["others_content"],
        half=table["others_share"] >= 0.5,
        fifth=table["others_share"] < 0.2,
    )
    of_all = pd.concat([table[ASKED[:-2]].mean(), table[ASKED[-2:]].sum()])
    ranks = table[SHARES].corrwith(table["need_rope"], method="spearman")
    of_kinds = table.groupby("name").agg({"heads": "sum", "need_rope": "mean", "need_mask": "mean"})
    rows_of_all = pd.concat([of_all, ranks]).to_frame("all").T.rename_axis("name")
    rows = pd.concat([rows_of_all, of_kinds]).reset_index()
    return rows.melt("name", var_name="measure").dropna(subset="value")


def steps_back(run: Run) -> pd.DataFrame:
    """Return what L16H0 wrote for L18H6 to look at: its term, what it moved, and the effect."""
    steps = run.tables["why_steps"].query("step == 1").set_index("writer")
    look = steps[steps["moved_from"].isna()]
    others = look.loc[["other writers"], "nats"].sum()
    of_writer = steps.loc[["L16H0"]]
    moved = of_writer.dropna(subset="moved_from").iloc[0]
    is_whole = of_writer["moved_from"].isna() & (of_writer["side"] == "key")
    parts = {
        "score": look[~look["side"].isin(["mean", "other"])]["nats"].sum() + others,
        "written": of_writer[is_whole]["nats"].item(),
        "moved": moved["nats"],
        "mean": of_writer[of_writer["side"] == "mean"]["nats"].item(),
        "effect": moved["effect"],
    }
    return pd.DataFrame({"name": "L18H6", "measure": [*parts], "value": [*parts.values()]})


def answers(run: Run) -> pd.DataFrame:
    """Return what makes and carries each number, a row each, in how many layers of how many."""
    rows = run.answer
    columns = [rows[column].astype(str) for column in ("number", "way", "made_by", "carried_by")]
    texts = ["|".join(cells) for cells in zip(*columns, strict=True)]
    counts = {"value": rows["layers"], "low": rows["of_layers"], "high": rows["below_zero"]}
    return pd.DataFrame({"name": texts, "measure": "answer", **counts})


def null_means(run: Run) -> pd.DataFrame:
    """Return the means over layers of the three numbers in the null of written position."""
    pattern = run.tables["pattern"]
    null = pattern[pattern["removed"] == "written_null"][[*NUMBERS]].mean().dropna()
    return null.rename_axis("measure").reset_index(name="value").assign(name="its null")


MEASURED: dict[str, Sequence[Callable[[Run], pd.DataFrame]]] = {
    "attention": [of_heads, steps_back],
    "attention gemma": [of_heads],
    **{name: [answers] for name in ("free", "nope-tiny", "rope-tiny", "code", "gemma")},
}


def rank_correlations(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the rank correlation of heads' need between each two runs that measured it."""
    needs = pd.DataFrame()
    for name, label in NEEDS.items():
        table, need = ("order", "value") if name.startswith("need") else ("attention", "need_rope")
        needs[label] = runs[name].tables[table].set_index(["layer", "head"])[need]
    values = {
        f"{one} / {other}": needs[one].corr(needs[other], method="spearman")
        for one, other in combinations(needs.columns, 2)
    }
    return pd.DataFrame({"name": [*values], "measure": "need", "value": [*values.values()]})


def order_by_layers(folder: Path) -> None:
    """Write the orders that begin with seven layers: those of least need, and every fourth."""
    heads = read_run(folder / "need-128").tables["order"]
    need = heads.groupby("layer")["value"].mean()
    first = {"least": sorted(need.nsmallest(7).index), "fourth": range(3, len(need), 4)}
    for name, layers in first.items():
        order = product([*layers, *(set(need.index) - {*layers})], sorted(heads["head"].unique()))
        rows = pd.DataFrame(order, columns=["layer", "head"])
        rows.to_csv(folder / f"layers-{name}.csv", index=False)


def by_quarter(model: str, windows: str) -> pd.DataFrame:
    """Return the cost of written position in parts of 64 positions: less its null's, and both.

    The loss at a position is that of its token, so the first token has none.
    """
    loaded = load(model)
    texts = sequences(tokenizer=loaded.tokenizer, n_seqs=192, seq_len=64, windows=windows)
    losses = {"intact": capture_losses(loaded, texts)}
    for removed in ("written", "written_null"):
        with ablated(loaded, removed, tokens=texts) as without:
            losses[removed] = capture_losses(without, texts)
    of_document = {what: by_document(x, texts.documents) for what, x in losses.items()}
    rows = []
    for span, (first, stop) in SPANS.items():
        at = {what: x[:, first:stop].mean(1) for what, x in of_document.items()}
        for measure, values in cost_of(at["written"], at["intact"], at["written_null"]).items():
            ends = zip(("value", "low", "high"), mean_interval(values).ends, strict=True)
            rows.append({"name": span, "measure": measure, **dict(ends)})
    return pd.DataFrame(rows)


def constant_keys(name: str, n_texts: int) -> pd.DataFrame:
    """Return the mean order with constant keys in all layers, and in the read layer alone.

    The mean of a norm's output on queries and keys is shorter than its outputs: where a model has
    such norms, their means take the place of their outputs too.
    """
    loaded = load(name)
    texts = sequences(tokenizer=loaded.tokenizer, n_seqs=n_texts, seq_len=64)
    calibration, intact = calibrate(loaded, texts), capture_scores(loaded, texts)

    def order(removed: ScoreMaps) -> list[float]:
        at = [intact.layers.index(layer) for layer in removed.layers]
        before = replace(
            intact, folds=intact.folds[:, at], visible=intact.visible[at], layers=removed.layers
        )
        values = attribute({(): before, "w_k": removed})
        return [values[layer].conditions["w_k"].order.value for layer in removed.layers]

    def without(remove: str, layers: list[int] | None = None) -> list[float]:
        with ablated(loaded, Ablation(remove=remove, layers=layers), calibration):
            return order(capture_scores(loaded, texts, layers=layers))

    whole = attribute({(): intact})
    orders = {
        "intact": [whole[layer].conditions["intact"].order.value for layer in intact.layers],
        "w_k": without("w_k"),
        "w_k here": [value for layer in intact.layers for value in without("w_k", [layer])],
        "w_q+w_k": without("w_q+w_k"),
    }
    norms = [name for name in loaded.model.hook_dict if re.search(r"[qk]_norm.hook_out$", name)]
    if norms:
        _, outputs = loaded.model.run_with_cache(texts.inputs, names_filter=norms)
        means = {name: outputs[name].mean((0, 2), keepdim=True) for name in norms}  # of each head
        hooks = [(name, lambda x, hook: means[hook.name].expand_as(x)) for name in norms]
        with loaded.model.hooks(fwd_hooks=hooks):
            orders["norms"] = order(capture_scores(loaded, texts))
    values = [np.nanmean(of_layers) for of_layers in orders.values()]
    return pd.DataFrame({"name": [*orders], "measure": "order", "value": values})


BY_NAME: dict[str, Callable[[], pd.DataFrame]] = {
    "keys smollm2-135m": partial(constant_keys, "smollm2-135m", 24),
    "keys gemma-3-270m": partial(constant_keys, "gemma-3-270m", 16),
    "quarters code random": partial(by_quarter, "smollm2-135m", "random"),
    "quarters code start": partial(by_quarter, "smollm2-135m", "start"),
    "quarters gemma random": partial(by_quarter, "gemma-3-270m", "random"),
    "quarters gemma start": partial(by_quarter, "gemma-3-270m", "start"),
}


def draw_need(stored: pd.DataFrame) -> None:
    """Draw what text and copies cost by how many heads have no RoPE, at three lengths."""
    figure = make_subplots(1, 2, subplot_titles=[*COSTLY.values()])
    colours = {32: "#2b7bba", 128: "#d9730d", 512: "#18753a"}
    ks = [30, 60, 100, 150, 200]
    chosen = product(
        colours.items(), enumerate(COSTLY, 1), {"cost": "solid", "chance": "dash"}.items()
    )
    for (n, ink), (column, measure), (name, dash) in chosen:
        rows = stored[(stored["run"] == f"need {n}") & (stored["measure"] == name)]
        points = rows.set_index("name").loc[[f"{measure} {k}" for k in ks]]
        line = {"x": ks, "y": points["value"], "line": {"color": ink, "dash": dash}}
        is_shown = name == "cost" and column == 1
        figure.add_scatter(**line, name=f"{n} tokens", showlegend=is_shown, row=1, col=column)
        ends = np.concatenate([points["low"], points["high"][::-1]])
        band = {"x": [*ks, *ks[::-1]], "y": ends, "fill": "toself", "fillcolor": ink}
        hidden = {"opacity": 0.2, "mode": "none", "showlegend": False, "hoverinfo": "skip"}
        figure.add_scatter(**band, **hidden, row=1, col=column)
    figure.update_xaxes(title="heads without RoPE, of 270")
    figure.update_yaxes(title="cost, nats", rangemode="tozero")
    figure.update_layout(width=1000, height=420, template="plotly_white")
    save_small(figure, IMAGES / "need.png")


def draw_sum(image: str, runs: Mapping[str, Run]) -> None:
    """Draw the patterns of some models' layers as the sum of what each source makes, a row each."""
    shown = SUMS[image]
    figure = make_subplots(
        len(shown),
        len(ADDENDS),
        subplot_titles=[*ADDENDS.values()],
        horizontal_spacing=0.03,
        vertical_spacing=0.06,
    )
    for row, (run, (title, layer)) in enumerate(shown.items(), 1):
        maps = {name: x[layer].copy() for name, x in runs[run].maps.items() if name in ADDENDS}
        for values in maps.values():
            values[:, 0] = np.nan  # the first key's lead, another number
        limit = np.nanquantile(np.abs(maps["pattern/intact"]), 0.99)
        bar = {"title": "nats", "thickness": 10, "len": 0.9 / len(shown), "x": 1.01}
        bar["y"] = 1 - (row - 0.5) / len(shown)
        colours = {"zmin": -limit, "zmax": limit, "colorscale": "RdBu_r", "colorbar": bar}
        for column, name in enumerate(ADDENDS, 1):
            if name in maps:
                trace = go.Heatmap(z=maps[name], showscale=column == 1, **colours)
                figure.add_trace(trace, row, column)
        figure.update_yaxes(title=f"{title}<br>query position", row=row, col=1)
    figure.update_yaxes(autorange="reversed", constrain="domain", showticklabels=False)
    figure.update_xaxes(constrain="domain", showticklabels=False)
    figure.update_xaxes(title="key position", row=len(shown))
    margin = {"t": 40, "b": 40, "l": 60, "r": 60}
    height = 60 + 240 * len(shown)
    figure.update_layout(width=1200, height=height, margin=margin, template="plotly_white")
    save_small(figure, IMAGES / image)


def save_small(figure: go.Figure, image: Path) -> None:
    """Save a figure of the docs with few colours, in a file of a fifth of the size."""
    figures.save(figure, image)
    shrink(image)


def shrink(image: Path) -> None:
    """Write a picture anew with few colours."""
    with Image.open(image) as picture:
        picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(image, optimize=True)
