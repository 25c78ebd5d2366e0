"""What a layer's lead and pattern lose, in two sentences and a table.

Sentences are chosen from tables by what intervals settle; numbers alone are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import pandas as pd

from nope_probe.figures.intervals import ValueAndBounds, interval_of
from nope_probe.figures.names import phrase
from nope_probe.figures.shares import QUESTIONS
from nope_probe.figures.words import capitalised
from nope_probe.hooks.removing.stand_ins import CONSTANT_OUTPUTS
from nope_probe.removal import NO_REPLACEMENT, Condition
from nope_probe.run.manifest import Manifest
from nope_probe.studies.verdicts import MOST, effect_of

# Of lead and pattern, by what is removed.
LossesByQuestion = Mapping[str, Mapping[str, ValueAndBounds]]
QUARTER = 0.25  # of position's part: the sentence says what loses surely more, or less
SMALL_LEAD = 0.5  # of the pattern's amplitude: no sentence is about a smaller lead
CONSTANT = {  # rows of the table, where a weight's output is constant
    "w_q": "lost with constant queries (W_Q)",
    "w_k": "lost with constant keys (W_K)",
    "w_q+w_k": "lost with both constant",
    "w_o": "lost where attention writes a constant (W_O)",
}
# By how many sources are needed for the lead and for the pattern, which the same source may be.
ONE_SOURCE: dict[tuple[str, ...], str] = {
    (
        "lead",
        "pattern",
    ): "{who} alone makes L{layer}'s lead of the first key ({lead}) and the order "
    "of its other keys ({pattern}).",
    ("lead",): "{who} alone makes L{layer}'s lead of the first key ({lead}).",
    ("pattern",): "{who} alone makes L{layer}'s positional pattern ({pattern}).",
}
SAME = (
    "Without {of_lead} L{layer} loses both the first key's lead ({lead}) and the order of the "
    "other keys ({pattern})."
)
DIFFERENT = (
    "Without {of_lead} L{layer} loses the first key's lead ({lead}); without {of_pattern} the "
    "order of the other keys ({pattern})."
)
LEAD_IS_THE_TOKENS = (
    "L{layer}'s lead of the first key comes mostly from the token: {left} nats without any "
    "source, {size} with them."
)
ONLY = {
    "lead": "Without {of_lead} L{layer} loses the first key's lead ({lead}).",
    "pattern": "Without {of_pattern} L{layer} loses the order of the other keys ({pattern}).",
}
NONE = {
    "lead": "No source alone is needed for the first key's lead of L{layer}.",
    "pattern": "No source alone is needed for the order of the other keys of L{layer}.",
}
# By whether queries (w_q) and keys (w_k) that vary, and what attention writes (w_o), are needed.
NEEDS: dict[tuple[bool, bool, bool], str] = {
    (False, False, False): "{what} needs neither queries ({w_q}) nor keys that vary ({w_k}), nor "
    "what attention writes ({w_o})",
    (True, False, False): "{what} needs queries that vary ({w_q}), not keys that vary ({w_k}) or "
    "what attention writes ({w_o})",
    (False, True, False): "{what} needs keys that vary ({w_k}), not queries that vary ({w_q}) or "
    "what attention writes ({w_o})",
    (False, False, True): "{what} needs what attention writes ({w_o}), not queries ({w_q}) or keys "
    "that vary ({w_k})",
    (True, True, False): "{what} needs queries ({w_q}) and keys that vary ({w_k}), not what "
    "attention writes ({w_o})",
    (True, False, True): "{what} needs queries that vary ({w_q}) and what attention writes "
    "({w_o}), not keys that vary ({w_k})",
    (False, True, True): "{what} needs keys that vary ({w_k}) and what attention writes ({w_o}), "
    "not queries that vary ({w_q})",
    (True, True, True): "{what} needs queries ({w_q}) and keys that vary ({w_k}), and what "
    "attention writes ({w_o})",
}
NEITHER = "{what} needs no queries or keys that vary: RoPE on constant ones makes it ({w_q+w_k})"
SHORT = {"lead": "the lead", "pattern": "the order of the others"}


@dataclass(frozen=True, kw_only=True)
class LayerLosses:
    """What one layer of a run of `ablate` has and loses.

    Attributes:
        layer: the layer.
        seq_len: tokens in a sequence.
        sources: the model's sources.
        replacement: of removed weights; `none` where none is removed.
        sizes: of `lead` and `pattern`, nats.
        left: the same without any source.
        from_sources: how much of each the sources make.
        losses: what each loses, by what is removed; weights by the first replacement.
    """

    layer: int
    seq_len: int
    sources: Sequence[str]
    replacement: str
    sizes: Mapping[str, float]
    left: Mapping[str, ValueAndBounds]
    from_sources: Mapping[str, ValueAndBounds]
    losses: LossesByQuestion

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame], manifest: Manifest, layer: int) -> LayerLosses:
        """Return a layer's losses from the tables of a run."""
        of_layer = {
            name: tables[name][tables[name]["layer"] == layer]
            for name in ("sources", "terms", "weights", "pattern")
            if name in tables
        }
        row = of_layer["pattern"].query("removed == 'intact'").iloc[0]
        replacement = next(iter(manifest.replacements or ()), NO_REPLACEMENT)
        losses: dict[str, dict[str, ValueAndBounds]] = {}
        named = of_layer["sources"].rename(columns={"source": "removed"})
        for table in (named, of_layer.get("weights", pd.DataFrame())):
            for of_row in table.to_dict("records"):
                if (
                    of_row.get("replacement") in (None, NO_REPLACEMENT, replacement)
                    and of_row["lost"] == of_row["lost"]
                ):
                    losses.setdefault(of_row["of"], {})[of_row["removed"]] = interval_of(
                        of_row, "lost"
                    )
        terms = of_layer["terms"].query("term == 'without_sources'").to_dict("records")
        return cls(
            layer=layer,
            seq_len=manifest.seq_len,
            sources=manifest.positional_sources or (),
            replacement=replacement,
            sizes={"lead": row["lead"], "pattern": row["amplitude"]},
            left={str(term["of"]): interval_of(term, "size") for term in terms},
            from_sources={name: interval_of(row, f"{name}_from_sources") for name in QUESTIONS},
            losses={name: losses[name] for name in QUESTIONS if name in losses},
        )

    @property
    def spoken(self) -> LossesByQuestion:
        """The losses of lead and pattern, without those of a lead that is small."""
        is_small = not abs(self.sizes["lead"]) > SMALL_LEAD * self.sizes["pattern"]
        return {name: of for name, of in self.losses.items() if not (name == "lead" and is_small)}

    def sources_sentence(self) -> str:
        """Return a sentence on the sources of lead and pattern; see the function of this name."""
        return sources_sentence(
            self.layer,
            self.spoken,
            self.sources,
            self.from_sources,
            left=self.left.get("lead") if "lead" in self.spoken else None,
            lead=self.sizes["lead"],
        )

    @property
    def is_constant(self) -> bool:
        """Whether a removed weight has the same output for every input."""
        return self.replacement in CONSTANT_OUTPUTS

    def weights_sentence(self) -> str:
        """Return a sentence on the weights that lead and pattern need, if outputs are constant."""
        return weights_sentence(self.spoken) if self.is_constant else ""

    def table(self) -> pd.DataFrame:
        """Return sizes and losses, a column for the first key and one for the other keys."""
        cells: dict[str, dict[str, str]] = {
            "size": {
                name: f"{_leads(size) if name == 'lead' else ''}{abs(size):.2g} nats"
                for name, size in self.sizes.items()
                if size == size
            },
            "left without any source": {
                name: f"{size:z.1f} nats" if name == "lead" else f"{size:z.2f} nats"
                for name, (size, _, _) in self.left.items()
            },
        }
        removed = dict.fromkeys(name for some in self.losses.values() for name in some)
        for name in sorted(removed, key=_place):
            label = self._row_of(name, [*removed])
            if label:
                cells[label] = {
                    question: percent_text(some[name])
                    for question, some in self.losses.items()
                    if name in some
                }
        table = {f"L{self.layer} at {self.seq_len:,} tokens": [*cells]}
        for name, heading in QUESTIONS.items():
            if any(name in of_row for of_row in cells.values()):
                table[heading] = [of_row.get(name, "") for of_row in cells.values()]
        return pd.DataFrame(table)

    def _row_of(self, removed: str, others: Sequence[str]) -> str:
        """Return the row of what is removed; empty for a circuit that equals another row."""
        if self.is_constant and removed == "w_o+w_v" and "w_o" in others:
            return ""
        if self.replacement == "mean" and removed in CONSTANT:
            return CONSTANT[removed]
        return f"lost without {phrase(removed)}"


