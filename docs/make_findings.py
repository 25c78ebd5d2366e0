"""Measure two language models and the shipped ones: python docs/make_findings.py FOLDER [RUN ...].

Each command of `COMMANDS`, or of the named ones, runs into one folder in FOLDER, unless it is
finished there (after `make real` of both models; three hours on two cores). Writes
docs/findings.csv and the pictures (needs Chromium), and pastes the tables into the README and into
the pages findings, intervals and trace: a table there is replaced by the one with its header.
Without FOLDER it pastes the tables of what is stored. `draw_attention.py` draws the pictures of
attention from the same FOLDER.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from make_long_sequences import markdown
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
from nope_probe.analyses.verdicts import Maker, kinds_of
from nope_probe.figures.intervals import interval_text
from nope_probe.figures.names import row_name
from nope_probe.run.folder import Run
from nope_probe.studies.ablate import COLUMNS, THREE_NUMBERS
from nope_probe.studies.ablate_page import carrier_text, maker_text

SMOLLM2, GEMMA = "--model smollm2-135m", "--model gemma-3-270m"
ALL_LAYERS = f"ablate {SMOLLM2} --layers all --n-seqs"
NO_MARK = "--remove written --kept-positions 0"
WORTH = "--remove rope written rope+written --measures loss"
TWINS = ("nope-tiny", "rope-tiny")
LENGTHS = {32: 64, 128: 16, 512: 8}  # tokens, and how many sequences
LONGER = {  # the model, tokens, how many sequences, and how many at once
    **{f"code {n}": (SMOLLM2, n, n_seqs, "") for n, n_seqs in ((256, 48), (1024, 16))},
    "gemma 256": (GEMMA, 256, 16, " --batch-size 4"),
}
SIZES = {  # the model, and how many texts
    **{model: (f"--model {model}", (64, 256, 1024)) for model in TWINS},
    "code": (f"{SMOLLM2} --layers all", (48, 192)),
    "prose": (f"{SMOLLM2} --layers all --data prose", (192,)),
    "gemma": (f"{GEMMA} --layers all", (48,)),
}
LEAST = "--remove rope --least --k 30 60 100 150 200 --draws 3"
GEMMA_LEAST = "--remove rope --least --k 8 16 27 40 53 --draws 3"  # of 72 heads, as many parts
COMMANDS = {
    "code": f"{ALL_LAYERS} 96",
    "prose": f"{ALL_LAYERS} 48 --data prose",
    "im_start": f'{ALL_LAYERS} 48 --bos "<|im_start|>"',
    "endoftext": f'{ALL_LAYERS} 48 --bos "<|endoftext|>"',
    "gemma": f"ablate {GEMMA} --layers all --n-seqs 96",
    "gemma never": f"ablate {GEMMA} --layers all --n-seqs 48 --bos never",
    "gemma turn": f'ablate {GEMMA} --layers all --n-seqs 48 --bos "<start_of_turn>"',
    **{
        run: f"ablate {model} --layers all --n-seqs {n_seqs} --seq-len {n} --remove written{small}"
        for run, (model, n, n_seqs, small) in LONGER.items()
    },
    **{
        f"{run} {n}": f"ablate {model} --n-seqs {n} --remove written"
        for run, (model, sizes) in SIZES.items()
        for n in sizes
    },
    "no mark code": f"{ALL_LAYERS} 48 {NO_MARK}",
    "no mark gemma": f"ablate {GEMMA} --layers all --n-seqs 48 {NO_MARK}",
    **{f"no mark {model}": f"ablate --model {model} {NO_MARK}" for model in TWINS},
    "worth nope-tiny": "behaviour --model nope-tiny --remove written --measures loss copy "
    "--n-seqs 256 --seq-len 96",
    "worth rope-tiny": f"behaviour --model rope-tiny {WORTH} copy --n-seqs 256 --seq-len 96",
    "free": "ablate --model parameter-free --n-seqs 512",
    **{model: f"ablate --model {model}" for model in TWINS},
    "first layers": f"ablate {SMOLLM2} --n-seqs 96 --remove sources",
    "attention": f"attention {SMOLLM2} --n-seqs 384 --seq-len 64 --text "
    '"Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter." '
    "--why L18H6 --query 14 --steps 2",
    "attention gemma": f"attention {GEMMA} --n-seqs 96 --seq-len 64",
    "attention prose": f"attention {SMOLLM2} --n-seqs 96 --seq-len 64 --data prose",
    "trace": f"trace {SMOLLM2} --layers 6",
    **{f"trace {model}": f"trace --model {model} --seq-len 96 --n-seqs 512" for model in TWINS},
    "effects": "trace --model nope-tiny --seq-len 96 --n-seqs 512 --reader L1",
    "behaviour": f"behaviour {SMOLLM2} --measures loss copy --remove mask rope --n-seqs 32 "
    "--seq-len 128",
    **{
        run: f"heads {model} --remove rope --by others --k 1 5 --draws 4 --n-seqs 32 --seq-len 128"
        for run, model in (("heads", SMOLLM2), ("heads gemma", GEMMA))
    },
    "content": f"heads {SMOLLM2} --remove content --by positional others "
    "--k 60 100 136 --draws 3 --n-seqs 24",
    "content least": f"heads {SMOLLM2} --remove content --by others --least "
    "--k 60 100 136 --draws 2 --n-seqs 24",
    **{
        f"need {n}": f"heads {SMOLLM2} {LEAST} --seq-len {n} --n-seqs {of_n} --mean-seqs {of_n}"
        for n, of_n in LENGTHS.items()
    },
    "need gemma": f"heads {GEMMA} {GEMMA_LEAST} --seq-len 128 --n-seqs 16 --mean-seqs 16",
    "need prose": f"heads {SMOLLM2} --remove rope --least --k 60 100 150 --draws 3 --seq-len 128 "
    "--n-seqs 8 --mean-seqs 8 --data prose --by FOLDER/need-128/order.csv",
    **{
        run: f"heads {SMOLLM2} --remove rope --k 63 --draws 3 --seq-len 128 --n-seqs 16 "
        f"--mean-seqs 16 --by FOLDER/{run.replace(' ', '-')}.csv"
        for run in ("layers least", "layers fourth")
    },
}
# What is stored of a run: a table, the columns that name a row of it, and its estimates.
NUMBERS = {
    "lead": "first key's lead",
    "order": "order of the other keys",
    "not_by_distance": "not by distance",
}
VALUES = ("pattern", ("removed", "replacement"), tuple(NUMBERS))
COUNTS = ("layers", "below_half")
COSTS_OF = ("cost", "cost_with_noise", "cost_null")
MEANS = (*NUMBERS, *(f"{name}_{count}" for name in NUMBERS for count in COUNTS), *COSTS_OF, "loss")
OVER_LAYERS = ("over_layers", ("removed", "replacement"), MEANS)
EFFECTS = ("effects", ("of", "writer"), ("predicted", "held", "direct", "total"))
TRACED = [
    ("terms", ("of", "term"), ("size", "part")),
    ("writers", ("of", "side", "writer"), ("part",)),
    EFFECTS,
]
NOT_BY_DISTANCE = (("removed", "replacement"), ("not_by_distance",))
LAYERED = {"code": "code, 96", "code 192": "code, 192", "prose 192": "prose, 192", "gemma": "Gemma"}
COSTS = [("tests", ("order", "measure", "k"), ("cost",))]
NEED = [("tests", ("measure", "k"), ("cost", "chance"))]
STORED_OF = {
    **{run: [OVER_LAYERS] for run, command in COMMANDS.items() if command.startswith("ablate")},
    **{run: [VALUES, OVER_LAYERS] for run in ("free", *TWINS)},
    "trace": TRACED,
    "trace nope-tiny": TRACED,
    "trace rope-tiny": TRACED,
    "effects": [EFFECTS],
    **{
        run: [("behaviour", ("measure", "removed"), ("value", "difference", "beyond_null"))]
        for run in COMMANDS
        if run.startswith(("behaviour", "worth"))
    },
    "heads": COSTS,
    "heads gemma": COSTS,
    "content": COSTS,
    "content least": COSTS,
    **{run: NEED for run in COMMANDS if run.startswith(("need", "layers"))},
}
ROOT, PAGES = Path(__file__).parent.parent, ("findings", "intervals", "trace")
STORED, IMAGES = Path(__file__).parent / "findings.csv", Path(__file__).parent / "images"
CHECKPOINTS = Path(__file__).parent.parent / "nope_probe" / "checkpoints"
TEXTS = {
    "code": "SmolLM2: any",
    "prose": "prose",
    "im_start": "im_start",
    "endoftext": "endoftext",
    "gemma never": "Gemma 3: any",
    "gemma turn": "start_of_turn",
    "gemma": "bos",
}
DRAWN = ("code", "prose", "im_start", "endoftext", "gemma")  # layer by layer
CONDITIONS = {
    f"{removed} {by}": row_name(removed, by)
    for removed, by in (
        *((name, "none") for name in ("intact", "mask", "rope", "mask+rope", "written")),
        *((name, "mean") for name in ("w_q", "w_k", "w_q+w_k", "w_o")),
    )
}
WORDS = {"lead": "lead", "order": "order", "not_by_distance": "not by distance"}
WITHIN = "within noise"
SHORTER = ("code", "gemma")  # the runs of the README's table
MODELS = {
    "free": "eq. 1",
    "nope-tiny": "nope-tiny",
    "rope-tiny": "rope-tiny",
    "code": "SmolLM2",
    "gemma": "Gemma 3",
}
LARGEST = {  # the layer where each number is largest
    "free": {"order": 3},
    "nope-tiny": {"lead": 2, "order": 2, "not_by_distance": 2},
    "rope-tiny": {"lead": 3, "order": 1, "not_by_distance": 3},
}
WRITTEN = {
    "nope-tiny": "nope-tiny, 64 tokens",
    "rope-tiny": "rope-tiny, 64",
    "code": "SmolLM2, 64, code",
    "prose": "SmolLM2, 64, prose",
    "gemma": "Gemma 3, 64, code",
}
BY_LENGTH = {
    "code": "SmolLM2, 64 tokens, 96 texts",
    "code 256": "SmolLM2, 256, 48",
    "code 1024": "SmolLM2, 1,024, 16",
    "gemma": "Gemma 3, 64 tokens, 96 texts",
    "gemma 256": "Gemma 3, 256, 16",
}
HOW_MANY = {
    **{f"{model} {n}": f"{model}, {n:,} texts" for model in TWINS for n in (64, 256, 1024)},
    "code 48": "SmolLM2, code, 48 texts",
    "code": "SmolLM2, code, 96 texts",
    "code 192": "SmolLM2, code, 192 texts",
    "prose": "SmolLM2, prose, 48 texts",
    "prose 192": "SmolLM2, prose, 192 texts",
    "gemma 48": "Gemma 3, code, 48 texts",
    "gemma": "Gemma 3, code, 96 texts",
}
QUARTERS = {  # the model, where its texts begin, and how it is called
    f"quarters {run} {windows}": (model, windows, f"{MODELS[run]}, {where}")
    for run, model in (("code", "smollm2-135m"), ("gemma", "gemma-3-270m"))
    for windows, where in (("random", "cut at random"), ("start", "from a document's start"))
}
SPANS = {"1 to 15": (0, 15), "16 to 31": (15, 31), "32 to 47": (31, 47), "48 to 63": (47, 63)}
SPANS |= {"later half": (31, 63), "all": (0, 63)}
WORTHS = {
    "worth nope-tiny": "nope-tiny, 96 tokens",
    "worth rope-tiny": "rope-tiny, 96",
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
REMOVED = {row_name(name): name for name in ("intact", "mask", "rope")}
QUANTITIES = {
    "loss": "loss",
    "loss_suffix": "suffix",
    "copy_text": "copy, text",
    "copy_random": "copy, random",
    "copy_text_second": "second copy, text",
    "copy_random_second": "second copy, random",
}
HEADS_OF_KINDS = ((16, 0), (18, 6), (18, 8))  # of SmolLM2
OF_FAMILIES = {"attention": "SmolLM2, 270 heads", "attention gemma": "Gemma 3, 72 heads"}
KEYS = {"keys smollm2-135m": 24, "keys gemma-3-270m": 16}  # texts of `constant_keys`
COUNTED = ("half", "fifth")
ASKED = {  # what attention is about: its name in the table, and how it is written
    "first_weight": ("weight of the first key", ".0%"),
    "information": ("information above uniform, nats", ".2f"),
    "first": ("of it: whether to look at the first key", ".2f"),
    "others": ("of it: where to look among the other keys", ".2f"),
    "others_position": ("of that: position, the same in every text", ".2f"),
    "half": ("heads with half or more of that in position", ".0f"),
    "fifth": ("heads with less than a fifth", ".0f"),
    "positional_share": ("need of RoPE and position's share: rank correlation", "z.2f"),
    "others_share": ("the same among the other keys", "z.2f"),
}
NEEDS = {  # the runs that order heads by need
    **{f"need {n}": f"code, {n} tokens" for n in LENGTHS},
    "attention": "code, 64 tokens",
    "attention prose": "prose, 64 tokens",
}
NULLS = (*(run for run in WRITTEN if run not in TWINS), *TWINS)
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
COSTLY = {"copy_random": "second copy of random tokens", "text": "text"}


def measure(folder: Path, names: Sequence[str] = (*COMMANDS, *KEYS, *QUARTERS)) -> pd.DataFrame:
    """Return the estimates of runs that the pages show, a row each, in nats; draw the pictures."""
    runs = dict[str, Run]()
    for name in [name for name in names if name in COMMANDS]:
        if name.startswith("layers"):
            order_by_layers(folder)
        runs[name] = finished(folder / name.replace(" ", "-"), COMMANDS[name])
    for name in [name for name in DRAWN if name in runs]:
        image = IMAGES / f"layers_{name}.png"
        rows = of_conditions(runs[name], "pattern")
        save_small(figures.draw(THREE_NUMBERS, rows, COLUMNS), image)
    for image, shown in SUMS.items():
        if {*shown} <= {*runs}:
            draw_sum([(title, layer, runs[run]) for run, (title, layer) in shown.items()], image)
    return pd.concat(
        [
            *(
                of_heads(name, runs[name].tables["attention"])
                for name in OF_FAMILIES
                if name in runs
            ),
            *([steps_back(runs["attention"])] if "attention" in runs else []),
            *(constant_keys(name) for name in names if name in KEYS),
            *(by_quarter(name) for name in names if name in QUARTERS),
            *(answers_of(name, runs[name]) for name in MODELS if name in runs),
            *([rank_correlations(runs)] if {*NEEDS} <= {*runs} else []),
            *(
                null_means(name, run.tables["pattern"])
                for name, run in runs.items()
                if name in NULLS
            ),
            *(
                estimates(name, of_conditions(run, table), labels, columns)
                for name, run in runs.items()
                for table, labels, columns in STORED_OF.get(name, ())
            ),
            *(
                estimates(name, rows[rows["removed"].isin(["intact", "written"])], *NOT_BY_DISTANCE)
                for name, rows in (
                    (name, runs[name].tables["pattern"]) for name in LAYERED if name in runs
                )
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


def of_heads(run: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return what the attention of a model's heads is about, and the needs of its kinds of heads.

    Args:
        run: the run's name.
        table: its `attention.csv`.
    """
    table = table.assign(
        name=kinds_of(table),
        heads=1,
        first=table["first_position"] + table["first_content"],
        others=table["others_position"] + table["others_content"],
        half=table["others_share"] >= 0.5,
        fifth=table["others_share"] < 0.2,
    )
    of_all = table[[*ASKED]].mean()
    of_all[[*COUNTED]] = table[[*COUNTED]].sum()
    shares = table[["positional_share", "others_share"]]
    of_all[[*shares]] = shares.corrwith(table["need_rope"], method="spearman")
    of_kinds = table.groupby("name").agg({"heads": "sum", "need_rope": "mean", "need_mask": "mean"})
    shown = [of_all.to_frame("all").T.rename_axis("name").reset_index(), of_kinds.reset_index()]
    if run == "attention":
        some = table.set_index(["layer", "head"]).loc[[*HEADS_OF_KINDS]]
        some["name"] = [f"L{layer}H{head}" for layer, head in HEADS_OF_KINDS]
        shown.append(some[["name", "need_rope", "need_mask"]])
    rows = pd.concat(shown).melt("name", var_name="measure").dropna(subset="value")
    return rows.assign(run=run, layer=pd.NA, low=np.nan, high=np.nan)


