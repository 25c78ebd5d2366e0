"""A window of no tokens is refused when a model is loaded, unless no layer has one."""

from pathlib import Path

import pytest
from support.decoders import write_decoder
from support.plain_states import plain_losses
from support.refused_models import change
from support.rounding import NETWORK, assert_same

from nope_probe import UserError, capture_losses, load


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("mistral", "sliding_window"),
        ("gemma3_text", "sliding_window"),
        ("gpt_neo", "window_size"),
        ("recurrent_gemma", "attention_window_size"),
        ("llama4_text", "attention_chunk_size"),
    ],
)
def test_a_window_of_no_tokens_is_refused_by_its_name(
    name: str, setting: str, size: int, tmp_path: Path
) -> None:
    folder = write_decoder(name, tmp_path).folder
    change(folder, **{setting: size})
    with pytest.raises(UserError, match=f"{setting} {size} in its configuration"):
        load(str(folder))


def test_a_window_that_no_layer_has_may_have_any_size(tmp_path: Path) -> None:
    full = ["full_attention"] * 3
    tiny = write_decoder("gemma3_text", tmp_path, layer_types=full, sliding_window=0)
    losses, expected = (
        capture_losses(load(tiny.folder), tiny.tokens),
        plain_losses(tiny.hf, tiny.tokens),
    )
    assert_same(losses, expected, NETWORK)
