"""The tables of a run: their columns, with and without rows."""

from io import StringIO
from typing import Any

import pandas as pd
import pytest

from nope_probe.analyses.attribution import Interaction, LayerAttribution, PlayerAttribution, Source
from nope_probe.analyses.jackknife import Interval
from nope_probe.analyses.pattern import Measures
from nope_probe.analyses.pattern_changes import MaskEffect
from nope_probe.analyses.splits import MeanCovariance
from nope_probe.experiments.tables import (
    interactions_table,
    mean_covariance_table,
    measures_table,
    non_relative_table,
    players_table,
    sources_table,
)


def interval(value: float) -> Interval:
    return Interval(value=float(value), low=value - 1.0, high=value + 2.0)


EFFECT = MaskEffect(with_mask=interval(0.3), without_mask=interval(0.2), difference=interval(0.1))


POSITION = Source(term="position", rms=interval(2), share=interval(9))


def layer(index: int, lost: float = 7.0) -> LayerAttribution:
    """A layer with one entry of each kind."""
    player = PlayerAttribution(
        player_set="players",
        player="w_q",
        share=interval(5),
        alone=interval(6),
        lost=interval(lost),
        amplification=interval(13),
    )
    return LayerAttribution(
        layer=index,
        sources=(Source(term="mask", rms=interval(3), share=interval(4)),),
        position=POSITION,
        players=(player,),
        interactions=(
            Interaction(player_set="players", players=("mask", "w_q"), share=interval(8)),
        ),
        non_relative=EFFECT,
    )


MEASURES = Measures(**{name: interval(1) for name in Measures.__dataclass_fields__})
TERMS = MeanCovariance(
    layer=0,
    mean=interval(1),
    covariance=interval(2),
    mean_rms=interval(3),
    covariance_rms=interval(4),
    dimensions=interval(5),
)
LABELS = ("tokens", "kept")
FULL = {
    "sources": sources_table([layer(0)]),
    "non_relative": non_relative_table({"text": [EFFECT]}),
    "players": players_table([layer(0)]),
    "interactions": interactions_table([layer(0)]),
    "pattern": measures_table([({"tokens": "text", "kept": "mask"}, [MEASURES])], LABELS),
    "mean_covariance": mean_covariance_table([TERMS]),
}
EMPTY = {
    "sources": sources_table([]),
    "non_relative": non_relative_table({"text": []}),
    "players": players_table([]),
    "interactions": interactions_table([]),
    "pattern": measures_table([], LABELS),
    "mean_covariance": mean_covariance_table([]),
}


@pytest.mark.parametrize("name", FULL)
def test_a_table_without_rows_keeps_its_columns_on_disk(name: str):
    read = pd.read_csv(StringIO(EMPTY[name].to_csv(index=False)))
    assert len(read) == 0
    assert list(read) == list(FULL[name])


def test_measures_come_with_the_labels_of_their_group():
    row = FULL["pattern"].iloc[0]
    assert (row["layer"], row["tokens"], row["kept"]) == (0, "text", "mask")
    assert (row["locality"], row["locality_low"], row["locality_high"]) == (1, 0, 3)


def test_a_player_has_its_share_alone_and_lost_with_bounds():
    [row] = players_table([layer(2)]).to_dict("records")
    assert row == {
        "layer": 2,
        "player_set": "players",
        "player": "w_q",
        **{"share": 5, "share_low": 4, "share_high": 7},
        **{"alone": 6, "alone_low": 5, "alone_high": 8},
        **{"lost": 7, "lost_low": 6, "lost_high": 9},
        **{"amplification": 13, "amplification_low": 12, "amplification_high": 15},
    }


def test_the_last_term_of_the_sources_is_the_sum_of_all_but_content():
    table = sources_table([layer(0)])
    assert table["term"].tolist() == ["mask", "position"]
    assert table["share"].tolist() == [4, 9]


def test_reparametrisations_add_the_range_of_each_part_layer_by_layer():
    again = [[layer(0, lost=11), layer(1, lost=1)], [layer(0, lost=9), layer(1, lost=6)]]
    table = players_table([layer(0), layer(1)], again)
    assert table["lost_reparametrised_min"].tolist() == [7, 1]
    assert table["lost_reparametrised_max"].tolist() == [11, 7]
    assert table["alone_reparametrised_max"].tolist() == [6, 6]


def test_a_player_that_was_not_reparametrised_has_no_range():
    other: Any = LayerAttribution(
        layer=0, sources=(), position=POSITION, players=(), interactions=(), non_relative=EFFECT
    )
    table = players_table([layer(0)], [[other]])
    assert table["lost_reparametrised_min"].isna().all()


def test_terms_and_interactions_are_named():
    assert interactions_table([layer(0)])["players"].tolist() == ["mask+w_q"]
    terms = mean_covariance_table([TERMS]).set_index("term")
    assert terms["share"].to_dict() == {"mean": 1, "covariance": 2}
    assert terms["rms_low"].to_dict() == {"mean": 2, "covariance": 3}
