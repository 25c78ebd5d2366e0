"""Measure SmolLM2-135M for README and findings.md: python docs/make_smollm2.py FOLDER.

Each command of `COMMANDS` runs into one folder in FOLDER, unless it is finished there.
Writes docs/smollm2.csv (half an hour on two cores, after `make real`) and a picture, and prints
the tables of the page. `draw_attention.py` draws the pictures of attention from the same FOLDER.
Without FOLDER it prints the tables of what is stored.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float
from make_long_sequences import Row, markdown

from nope_probe import figures, read_run
from nope_probe.figures.intervals import interval_text
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.run.folder import Run

PAPER = Path(__file__).parents[1] / "recipes" / "paper"
sys.path.insert(0, str(PAPER))
from published_panels import published, resampled  # noqa: E402
from reproduce_settings import LANGUAGE_MODELS  # noqa: E402

Cells = Float[np.ndarray, "query_pos key_pos"]
NAME, TITLE = "smollm2-135m", "SmolLM2-135M"
COMMANDS = {
    "ablate": f"ablate --model {NAME} --n-seqs 96",
    "figure5": f"reproduce figure5 --model {NAME} --data shipped --n-seqs 48 --seq-len 1024",
    "trace": f"trace --model {NAME} --layers 6",
    "behaviour": f"behaviour --model {NAME} --measures loss copy --remove mask rope --n-seqs 32 "
    "--seq-len 128",
    "attention": f"attention --model {NAME} --n-seqs 384 --seq-len 64 --text "
    '"Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter."',
    "heads": f"heads --model {NAME} --remove rope --k 1 5 --n-seqs 4 --folds 4 --mean-seqs 48",
    "content": f"heads --model {NAME} --remove content --by positional others lowest-others "
    "--k 60 100 136 --draws 3 --n-seqs 24",
}
PARTS_OF_HEADS = (
    *("information", "first_position", "others_position"),
    *("positional_share", "others_share", "first_weight"),
)
POSITION = ("first_position", "others_position")
# What is told of a run: a table, the columns that name a row of it, and the estimates.
Told = tuple[str, tuple[str, ...], tuple[str, ...]]
TOLD: dict[str, list[Told]] = {
    "ablate": [
        ("sources", ("of", "source"), ("lost",)),
        ("pattern", ("removed",), ("lead", "amplitude")),
        ("weights", ("of", "removed", "replacement"), ("lost",)),
        ("non_relative", ("tokens",), ("with_mask", "without_mask", "difference")),
    ],
    "trace": [
        ("terms", ("of", "term"), ("size", "part")),
        ("writers", ("of", "side", "writer"), ("part",)),
        ("effects", ("of", "writer"), ("predicted", "held", "direct", "total")),
    ],
    "behaviour": [("behaviour", ("measure", "condition"), ("value", "difference"))],
    "attention": [("attention", ("head",), PARTS_OF_HEADS)],
}
STORED, IMAGES = Path(__file__).parent / "smollm2.csv", Path(__file__).parent / "images"
WHERE = ["run", "layer", "name", "measure"]
ASKED = {"lead": "lead", "pattern": "amplitude"}  # each with the measure of its size
SOURCES = {"mask": "the mask", "rope": "RoPE"}
W_O = {"w_o mean": "mean output kept", "w_o identity": "identity in its place"}
LOST = {f"{question} {removed}" for question in ASKED for removed in (*SOURCES, *W_O)}
PAPERS = dict(zip(LANGUAGE_MODELS, ("Llama-3.1", "Phi-4", "Qwen3"), strict=True))
LAYERS = (1, 2, 3)  # of the tables of losses, and whose pattern the paper's Figure 5 shows
WRITERS = {2: "MLP1", 3: "MLP2", 4: "MLP2", 5: "MLP2"}  # the strongest into each layer's keys
LOST_WITHOUT = ("MLP2", "MLP0", "ATTN0", "MLP1")  # writers whose position is taken away before L3
EDGE = 0.05  # the share of the keys that are the first
PIXELS = 104  # of a published panel
CHANCE = "chance"  # the mean cost of removals from heads drawn from the same layers
ORDERS = ("positional", "others", "lowest-others")
POSITIONAL, CONTENT, QUERY = (16, 0), (18, 6), 14  # two heads, and the token that they look from
LITTLE, HALF = 0.2, 0.5  # positional shares
REMOVED = {"intact": "intact", "without the mask": "mask", "without RoPE": "rope"}
QUANTITIES = {
    "loss": "loss",
    "loss_suffix": "suffix",
    "copy_text": "copy, text",
    "copy_random": "copy, random",
    "copy_text_second": "second copy, text",
    "copy_random_second": "second copy, random",
}


def measure(folder: Path) -> pd.DataFrame:
    """Return all estimates that are told, a row each, in nats or as a share."""
    runs = {name: finished(folder / name, command) for name, command in COMMANDS.items()}
    scores = runs["figure5"].manifest.results["experiments"][NAME]
    runs["figure5"] = read_run(folder / "figure5" / scores)
    draw(runs["figure5"].maps["normalised/intact"])
    others = drawn_rows(runs["figure5"]), text_rows(runs["attention"]), head_rows(runs)
    stored = pd.concat([told_rows(runs, TOLD), *map(pd.DataFrame, others)])
    names = ("all", "rotation", *(f"key {writer}" for writer in WRITERS.values()), *LOST_WITHOUT)
    read = {f"{question} {name}" for question in ("lead", "pattern") for name in names}
    stored = stored[(stored["run"] != "trace") | stored["name"].isin(read)]
    is_removed = stored["measure"].isin(ASKED.values()) & (stored["name"] != "intact")
    is_other = (stored["measure"] == "lost") & ~stored["name"].isin(LOST)
    stored = stored[~is_removed & ~is_other]
    return stored[[*WHERE, "value", "low", "high"]].astype({"layer": "Int64"})


def told_rows(runs: Mapping[str, Run], told: Mapping[str, Sequence[Told]]) -> pd.DataFrame:
    """Return the estimates that are told of runs, a row for each."""
    return pd.concat(
        estimates(name, run.tables[table], label, columns)
        for name, run in runs.items()
        for table, label, columns in told.get(name, ())
        if len(run.tables[table])
    )


def finished(folder: Path, command: str) -> Run:
    """Return a command's run; the command runs if its run is missing."""
    if not (folder / "manifest.json").is_file():
        name, *arguments = shlex.split(command)
        arguments += ["--out", str(folder)]
        script = PAPER / f"{name}.py"
        program = [str(script)] if script.is_file() else ["-m", f"nope_probe.{name}"]
        subprocess.run([sys.executable, *program, *arguments], check=True)
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
    where = {"run": run, "layer": table.get("layer")}
    where["name"] = table[list(labels)].astype(str).agg(" ".join, axis=1) if labels else "all"
    parts = []
    for column in columns:
        ends = {"value": table[column], "low": table[f"{column}_low"]}
        ends["high"] = table[f"{column}_high"]
        parts.append(pd.DataFrame({**where, "measure": column, **ends}, index=table.index))
    return pd.concat(parts).dropna(subset="value")