def _leads(size: float) -> str:
    return "leads by " if size > 0 else "trails by "


def _place(removed: str) -> int:
    """Return the place of a row: sources come first, then `CONSTANT` in its order."""
    if Condition.parse(removed).are_sources:
        return -1
    return [*CONSTANT].index(removed) if removed in CONSTANT else len(CONSTANT)


def percent_text(loss: ValueAndBounds) -> str:
    """Return a fraction in percent, without decimals.

    Example:
        >>> percent_text((1.143, 1.1, 1.2)), percent_text((-0.001, -0.1, 0.1))
        ('114%', '0%')
    """
    return f"{100 * loss[0]:z.0f}%"


def sources_sentence(
    layer: int,
    losses: Mapping[str, Mapping[str, ValueAndBounds]],
    sources: Sequence[str],
    from_sources: Mapping[str, ValueAndBounds],
    left: ValueAndBounds | None = None,
    lead: float = 0.0,
) -> str:
    """Return a sentence on the sources of a layer's lead and pattern, from the loss without each.

    Args:
        layer: the layer.
        losses: of `lead` and `pattern`, the loss without each source, where it is defined.
        sources: the model's sources.
        from_sources: how much of lead and pattern the sources make; NaN within noise.
        left: the lead without any source, nats.
        lead: the lead, nats.

    Example:
        >>> lost = {
        ...     "lead": {"mask": (1.14, 1.1, 1.18), "rope": (0.35, 0.3, 0.4)},
        ...     "pattern": {"mask": (-0.08, -0.1, -0.06), "rope": (1.02, 1.0, 1.04)},
        ... }
        >>> made = {"lead": (1.0, 0.9, 1.1), "pattern": (1.0, 0.9, 1.1)}
        >>> sources_sentence(3, lost, ["mask", "rope"], made)
        "Without the causal mask L3 loses the first key's lead (114%); without RoPE the order of \
the other keys (102%)."
    """
    questions = tuple(name for name in SHORT if name in losses)
    if left is not None and left[1] > MOST * lead > 0:
        sentence = LEAD_IS_THE_TOKENS.format(layer=layer, left=f"{left[0]:.1f}", size=f"{lead:.1f}")
        rest = {name: some for name, some in losses.items() if name != "lead"}
        return " ".join([sentence, sources_sentence(layer, rest, sources, from_sources)])
    if len(sources) == 1:
        questions = tuple(name for name in questions if not isnan(from_sources[name][0]))
    if not questions:
        return ""
    if len(sources) == 1:
        who = capitalised(phrase(sources[0]))
        numbers = {name: percent_text(from_sources[name]) for name in questions}
        return ONE_SOURCE[questions].format(who=who, layer=layer, **numbers)
    needed = {name: _needed(losses[name], sources) for name in questions}
    texts = {f"of_{name}": phrase(one) for name, one in needed.items() if one}
    texts |= {name: percent_text(losses[name][one]) for name, one in needed.items() if one}
    if len(questions) == 2 and all(needed.values()):
        is_same = needed["lead"] == needed["pattern"]
        return (SAME if is_same else DIFFERENT).format(layer=layer, **texts)
    parts = [(ONLY if needed[name] else NONE)[name] for name in questions]
    return " ".join(part.format(layer=layer, **texts) for part in parts)


