"""The maps are the same whichever TransformerLens is installed."""

import pytest
import torch
from safetensors.torch import load_file
from support.reference_maps import INPUTS, MAPS, differences, reference_maps

from nope_probe.models.parameter_free import (
    build,
    has_hooked_transformer,
    nope_llama,
    parameter_free,
)


def test_maps_of_the_saved_inputs_equal_those_of_transformer_lens_3() -> None:
    found = differences(reference_maps(), load_file(MAPS))
    assert not {name: far for name, far in found.items() if not far <= 1e-5}


def test_differences_are_relative_and_infinite_for_other_masked_cells() -> None:
    expected = torch.tensor([[8.0, float("nan")], [2.0, 1.0]])
    assert differences({"a": expected + 2}, {"a": expected}) == {"a": 0.25}
    assert differences({"a": expected.nan_to_num()}, {"a": expected}) == {"a": float("inf")}
    with pytest.raises(ValueError, match=r"only one of the two has \['b'\]"):
        differences({"a": expected}, {"a": expected, "b": expected})


def test_the_saved_files_stay_small() -> None:
    assert INPUTS.stat().st_size + MAPS.stat().st_size < 160_000


def test_models_are_of_the_kind_that_transformer_lens_has(kind: str) -> None:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        HookedTransformer = None
    assert has_hooked_transformer() == (HookedTransformer is not None)
    for config in (parameter_free(1, 6), nope_llama("tiny", rope=True)):
        assert type(build(config)).__name__ == kind
