"""How sentences name what stands in the place of a removed weight."""

from __future__ import annotations

from nope_probe.components import Replacement, expanded, weights_of
from nope_probe.figures.names import words

_STAND_INS: dict[Replacement, tuple[str, str]] = {
    "identity": ("an identity", "identities"),
    "random": ("a random projection", "random projections"),
    "zero": ("a zero", "zeros"),
}
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
    weights = weights_of(name)
    several, alone = len(weights) > 1, len(weights) == len(expanded(name.split("+")))
    owner = ("their" if several else "its") if alone else "the"
    labels = " and ".join(words(weight) for weight in weights)
    if replacement == "mean":
        outputs = " and ".join(_OUTPUTS_OF[weight] for weight in weights)
        return f"{owner} mean {outputs}{'' if alone else f' of {labels}'} kept"
    place = f"in {owner} place" if alone else f"in place of {labels}"
    return f"{_STAND_INS[replacement][several]} {place}"
