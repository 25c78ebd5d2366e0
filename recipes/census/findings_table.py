"""The findings on a model's layers as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nope_probe.figures.words import layer_names
from nope_probe.reports.page import MOST_ROWS, Headline
from nope_probe.studies.page import PlainConsole, print_headline, print_table
from nope_probe.studies.tables import TableRow
from probe import LayerFindings, ModelFindings
from recover import FOLLOWS

COLUMNS = ("layer", "RoPE", "pairs", "base", "turned", "mask", "q/k-norm", "cap", "scale")
# Columns that only some models need, and their sentences in the legend.
RARE = {
    "first": "First: the first pair's frequency, radians a token.",
    "slowed": "Slowed: how many times slower the last pair turns than by the base.",
    "learned": "Learned: the same of learned position embeddings.",
    "bias": "Bias: how many nats it gives a key more than another of the same query, at most.",
    "sink": "Sink: whether a learned sink takes part of each row's attention.",
    "MLA": "MLA: heads share their keys' rotary coordinates, but not the other coordinates.",
}
LEGEND = (
    "RoPE: the largest change of a score, nats, when it is removed. Pairs: the rotary "
    "pairs that change a score, of those that turn. Turned: the share of a head's coordinates. "
    "q/k-norm: over a head or over all. Mask: on {n} positions; a longer window would not show."
)
PER_LAYER = ("RoPE", "learned", "bias")  # columns of numbers that differ in layers that are alike
MASKS = 3  # in a sentence
SAYS_BOS = {"forced": ", and its tokenizer puts a BOS token first", "none": ""}
NONE, UNKNOWN, YES = "-", "?", "yes"


def print_findings(findings: ModelFindings, verbose: bool = False) -> None:
    """Print a row for layers that are alike, and what is unusual.

    Args:
        findings: of a model.
        verbose: whether to print a row per layer, and the legend.
    """
    console, table = PlainConsole(), as_text(findings)
    print_headline(console, headline(findings))
    if verbose:
        console.print(f"{findings.model}: position, layer by layer")
        print_table(console, table)
        rare = [about for name, about in RARE.items() if name in table]
        legend = LEGEND.format(n=findings.layers[0].mask.n_positions)
        console.print(" ".join([legend, *rare]), style="dim")
    if lines := notes(findings):
        title = "Not as found in a block of the usual kind:"
        console.print(title, *(f"  {line}" for line in lines), sep="\n")


def headline(findings: ModelFindings) -> Headline:
    """Return what a model's layers know of position, a row for layers that are alike."""
    table = as_text(findings)
    shared = [name for name in table if name not in (*PER_LAYER, "layer")]
    rows = []
    for cells, group in table.groupby(shared, sort=False):
        row: TableRow = {"layers": layer_names(group["layer"].str[1:].astype(int))}
        for name in map(str, table.columns[1:]):
            row[name] = _range(group[name]) if name in PER_LAYER else cells[shared.index(name)]
        rows.append(row)
    n_rope, n = sum(layer.rope for layer in findings.layers), len(findings.layers)
    bos = SAYS_BOS[findings.bos]
    masks = ", ".join([*dict.fromkeys(str(layer.mask) for layer in findings.layers)][:MASKS])
    return Headline(
        sentence=f"{findings.model} uses RoPE in {n_rope} of {n} attending layers; its mask is "
        f"{masks}{bos}.",
        table=pd.DataFrame(rows[:MOST_ROWS]),
        caption="RoPE: the largest change of a score, nats, when it is removed. Pairs: the rotary "
        "pairs that change a score, of those that turn. --verbose has a row per layer.",
    )


def _range(cells: pd.Series) -> str:
    """Return the smallest and the largest of some layers' numbers."""
    numbers = pd.to_numeric(cells, errors="coerce").dropna().sort_values()
    if numbers.empty or len({*cells}) == 1:
        return str(cells.iloc[0])
    first, last = cells[numbers.index[0]], cells[numbers.index[-1]]
    return f"{first} to {last}"


