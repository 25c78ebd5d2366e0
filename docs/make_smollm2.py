"""Measure SmolLM2-135M for README and findings.md: python docs/make_smollm2.py FOLDER.

Each command of `COMMANDS` runs into a folder of its own in FOLDER, unless it is finished there.
Writes docs/smollm2.csv (half an hour on two cores, after `make real`) and two pictures, and prints
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
from nope_probe.experiments.paper.panels import published, resampled
from nope_probe.experiments.paper.settings import LANGUAGE_MODELS
from nope_probe.figures.intervals import interval_text
from nope_probe.figures.names import words
from nope_probe.figures.panels import Panel, panel_groups
from nope_probe.runtime.folder import Run

Cells = Float[np.ndarray, "query_pos key_pos"]
NAME, TITLE = "smollm2-135m", "SmolLM2-135M"
COMMANDS = {
    "layers": f"ablate --model {NAME} --players sources --layers all --n-seqs 64 --seq-len 64",
    "sources": f"ablate --model {NAME} --players sources --layers 4 --n-seqs 96 --seq-len 128",
    "figure5": f"reproduce figure5 --model {NAME} --data shipped --n-seqs 48 --seq-len 1024",
    "trace": f"trace --model {NAME} --layers 6 --n-seqs 96 --seq-len 96 --confirm 0",
    "w_o": f"ablate --model {NAME} --players w_o --layers 4 --n-seqs 96 --seq-len 96",
    "bands": f"scores --model {NAME} --bands octaves --layers 4 --n-seqs 96 --seq-len 96",
    "behaviour": f"behaviour --model {NAME} --measures loss copy --remove mask rope --n-seqs 32 "
    "--seq-len 128",
    "attention": f"attention --model {NAME} --n-seqs 384 --seq-len 64 --text "
    '"Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter."',
}
SHARES = ("share", "share_first", "share_others")
LOST = ("lost", "lost_first", "lost_others")
PARTS_OF_HEADS = (
    *("information", "first_position", "others_position"),
    *("positional_share", "others_share", "first_weight"),
)
# What is told of a run: a table, the columns that name a row of it, and the estimates.
Told = tuple[str, tuple[str, ...], tuple[str, ...]]
TOLD: dict[str, list[Told]] = {
    "layers": [("sources", ("term",), SHARES)],
    "sources": [
        ("sources", ("term",), SHARES),
        ("pattern", (), ("amplitude",)),
        ("non_relative", ("tokens",), ("with_mask", "without_mask", "difference")),
    ],
    "figure5": [("pattern", (), ("non_relative", "edge_contrast_visible"))],
    "trace": [("terms", ("term",), SHARES), ("writers", ("side", "writer"), SHARES)],
    "w_o": [("players", ("player", "replacement"), LOST)],
    "bands": [("bands", ("band",), ("share",)), ("pattern", (), ("amplitude",))],
    "behaviour": [("behaviour", ("measure", "condition"), ("value", "difference"))],
    "attention": [("attention", ("head",), PARTS_OF_HEADS)],
}
STORED, IMAGES = Path(__file__).parent / "smollm2.csv", Path(__file__).parent / "images"
WHERE = ["run", "layer", "name", "measure"]
SOURCES = ("mask", "rope", "mask_x_rope")
PAPERS = dict(zip(LANGUAGE_MODELS, ("Llama-3.1", "Phi-4", "Qwen3"), strict=True))
LAYERS = (1, 5, 11, 17, 24)  # of the first table
WRITERS = {2: "MLP1", 3: "MLP2", 4: "MLP2", 5: "MLP2"}  # the strongest into each layer's keys
LATER = (1, 2, 3)  # the layers whose pattern the paper's Figure 5 shows
EDGE = 0.05  # the share of the keys that are the first, as in `edge_contrast`
PIXELS = 104  # of a published panel
POSITIONAL, CONTENT, QUERY = (16, 0), (18, 6), 14  # two heads, and the token that they look from
LITTLE, MOST = 0.2, 0.8  # positional shares among the keys after the first
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
    scores = runs["figure5"].manifest["experiments"][NAME]
    runs["figure5"] = read_run(folder / "figure5" / scores)
    draw(runs["layers"].tables["sources"], runs["figure5"].maps["normalised"])
    others = drawn_rows(runs["figure5"]), text_rows(runs["attention"])
    stored = pd.concat([told_rows(runs, TOLD), *map(pd.DataFrame, others)])
    read = {"written_key", *(f"key {writer}" for writer in WRITERS.values())}
    stored = stored[(stored["run"] != "trace") | stored["name"].isin(read)]
    return stored[[*WHERE, "value", "low", "high"]].astype({"layer": "Int64"})


def told_rows(runs: Mapping[str, Run], told: Mapping[str, Sequence[Told]]) -> pd.DataFrame:
    """Return the estimates that are told of runs, a row for each."""
    return pd.concat(
        estimates(name, run.tables[table], label, columns)
        for name, run in runs.items()
        for table, label, columns in told[name]
        if len(run.tables[table])
    )


def finished(folder: Path, command: str, *, image: Path | None = None) -> Run:
    """Return a command's run; the command runs if its run is missing, or to draw an image."""
    if image or not (folder / "manifest.json").is_file():
        name, *arguments = shlex.split(command)
        arguments += ["--out", str(folder), *(["--image", str(image)] if image else [])]
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
    where = {"run": run, "layer": table.get("layer")}
    where["name"] = table[list(labels)].astype(str).agg(" ".join, axis=1) if labels else "all"
    parts = []
    for column in columns:
        ends = {"value": table[column], "low": table[f"{column}_low"]}
        ends["high"] = table[f"{column}_high"]
        parts.append(pd.DataFrame({**where, "measure": column, **ends}, index=table.index))
    return pd.concat(parts).dropna(subset="value")


