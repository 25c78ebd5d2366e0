"""The tables of a run: their columns, with and without rows."""

from io import StringIO

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


def bounds(**values: float) -> dict[str, float]:
    """The columns of some intervals."""
    row = {}
    for name, value in values.items():
        row |= {name: value, f"{name}_low": value - 1, f"{name}_high": value + 2}
    return row


RMS = {"rms_first": interval(17), "rms_others": interval(18)}
SHARES = {"share_first": interval(14), "share_others": interval(15)}
OF_SHARE = {"share_first": 14, "share_others": 15}
SPLIT = {
    f"{name}_{part}": 21 for name in ("share", "lost", "alone") for part in ("first", "others")
}
EFFECT = MaskEffect(with_mask=interval(0.3), without_mask=interval(0.2), difference=interval(0.1))


def layer(index: int = 0, lost: float = 7.0, player: str = "w_q") -> LayerAttribution:
    """A layer with one entry of each kind."""
    parts = {"share": 5, "alone": 6, "lost": lost, "amplification": 13, **SPLIT}
    intervals = {name: interval(value) for name, value in parts.items()}
    pair = Interaction(player_set="players", players=("mask", "w_q"), share=interval(8), **SHARES)
    return LayerAttribution(
        layer=index,
        sources=(Source(term="mask", rms=interval(3), share=interval(4), **SHARES, **RMS),),
        position=Source(term="position", rms=interval(2), share=interval(9)),
        players=(PlayerAttribution(player_set="players", player=player, **intervals),),
        interactions=(pair,),
        non_relative=EFFECT,
    )


MEASURES = Measures(**{name: interval(1) for name in Measures.__dataclass_fields__})
TERMS = MeanCovariance(
    layer=0,
    mean=interval(1),
    covariance=interval(2),
    mean_rms=interval(3),
    covariance_rms=interval(4),
)
LABELS = ("tokens", "kept")
LABELLED = ({"tokens": "text", "kept": "mask"}, [MEASURES])
TABLES = {
    "sources": (sources_table([layer()]), sources_table([])),
    "non_relative": (
        non_relative_table({"text": [EFFECT]}, [0]),
        non_relative_table({"text": []}, []),
    ),
    "players": (players_table([layer()]), players_table([])),
    "interactions": (interactions_table([layer()]), interactions_table([])),
    "pattern": (measures_table([LABELLED], [0], LABELS), measures_table([], [], LABELS)),
    "mean_covariance": (mean_covariance_table([TERMS]), mean_covariance_table([])),
}
FIRST_ROWS = {
    "sources": {"layer": 0, "term": "mask", **bounds(rms=3, share=4)}
    | bounds(rms_first=17, rms_others=18, **OF_SHARE),
    "players": {"layer": 0, "player_set": "players", "player": "w_q"}
    | bounds(share=5, lost=7, alone=6, amplification=13, **SPLIT),
    "interactions": {"layer": 0, "player_set": "players", "players": "mask+w_q"}
    | bounds(share=8, **OF_SHARE),
    "mean_covariance": {"layer": 0, "term": "mean", **bounds(share=1, rms=3)},
    "pattern": {"layer": 0, "tokens": "text", "kept": "mask"}
    | bounds(**dict.fromkeys(Measures.__dataclass_fields__, 1)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_rows_keeps_its_columns_on_disk(name: str):
    full, empty = TABLES[name]
    read = pd.read_csv(StringIO(empty.to_csv(index=False)))
    assert len(read) == 0
    assert list(read) == list(full)


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_each_number_stands_with_its_bounds(name: str):
    assert TABLES[name][0].iloc[0].to_dict() == FIRST_ROWS[name]


def test_the_last_term_of_the_sources_is_the_sum_of_all_but_content():
    assert TABLES["sources"][0]["term"].tolist() == ["mask", "position"]
    assert TABLES["sources"][0]["share"].tolist() == [4, 9]