def answers_of(name: str, run: Run) -> pd.DataFrame:
    """Return what makes and carries each number, a row each, in how many layers of how many."""
    rows = run.answer
    columns = [rows[column].astype(str) for column in ("number", "way", "made_by", "carried_by")]
    texts = ["|".join(cells) for cells in zip(*columns, strict=True)]
    found = {"name": texts, "value": rows["layers"], "low": rows["of_layers"]}
    return pd.DataFrame({**found, "high": rows["below_zero"]}).assign(
        run=name, layer=pd.NA, measure="answer"
    )


def steps_back(run: Run) -> pd.DataFrame:
    """Return what L16H0 wrote for L18H6 to look at: its term, what it moved, and the effect."""
    steps = run.tables["why_steps"]
    look = steps[(steps["step"] == 1) & steps["moved_from"].isna()]
    of_writer = steps[(steps["step"] == 1) & (steps["writer"] == "L16H0")]
    moved = of_writer.dropna(subset="moved_from").iloc[0]
    parts = {
        "score": look[~look["side"].isin(["mean", "other"])]["nats"].sum()
        + of(look, writer="other writers")["nats"].item(),
        "written": of(of_writer[of_writer["moved_from"].isna()], side="key")["nats"].item(),
        "moved": moved["nats"],
        "mean": of(of_writer, side="mean")["nats"].item(),
        "effect": moved["effect"],
    }
    rows = pd.DataFrame({"name": "L18H6", "measure": [*parts], "value": [*parts.values()]})
    return rows.assign(run="attention", layer=pd.NA, low=np.nan, high=np.nan)


