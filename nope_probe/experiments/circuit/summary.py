"""The circuit command's headline."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nope_probe.figures.style import words
from nope_probe.runtime.folder import Run

Row = tuple[float, float, float]
Rows = dict[str, Row]


def headline(manifest: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """Say which stages prefer near keys, and whether the pattern turns over at (g) and (h)."""
    layer, name, removed = manifest["layer"], manifest["model"]["name"], manifest["removed"]
    of = f"L{layer} of {name}" + (
        f" without {' and '.join(map(words, removed))}" if removed else ""
    )
    intact, ablated = _rows(table, "intact"), _rows(table, "ablated")
    shown = ablated if removed else intact
    sentences = [_leanings(of, shown), _turns(shown, "mlp" in removed)]
    if ablated:
        sentences.append(_against_intact(ablated, intact))
    if "h" in manifest["absent"]:
        sentences.append(
            f"L{layer} is the last, so there is no next layer: (h) and (i) do not exist."
        )
    return sentences


def _rows(table: pd.DataFrame, model: str) -> Rows:
    """Give per stage its rank correlation of value with nearness, and its interval."""
    if not len(table):
        return {}
    rows = table[table["model"] == model]
    columns = (rows[name].astype(float) for name in ("locality", "locality_low", "locality_high"))
    return dict(zip(rows["stage"].astype(str), zip(*columns, strict=True), strict=True))


def _leanings(of: str, rows: Rows) -> str:
    near = [stage for stage, (_, low, _) in rows.items() if low > 0]
    far = [stage for stage, (_, _, high) in rows.items() if high < 0]
    level = [stage for stage in rows if stage not in (*near, *far)]
    kinds = {"nearer keys have more": near, "farther keys have more": far, "neither is sure": level}
    parts = [f"{kind} at {_list(stages)}" for kind, stages in kinds.items() if stages]
    return f"In {of}, {'; '.join(parts) or 'no stage shows all keys'}."


def _turns(rows: Rows, no_ffn: bool) -> str:
    """Say what happens from (f) over (g) to (h), which the paper leaves unexplained."""
    seen = ", ".join(f"{rows[stage][0]:+.2f} at ({stage})" for stage in "fgh" if stage in rows)
    if "f" not in rows or "g" not in rows:
        return "This block has no (f) to compare (g) with, so no turn behind an FFN can be seen."
    lead = f"The rank correlation of a value with its key's nearness is {seen}: "
    if not _opposite(rows["f"], rows["g"]):
        return lead + "the pattern does not surely turn over at (g)."
    turned = f"the pattern turns over at (g), behind {'the residual' if no_ffn else 'the FFN'}"
    if "h" not in rows:
        return f"{lead}{turned}."
    back = "back" if _opposite(rows["g"], rows["h"]) else "not surely back"
    return f"{lead}{turned}, and {back} at (h), the next norm."


def _opposite(one: Row, other: Row) -> bool:
    """Tell whether two stages surely lean in opposite ways."""
    return bool((one[1] > 0 and other[2] < 0) or (one[2] < 0 and other[1] > 0))


def _against_intact(rows: Rows, intact: Rows) -> str:
    both = [stage for stage in rows if stage in intact]
    most = sorted(both, key=lambda stage: -abs(rows[stage][0] - intact[stage][0]))[:2]
    parts = [f"from {intact[s][0]:+.2f} to {rows[s][0]:+.2f} at ({s})" for s in most]
    return f"Against the intact model it changes most {' and '.join(parts)}."


def _list(stages: Sequence[str]) -> str:
    return " ".join(f"({stage})" for stage in stages)


def print_summary(run: Run, folder: Path) -> None:
    """Print the headline of a run and where its report is."""
    lines = [*run.manifest["headline"], f"report: {folder / 'report.html'}"]
    sys.stdout.write("\n".join(lines) + "\n")