def drawn_rows(scores: Run) -> Iterator[Row]:
    """Yield what Figure 5 draws: 98% of the cells, and the first keys less the others.

    The model's maps are drawn as the paper's are: pooled, and clipped at these 98%.
    """
    panels = published("figure5")
    for layer in range(len(scores.maps["score"])):
        spans = {kind: percentiles(scores.maps[kind][layer]) for kind in ("score", "normalised")}
        own = scores.maps["normalised"][layer].clip(*spans["normalised"])
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


def draw(sources: pd.DataFrame, normalised: Float[np.ndarray, "layer query_pos key_pos"]) -> None:
    """Draw the sources of all layers, and the paper's Figure 5 with the model's maps beside it."""
    figures.save(figures.source_shares(sources), IMAGES / "sources_smollm2.png")
    groups = []
    for layer in LATER:
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
        source_shares(of(stored, run="layers"), LAYERS),
        claims(of(stored, run="figure5"), of(stored, run="sources")),
        source_shares(of(stored, run="sources"), (2, 3)),
        writers(of(stored, run="trace"), of(stored, run="w_o")),
        bands(of(stored, run="bands")),
        losses(of(stored, run="behaviour")),
    ]


def sentences(stored: pd.DataFrame) -> dict[str, list[str]]:
    """Return the statements with numbers that README and the page make outside of tables."""

    def percent(run: str, layer: int, name: str, measure: str) -> str:
        row = of(stored, run=run, layer=layer, name=name, measure=measure)
        return f"{100 * row['value'].item():.0f}%"

    def nats(name: str, measure: str) -> str:
        return f"{abs(of(stored, run='behaviour', name=name, measure=measure)['value'].item()):.2f}"

    mask, rope = (percent("sources", 3, name, "share") for name in ("mask", "rope"))
    intact, gone = nats("copy_random intact", "value"), nats("copy_random rope", "difference")
    shares = of(stored, run="attention", measure="others_share")["value"]
    few, most = (shares < LITTLE).sum(), (shares >= MOST).sum()
    counts = f"{few} of {len(shares)} heads are below {LITTLE:.0%}, {most} at {MOST:.0%} or more"
    previous, induction = (looks(stored, head) for head in (POSITIONAL, CONTENT))
    first = of(stored, run="attention", measure="first_weight")
    is_middle = first["layer"].isin([10, 11])
    later = first[(first["layer"] >= 3) & ~is_middle]["value"].median()
    middle = first[is_middle]["value"].max()
    return {
        "README.md": [
            counts,
            f"In L3 the mask brings {mask} of the pattern, all at the first key, and RoPE {rope}.",
            f"{percent('trace', 5, 'key MLP2', 'share')} of L5's pattern is what MLP2 writes",
            f"L3 loses {percent('w_o', 3, 'w_o mean', 'lost')}",
            f"costs {intact} nats less than the first; {gone} of them are gone.",
        ],
        "docs/findings.md": [
            f"{counts}.",
            f"From L3 on, the first key gets {later:.0%} of a head's weight (median), but in L10 "
            f"and L11 {middle:.0%} at most.",
            f"L16H0 gives {previous}",
            f"L18H6 gives {induction}",
            f"costs {intact} nats less than the first; without RoPE {gone} of them are gone.",
            f"text costs {nats('loss_suffix mask', 'difference')} nats more.",
        ],
    }


def looks(stored: pd.DataFrame, head: tuple[int, int]) -> str:
    """Return where a head looks in the text, and how much it looks there in other texts."""
    layer, number = head
    rows = of(stored, run="text", layer=layer).set_index("measure")
    rows = rows[rows["name"].str.startswith(f"{number} ")]["value"]
    return f"{rows['weight']:.0%} (in other texts {rows['position']:.0%})"


