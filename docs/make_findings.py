"""Run the commands of findings.toml, and paste what they find: make_findings.py FOLDER [RUN ...].

The named runs, or all, run into folders in FOLDER, unless they are finished there (after `make
real` of both models; three hours on two cores). What they measure goes into findings.csv. `compare`
draws a series of findings.toml once FOLDER has all its runs (needs Chromium), and its numbers are
the series' rows. Then the tables of findings.toml take the place of those that begin alike in the
pages. Without FOLDER, what is stored is pasted.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import findings_in_python as in_python
import pandas as pd
from make_long_sequences import markdown

from nope_probe import figures, read_run
from nope_probe.analyses.verdicts import Maker
from nope_probe.figures.names import row_name
from nope_probe.figures.words import interval_text
from nope_probe.run.folder import Run
from nope_probe.studies.ablate import COLUMNS, THREE_NUMBERS
from nope_probe.studies.ablate_page import carrier_text, maker_text

Of: TypeAlias = dict[str, Any]
Numbers: TypeAlias = Mapping[tuple[str, ...], Sequence[float]]  # value and bounds

DOCS = Path(__file__).parent
STORED, IMAGES, PAGES = DOCS / "findings.csv", DOCS / "images", ("findings", "intervals", "trace")
SPEC = tomllib.loads((DOCS / "findings.toml").read_text(encoding="utf-8"))
COMMANDS: dict[str, str] = SPEC["commands"]
DRAWN = ("code", "prose", "im_start", "endoftext", "gemma")  # layer by layer
PLACE = ["run", "layer", "name", "measure"]  # what names a row of findings.csv
WITHIN = "within noise"
STYLES = {
    **dict.fromkeys(("cost", "difference", "beyond_null", "chance"), "+z.2f"),
    **dict.fromkeys(("half", "fifth", "heads"), ".0f"),
    **dict.fromkeys(("need_rope", "need_mask", "held_out_loss"), ".3f"),
    "first_weight": ".0%",
}


def commands() -> dict[str, str]:
    """Return the commands of all runs by their names, those of training's snapshots too."""
    of_snapshots = {
        f"{of['model']}-seed{seed}/{kind}-{step}": command.format(seed=seed, step=step)
        for of in SPEC["snapshots"]
        for seed, steps in of["steps"].items()
        for step in steps
        for kind, command in of["commands"].items()
    }
    return COMMANDS | of_snapshots


def series() -> dict[str, list[str]]:
    """Return the names of the runs of each series; a pattern is of all names that match it."""
    return {
        name: runs if isinstance(runs, list) else [x for x in commands() if re.fullmatch(runs, x)]
        for name, runs in SPEC["series"].items()
    }


def place_of(folder: Path, name: str) -> Path:
    """Return the folder of a run."""
    return folder / name.replace(" ", "-")


def finished(folder: Path, command: str, name: str) -> Run:
    """Return a run; its command runs if it is missing."""
    place = place_of(folder, name)
    if not (place / "manifest.json").is_file():
        command, *arguments = shlex.split(command.replace("FOLDER", str(folder)))
        arguments += ["--out", str(place)]
        subprocess.run([sys.executable, "-m", f"nope_probe.{command}", *arguments], check=True)
    return read_run(place)


def measure(folder: Path, names: Sequence[str]) -> pd.DataFrame:
    """Return the rows of findings.csv that runs measure, and draw their pictures."""
    runs, parts = dict[str, Run](), list[pd.DataFrame]()
    for name in names:
        if name in in_python.BY_NAME:
            parts.append(in_python.BY_NAME[name]().assign(run=name))
            continue
        if name.startswith("layers"):
            in_python.order_by_layers(folder)
        run = runs[name] = finished(folder, commands()[name], name)
        pattern = of_conditions(run)
        parts += stored_of(name, {**run.tables, "pattern": pattern})
        extra = [*in_python.MEASURED.get(name, ())]
        extra += [in_python.null_means] * (pattern is not None and "seed" not in name)
        parts += [of_run(run).assign(run=name) for of_run in extra]
        if name in DRAWN:
            figure = figures.draw(THREE_NUMBERS, pattern, COLUMNS)
            in_python.save_small(figure, IMAGES / f"layers_{name}.png")
    for image, shown in in_python.SUMS.items():
        if {*shown} <= {*runs}:
            in_python.draw_sum(image, runs)
    if {*in_python.NEEDS} <= {*runs}:
        parts.append(in_python.rank_correlations(runs).assign(run="rank correlation"))
    for name, of_series in series().items():
        known = [run for run in of_series if (place_of(folder, run) / "manifest.json").is_file()]
        if {*of_series} & {*runs} and known == of_series:
            parts += compare(folder, name, of_series)
    rows = pd.concat(parts).reindex(columns=[*PLACE, "value", "low", "high"])
    return rows.astype({"layer": "Int64"}).drop_duplicates(PLACE, keep="last")


