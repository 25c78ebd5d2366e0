"""Maps of every decoder that TransformerLens reads are plain transformers' own scores."""

from pathlib import Path

import pytest
from support.decoder_errors import map_error, removals_of
from support.decoders import DECODERS, write_decoder

from nope_probe import load
from nope_probe.errors import UserError

# One of each scheme: of positions, windows, norms, heads, biases, sinks, blocks.
SCHEMES = (
    *("bloom", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "llama"),
    *("llama4_text", "mpt", "olmo2", "opt", "phi3", "qwen3", "qwen3_next", "smollm3"),
)


def by_scheme(model_type: str) -> object:
    marks = [] if model_type in SCHEMES else [pytest.mark.every_decoder]
    return pytest.param(model_type, marks=marks)


@pytest.mark.parametrize("model_type", map(by_scheme, DECODERS))
def test_maps_are_plain_transformers_own_intact_and_without_each_component(
    model_type: str, tmp_path: Path
) -> None:
    tiny = write_decoder(model_type, tmp_path)
    removals = removals_of(tiny)
    if not removals:
        with pytest.raises(UserError, match="no attention"):
            load(str(tiny.folder))
        return
    model = load(str(tiny.folder)).model
    errors = {removal: map_error(model, tiny, removal) for removal in removals}
    assert max(errors.values()) <= 1e-5, errors
