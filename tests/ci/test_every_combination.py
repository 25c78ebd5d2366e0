"""Every combination of removals, with every replacement, equals a model edited by hand."""

from typing import Any

import pytest
from support.edited_model import SEVEN, subsets
from support.hooked_runs import replacement_errors
from support.tiny_models import ByName, ModelOf

from nope_probe.hooks.removing.stand_ins import REPLACEMENTS

MODELS = ("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "hooked:smollm3-rope")


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("spec", MODELS)
def test_every_combination_with_each_replacement_equals_an_edited_model(
    spec: str, replacement: Any, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    assert not replacement_errors(model, tiny(name), replacement, subsets(SEVEN))