def as_text(findings: ModelFindings) -> pd.DataFrame:
    """Return the findings, a row per layer, for a table on the terminal."""
    cells = {layer.layer: _cells(layer) for layer in findings.layers}
    for layer in findings.not_attending:
        cells[layer] = {"layer": f"L{layer}", "mask": "no attention"}
    table = pd.DataFrame([cells[layer] for layer in sorted(cells)], columns=[*COLUMNS, *RARE])
    usual = {name: [NONE, "1"] if name in ("first", "slowed") else [NONE] for name in RARE}
    absent = [name for name in RARE if table[name].dropna().isin(usual[name]).all()]
    return table.drop(columns=absent).fillna(NONE)


def _cells(layer: LayerFindings) -> dict[str, str]:
    """Return a layer's cells by the names of the columns."""
    norms = {(True, False): "q only", (False, True): "k only"}
    over = {"head": "per head", "all heads": "all heads", None: NONE}[layer.norm_over]
    rotary = layer.rope and layer.rope_pairs > 0
    return {
        "layer": f"L{layer.layer}",
        "RoPE": f"{layer.rope_change:.3g}" if layer.rope else "none",
        "pairs": f"{layer.rope_pairs_acting}/{layer.rope_pairs}" if rotary else _unknown(layer),
        "base": _number(layer.rope_base if layer.rope else None, ",.6g"),
        "turned": f"{layer.rotary_fraction:.3g}" if rotary else _unknown(layer),
        "mask": str(layer.mask),
        "q/k-norm": norms.get((layer.q_norm, layer.k_norm), over),
        "cap": _number(layer.soft_cap, ".4g"),
        "scale": f"1/√{layer.scale**-2:.4g}" if layer.scale > 0 else f"{layer.scale:.4g}",
        "first": _number(layer.rope_first if layer.rope else None, ".4g"),
        "slowed": _number(layer.rope_scale if layer.rope else None, ".4g"),
        "learned": _number(layer.learned_positions_change or None, ".3g"),
        "bias": _number(layer.score_bias or None, ".3g"),
        "sink": YES if layer.sinks else NONE,
        "MLA": YES if layer.mla else NONE,
    }


def _unknown(layer: LayerFindings) -> str:
    """Return the sign in RoPE's columns for a layer without RoPE, or for an unknown rotation."""
    return UNKNOWN if layer.rope else NONE


def _number(value: float | None, style: str) -> str:
    return NONE if value is None else f"{value:{style}}"


def notes(findings: ModelFindings) -> list[str]:
    """Return lines on findings that are unusual, or without a column in the table."""
    lines = []
    for layer in findings.layers:
        name = f"L{layer.layer}"
        if not layer.mask_same_in_all_heads:
            lines.append(f"{name}: heads have different masks; the table shows H0's")
        if layer.product_error > 1e-3:
            lines.append(f"{name}: scores are not q.k alone: off by {layer.product_error:.2g}")
        if layer.rope:
            lines += [f"{name}: {line}" for line in _rope_notes(layer)]
        if layer.queries_grow_from is not None:
            lines.append(
                f"{name}: queries are scaled from position {layer.queries_grow_from:,} on "
                f"({layer.queries_grow_by:.4g} times at the last)"
            )
    return lines


def _rope_notes(layer: LayerFindings) -> Iterator[str]:
    """Yield what is unusual of the RoPE of a layer."""
    if not layer.rope_pairs:
        yield "RoPE's pairs of coordinates were not recognised"
    if layer.rope_as_configured is False:
        yield "RoPE's frequencies are not those that transformers computes from the configuration"
    if abs(layer.rope_factor - 1) > FOLLOWS:
        yield f"RoPE multiplies queries and keys by {layer.rope_factor:.4g}"
    if layer.rope_first is not None and abs(layer.rope_first - 1) > FOLLOWS:
        yield f"RoPE's first pair turns by {layer.rope_first:.4g}, not by 1"
    if layer.rope_pairs_following < layer.rope_pairs:
        slowed = "" if layer.rope_scale is None else f", up to {layer.rope_scale:.4g} times slower"
        yield (
            f"pairs from {layer.rope_pairs_following} on do not follow the power law of the first "
            f"ones (RoPE is scaled{slowed})"
        )
    if layer.rope_rescaled_from is not None:
        yield (
            f"RoPE changes from sequences of {layer.rope_rescaled_from:,} tokens on (the pair that "
            f"changes most turns {layer.rope_rescaled_by:.3g} times as fast)"
        )
