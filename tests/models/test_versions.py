"""One call returns the same maps whatever TransformerLens is installed."""

import pytest
import torch
from safetensors.torch import load_file
from support.reference_maps import INPUTS, MAPS, differences, reference_maps

from nope_probe.models.parameter_free import build, has_hooked_transformer, parameter_free
from nope_probe.models.presets import nope_llama


def test_maps_of_the_saved_inputs_are_those_that_transformer_lens_3_gave() -> None:
    found = differences(reference_maps(), load_file(MAPS))
    assert not {name: far for name, far in found.items() if not far <= 1e-5}


def test_a_map_that_differs_or_hides_other_cells_is_far_away() -> None:
    truth = torch.tensor([[8.0, float("nan")], [2.0, 1.0]])
    assert differences({"a": truth + 2}, {"a": truth}) == {"a": 0.25}
    assert differences({"a": truth.nan_to_num()}, {"a": truth}) == {"a": float("inf")}
    with pytest.raises(ValueError, match=r"only one of the two has \['b'\]"):
        differences({"a": truth}, {"a": truth, "b": truth})


def test_the_saved_files_stay_small() -> None:
    assert INPUTS.stat().st_size + MAPS.stat().st_size < 160_000


def test_the_version_is_told_by_what_transformer_lens_has(kind: str) -> None:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        HookedTransformer = None
    assert has_hooked_transformer() == (HookedTransformer is not None)
    for config in (parameter_free(1, 6), nope_llama("tiny", rope=True)):
        assert type(build(config)).__name__ == kind