def head_rows(runs: Mapping[str, Run]) -> Iterator[Row]:
    """Yield what RoPE or content in the first heads costs, and in heads of the same layers."""
    labels = {"heads": ["measure", "k"], "content": ["order", "measure", "k"]}
    for run, names in labels.items():
        cost = runs[run].tables["cost"]
        cost = cost[cost["draw"].isna()].set_index(["order", "measure", "k"])
        for row in runs[run].tables["tests"].to_dict("records"):
            where = {"run": run, "name": " ".join(str(row[name]) for name in names)}
            own = cost.loc[(row["order"], row["measure"], row["k"])]
            for measure, source in (("cost", own), ("chance", row)):
                ends = {"low": source[f"{measure}_low"], "high": source[f"{measure}_high"]}
                yield {**where, "measure": measure, "value": source[measure], **ends}


def drawn_rows(scores: Run) -> Iterator[Row]:
    """Yield what Figure 5 draws: 98% of the cells, and the first keys less the others.

    The model's maps are drawn as the paper's are: pooled, and clipped at these 98%.
    """
    panels = published("figure5")
    for layer in range(len(scores.maps["score/intact"])):
        spans = {
            kind: percentiles(scores.maps[f"{kind}/intact"][layer])
            for kind in ("score", "normalised")
        }
        own = scores.maps["normalised/intact"][layer].clip(*spans["normalised"])
        drawn = {NAME: (resampled(own, PIXELS), spans)}
        for model in PAPERS:
            panel = panels[f"{model}/layer{layer + 1}"]
            drawn[model] = panel.values, {"normalised": (panel.low, panel.high)}
        for model, (cells, ends) in drawn.items():
            where = {"run": "figure5", "layer": layer, "name": model}
            yield {**where, "measure": "first_keys", "value": first_keys(cells)}
            for kind, (low, high) in ends.items():
                yield {**where, "measure": kind, "low": low, "high": high}


