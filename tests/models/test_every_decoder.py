"""Maps of every decoder that TransformerLens reads are plain transformers' own scores."""

from pathlib import Path

import pytest
import torch
from support.decoder_errors import map_error, removals_of
from support.decoders import DECODERS, write_decoder
from support.plain_attention import Recorder, recording
from support.tiny_models import distance

from nope_probe import load
from nope_probe.errors import UserError

# One of each scheme: of positions, windows, norms, heads, biases, sinks, blocks.
SCHEMES = (
    *("bloom", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "llama"),
    *("llama4_text", "mpt", "olmo2", "opt", "phi3", "qwen3", "qwen3_next", "smollm3"),
)


each_decoder = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in SCHEMES else [pytest.mark.every_decoder])
        for name in DECODERS
    ],
)


@each_decoder
def test_the_recording_function_attends_as_transformers_itself_does(
    model_type: str, tmp_path: Path
) -> None:
    tiny = write_decoder(model_type, tmp_path)
    with torch.inference_mode():
        logits = tiny.hf(tiny.tokens).logits
        with recording(tiny.hf, Recorder(None)):
            recorded = tiny.hf(tiny.tokens).logits
    assert distance(recorded, logits) <= 1e-5


@each_decoder
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
