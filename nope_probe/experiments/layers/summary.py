"""What the `layers` command prints: one table, or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nope_probe.experiments.console import PlainConsole
from nope_probe.experiments.layers.probe import LayerFindings
from nope_probe.experiments.layers.run import Report, Settings
from nope_probe.runtime.identity import record_sources
from nope_probe.runtime.provenance import threads, versions

COLUMNS = ("layer", "RoPE", "pairs", "base", "turned", "mask", "q/k-norm", "cap", "scale")
LEARNED = "learned"  # a column of models that have learned position embeddings
LEGEND = (
    "RoPE, learned: the largest change of a score, nats, when it is removed. Pairs: the rotary "
    "pairs that change a score, of those that turn. Turned: the share of a head's coordinates. "
    "Mask: on {n} positions; a longer window would not show."
)
NONE = "-"


def print_json(report: Report, settings: Settings) -> None:
    """Print a report as one JSON document on stdout."""
    sys.stdout.write(as_json(report, settings) + "\n")


def as_json(report: Report, settings: Settings) -> str:
    """Return a report as one JSON document, which holds what is needed to repeat it."""
    asked = {name: value for name, value in asdict(settings).items() if name != "json"}
    run = {
        "kind": "layers",
        "settings": asked,
        "versions": versions(),
        "threads": threads(),
        "sources": record_sources(settings.sources()),
    }
    return json.dumps(report.to_dict() | {"run": run}, indent=1)


def print_report(report: Report) -> None:
    """Print a report's table, and where the configuration says otherwise."""
    console = PlainConsole()
    learned = any(each.learned_positions_change for each in report.layers)
    table = Table(
        title=f"{report.model}: position, layer by layer", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in (*COLUMNS, *([LEARNED] if learned else [])):
        table.add_column(column, no_wrap=True)
    for each in report.layers:
        own = _number(each.learned_positions_change or None, ".3g")
        table.add_row(*_cells(each), *([own] if learned else []))
    console.print(table)
    console.print(f"BOS: {'forced by the tokenizer' if report.bos == 'forced' else 'not forced'}.")
    console.print(LEGEND.format(n=report.layers[0].mask.n_positions), style="dim")
    for title, lines in (
        ("The configuration says otherwise:", [str(each) for each in report.differences]),
        ("Not as found in a block of the usual kind:", _notes(report)),
    ):
        if lines:
            console.print(title, *(f"  {line}" for line in lines), sep="\n")


def _cells(each: LayerFindings) -> list[str]:
    norms = {(True, True): "acts", (True, False): "q only", (False, True): "k only"}
    return [
        f"L{each.layer}",
        f"{each.rope_change:.3g}" if each.rope else "none",
        f"{each.rope_pairs_acting}/{each.rope_pairs}" if each.rope else NONE,
        _number(each.rope_base if each.rope else None, ",.6g"),
        _number(each.rotary_fraction if each.rope else None, ".3g"),
        str(each.mask),
        norms.get((each.q_norm, each.k_norm), NONE),
        _number(each.soft_cap, ".4g"),
        f"1/√{each.scale**-2:.4g}" if each.scale > 0 else f"{each.scale:.4g}",
    ]


def _number(value: float | None, style: str) -> str:
    return NONE if value is None else f"{value:{style}}"


def _notes(report: Report) -> list[str]:
    """Return what the table has no column for."""
    lines = []
    for each in report.layers:
        name = f"L{each.layer}"
        if not each.mask_same_in_all_heads:
            lines.append(f"{name}: heads have different masks; the table shows H0's")
        if each.product_error > 1e-3:
            lines.append(f"{name}: scores are not q.k alone: off by {each.product_error:.2g}")
        if each.rope and each.rope_pairs_following < each.rope_pairs:
            lines.append(
                f"{name}: pairs from {each.rope_pairs_following} on do not follow the power "
                "law of the first ones (RoPE is scaled)"
            )
    return lines
