"""Measure SmolLM2-135M and the shipped models: python docs/make_findings.py FOLDER [RUN ...].

Each command of `COMMANDS`, or of the named ones, runs into one folder in FOLDER, unless it is
finished there (after `make real`; an hour on two cores). Writes docs/findings.csv and the pictures
(needs Chromium), and prints the tables of findings.md and trace.md. Without FOLDER it prints the
tables of what is stored. `draw_attention.py` draws the pictures of attention from the same FOLDER.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from make_long_sequences import markdown
from PIL import Image
from plotly.subplots import make_subplots

from nope_probe import figures, read_run, row_centred
from nope_probe.analyses.verdicts import kinds_of
from nope_probe.figures.intervals import interval_text
from nope_probe.run.folder import Run
from nope_probe.studies.ablate import COLUMNS, THREE_NUMBERS

SMOLLM2 = "--model smollm2-135m"
ALL_LAYERS = f"ablate {SMOLLM2} --layers all --n-seqs"
TWINS = ("nope-tiny", "rope-tiny")
LENGTHS = {32: 64, 128: 16, 512: 8}  # tokens, and how many sequences
LEAST = "--remove rope --least --k 30 60 100 150 200 --draws 3"
COMMANDS = {
    "code": f"{ALL_LAYERS} 96",
    "prose": f"{ALL_LAYERS} 96 --data prose",
    "im_start": f'{ALL_LAYERS} 48 --bos "<|im_start|>"',
    "endoftext": f'{ALL_LAYERS} 48 --bos "<|endoftext|>"',
    "free": "ablate --model parameter-free --n-seqs 512",
    **{model: f"ablate --model {model}" for model in TWINS},
    "first layers": f"ablate {SMOLLM2} --n-seqs 96",
    "attention": f"attention {SMOLLM2} --n-seqs 384 --seq-len 64 --text "
    '"Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter."',
    "attention prose": f"attention {SMOLLM2} --n-seqs 96 --seq-len 64 --data prose",
    "trace": f"trace {SMOLLM2} --layers 6",
    **{f"trace {model}": f"trace --model {model} --seq-len 96 --n-seqs 512" for model in TWINS},
    "effects": "trace --model nope-tiny --seq-len 96 --n-seqs 512 --reader L1",
    "behaviour": f"behaviour {SMOLLM2} --measures loss copy --remove mask rope --n-seqs 32 "
    "--seq-len 128",
    "heads": f"heads {SMOLLM2} --remove rope --by others --k 1 5 --draws 4 --n-seqs 32 "
    "--seq-len 128",
    "content": f"heads {SMOLLM2} --remove content --by positional others "
    "--k 60 100 136 --draws 3 --n-seqs 24",
    "content least": f"heads {SMOLLM2} --remove content --by others --least "
    "--k 60 100 136 --draws 2 --n-seqs 24",
    **{
        f"need {n}": f"heads {SMOLLM2} {LEAST} --seq-len {n} --n-seqs {of_n} --mean-seqs {of_n}"
        for n, of_n in LENGTHS.items()
    },
    "need prose": f"heads {SMOLLM2} --remove rope --least --k 60 100 150 --draws 3 --seq-len 128 "
    "--n-seqs 8 --mean-seqs 8 --data prose --by FOLDER/need-128/order.csv",
    **{
        run: f"heads {SMOLLM2} --remove rope --k 63 --draws 3 --seq-len 128 --n-seqs 16 "
        f"--mean-seqs 16 --by FOLDER/{run.replace(' ', '-')}.csv"
        for run in ("layers least", "layers fourth")
    },
    **{
        f"maps {model}": f"ablate --model {model} --remove sources --n-seqs 3456" for model in TWINS
    },
}
# What is stored of a run: a table, the columns that name a row of it, and its estimates.
VALUES = ("pattern", ("removed", "replacement"), ("lead", "kept"))
MEANS = ("lead", "kept", "lead_layers", "lead_below_half", "kept_layers", "kept_below_half")
OVER_LAYERS = ("over_layers", ("removed", "replacement"), MEANS)
BEYOND_DISTANCE = ("non_relative", "mask_adds")
EFFECTS = ("effects", ("of", "writer"), ("predicted", "held", "direct", "total"))
TRACED = [
    ("terms", ("of", "term"), ("size", "part")),
    ("writers", ("of", "side", "writer"), ("part",)),
    EFFECTS,
]
COSTS = [("tests", ("order", "measure", "k"), ("cost",))]
NEED = [("tests", ("measure", "k"), ("cost", "chance"))]
STORED_OF = {
    **{run: [OVER_LAYERS] for run in ("code", "prose", "im_start", "endoftext")},
    **{run: [VALUES] for run in ("free", *TWINS)},
    "first layers": [
        ("pattern", ("removed",), BEYOND_DISTANCE),
        ("controls", ("tokens", "removed"), BEYOND_DISTANCE),
    ],
    "trace": TRACED,
    "trace nope-tiny": TRACED,
    "trace rope-tiny": TRACED,
    "effects": [EFFECTS],
    "behaviour": [("behaviour", ("measure", "removed"), ("value", "difference"))],
    "heads": COSTS,
    "content": COSTS,
    "content least": COSTS,
    **{run: NEED for run in COMMANDS if run.startswith(("need", "layers"))},
}
STORED, IMAGES = Path(__file__).parent / "findings.csv", Path(__file__).parent / "images"
CHECKPOINTS = Path(__file__).parent.parent / "nope_probe" / "checkpoints"
TEXTS = {
    "code": "Python source, any token first",
    "prose": "English prose, any token first",
    "im_start": "the token im_start first",
    "endoftext": "the token endoftext first",
}
CONDITIONS = {
    "intact none": "intact",
    "mask none": "without the mask",
    "rope none": "without RoPE",
    "mask+rope none": "without both",
    "w_q mean": "constant queries (W_Q)",
    "w_k mean": "constant keys (W_K)",
    "w_q+w_k mean": "both constant",
    "w_o mean": "attention writes a constant (W_O)",
}
QUESTIONS = {"lead": "first key's lead", "kept": "order of the other keys"}
MODELS = {  # the shown layer of each
    "free": ("eq. 1, L3", 3),
    "nope-tiny": ("nope-tiny, L2", 2),
    "rope-tiny": ("rope-tiny, L3", 3),
    "code": ("SmolLM2, mean of 30 layers", None),
}
READERS = {2: "MLP1", 3: "MLP2", 4: "MLP2", 5: "MLP2"}  # each with its strongest writer
TERMS = {
    "rotation": "rotation",
    "written_key": "written into keys",
    "written_query": "into queries",
    "written_both": "into both",
    "covariance": "covariance",
}
WRITERS = [(1, "MLP0"), (1, "L0H0"), (1, "L0H1"), (2, "L1H0"), (2, "L1H1"), (2, "MLP1")]
REMOVED = {"intact": "intact", "without the mask": "mask", "without RoPE": "rope"}
QUANTITIES = {
    "loss": "loss",
    "loss_suffix": "suffix",
    "copy_text": "copy, text",
    "copy_random": "copy, random",
    "copy_text_second": "second copy, text",
    "copy_random_second": "second copy, random",
}
HEADS_OF_KINDS = ((16, 0), (18, 6), (18, 8))
NEEDS = {  # the runs that order heads by need
    **{f"need {n}": f"code, {n} tokens" for n in LENGTHS},
    "attention": "code, 64 tokens",
    "attention prose": "prose, 64 tokens",
}
COSTLY = {"copy_random": "second copy of random tokens", "text": "text"}


def measure(folder: Path, names: Sequence[str] = tuple(COMMANDS)) -> pd.DataFrame:
    """Return the estimates of runs that the pages show, a row each, in nats; draw the pictures."""
    runs = dict[str, Run]()
    for name in names:
        if name.startswith("layers"):
            order_by_layers(folder)
        runs[name] = finished(folder / name.replace(" ", "-"), COMMANDS[name])
    for name in [name for name in TEXTS if name in runs]:
        image = IMAGES / f"layers_{name}.png"
        save_small(figures.draw(THREE_NUMBERS, runs[name].tables["pattern"], COLUMNS), image)
    if twins := [runs[f"maps {model}"] for model in TWINS if f"maps {model}" in runs]:
        draw_twins(twins)
    of_kinds = [kinds(runs["attention"].tables["attention"])] if "attention" in runs else []
    return pd.concat(
        [
            *of_kinds,
            rank_correlations(runs),
            *(
                estimates(name, run.tables[table], labels, columns)
                for name, run in runs.items()
                for table, labels, columns in STORED_OF.get(name, ())
            ),
        ]
    )


def order_by_layers(folder: Path) -> None:
    """Write the orders that begin with seven layers: those of least need, and every fourth."""
    heads = read_run(folder / "need-128").tables["order"]
    need = heads.groupby("layer")["value"].mean()
    first = {"least": sorted(need.nsmallest(7).index), "fourth": range(3, len(need), 4)}
    for name, layers in first.items():
        order = product([*layers, *(set(need.index) - {*layers})], sorted(heads["head"].unique()))
        rows = pd.DataFrame(order, columns=["layer", "head"])
        rows.to_csv(folder / f"layers-{name}.csv", index=False)


def rank_correlations(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the rank correlation of heads' need between each two runs that measured it."""
    needs = pd.DataFrame()
    for name, label in NEEDS.items():
        if name in runs:
            is_order = name.startswith("need")
            table = runs[name].tables["order" if is_order else "attention"]
            of_head = table.set_index(["layer", "head"])
            needs[label] = of_head["value" if is_order else "need_rope"]
    pairs = [*combinations(needs.columns, 2)]
    rows = pd.DataFrame(
        {
            "run": "rank correlation",
            "layer": pd.NA,
            "name": [" / ".join(pair) for pair in pairs],
            "measure": "need",
            "value": [needs[one].corr(needs[other], method="spearman") for one, other in pairs],
        }
    )
    return rows.assign(low=np.nan, high=np.nan)