def of_conditions(run: Run) -> pd.DataFrame | None:
    """Return the table `pattern` of a run without its controls."""
    pattern = run.tables.get("pattern")
    if pattern is None:
        return None
    return pattern[pattern["removed"].isin(run.manifest.results["conditions"])]


def stored_of(run: str, tables: Mapping[str, pd.DataFrame | None]) -> list[pd.DataFrame]:
    """Return what findings.toml stores of a run's tables, a row an estimate."""
    parts = []
    for rule in SPEC["stored"]:
        table = tables.get(rule["table"])
        if table is None or not re.fullmatch(rule["runs"], f"{commands()[run].split()[0]} {run}"):
            continue
        if "removed" in rule:
            table = table[table["removed"].isin(rule["removed"])]
        names = table[rule["rows"]].astype(str).agg(" ".join, axis=1)
        for number in [x for x in rule["numbers"] if x in table]:
            ends = {"value": number, "low": f"{number}_low", "high": f"{number}_high"}
            rows = pd.DataFrame({name: table.get(column) for name, column in ends.items()})
            rows = rows.assign(run=run, layer=table.get("layer"), name=names, measure=number)
            rows = rows.dropna(subset="value")
            parts.append(rows[(number != "cost") | (rows["value"] != 0)])  # of the intact model
    return parts


def compare(folder: Path, name: str, names: Sequence[str]) -> list[pd.DataFrame]:
    """Return the means over layers that `compare` finds in runs, and draw its figure."""
    out, image = folder / f"compare-{name}", IMAGES / f"series_{name}.png"
    shutil.rmtree(out, ignore_errors=True)
    places = [str(place_of(folder, run)) for run in names]
    to = ["--out", str(out), "--image", str(image)]
    subprocess.run([sys.executable, "-m", "nope_probe.compare", *places, *to], check=True)
    in_python.shrink(image)
    compared = read_run(out)
    rows = compared.tables["differences"].query("table == 'over_layers'")
    called = dict(zip(compared.manifest.results["folders"], names, strict=True))
    parts = []
    for label, of_run in rows.groupby("run"):
        ends = ["value", "value_low", "value_high"]
        wide = of_run.pivot(index=["removed", "replacement"], columns="number", values=ends)
        wide.columns = [number + end.removeprefix("value") for end, number in wide.columns]
        parts += stored_of(called[label], {"over_layers": wide.reset_index()})
    return parts


def tables(stored: pd.DataFrame) -> list[str]:
    """Return the pages' tables in Markdown."""
    layers = stored["layer"].map(lambda layer: "" if layer != layer else f"L{layer:.0f}")
    keys = zip(stored["run"], layers, stored["name"], stored["measure"], strict=True)
    numbers = dict(zip(keys, stored[["value", "low", "high"]].to_numpy(float), strict=True))
    for model in ("nope-tiny", "rope-tiny"):
        record = DOCS.parent / "nope_probe" / "checkpoints" / model / "training.json"
        loss = json.loads(record.read_text(encoding="utf-8"))["held_out_loss"]
        numbers[f"trace {model}", "", "training", "held_out_loss"] = [loss] * 2
    return [verdicts(stored), *(table_of(numbers, spec) for spec in SPEC["table"])]