def by_quarter(run: str) -> pd.DataFrame:
    """Return the cost of written position in parts of 64 positions: less its null's, and both.

    The loss at a position is that of its token, so the first token has none.
    """
    name, windows, _ = QUARTERS[run]
    loaded = load(name)
    texts = sequences(tokenizer=loaded.tokenizer, n_seqs=192, seq_len=64, windows=windows)
    losses = {"intact": capture_losses(loaded, texts)}
    for removed in ("written", "written_null"):
        with ablated(loaded, removed, tokens=texts) as model:
            losses[removed] = capture_losses(model, texts)
    of_document = {what: by_document(x, texts.documents) for what, x in losses.items()}
    rows = []
    for span, (first, stop) in SPANS.items():
        at = {what: x[:, first:stop].mean(1) for what, x in of_document.items()}
        for measure, values in cost_of(at["written"], at["intact"], at["written_null"]).items():
            ends = zip(("value", "low", "high"), mean_interval(values).ends, strict=True)
            rows.append({"name": span, "measure": measure, **dict(ends)})
    return pd.DataFrame(rows).assign(run=run, layer=pd.NA)


def constant_keys(run: str) -> pd.DataFrame:
    """Return the mean order with constant keys in all layers, and in the read layer alone.

    The mean of a norm's output on queries and keys is shorter than its outputs: where a model has
    such norms, their means take the place of their outputs too.
    """
    loaded = load(run.removeprefix("keys "))
    texts = sequences(tokenizer=loaded.tokenizer, n_seqs=KEYS[run], seq_len=64)
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
    rows = pd.DataFrame({"run": run, "name": [*orders], "value": values})
    return rows.assign(layer=pd.NA, measure="order", low=np.nan, high=np.nan)


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
    rows = pd.concat(parts).dropna(subset="value")
    return rows[(rows["measure"] != "cost") | (rows["value"] != 0)]  # of the intact model


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


