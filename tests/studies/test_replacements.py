"""Several replacements side by side, bands of RoPE, and the values of heads."""

import numpy as np
import pandas as pd
import pytest
from support.rounding import MEASURE
from support.tiny_models import ByName, tokens

from nope_probe import Ablation, ablated, attribute_heads, capture_scores, run_ablations

pytestmark = pytest.mark.usefixtures("undrawn")


def test_each_replacement_has_the_rows_of_a_run_with_it_alone(bridge: ByName) -> None:
    model, inputs, kinds = bridge("llama"), tokens(16, 11), ("random", "identity", "mean")
    together, mean = (
        run_ablations(model, inputs, remove=["w_q", "w_k"], folds=4, replacement=replacement)
        for replacement in (kinds, "mean")
    )
    rows = together.tables["pattern"]
    of_mean = rows[rows["replacement"].isin(("none", "mean"))].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_mean, mean.tables["pattern"])
    assert {*rows["replacement"]} == {"none", *kinds}
    # Removals without a weight run once.
    names = set(together.maps)
    assert not {f"score_{kind}/mask" for kind in kinds} & names
    for kind in kinds:
        assert {f"score_{kind}/w_q", f"score_{kind}/w_k"} <= names
    for name in ("score_mean/w_q", "score/mask"):
        np.testing.assert_array_equal(together.maps[name], mean.maps[name])


def test_each_band_of_rope_is_a_row_and_all_together_are_rope(bridge: ByName) -> None:
    model, inputs = bridge("llama"), tokens(16, 11)
    bands, whole = (
        run_ablations(model, inputs, folds=4, **options)
        for options in ({"remove": ["rope[0:2]", "rope[2:5]"]}, {"remove": ["sources"]})
    )
    names = ["intact", "mask", "rope", "mask+rope", "rope[0:2]", "rope[2:5]"]
    rows = bands.tables["pattern"]
    assert rows["removed"].unique().tolist() == [*names, "shuffled", "mask+shuffled"]
    rows = rows[~rows["removed"].isin(names[4:])].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, whole.tables["pattern"])
    one = run_ablations(model, inputs, folds=4, remove="rope[0:5]").tables["pattern"]
    for name in ("lead", "order"):
        by_source = one.pivot(index="layer", columns="removed", values=name)
        np.testing.assert_allclose(by_source["rope[0:5]"], by_source["rope"], rtol=1e-4, atol=1e-4)


BANDS = ("rope[0:2]", "rope[2:5]")


def test_the_values_of_a_head_are_those_of_its_maps_without_each_source_and_band(
    bridge: ByName,
) -> None:
    model, inputs = bridge("llama"), tokens(97, 13)
    run = run_ablations(model, inputs, folds=5, batch_size=31, remove=BANDS, per_head=True)
    table, names = run.tables["head_pattern"], ["intact", "mask", "rope", "mask+rope", *BANDS]
    assert table["removed"].tolist() == names * 2 * 6
    maps = {}
    for name in names:
        removed = () if name == "intact" else name
        with ablated(model, Ablation(remove=removed)):
            maps[removed] = capture_scores(model, inputs, n_folds=5, per_head=True)
    heads = attribute_heads(maps)
    for row in table.to_dict("records"):
        values = heads[row["layer"], row["head"]].conditions[row["removed"]]
        for name in ("lead", "amplitude", "order"):
            found = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            expected = getattr(values, name).ends
            assert found == pytest.approx(expected, rel=MEASURE, abs=MEASURE, nan_ok=True)
