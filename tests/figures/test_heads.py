"""Heat maps of the heads' measures."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from nope_probe.figures.measures import HEAD_MEASURES, head_map
from nope_probe.figures.words import MEASURES


def heads(**values: Any) -> pd.DataFrame:
    table = pd.DataFrame({"layer": [1, 1, 2, 2], "head": [1, 2, 1, 2], **values})
    for name in values:
        table[f"{name}_low"], table[f"{name}_high"] = table[name] - 1, table[name] + 1
    return table


def test_a_head_map_has_a_row_per_layer_and_a_column_per_head_and_leaves_out_no_pattern():
    figure = head_map(heads(relative_r2=[0.2, 0.3, np.nan, 0.7]), "relative_r2")
    np.testing.assert_array_equal(figure.data[0].z, [[0.2, 0.3], [np.nan, 0.7]])
    assert figure.layout.yaxis.autorange == "reversed"


def test_signed_measures_of_heads_are_coloured_around_zero():
    axis = head_map(heads(edge_contrast=[0.2, -0.5, 0.1, 0.3]), "edge_contrast").layout.coloraxis
    assert (axis.cmin, axis.cmax) == (-0.5, 0.5)


def test_a_measure_that_heads_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"expected a measure of amplitude, .*, got 'height'"):
        head_map(heads(amplitude=[1.0, 2.0, 3.0, 4.0]), "height")


@pytest.mark.parametrize("measure", HEAD_MEASURES)
def test_the_colour_bar_has_the_measures_unit(measure: str) -> None:
    figure = head_map(heads(**{measure: [0.2, 0.3, 0.4, 0.7]}), measure)
    assert figure.layout.coloraxis.colorbar.title.text == MEASURES[measure].unit
    assert MEASURES[measure].title in figure.layout.title.text