def of_conditions(run: Run, table: str) -> pd.DataFrame:
    """Return a table of a run, `pattern` without the rows of its controls."""
    rows = run.tables[table]
    is_pattern = table == "pattern"
    return rows[rows["removed"].isin(run.manifest.results["conditions"])] if is_pattern else rows


def null_means(name: str, pattern: pd.DataFrame) -> pd.DataFrame:
    """Return the means over layers of the three numbers in the null of written position."""
    null = pattern[pattern["removed"] == "written_null"]
    if null.empty:  # of a run whose controls were a table
        raise ValueError(f"{name} has no null: run it again")
    values = null[[*NUMBERS]].mean().rename("value").rename_axis("measure").reset_index()
    return values.assign(run=name, layer=pd.NA, name="its null", low=np.nan, high=np.nan)


def draw_sum(shown: Sequence[tuple[str, int, Run]], image: str) -> None:
    """Draw the patterns of some models' layers as the sum of what each source makes, a row each."""
    titles = [*ADDENDS.values(), *[""] * (len(ADDENDS) * (len(shown) - 1))]
    figure = make_subplots(
        len(shown),
        len(ADDENDS),
        subplot_titles=titles,
        horizontal_spacing=0.03,
        vertical_spacing=0.06,
    )
    for row, (title, layer, run) in enumerate(shown, 1):
        maps = {name: run.maps[name][layer].copy() for name in ADDENDS if name in run.maps}
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
    figure.update_layout(
        width=1200, height=60 + 240 * len(shown), margin=margin, template="plotly_white"
    )
    save_small(figure, IMAGES / image)