def percentiles(cells: Cells) -> tuple[float, float]:
    """Return the 1% and the 99% quantile of a map."""
    low, high = np.nanquantile(cells, [0.01, 0.99])
    return float(low), float(high)


def first_keys(cells: Cells) -> float:
    """Return the mean of the first 5% of the keys less that of the others, nats."""
    below = np.tri(len(cells), k=-1, dtype=bool) & np.isfinite(cells)
    first = np.arange(len(cells)) < round(EDGE * len(cells))
    return float(cells[below & first].mean() - cells[below & ~first].mean())


def draw(normalised: Float[np.ndarray, "layer query_pos key_pos"]) -> None:
    """Draw the paper's Figure 5 with the model's maps next to it."""
    groups = []
    for layer in LAYERS:
        panel, own = published("figure5")[f"llama-3.1-8b/layer{layer + 1}"], normalised[layer]
        maps = {"Llama-3.1-8B (paper)": panel.values, "SmolLM2-135M": resampled(own, PIXELS)}
        scales = (panel.low, panel.high), percentiles(own)
        groups.append(
            [
                Panel(
                    name=f"{name}, L{layer}",
                    values=cells,
                    low=-max(map(abs, scale)),
                    high=max(map(abs, scale)),
                    diverging=True,
                    positions=len(own),
                )
                for (name, cells), scale in zip(maps.items(), scales, strict=True)
            ]
        )
    figures.save(
        panel_groups(groups, title="Scores less the means of their diagonals"),
        IMAGES / "figure5_smollm2.png",
    )


def text_rows(run: Run) -> Iterator[Row]:
    """Yield where two heads look in the text, and how much they look there in other texts."""
    weights, position = run.maps["text_weights"], run.maps["weights"]
    for layer, head in (POSITIONAL, CONTENT):
        key = int(weights[layer, head, QUERY].argmax())
        where = {"run": "text", "layer": layer, "name": f"{head} {key}"}
        yield {**where, "measure": "weight", "value": weights[layer, head, QUERY, key]}
        yield {**where, "measure": "position", "value": position[layer, head, QUERY, key]}


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the page's tables in Markdown."""
    return [
        claims(of(stored, run="figure5"), of(stored, run="ablate")),
        source_losses(of(stored, run="ablate")),
        writers(of(stored, run="trace")),
        removed_writers(of(stored, run="trace", layer=3)),
        without_w_o(of(stored, run="ablate")),
        losses(of(stored, run="behaviour")),
    ]


def sentences(stored: pd.DataFrame) -> dict[str, list[str]]:
    """Return the statements with numbers that README and the page make outside of tables."""

    def percent(run: str, layer: int, name: str, measure: str) -> str:
        row = of(stored, run=run, layer=layer, name=name, measure=measure)
        return f"{100 * row['value'].item():.0f}%"

    def nats(name: str, measure: str) -> str:
        return f"{abs(of(stored, run='behaviour', name=name, measure=measure)['value'].item()):.2f}"

    traced = of(stored, run="trace", layer=3)
    written = [
        f"{of(traced, name=name, measure=measure)['value'].item():.1f}"
        for name, measure in (("lead key MLP2", "part"), ("lead all", "size"))
    ]
    lead = of(stored, run="ablate", layer=3, name="intact", measure="lead")["value"].item()
    mask, rope = (
        [percent("ablate", 3, f"{question} {source}", "lost") for question in ASKED]
        for source in SOURCES
    )

    intact, gone = nats("copy_random intact", "value"), nats("copy_random rope", "difference")
    heads = of(stored, run="attention")
    shares = of(heads, measure="positional_share")["value"]
    few, most = (shares < LITTLE).sum(), (shares >= HALF).sum()
    counts = f"{most} of {len(shares)} heads are at {HALF:.0%} or more, {few} below {LITTLE:.0%}"
    parts = [of(heads, measure=name)["value"].sum() for name in POSITION]
    whole = sum(parts) / of(heads, measure="information")["value"].sum()
    previous, induction = (looks(stored, head) for head in (POSITIONAL, CONTENT))
    first = of(stored, run="attention", measure="first_weight")
    is_middle = first["layer"].isin([10, 11])
    later = first[(first["layer"] >= 3) & ~is_middle]["value"].median()
    middle = first[is_middle]["value"].max()
    return {
        "README.md": [
            f"{whole:.0%} of the information in its attention is position: {counts}.",
            f"In L3, the first key leads by {lead:.2f} nats: without the mask {mask[0]} of that "
            f"are lost, and {mask[1]} of the pattern among the other keys; without RoPE {rope[0]} "
            f"and {rope[1]}.",
            f"MLP2 writes {written[0]} of the {written[1]} nats of L3's lead",
            f"L3 loses {percent('ablate', 3, 'lead w_o mean', 'lost')} of its lead",
            f"costs {cost(stored, 'copy_random 1')} nats more, text {cost(stored, 'text 1')}; "
            f"without that of another head of its layer {cost(stored, 'copy_random 1', CHANCE)}",
        ],
        "docs/findings.md": [
            f"{whole:.0%} of the information in the model's attention is position: {counts}.",
            f"From L3 on, the first key gets {later:.0%} of a head's weight (median), but in L10 "
            f"and L11 {middle:.0%} at most.",
            f"L16H0 gives {previous}",
            f"L18H6 gives {induction}",
            f"costs {intact} nats less than the first; without RoPE {gone} of them are gone.",
            f"text costs {nats('loss_suffix mask', 'difference')} nats more.",
            *heads_sentences(stored),
        ],
    }