def _needed(losses: Mapping[str, ValueAndBounds], sources: Sequence[str]) -> str | None:
    """Return the source without which most is surely lost; the largest loss of several."""
    most = {name: losses[name] for name in sources if name in losses and losses[name][1] > MOST}
    return max(most, key=lambda name: most[name][0], default=None)


def weights_sentence(losses: Mapping[str, Mapping[str, ValueAndBounds]]) -> str:
    """Return a sentence on the queries, keys and outputs that lead and pattern need.

    Args:
        losses: of `lead` and `pattern`, the loss where the output of `w_q`, `w_k`, both (`w_q+w_k`)
            and `w_o` is constant. Nothing is said where an interval leaves it open.

    Example:
        >>> lead = {"w_q": (0.09, 0.08, 0.1), "w_k": (1.09, 1.0, 1.2), "w_o": (1.17, 1.1, 1.2)}
        >>> weights_sentence({"lead": lead})
        'The lead needs keys that vary (109%) and what attention writes (117%), not queries that \
vary (9%).'
    """
    parts = [part for name in SHORT if (part := _needs(SHORT[name], losses.get(name, {})))]
    sentence = "; ".join(parts)
    return f"{capitalised(sentence)}." if sentence else ""


def _needs(what: str, losses: Mapping[str, ValueAndBounds]) -> str:
    both, names = losses.get("w_q+w_k"), ("w_q", "w_k", "w_o")
    if not {*names} <= {*losses}:
        return ""
    texts = {name: percent_text(loss) for name, loss in losses.items()}
    rope, w_o = losses.get("rope"), effect_of(losses["w_o"], QUARTER)
    if both and rope and rope[1] > MOST and effect_of(both, QUARTER) == w_o == "not needed":
        return NEITHER.format(what=what, **texts)
    effects = [effect_of(losses[name], QUARTER) for name in names]
    if "unclear" in effects:
        return ""
    queries, keys, writes = (effect == "needed" for effect in effects)
    return NEEDS[queries, keys, writes].format(what=what, **texts)