def save_small(figure: go.Figure, image: Path) -> None:
    """Save a figure of the docs with few colours, in a file of a fifth of the size."""
    figures.save(figure, image)
    with Image.open(image) as picture:
        picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(image, optimize=True)


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the pages' tables in Markdown."""
    return [
        compact(families(stored)).replace(WITHIN, "noise"),
        compact(verdicts(stored)),
        *(over_layers(at(stored, run, "lead"), f"{MODELS[run]}, nats") for run in SHORTER),
        keys_alone(stored),
        by_text(stored),
        *(of_models(stored, number) for number in NUMBERS),
        by_length(stored),
        how_many(stored),
        layer_by_layer(stored),
        quarters(stored),
        without_written(stored),
        worth(stored),
        written(of(stored, run="trace")),
        losses(of(stored, run="behaviour")),
        asked(stored),
        why(of(stored, run="attention", name="L18H6")),
        costs(stored),
        content(stored),
        without_rope(stored),
        of_layers(stored),
        correlations(of(stored, run="rank correlation")),
        needs_of_kinds(stored),
        strengths(stored),
        terms(stored),
        writers(stored),
        removed_writers(of(stored, run="trace", layer=3)),
    ]


def compact(table: str) -> str:
    """Return a table without spaces around its cells, as the README's."""
    return re.sub(r" *\| *", "|", table)