def heads_sentences(stored: pd.DataFrame) -> list[str]:
    """Return what the page says of removals from the most positional heads."""

    def content(order: str, measure: str, label: str) -> str:
        numbers = [cost(stored, f"{order} text {k}", measure, "content") for k in (60, 100, 136)]
        return " | ".join([f"| {label}`{order}`", *numbers]) + " |"

    of_one, of_five = (
        [cost(stored, f"{measure} {k}") for measure in ("copy_random", "text")] for k in (1, 5)
    )
    chance = [cost(stored, f"{measure} 1", CHANCE) for measure in ("copy_random", "text")]
    return [
        f"a second copy of random tokens costs {of_one[0]} nats more and text {of_one[1]}; "
        f"without that of another head of L16 {chance[0]} and {chance[1]}.",
        f"the five most positional heads it is {of_five[0]} and {of_five[1]}",
        *(content(order, "cost", "") for order in ORDERS),
        *(content(order, CHANCE, "heads of the layers of ") for order in ORDERS),
    ]


def cost(stored: pd.DataFrame, name: str, measure: str = "cost", run: str = "heads") -> str:
    """Return what a removal from heads costs, or from as many heads of the same layers."""
    return f"{of(stored, run=run, name=name, measure=measure)['value'].item():z.2f}"


def looks(stored: pd.DataFrame, head: tuple[int, int]) -> str:
    """Return where a head looks in the text, and how much it looks there in other texts."""
    layer, number = head
    rows = of(stored, run="text", layer=layer).set_index("measure")
    rows = rows[rows["name"].str.startswith(f"{number} ")]["value"]
    return f"{rows['weight']:.0%} (in other texts {rows['position']:.0%})"


def source_losses(rows: pd.DataFrame) -> str:
    """Return the table of what the leads and the patterns of layers lose without each source."""
    lines = {
        f"L{layer}": [
            cell
            for question, size in ASKED.items()
            for cell in (
                estimate(of(rows, layer=layer, name="intact", measure=size), ".2f"),
                *(lost(of(rows, layer=layer), f"{question} {source}") for source in SOURCES),
            )
        ]
        for layer in LAYERS
    }
    without = [f"lost without {source}, %" for source in SOURCES.values()]
    return markdown("", ["first key's lead, nats", *without, "pattern, nats", *without], lines)


def lost(rows: pd.DataFrame, name: str) -> str:
    """Return what is lost in percent, with its interval."""
    return estimate(of(rows, name=name, measure="lost"), "z.0f", 100)


