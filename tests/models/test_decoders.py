"""Maps of decoders that differ in kind are plain transformers' own; tests/ci has every decoder."""

from pathlib import Path

import pytest
from support.decoder_errors import map_error, removals_of
from support.decoders import write_decoder
from support.rounding import NETWORK

from nope_probe import UserError, load

# ALiBi, soft cap and window, sinks, fused, learned positions, norms of q and k, hybrid, NoPE.
KINDS = ("bloom", "gemma2", "gpt_oss", "phi3", "opt", "qwen3", "qwen3_next", "smollm3")


@pytest.mark.parametrize("name", KINDS)
def test_maps_are_plain_transformers_own_intact_and_without_each_component(
    name: str, tmp_path: Path
) -> None:
    decoder = write_decoder(name, tmp_path)
    model = load(str(decoder.folder)).model
    errors = {removal: map_error(model, decoder, removal) for removal in removals_of(decoder)}
    assert max(errors.values()) <= NETWORK, errors


def test_keys_that_are_selected_for_each_query_are_refused(tmp_path: Path) -> None:
    tiny = write_decoder("glm_moe_dsa", tmp_path, index_topk=7)
    with pytest.raises(UserError, match="beyond 7 tokens"):
        load(str(tiny.folder))