def families(stored: pd.DataFrame) -> str:
    """Return the README's table: the three numbers, and the cost of removal, in two families."""
    lines = {
        label: [
            cell(of(at(stored, run, number), name=name), number)
            for run in SHORTER
            for number in (*NUMBERS, "cost")
        ]
        for name, label in CONDITIONS.items()
    }
    columns = [
        f"{MODELS[run]}: {title}" if title == "lead" else title
        for run, title in product(SHORTER, (*WORDS.values(), "cost"))
    ]
    return markdown("nats", columns, lines)


def verdicts(stored: pd.DataFrame) -> str:
    """Return the README's table of what makes each number in five models."""
    lines = {}
    for number, title in NUMBERS.items():
        cells = []
        for run in MODELS:
            rows = of(stored, run=run, measure="answer")
            rows = rows[rows["name"].str.startswith(f"{number}|")]
            makers, carriers = [], ""
            for row in rows[rows["value"] >= rows["low"] / 3].itertuples():
                _, way, sources, carriers = row.name.split("|")
                maker = Maker(way=way, sources=tuple(sources.split("+")) if sources else ())
                count = f" ({row.value:.0f}/{row.low:.0f})" if row.low else ""
                makers.append(maker_text(maker, number) + count)
            below = rows["high"].max()
            if number == "lead" and below >= rows["low"].max() / 3 > 0:
                makers.append(f"trails in {below:.0f}")
            carried = ", ".join(map(carrier_text, filter(None, carriers.split(", "))))
            cells.append("<br>".join(makers) + f"<br>*{carried}*" * bool(carried))
        lines[title] = cells
    return markdown("made by<br>*carried by*", list(MODELS.values()), lines)


def over_layers(rows: pd.DataFrame, title: str, names: Mapping[str, str] = CONDITIONS) -> str:
    """Return the table of means over layers, and of how many layers keep less than half."""
    lines = {label: over_layers_cells(of(rows, name=name)) for name, label in names.items()}
    columns = [name for heading in NUMBERS.values() for name in (heading, "below half")]
    return markdown(title, [*columns, "cost"], lines)


def over_layers_cells(row: pd.DataFrame) -> list[str]:
    """Return the cells of one condition: each number, its layers below half, and the cost."""
    cells = []
    for number in NUMBERS:
        counts = [value(row, f"{number}_{count}") for count in ("below_half", "layers")]
        below = "{:.0f}\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}{:.0f}".format(*counts)
        cells += [estimate(row, number), below]
    return [*cells, estimate(row, "cost", "+z.2f")]


def by_length(stored: pd.DataFrame) -> str:
    """Return the table of the three numbers by the length of the texts."""
    names = ("intact none", "mask none", "written none", "rope none", "mask+rope none")
    lines = {
        f"{title}: {CONDITIONS[name]}": over_layers_cells(of(at(stored, run, "lead"), name=name))
        for run, title in BY_LENGTH.items()
        for name in names
    }
    columns = [name for heading in NUMBERS.values() for name in (heading, "below half")]
    return markdown("nats, mean of all layers", [*columns, "cost"], lines)


def how_many(stored: pd.DataFrame) -> str:
    """Return the table of the numbers of written position by how many texts there are."""
    lines = {}
    for run, title in HOW_MANY.items():
        rows = of(stored, run=run)
        rows = rows[rows["layer"].isna()]
        written = of(rows, name="written none")
        intact, null = (
            cell(of(rows, name=name), "not_by_distance") for name in ("intact none", "its null")
        )
        lines[title] = [
            *(estimate(written, number) for number in NUMBERS),
            intact,
            null,
            *(estimate(written, cost, "+z.3f") for cost in COSTS_OF),
        ]
    columns = [
        *NUMBERS.values(),
        "not by distance, intact",
        "its null",
        "cost",
        "rise",
        "null's rise",
    ]
    return markdown("without written position, nats", columns, lines)


def layer_by_layer(stored: pd.DataFrame) -> str:
    """Return the table of the part not by distance in every layer, with what is not written.

    Layers in which no text's part exceeds its noise are left out.
    """
    rows = of(stored, measure="not_by_distance").dropna(subset="layer")
    intact = of(rows, name="intact none")
    known = intact[intact["run"].isin(LAYERED) & (intact["low"] > 0)]["layer"]
    lines = {
        f"L{layer:.0f}": [
            cell(of(rows, run=run, layer=layer, name=name), "not_by_distance")
            for run in LAYERED
            for name in ("intact none", "written none")
        ]
        for layer in sorted({*known})
    }
    columns = [f"{title}: {what}" for title in LAYERED.values() for what in ("intact", "without")]
    return markdown("not by distance, nats", columns, lines)


