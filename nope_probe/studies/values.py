"""What a run of `ablate` answers, in nats: a sentence and a table, from the rows of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nope_probe.figures.intervals import interval_of, interval_text
from nope_probe.figures.names import row_name
from nope_probe.figures.values import QUESTIONS
from nope_probe.removal import NO_REPLACEMENT, Condition
from nope_probe.run.manifest import Manifest

SHORT = {"lead": "lead", "kept": "order"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The lead and the order of the other keys in every condition, of a layer or over layers.

    Attributes:
        place: of which layer, such as `L3`, or `30 layers`.
        seq_len: tokens in a sequence.
        rows: a row per condition and replacement, the intact model first: `removed`,
            `replacement`, `lead` and `kept` with their bounds (nats); of means over layers also in
            how many layers less than half of the intact value is left (`lead_below_half`).
        is_mean: whether the rows are means over layers.
    """

    place: str
    seq_len: int
    rows: list[dict[Any, Any]]
    is_mean: bool = False

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame], manifest: Manifest, layer: int) -> Answer:
        """Return the answer of one layer, or over all layers if the run is of all (`--layers all`).

        Args:
            tables: the run's `pattern`, and `over_layers` of several layers.
            manifest: the run's.
            layer: the layer that is shown.
        """
        if manifest.settings.get("layers") == "all" and "over_layers" in tables:
            rows = tables["over_layers"].to_dict("records")
            place, is_mean = f"{len(manifest.layers)} layers", True
        else:
            pattern = tables["pattern"]
            rows = pattern[pattern["layer"] == layer].to_dict("records")
            place, is_mean = f"L{layer}", False
        return cls(place=place, seq_len=manifest.seq_len, rows=rows, is_mean=is_mean)

    @property
    def questions(self) -> list[str]:
        """`lead` where the first key has one, and `kept`."""
        intact = self.rows[0]
        return [name for name in QUESTIONS if name in intact and intact[name] == intact[name]]

    def sentence(self) -> str:
        """Return the values without each source and without all, in words."""
        intact, *others = (row for row in self.rows if Condition.parse(row["removed"]).are_sources)
        parts = []
        if "lead" in self.questions:
            whose = "the mean of " * self.is_mean + f"{self.place}, the first key"
            whose = f"In {whose}" if self.is_mean else f"{self.place}'s first key"
            lead = intact["lead"]
            has = f"leads by {lead:.1f}" if lead > 0 else f"has a lead of {lead:.1f}"
            left = ", ".join(f"{row['lead']:z.1f} {self._label(row)}" for row in others)
            parts.append(f"{whose} {has} nats: {left}.")
        if "kept" in self.questions:
            left = ", ".join(
                f"{row['kept']:z.2f} {'is there ' * (not place)}{self._label(row)}"
                for place, row in enumerate(others)
            )
            whose = "the" if self.is_mean else "its" if parts else f"{self.place}'s"
            others_of = f"{whose} other keys" if "lead" in self.questions else f"{whose} keys"
            parts.append(f"Of the order of {others_of}, {intact['kept']:.2f} nats strong, {left}.")
        return " ".join(parts)

    def table(self) -> pd.DataFrame:
        """Return the values of every condition with their intervals, nats."""
        first = f"{'mean of ' * self.is_mean}{self.place} at {self.seq_len:,} tokens, nats"
        cells = {first: [self._label(row) for row in self.rows]}
        for name in self.questions:
            cells[QUESTIONS[name]] = [
                interval_text(interval_of(row, name), "z.2f") for row in self.rows
            ]
            if self.is_mean:
                cells[f"{SHORT[name]} below half"] = [
                    f"{row[f'{name}_below_half']:.0f} of {row[f'{name}_layers']:.0f}"
                    for row in self.rows
                ]
        return pd.DataFrame(cells)

    def _label(self, row: Mapping[Any, Any]) -> str:
        """Return what a row is of, in words."""
        removed = [str(other["removed"]) for other in self.rows]
        replacement = str(row.get("replacement", NO_REPLACEMENT))
        return row_name(str(row["removed"]), replacement, removed)
