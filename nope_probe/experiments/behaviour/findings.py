"""What a run of `behaviour` found, one sentence per section: the headings of its page.

A change whose interval includes zero counts as noise.
"""

from __future__ import annotations

import pandas as pd

from nope_probe.components import phrase
from nope_probe.experiments.behaviour.measures import QUANTITIES
from nope_probe.figures.behaviour import removed

INTACT = "intact"
LEADING = {"loss_suffix": "suffix's loss", "loss": "loss"}  # what the heading is about, if measured
NOISE = "not distinguishable from noise"


def difference_finding(behaviour: pd.DataFrame) -> str:
    """Return which removal raises the loss most; the first other measure if none was taken."""
    known = behaviour.dropna(subset=["difference"])
    measured = set(known["measure"])
    name = next(each for each in (*LEADING, *QUANTITIES) if each in measured)
    about, rows = QUANTITIES[name], known[known["measure"] == name]
    label = LEADING.get(name, about.label)
    clear = rows[rows["difference_low"] > 0]
    if clear.empty:
        return f"No removal raises the {label} beyond the noise"
    top = clear.sort_values("difference").iloc[-1]
    subject = _removal(str(top["condition"]))
    return f"Without {subject} the {label} rises most: {top['difference']:+.2g} {about.unit}"


def window_finding(behaviour: pd.DataFrame, measure: str, title: str, along: str) -> str:
    """Return how much the intact model's loss rises or falls.

    Args:
        behaviour: `behaviour.csv`.
        measure: `in_context`, a loss early in the window less the loss late, or `extrapolation`,
            the loss beyond the trained context less that at its end.
        title: what the section is about, which is returned alone if the measure was not taken.
        along: from where to where.
    """
    rows = behaviour[(behaviour["measure"] == measure) & (behaviour["condition"] == INTACT)]
    rows = rows.dropna(subset=["value"])
    if rows.empty:
        return title
    row = rows.iloc[0]
    if row["value_low"] <= 0 <= row["value_high"]:
        return f"{title}: the intact model's change {along} is {NOISE}"
    falls = (row["value"] > 0) == (measure == "in_context")
    verb = "falls" if falls else "rises"
    return f"{title}: the intact model's {verb} by {abs(row['value']):.2g} nats {along}"


def decodability_finding(table: pd.DataFrame) -> str:
    """Return how well the index can be read from the residual stream, with and without the mask."""
    rows = table[table["condition"] == INTACT].sort_values("distance")
    best = rows.iloc[0]
    if not best["distance_high"] < best["chance"]:
        return "Position cannot be read from the residual stream beyond chance"
    text = (
        f"Position can be read from the residual stream to {best['distance']:.1f} positions "
        f"(chance {best['chance']:.1f})"
    )
    without = table[(table["condition"] == "mask") & (table["layer"] == best["layer"])]
    if without.empty:
        return text
    return f"{text}, without the causal mask to {without.iloc[0]['distance']:.1f}"


def bridge_finding(correlations: pd.DataFrame) -> str:
    """Return how the pattern and the behaviour that removals take go together, over all layers."""
    removals = correlations[correlations["over"] == "conditions"]
    rows = removals[removals["layer"].astype(str) == "all"].dropna(subset=["rho"])
    title = "Pattern and behaviour"
    if rows.empty:
        return f"{title}: too few conditions for a rank correlation"
    parts = [f"{row['effect']} {row['rho']:+.2f}" for _, row in rows.iterrows()]
    n = int(rows["n"].max())
    return f"{title}: rank correlation over {n} removals, {', '.join(parts)}"


def correlation_finding(correlations: pd.DataFrame) -> str:
    """Return the layer and effect with the largest rank correlation."""
    title = "Rank correlations by layer"
    rows = correlations[correlations["layer"].astype(str) != "all"].dropna(subset=["rho"])
    if rows.empty:
        return f"{title}: too few conditions"
    top = rows.iloc[int(rows["rho"].abs().to_numpy(float).argmax())]
    return f"{title}: largest between L{top['layer']} and {top['effect']}, {top['rho']:+.2f}"


def head_finding(heads: pd.DataFrame) -> str:
    """Return which head's W_Q the loss needs most."""
    clear = heads[heads["loss_low"] > 0]
    if clear.empty:
        return f"Heads: what the loss rises by without one head's W_Q is {NOISE}"
    top = clear.sort_values("loss").iloc[-1]
    name = f"L{top['layer']:.0f}H{top['head']:.0f}"
    return f"Heads: without the W_Q of {name} the loss rises most, {top['loss']:+.2g} nats"


def _removal(condition: str) -> str:
    return removed(condition) if "+" in condition or ":" in condition else phrase(condition)