def claims(rows: pd.DataFrame, ablated: pd.DataFrame) -> str:
    """Return the table of the claims of the paper's section 5, with both sides' numbers."""

    def span(model: str, measure: str, layers: Sequence[int]) -> str:
        own = of(rows, name=model, measure=measure)
        own = own[own["layer"].isin(layers)]
        return f"{own['low'].min():.2f} to {own['high'].max():.2f}"

    def contrast(model: str) -> str:
        own = of(rows, name=model, measure="first_keys").set_index("layer")["value"]
        return ", ".join(f"{own[layer]:+.2f}" for layer in LAYERS)

    def line(text: Callable[[str], str]) -> list[str]:
        return ["; ".join(f"{title} {text(model)}" for model, title in PAPERS.items()), text(NAME)]

    def with_mask(layer: int) -> str:
        own = of(ablated, layer=layer, name="text", measure="with_mask")
        return estimate(own, ".2f")

    of_l3 = of(ablated, layer=3)
    mask = "{} with the mask, {} without, {} the mask's".format(
        *(
            estimate(of(of_l3, name="text", measure=name), ".2f")
            for name in ("with_mask", "without_mask", "difference")
        )
    )
    both = "lost without the mask: {}% of the lead; without RoPE: {}% of the pattern".format(
        lost(of_l3, "lead mask"), lost(of_l3, "pattern rope")
    )
    lines = {
        "scores are within ±10": ["±10, from plots", span(NAME, "score", range(4))],
        "less the diagonals' means, within ±1 (98% of the cells of L1 to L3)": line(
            lambda model: span(model, "normalised", LAYERS)
        ),
        "L0 has no such pattern (98% of its cells)": line(
            lambda model: span(model, "normalised", (0,))
        ),
        "the first keys stand out (first 5% less the others, as drawn; L1, L2, L3)": line(contrast),
        "L1 to L3 have a part that is no function of distance": [
            "from plots",
            ", ".join(map(with_mask, LAYERS)),
        ],
        "the mask makes that part (L3)": ["simulated: none without the mask", mask],
        "models rely on both (L3)": ["not measured", both],
    }
    return markdown("claim of section 5, nats", ["paper, 8B models", TITLE], lines)


def writers(rows: pd.DataFrame) -> str:
    """Return the table of each layer's lead and pattern: RoPE's part, and the main writer's."""
    lines = {}
    for layer, writer in WRITERS.items():
        own, cells = of(rows, layer=layer), list[str]()
        for question in ("lead", "pattern"):
            cells.append(estimate(of(own, name=f"{question} all", measure="size"), ".2f"))
            of_rope = of(own, name=f"{question} rotation", measure="part")
            written = of(own, name=f"{question} key {writer}", measure="part")
            cells += [estimate(part, "z.2f") for part in (of_rope, written)]
        lines[f"L{layer}, {writer}"] = cells
    columns = [
        f"{of_key}, {what}"
        for of_key in ("first key", "other keys")
        for what in ("whole", "rotation", "written into keys")
    ]
    return markdown("reader, writer, nats", columns, lines)


def removed_writers(rows: pd.DataFrame) -> str:
    """Return the table of what L3 loses without the position of a writer."""

    def cell(writer: str, question: str, measure: str) -> str:
        return estimate(of(rows, name=f"{question} {writer}", measure=measure), "z.1f")

    lines = {
        writer: [
            *(cell(writer, "lead", measure) for measure in ("held", "direct", "total")),
            cell(writer, "pattern", "total"),
        ]
        for writer in LOST_WITHOUT
    }
    columns = ["scale held: what it writes", "in the model", "on all paths"]
    columns.append("other keys, on all paths")
    return markdown("nats of L3's lead lost without", columns, lines)


def without_w_o(rows: pd.DataFrame) -> str:
    """Return the table of what layers lose without W_O: its mean output, or an identity."""
    lines = {
        f"L{layer}": [
            lost(of(rows, layer=layer), f"{question} {removed}")
            for question in ASKED
            for removed in W_O
        ]
        for layer in (2, 3)
    }
    of_keys = ("first key", "other keys")
    columns = [f"{of_key}, {what}" for of_key in of_keys for what in W_O.values()]
    return markdown("% lost without W_O", columns, lines)


def losses(rows: pd.DataFrame) -> str:
    """Return the table of losses, and of how removals change them."""
    lines = {}
    for label, condition in REMOVED.items():
        measure = "value" if condition == "intact" else "difference"
        own = of(rows, measure=measure).set_index("name")
        lines[label] = [
            estimate(own.loc[[name]], ".2f" if measure == "value" else "+.2f")
            if (name := f"{quantity} {condition}") in own.index
            else ""
            for quantity in QUANTITIES
        ]
    return markdown("nats", list(QUANTITIES.values()), lines)


def of(rows: pd.DataFrame, **wanted: str | int) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    for column, value in wanted.items():
        rows = rows[rows[column] == value]
    return rows


def estimate(row: pd.DataFrame, style: str, factor: float = 1) -> str:
    """Return the estimate of a row with its interval."""
    value, low, high = (float(row[name].item()) * factor for name in ("value", "low", "high"))
    return interval_text((value, low, high), style)


def main(*arguments: str) -> None:
    if arguments:
        measure(Path(arguments[0]).resolve()).to_csv(STORED, index=False, float_format="%.5g")
    for table in tables(pd.read_csv(STORED)):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