def source_shares(rows: pd.DataFrame, layers: Sequence[int]) -> str:
    """Return the table of the sources' shares of some layers' patterns."""
    lines = {
        f"L{layer}": [split(of(rows, layer=layer, name=term)) for term in SOURCES]
        for layer in layers
    }
    return markdown("% of the pattern", [words(term) for term in SOURCES], lines)


def claims(rows: pd.DataFrame, ablated: pd.DataFrame) -> str:
    """Return the table of the claims of the paper's section 5, with both sides' numbers."""

    def span(model: str, measure: str, layers: Sequence[int]) -> str:
        own = of(rows, name=model, measure=measure)
        own = own[own["layer"].isin(layers)]
        return f"{own['low'].min():.2f} to {own['high'].max():.2f}"

    def contrast(model: str) -> str:
        own = of(rows, name=model, measure="first_keys").set_index("layer")["value"]
        return ", ".join(f"{own[layer]:+.2f}" for layer in LATER)

    def line(text: Callable[[str], str]) -> list[str]:
        return ["; ".join(f"{title} {text(model)}" for model, title in PAPERS.items()), text(NAME)]

    def later(measure: str, style: str) -> str:
        own = of(rows, name="all", measure=measure).set_index("layer")
        return ", ".join(estimate(own.loc[[layer]], style) for layer in LATER)

    def of_l3(name: str, measure: str, style: str, factor: float = 1) -> str:
        return estimate(of(ablated, layer=3, name=name, measure=measure), style, factor)

    mask = "{} with the mask, {} without, {} the mask's".format(
        *(of_l3("text", name, ".2f") for name in ("with_mask", "without_mask", "difference"))
    )
    both = "mask {}%, RoPE {}%".format(
        *(of_l3(name, "share", "z.0f", 100) for name in ("mask", "rope"))
    )
    lines = {
        "scores are within ±10": ["±10, from plots", span(NAME, "score", range(4))],
        "less the diagonals' means, within ±1 (98% of the cells of L1 to L3)": line(
            lambda model: span(model, "normalised", LATER)
        ),
        "L0 has no such pattern (98% of its cells)": line(
            lambda model: span(model, "normalised", (0,))
        ),
        "the first keys stand out (first 5% less the others, as drawn; L1, L2, L3)": line(contrast),
        "... among the keys after the first, in what softmax sees": [
            "not measured",
            later("edge_contrast_visible", "+.2f"),
        ],
        "L1 to L3 have a part that is no function of distance": [
            "from plots",
            later("non_relative", ".2f"),
        ],
        "the mask makes that part (L3)": ["simulated: none without the mask", mask],
        "models rely on both (L3)": ["not measured", both],
    }
    return markdown("claim of section 5, nats", ["paper, 8B models", TITLE], lines)


def writers(rows: pd.DataFrame, w_o: pd.DataFrame) -> str:
    """Return the table of what was written into keys, by whom, and of what is lost without W_O."""
    lines = {
        f"L{layer}": [
            split(of(rows, layer=layer, name="written_key")),
            f"{writer}: {split(of(rows, layer=layer, name=f'key {writer}'))}",
            *(
                split(of(w_o, layer=layer, name=f"w_o {replacement}"), LOST) if layer < 4 else ""
                for replacement in ("mean", "identity")
            ),
        ]
        for layer, writer in WRITERS.items()
    }
    columns = ["written into keys", "most by", "lost without W_O, its mean output kept"]
    return markdown("% of the pattern", [*columns, "with an identity in its place"], lines)


def bands(rows: pd.DataFrame) -> str:
    """Return the table of the shares of RoPE's bands, where one of a layer is 10% or more."""
    shares = of(rows, measure="share")
    large = shares[shares["value"] >= 0.1]["name"].drop_duplicates()
    lines = {
        name: [estimate(of(shares, layer=layer, name=name), "z.0f", 100) for layer in range(4)]
        for name in sorted(large, key=lambda name: int(name.split("-")[0]))
    }
    return markdown("% of the pattern, wavelength", [f"L{layer}" for layer in range(4)], lines)


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


def split(rows: pd.DataFrame, measures: Sequence[str] = SHARES) -> str:
    """Return a share in percent, with its parts at the first key and among the other keys."""
    whole, *parts = measures
    first, others = (round(100 * of(rows, measure=name)["value"].item()) for name in parts)
    share = estimate(of(rows, measure=whole), "z.0f", 100)
    return f"{share} = {first} {'-' if others < 0 else '+'} {abs(others)}"


def main(*arguments: str) -> None:
    if arguments:
        measure(Path(arguments[0]).resolve()).to_csv(STORED, index=False, float_format="%.5g")
    for table in tables(pd.read_csv(STORED)):
        print(table, end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