def quarters(stored: pd.DataFrame) -> str:
    """Return the table of the cost of written position by position in the text."""
    lines = {
        f"{title}: {what}": [
            estimate(of(stored, run=run, name=span), measure, "+z.2f") for span in SPANS
        ]
        for run, (_, _, title) in QUARTERS.items()
        for measure, what in (("cost", "cost"), ("cost_null", "null's rise"))
    }
    return markdown("nats a token, at positions", list(SPANS), lines)


def keys_alone(stored: pd.DataFrame) -> str:
    """Return the table of the order with constant keys in all layers, and in one layer."""
    columns = {
        "intact": "intact",
        "w_k": f"{row_name('w_k', 'mean')} in all layers",
        "w_k here": "in the read layer alone",
        "w_q+w_k": row_name("w_q+w_k", "mean"),
        "norms": "the same after their norms",
    }
    lines = {
        f"{model}, {KEYS[run]} texts": [
            number_or_nothing(of(stored, run=run, name=name), "order") for name in columns
        ]
        for run, model in zip(KEYS, ("SmolLM2", "Gemma 3"), strict=True)
    }
    return markdown("order of the other keys, nats", list(columns.values()), lines)


def by_text(stored: pd.DataFrame) -> str:
    """Return the table of mean lead and order kept by text and first token."""
    lines = {
        label: [
            ", ".join(
                number_or_nothing(of(stored, run=run, name=name), number)
                for number in ("lead", "order")
            ).strip(", ")
            for run in TEXTS
        ]
        for name, label in CONDITIONS.items()
    }
    lines["loss of text, intact"] = [
        number_or_nothing(of(stored, run=run, name="intact none"), "loss") for run in TEXTS
    ]
    return markdown("lead, order; nats", list(TEXTS.values()), lines)


def of_models(stored: pd.DataFrame, number: str) -> str:
    """Return the table of what is there of a number in five models."""
    runs = [run for run in MODELS if number in LARGEST.get(run, NUMBERS)]
    lines = {
        label: [estimate(of(at(stored, run, number), name=name), number) for run in runs]
        for name, label in CONDITIONS.items()
    }
    titles = {"code": "mean of 30 layers", "gemma": "mean of 18 layers"}
    columns = [f"{MODELS[run]}, {titles.get(run) or place(run, number)}" for run in runs]
    return markdown(f"{NUMBERS[number]}, nats", columns, lines)


def at(stored: pd.DataFrame, run: str, number: str) -> pd.DataFrame:
    """Return the rows of a run's layer where a number is largest; of large models, the means."""
    rows = of(stored, run=run)
    layer = LARGEST.get(run, {}).get(number)
    return rows[rows["layer"].isna()] if layer is None else of(rows, layer=layer)


def place(run: str, number: str) -> str:
    """Return the layer where a number is largest, as text."""
    return f"L{LARGEST[run][number]}"


def cell(rows: pd.DataFrame, number: str) -> str:
    """Return a number without its interval; a size within its noise says so."""
    row = of(rows, measure=number)
    if number == "not_by_distance" and not row.empty and row["low"].item() <= 0:
        return WITHIN
    return number_or_nothing(rows, number, "+z.2f" if number == "cost" else "z.2f")


def without_written(stored: pd.DataFrame) -> str:
    """Return the table of the three numbers without written position, and in its null."""
    lines = {}
    for run, label in WRITTEN.items():
        rows, no_mark = (of(stored, run=name) for name in (run, f"no mark {run}"))
        lines[label] = [
            cell(of(rows[rows["layer"].isna()], name=name), number)
            for number in ("order", "not_by_distance", "lead")
            for name in ("intact none", "written none", "its null")
        ] + [number_or_nothing(of(no_mark, name="written none"), "lead")]
    columns = [
        f"{number}: {what}"
        for number in ("order", "not by distance", "lead")
        for what in ("intact", "without", "null")
    ]
    return markdown("mean of all layers, nats", [*columns, "lead: mark taken too"], lines)


def worth(stored: pd.DataFrame) -> str:
    """Return the table of what position is worth: the rise of losses, nats."""
    quantities = {
        "loss": "text",
        "copy_text_second": "second copy of a text",
        "copy_random_second": "second copy of random tokens",
    }
    removals = {
        "rope": (row_name("rope"), "difference"),
        "written": (row_name("written"), "beyond_null"),
        "written_null": ("its null", "difference"),
        "rope+written": (row_name("rope+written"), "difference"),
    }
    lines = {
        f"{label}: {what}": [
            estimate(of(stored, run=run, name=f"{quantity} {removed}"), measure, "+z.2f")
            for removed, (_, measure) in removals.items()
        ]
        for run, label in WORTHS.items()
        for quantity, what in quantities.items()
    }
    lines = {label: line for label, line in lines.items() if any(line)}
    return markdown("rise of the loss, nats", [title for title, _ in removals.values()], lines)


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


