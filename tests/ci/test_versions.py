"""Maps of the saved inputs are those of TransformerLens 3.9, with every version."""

from ci.reference_maps import MAPS, differences, reference_maps
from safetensors.torch import load_file
from support.rounding import NETWORK


def test_maps_of_the_saved_inputs_equal_those_of_transformer_lens_3() -> None:
    told = differences(reference_maps(), load_file(MAPS))
    assert not {name: far for name, far in told.items() if not far <= NETWORK}
