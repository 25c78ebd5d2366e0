"""The two sentences on a layer: which source makes its lead and its pattern, and how weights do.

Sentences are chosen from tables by what intervals settle; numbers alone are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nope_probe.experiments.verdicts import MOST, effect_of
from nope_probe.figures.intervals import ValueAndBounds
from nope_probe.figures.names import phrase

THINGS = {"lead": "the first key's lead", "pattern": "the order of the other keys"}
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
    "L{layer}'s lead of the first key is mostly the token's own: {left} nats without any "
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
    (
        True,
        False,
        True,
    ): "{what} needs queries that vary ({w_q}) and what attention writes "
    "({w_o}), not keys that vary ({w_k})",
    (
        False,
        True,
        True,
    ): "{what} needs keys that vary ({w_k}) and what attention writes ({w_o}), "
    "not queries that vary ({w_q})",
    (True, True, True): "{what} needs queries ({w_q}) and keys that vary ({w_k}), and what "
    "attention writes ({w_o})",
}
NEITHER = "{what} needs no queries or keys that vary: RoPE on constant ones makes it ({w_q+w_k})"
SHORT = {"lead": "the lead", "pattern": "the order of the others"}


def percent(loss: ValueAndBounds) -> str:
    """Return a fraction in percent, without decimals.

    Example:
        >>> percent((1.143, 1.1, 1.2)), percent((-0.001, -0.1, 0.1))
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
    """Return who makes a layer's lead and its pattern, from what is lost without each source.

    Args:
        layer: the layer.
        losses: of `lead` and `pattern`, the loss without each source, where it is defined.
        sources: the model's sources.
        from_sources: how much of lead and pattern the sources make.
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
    questions = tuple(name for name in THINGS if name in losses)
    if left is not None and left[1] > MOST * lead > 0:
        own = LEAD_IS_THE_TOKENS.format(layer=layer, left=f"{left[0]:.1f}", size=f"{lead:.1f}")
        rest = {name: some for name, some in losses.items() if name != "lead"}
        return " ".join([own, sources_sentence(layer, rest, sources, from_sources)])
    if not questions:
        return ""
    if len(sources) == 1:
        who = phrase(sources[0])
        numbers = {name: percent(from_sources[name]) for name in questions}
        who = who[:1].upper() + who[1:]
        return ONE_SOURCE[questions].format(who=who, layer=layer, **numbers)
    needed = {name: _needed(losses[name], sources) for name in questions}
    texts = {f"of_{name}": phrase(one) for name, one in needed.items() if one}
    texts |= {name: percent(losses[name][one]) for name, one in needed.items() if one}
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
    """Return what lead and pattern need of queries, keys and what attention writes.

    Args:
        losses: of `lead` and `pattern`, the loss where the output of `w_q`, `w_k`, both (`w_q+w_k`)
            and `w_o` is constant. Nothing is said where an interval leaves it open.

    Example:
        >>> lead = {"w_q": (0.09, 0.08, 0.1), "w_k": (1.09, 1.0, 1.2), "w_o": (1.17, 1.1, 1.2)}
        >>> weights_sentence({"lead": lead})
        'The lead needs keys that vary (109%) and what attention writes (117%), not queries that \
vary (9%).'
    """
    parts = [part for name in THINGS if (part := _needs(SHORT[name], losses.get(name, {})))]
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def _needs(what: str, losses: Mapping[str, ValueAndBounds]) -> str:
    both, names = losses.get("w_q+w_k"), ("w_q", "w_k", "w_o")
    if not {*names} <= {*losses}:
        return ""
    texts = {name: percent(loss) for name, loss in losses.items()}
    rope, w_o = losses.get("rope"), effect_of(losses["w_o"])
    if both and rope and rope[1] > MOST and effect_of(both) == w_o == "not needed":
        return NEITHER.format(what=what, **texts)
    effects = [effect_of(losses[name]) for name in names]
    if "unclear" in effects:
        return ""
    queries, keys, writes = (effect == "needed" for effect in effects)
    return NEEDS[queries, keys, writes].format(what=what, **texts)