def table_of(numbers: Numbers, spec: Of) -> str:
    """Return a table of findings.toml in Markdown, without lines of nothing."""
    lines, columns = (
        [place for axes in spec[side] for place in places_of(axes, spec.get("joint", ", "))]
        for side in ("lines", "columns")
    )
    cells = {
        title: [cell(numbers, spec | spec.get("of", {}) | line | of) for _, of in columns]
        for title, line in lines
    }
    shown = {title: line for title, line in cells.items() if any(line)}
    text = markdown(spec["corner"], [title for title, _ in columns], shown)
    return compact(text).replace(WITHIN, "noise") if spec.get("is_compact") else text


def places_of(axes: Mapping[str, Any], joint: str) -> list[tuple[str, Of]]:
    """Return lines or columns: a title for each choice of one value of all axes."""
    titled = [SPEC["titles"].get(of, of) if isinstance(of, str) else of for of in axes.values()]
    titled = [{x: title_of(x) for x in of} if isinstance(of, list) else of for of in titled]
    return [
        (joint.join(filter(None, titles)), dict(zip(axes, values, strict=True)))
        for chosen in product(*(of.items() for of in titled))
        for values, titles in [tuple(zip(*chosen, strict=True))]
    ]


def title_of(name: str) -> str:
    """Return what a row is called: a removal with its replacement by nope_probe's words."""
    removed, _, by = name.rpartition(" ")
    return row_name(removed, by) if by in ("none", "mean") else name


def cell(numbers: Numbers, of: Of) -> str:
    """Return a number as text, of a measure such as `lead, order` both; see findings.toml."""
    name, measure = of["number"].split("/") if "number" in of else (of["name"], of["measure"])
    if ", " in measure:
        parts = (cell(numbers, {**of, "measure": part}) for part in measure.split(", "))
        return ", ".join(filter(None, parts))
    run, name, layer = (x.format_map(of) for x in (of["run"], name, of.get("layer", "")))
    ends = numbers.get((run, layer, name, measure))
    if ends is None:
        return ""
    if measure == "not_by_distance" and ends[1] <= 0:
        return WITHIN
    style = of.get("style", STYLES.get(measure, "z.2f"))
    if not of.get("bounds", True) or ends[1] != ends[1]:
        return format(ends[0], style)
    return interval_text(ends, style).replace(", ", ",\N{NO-BREAK SPACE}")


def compact(table: str) -> str:
    """Return a table without spaces around its cells, as the README's."""
    return re.sub(r" *\| *", "|", table)


def verdicts(stored: pd.DataFrame) -> str:
    """Return the README's table of what makes each number in five models."""
    answers, models = stored[stored["measure"] == "answer"], SPEC["titles"]["models"]
    lines = {}
    for number, title in SPEC["titles"]["numbers"].items():
        cells = []
        for run in models:
            rows = answers[(answers["run"] == run) & answers["name"].str.startswith(f"{number}|")]
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
    return compact(markdown("made by<br>*carried by*", [*models.values()], lines))


def paste(made: Sequence[str]) -> None:
    """Put tables into the pages, in the places of the tables, or headers, that begin alike."""
    for page in (DOCS.parent / "README.md", *(DOCS / f"{name}.md" for name in PAGES)):
        text = page.read_text(encoding="utf-8")
        for table in made:
            header = re.escape(table.partition("\n")[0])
            text = re.sub(
                rf"^{header}\n(\|.*\n)*", lambda _, new=table: f"{new}\n", text, flags=re.M
            )
        page.write_text(text, encoding="utf-8")


def main(*arguments: str) -> None:
    folder, *names = arguments or ("",)
    stored = pd.read_csv(STORED)
    if folder:
        names = names or [*commands(), *in_python.BY_NAME]
        measured = measure(Path(folder).resolve(), names)
        rows = pd.concat([stored[~stored["run"].isin(names)], measured])
        stored = rows.astype({"layer": "Int64", "low": float, "high": float})
        stored = stored.drop_duplicates(PLACE, keep="last").sort_values("run", kind="stable")
        stored.to_csv(STORED, index=False, float_format="%.5g")
        if any(name.startswith("need") for name in measured["run"]):
            in_python.draw_need(stored)
    paste(tables(pd.read_csv(STORED)))


if __name__ == "__main__":
    main(*sys.argv[1:])
