"""How pages name what stands in the place of a removed weight, in the words of its record."""

from __future__ import annotations

from collections.abc import Sequence

from nope_probe.conditions import expanded, weights_of
from nope_probe.figures.names import words
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement

_OUTPUTS_OF = {"w_q": "query", "w_k": "key", "w_v": "value", "w_o": "output"}


def stand_in(name: str, replacement: Replacement) -> str:
    """Return the stand-in for a player's removed weights, as sentences say it after "with".

    Args:
        name: a weight, a circuit, or a union that holds one.
        replacement: what the weights are replaced by.

    Example:
        >>> stand_in("w_q", "identity"), stand_in("w_q", "mean")
        ('an identity in its place', 'its mean query kept')
        >>> stand_in("qk", "mean"), stand_in("w_q+mlp", "identity")
        ('their mean query and key kept', 'an identity in place of W_Q')
    """
    weights, record = weights_of(name), STAND_INS[replacement]
    several, alone = len(weights) > 1, len(weights) == len(expanded(name.split("+")))
    owner = ("their" if several else "its") if alone else "the"
    labels = " and ".join(words(weight) for weight in weights)
    if record.mean:
        outputs = " and ".join(_OUTPUTS_OF[weight] for weight in weights)
        return f"{owner} mean {outputs}{'' if alone else f' of {labels}'} kept"
    place = f"in {owner} place" if alone else f"in place of {labels}"
    return f"{record.several if several else record.one} {place}"


def replaced_weights(replacements: Sequence[Replacement]) -> list[str]:
    """Return notes on the replacements of removed weights in a run; empty without replacements.

    Example:
        >>> replaced_weights(["mean"])[0].split(": ")[1]
        'mean (the mean of its output, whatever it reads).'
        >>> replaced_weights([])
        []
    """
    if not replacements:
        return []
    kinds = "; ".join(f"{name} ({STAND_INS[name].note})" for name in replacements)
    note = "Statements about a removed weight are about what stands in for it"
    several = "A weight counts as needed only where all of these say so."
    return [f"{note}: {kinds}. {several if len(replacements) > 1 else ''}".rstrip()]
