"""The explorer of an ablation run, from the conditions that the run has anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nope_probe.analyses.pattern_changes import KeptPattern
from nope_probe.analyses.shapley import Condition, PlayerSet
from nope_probe.experiments.explore.views import combinations, mean_pattern_view, strongest_layer
from nope_probe.figures.explorer import Explorer
from nope_probe.maps.stored_maps import StoredMaps

PAGE_BYTES = 900_000  # beside all other maps of a report


def explorer_of(
    maps: Mapping[Condition, StoredMaps],
    players: PlayerSet,
    skip_keys: int,
    kept: Mapping[Condition, Sequence[KeptPattern]],
) -> Explorer:
    """Return the explorer of the conditions of some players, which the run has captured.

    It opens on the layer with the strongest pattern.

    Args:
        maps: score maps of all conditions.
        players: what the switches remove.
        skip_keys: how many first keys the patterns leave out.
        kept: what each condition leaves of every layer's pattern.
    """
    found = combinations(players)
    view = mean_pattern_view(
        [maps[each] for each in found], [kept[each] for each in found], skip_keys
    )
    return Explorer(
        title="Remove components, and see what is left of the positional pattern",
        players={each.name: sorted(each.components) for each in players.players},
        views=(view,),
        components=[],
        layer=strongest_layer(view),
        note="A switch removes its component as the run did; brackets are 95% intervals.",
        max_bytes=PAGE_BYTES,
    )