def kinds(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many heads are of each kind, their mean needs, and those of some heads."""
    table = table.assign(name=kinds_of(table), heads=1)
    of_kinds = table.groupby("name").agg({"heads": "sum", "need_rope": "mean", "need_mask": "mean"})
    some = table.set_index(["layer", "head"]).loc[[*HEADS_OF_KINDS]].reset_index()
    some["name"] = [f"L{layer}H{head}" for layer, head in HEADS_OF_KINDS]
    shown = pd.concat((of_kinds.reset_index(), some[["name", "need_rope", "need_mask"]]))
    rows = shown.melt("name", var_name="measure").dropna(subset="value")
    return rows.assign(run="attention", layer=pd.NA, low=np.nan, high=np.nan)


def finished(folder: Path, command: str) -> Run:
    """Return a command's run; the command runs if its run is missing."""
    if not (folder / "manifest.json").is_file():
        name, *arguments = shlex.split(command)
        arguments = [word.replace("FOLDER", str(folder.parent)) for word in arguments]
        arguments += ["--out", str(folder)]
        subprocess.run([sys.executable, "-m", f"nope_probe.{name}", *arguments], check=True)
    return read_run(folder)


def estimates(
    run: str, table: pd.DataFrame, labels: Sequence[str], columns: Sequence[str]
) -> pd.DataFrame:
    """Return estimates of a run's table with their bounds, a row for each.

    Args:
        run: the run's name.
        table: its table.
        labels: the columns that name a row of the table.
        columns: the estimates.
    """
    names = table[list(labels)].astype(str).agg(" ".join, axis=1)
    layers = table.get("layer", pd.Series(pd.NA, index=table.index)).astype("Int64")
    parts = [
        pd.DataFrame(
            {
                "run": run,
                "layer": layers,
                "name": names,
                "measure": column,
                "value": table[column],
                "low": table.get(f"{column}_low"),
                "high": table.get(f"{column}_high"),
            }
        )
        for column in columns
        if column in table
    ]
    return pd.concat(parts).dropna(subset="value")


def draw_need(stored: pd.DataFrame) -> None:
    """Draw what text and copies cost by how many heads have no RoPE, at three lengths."""
    figure = make_subplots(1, 2, subplot_titles=[*reversed(COSTLY.values())])
    colours = ("#2b7bba", "#d9730d", "#18753a")
    for (n, ink), (column, measure) in product(
        zip(LENGTHS, colours, strict=True), enumerate(reversed(COSTLY), 1)
    ):
        rows = of(stored, run=f"need {n}")
        ks = [30, 60, 100, 150, 200]
        for name, dash in (("cost", "solid"), ("chance", "dash")):
            points = pd.concat([of(rows, name=f"{measure} {k}", measure=name) for k in ks])
            ends = np.concatenate([points["low"], points["high"][::-1]])
            shown = name == "cost" and column == 1
            line = {"x": ks, "y": points["value"], "line": {"color": ink, "dash": dash}}
            figure.add_scatter(**line, name=f"{n} tokens", showlegend=shown, row=1, col=column)
            band = {"x": [*ks, *ks[::-1]], "y": ends, "fill": "toself", "fillcolor": ink}
            hidden = {"opacity": 0.2, "mode": "none", "showlegend": False, "hoverinfo": "skip"}
            figure.add_scatter(**band, **hidden, row=1, col=column)
    figure.update_xaxes(title="heads without RoPE, of 270")
    figure.update_yaxes(title="cost, nats", rangemode="tozero")
    figure.update_layout(width=1000, height=420, template="plotly_white")
    save_small(figure, IMAGES / "need.png")


def draw_twins(runs: Iterable[Run], layer: int = 2) -> None:
    """Draw the positional patterns of both models, intact and without the mask."""
    titles = [
        f"{model}, L{layer}, {what}" for model in TWINS for what in ("intact", "without mask")
    ]
    figure = make_subplots(1, 4, subplot_titles=titles, horizontal_spacing=0.04)
    for index, run in enumerate(runs):
        scores = [torch.from_numpy(run.maps[f"score/{name}"][layer]) for name in ("intact", "mask")]
        patterns = [row_centred(of_condition, skip_keys=1).numpy() for of_condition in scores]
        limit = np.nanquantile(np.abs(patterns[0]), 0.99)
        for column, values in enumerate(patterns):
            bar = {"title": "nats", "x": 0.475 + 0.53 * index, "thickness": 10}
            colours = {"zmin": -limit, "zmax": limit, "colorscale": "RdBu_r", "colorbar": bar}
            trace = go.Heatmap(z=values, showscale=column == 1, **colours)
            figure.add_trace(trace, 1, 1 + 2 * index + column)
    figure.update_yaxes(autorange="reversed", constrain="domain", scaleanchor="x")
    figure.update_xaxes(title="key position", constrain="domain")
    figure.update_yaxes(title="query position", row=1, col=1)
    margin = {"t": 40, "b": 50, "l": 60, "r": 60}
    figure.update_layout(width=1200, height=330, margin=margin, template="plotly_white")
    figure.write_image(IMAGES / "twins.png")


def save_small(figure: go.Figure, image: Path) -> None:
    """Save a figure of the docs with few colours, in a file of a fifth of the size."""
    figures.save(figure, image)
    with Image.open(image) as picture:
        picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(image, optimize=True)


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the pages' tables in Markdown."""
    return [
        over_layers(of(stored, run="code")),
        by_text(stored),
        *(of_models(stored, question) for question in ("kept", "lead")),
        non_relative(of(stored, run="first layers")),
        written(of(stored, run="trace")),
        losses(of(stored, run="behaviour")),
        costs(of(stored, run="heads")),
        content(stored),
        without_rope(stored),
        of_layers(stored),
        correlations(of(stored, run="rank correlation")),
        needs_of_kinds(of(stored, run="attention")),
        strengths(stored),
        terms(stored),
        writers(stored),
        removed_writers(of(stored, run="trace", layer=3)),
    ]


def over_layers(rows: pd.DataFrame) -> str:
    """Return the table of means over layers, and of how many layers keep less than half."""
    lines = {}
    for name, label in CONDITIONS.items():
        row = of(rows, name=name)
        lines[label] = [
            cell
            for question in QUESTIONS
            for cell in (
                estimate(row, question),
                "{:.0f} of {:.0f}".format(
                    *(value(row, f"{question}_{count}") for count in ("below_half", "layers"))
                ),
            )
        ]
    columns = [name for title in QUESTIONS.values() for name in (title, "below half")]
    return markdown("mean of 30 layers at 64 tokens, nats", columns, lines)


def by_text(stored: pd.DataFrame) -> str:
    """Return the table of mean lead and order kept by text and first token."""
    lines = {
        label: [
            ", ".join(f"{value(of(stored, run=run, name=name), x):z.2f}" for x in QUESTIONS)
            for run in TEXTS
        ]
        for name, label in CONDITIONS.items()
    }
    return markdown("lead, order; nats", list(TEXTS.values()), lines)


def of_models(stored: pd.DataFrame, question: str) -> str:
    """Return the table of what is there of the order, or of the lead, in four models."""
    shown = {run: of(stored, run=run) for run in MODELS}
    for run, (_, layer) in MODELS.items():
        shown[run] = shown[run] if layer is None else of(shown[run], layer=layer)
    shown = {run: rows for run, rows in shown.items() if (rows["measure"] == question).any()}
    lines = {
        label: [estimate(of(rows, name=name), question) for rows in shown.values()]
        for name, label in CONDITIONS.items()
    }
    title = f"{QUESTIONS[question]}, nats"
    return markdown(title, [MODELS[run][0] for run in shown], lines)


def non_relative(rows: pd.DataFrame) -> str:
    """Return the table of the part that is no function of distance, with and without the mask."""
    columns = {
        "intact": ("intact", "non_relative"),
        "without the mask": ("mask", "non_relative"),
        "the mask's": ("mask", "mask_adds"),
    }
    lines = {
        f"L{layer}, {tokens}": [
            estimate(of(rows, layer=layer, name=f"{control}{removed}"), measure)
            for removed, measure in columns.values()
        ]
        for layer in (2, 3)
        for tokens, control in (("text", ""), ("shuffled", "shuffled "))
    }
    return markdown("part that is not relative, nats", [*columns], lines)


def written(rows: pd.DataFrame) -> str:
    """Return the table of each layer's lead and order: RoPE's part, and the main writer's."""
    lines = {
        f"L{layer}, {writer}": [
            estimate(of(rows, layer=layer, name=f"{question} {name}"), measure)
            for question in ("lead", "pattern")
            for name, measure in (("all", "size"), ("rotation", "part"), (f"key {writer}", "part"))
        ]
        for layer, writer in READERS.items()
    }
    columns = [
        f"{of_key}, {what}"
        for of_key in ("lead", "order")
        for what in ("whole", "rotation", "written into keys")
    ]
    return markdown("reader, writer; nats", columns, lines)


def losses(rows: pd.DataFrame) -> str:
    """Return the table of losses, and of how removals change them."""
    lines = {
        label: [
            estimate(of(rows, name=f"{quantity} {condition}"), *about)
            for about in [("value", ".2f") if condition == "intact" else ("difference", "+.2f")]
            for quantity in QUANTITIES
        ]
        for label, condition in REMOVED.items()
    }
    return markdown("nats", list(QUANTITIES.values()), lines)


def costs(rows: pd.DataFrame) -> str:
    """Return the table of what it costs to remove RoPE from the first heads."""
    lines = {
        title: [estimate(of(rows, name=f"others {measure} {k}"), "cost") for k in (1, 5)]
        for measure, title in COSTLY.items()
    }
    return markdown("cost, nats", ["L16H0", "the first five heads"], lines)


def content(stored: pd.DataFrame) -> str:
    """Return the table of what text costs without the content of heads."""
    orders = {
        "`positional`": ("content", "positional"),
        "`others`": ("content", "others"),
        "`others`, last": ("content least", "others"),
    }
    lines = {
        title: [
            estimate(of(stored, run=run, name=f"{order} text {k}"), "cost") for k in (60, 100, 136)
        ]
        for title, (run, order) in orders.items()
    }
    return markdown("cost on text, nats; first by", ["60 heads", "100 heads", "136 heads"], lines)


def without_rope(stored: pd.DataFrame) -> str:
    """Return the table of what it costs to remove RoPE from the heads that need it least."""
    runs = {f"need {n}": f"code, {n} tokens" for n in LENGTHS} | {"need prose": "prose, 128 tokens"}
    lines = {
        f"{k} heads, {text}": [
            estimate(of(stored, run=run, name=f"{measure} {k}"), column, "+.2f")
            for measure in reversed(COSTLY)
            for column in ("cost", "chance")
        ]
        for run, text in runs.items()
        for k in (60, 100, 150)
    }
    columns = [f"{what}, {of_heads}" for what in ("text", "copies") for of_heads in ("", "random")]
    columns = [column.removesuffix(", ") for column in columns]
    return markdown("cost, nats; random: mean [lowest, highest draw]", columns, lines)


def of_layers(stored: pd.DataFrame) -> str:
    """Return the table of what it costs to remove RoPE from whole layers."""
    runs = {
        "the 60 heads of least need": ("need 128", 60),
        "the 63 heads of the seven layers of least need": ("layers least", 63),
        "the 63 heads of every fourth layer": ("layers fourth", 63),
    }
    lines = {
        label: [
            estimate(of(stored, run=run, name=f"{measure} {k}"), "cost", "+.2f")
            for measure in reversed(COSTLY)
        ]
        for label, (run, k) in runs.items()
    }
    return markdown("cost without RoPE in, nats", ["text", "copies"], lines)


def correlations(rows: pd.DataFrame) -> str:
    """Return the table of the rank correlations between orders by need."""
    pairs = dict(zip(rows["name"], rows["value"], strict=True))
    labels = [*NEEDS.values()]
    lines = {
        label: [
            f"{pairs[pair]:.2f}" if (pair := f"{top} / {label}") in pairs else ""
            for top in labels[:-1]
        ]
        for label in labels[1:]
    }
    return markdown("rank correlation", labels[:-1], lines)


def needs_of_kinds(rows: pd.DataFrame) -> str:
    """Return the table of the kinds of heads: how many, and their mean need of RoPE and mask."""
    measures = {"heads": ("heads", ".0f"), "need_rope": ("need of RoPE", ".3f")}
    measures["need_mask"] = ("need of the mask", ".3f")
    names = ["sink", "order", "content", *(f"L{layer}H{head}" for layer, head in HEADS_OF_KINDS)]
    lines = {
        name: [
            "".join(f"{number:{style}}" for number in of(rows, name=name, measure=measure)["value"])
            for measure, (_, style) in measures.items()
        ]
        for name in names
    }
    return markdown("mean, nats", [title for title, _ in measures.values()], lines)


def strengths(stored: pd.DataFrame) -> str:
    """Return the table of the losses of the intact models, and the sizes of their patterns."""
    lines = {}
    for model in TWINS:
        record = json.loads((CHECKPOINTS / model / "training.json").read_text(encoding="utf-8"))
        own = of(stored, run=f"trace {model}", name="pattern all", measure="size")
        sizes = [f"{size:.2f}" for size in own.sort_values("layer")["value"]]
        lines[f"`{model}`"] = [f"{record['held_out_loss']:.3f}", *sizes]
    columns = ["held-out loss, nats", *(f"pattern of L{layer}, nats" for layer in range(4))]
    return markdown("model", columns, lines)


def terms(stored: pd.DataFrame) -> str:
    """Return the table of the terms of both models' patterns."""
    readers = [(model, layer) for model in TWINS for layer in (1, 2, 3)]
    columns = [f"{model} L{layer}" if layer == 1 else f"L{layer}" for model, layer in readers]
    names = {"all": ("whole", "size")} | {name: (label, "part") for name, label in TERMS.items()}
    lines = {}
    for name, (label, measure) in names.items():
        own = of(stored, name=f"pattern {name}")
        lines[label] = [
            f"{value(of(own, run=f'trace {model}', layer=layer), measure):z.2f}"
            for model, layer in readers
        ]
    return markdown("pattern, nats", columns, lines)


def writers(stored: pd.DataFrame) -> str:
    """Return the table of what writers write, and of what is lost without their position."""
    columns = {
        "predicted": "with queries",
        "held": "lost, scale held",
        "direct": "lost in the model",
        "total": "lost on all paths",
    }
    lines = {}
    for layer, writer in WRITERS:
        traced = of(stored, run="trace nope-tiny", layer=layer)
        without = of(stored, run="effects", layer=1) if layer == 1 else traced
        numbers = [
            value(of(traced, name=f"pattern key {writer}"), "part"),
            *(value(of(without, name=f"pattern {writer}"), measure) for measure in columns),
        ]
        lines[f"L{layer}, {writer}"] = [f"{number:z.2f}" for number in numbers]
    return markdown("reader, writer, nats", ["into keys", *columns.values()], lines)


def removed_writers(rows: pd.DataFrame) -> str:
    """Return the table of what L3 of SmolLM2 loses without the position of a writer."""
    columns = {
        ("lead", "held"): "scale held: what it writes",
        ("lead", "direct"): "in the model",
        ("lead", "total"): "on all paths",
        ("pattern", "total"): "other keys, on all paths",
    }
    lines = {
        writer: [
            estimate(of(rows, name=f"{question} {writer}"), measure, "z.1f")
            for question, measure in columns
        ]
        for writer in ("MLP2", "MLP0", "ATTN0", "MLP1")
    }
    return markdown("nats of L3's lead lost without", list(columns.values()), lines)


def of(rows: pd.DataFrame, **wanted: str | int) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    for column, value_of in wanted.items():
        rows = rows[rows[column] == value_of]
    return rows


def value(rows: pd.DataFrame, measure: str) -> float:
    """Return the one value of a measure."""
    return float(of(rows, measure=measure)["value"].item())


def estimate(rows: pd.DataFrame, measure: str, style: str = "z.2f") -> str:
    """Return the one estimate of a measure with its interval; empty if there is none."""
    row = of(rows, measure=measure)
    if row.empty:
        return ""
    ends = tuple(float(row[name].item()) for name in ("value", "low", "high"))
    return interval_text(ends, style)


def main(*arguments: str) -> None:
    folder, *names = arguments or ("",)
    if folder:
        measured = measure(Path(folder).resolve(), names or tuple(COMMANDS))
        stored = pd.read_csv(STORED)
        rows = pd.concat([stored[~stored["run"].isin(measured["run"])], measured])
        rows.to_csv(STORED, index=False, float_format="%.5g")
        if any(name.startswith("need") for name in rows["run"]):
            draw_need(rows)
    for table in tables(pd.read_csv(STORED)):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