def asked(stored: pd.DataFrame) -> str:
    """Return the table of what the attention of both families' heads is about."""
    lines = {
        title: [
            number_or_nothing(of(stored, run=run, name="all"), measure, style)
            for run in OF_FAMILIES
        ]
        for measure, (title, style) in ASKED.items()
    }
    return markdown("mean of all heads", list(OF_FAMILIES.values()), lines)


def why(rows: pd.DataFrame) -> str:
    """Return the table of why L18H6 looks at "field": terms and an effect of the writer L16H0."""
    columns = {
        "score": "score, less its row's mean",
        "written": "written into the key by L16H0",
        "moved": 'moved from the first " Whit"',
        "mean": "less the mean over keys",
        "effect": "effect of what it moved",
    }
    line = [number_or_nothing(rows, measure) for measure in columns]
    return markdown("nats", list(columns.values()), {'L18H6, second " Whit" to "field"': line})


def costs(stored: pd.DataFrame) -> str:
    """Return the table of what it costs to remove RoPE from the first heads."""
    lines = {
        f"{model}, {title}": [
            estimate(of(stored, run=run, name=f"others {measure} {k}"), "cost") for k in (1, 5)
        ]
        for run, model in (("heads", "SmolLM2"), ("heads gemma", "Gemma 3"))
        for measure, title in COSTLY.items()
    }
    return markdown("cost, nats", ["the first head", "the first five"], lines)


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
    runs = {f"need {n}": f"code, {n} tokens" for n in LENGTHS}
    runs |= {"need prose": "prose, 128 tokens", "need gemma": "of 72, Gemma 3, code, 128 tokens"}
    lines = {
        f"{k} heads, {text}".replace("heads, of", "heads of"): [
            estimate(of(stored, run=run, name=f"{measure} {k}"), column, "+.2f")
            for measure in reversed(COSTLY)
            for column in ("cost", "chance")
        ]
        for run, text in runs.items()
        for k in ((16, 27, 40) if run == "need gemma" else (60, 100, 150))
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


def needs_of_kinds(stored: pd.DataFrame) -> str:
    """Return the table of the kinds of heads: how many, and their mean need of RoPE and mask."""
    measures = {"heads": ("heads", ".0f"), "need_rope": ("need of RoPE", ".3f")}
    measures["need_mask"] = ("need of the mask", ".3f")
    names = ["sink", "order", "content", *(f"L{layer}H{head}" for layer, head in HEADS_OF_KINDS)]
    lines = {
        name: [
            number_or_nothing(of(stored, run=run, name=name), measure, style)
            for run in OF_FAMILIES
            for measure, (_, style) in measures.items()
        ]
        for name in names
    }
    columns = [
        f"{model.split(',')[0]}: {title}"
        for model in OF_FAMILIES.values()
        for title, _ in measures.values()
    ]
    return markdown("mean, nats", columns, lines)


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


def number_or_nothing(rows: pd.DataFrame, measure: str, style: str = "z.2f") -> str:
    """Return the one value of a measure without its interval; empty if there is none."""
    found = of(rows, measure=measure)["value"]
    return "" if found.empty else format(float(found.item()), style)


def estimate(rows: pd.DataFrame, measure: str, style: str = "z.2f") -> str:
    """Return the one estimate of a measure with its interval; empty if there is none."""
    row = of(rows, measure=measure)
    if row.empty:
        return ""
    ends = tuple(float(row[name].item()) for name in ("value", "low", "high"))
    if measure == "not_by_distance" and ends[1] <= 0:
        return WITHIN
    return interval_text(ends, style).replace(", ", ",\N{NO-BREAK SPACE}")


def paste(made: Sequence[str]) -> None:
    """Put tables into the pages, in the places of the tables, or headers, that begin alike."""
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES)):
        text = page.read_text(encoding="utf-8")
        for table in made:
            header = re.escape(table.partition("\n")[0])
            text = re.sub(
                rf"^{header}\n(\|.*\n)*", lambda _, new=table: f"{new}\n", text, flags=re.M
            )
        page.write_text(text, encoding="utf-8")


def main(*arguments: str) -> None:
    folder, *names = arguments or ("",)
    if folder:
        measured = measure(Path(folder).resolve(), names or tuple(COMMANDS))
        stored = pd.read_csv(STORED)
        rows = pd.concat([stored[~stored["run"].isin(measured["run"])], measured])
        rows = rows.astype({"layer": "Int64", "low": float, "high": float})
        rows.to_csv(STORED, index=False, float_format="%.5g")
        if any(name.startswith("need") for name in rows["run"]):
            draw_need(rows)
    paste(tables(pd.read_csv(STORED)))


if __name__ == "__main__":
    main(*sys.argv[1:])
