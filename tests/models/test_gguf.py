"""A GGUF file is the model that was written into it; tests/ci has every architecture and key."""

from pathlib import Path

import pytest
from ci.test_gguf_keys import LINEAR, error_of, written
from support.rounding import NETWORK

from nope_probe import UserError
from nope_probe.models.context import configured_context
from nope_probe.models.gguf import complete_fields


def test_a_file_is_the_model_that_was_written_into_it(tmp_path: Path) -> None:
    """RoPE turns half of each head, at positions over a scale."""
    path, rope = tmp_path / "tiny.gguf", LINEAR | {"partial_rotary_factor": 0.5}
    model = written("stablelm", path, rope_parameters=rope)
    assert error_of(path, model) <= NETWORK
    assert configured_context(str(path)) == model.config.max_position_embeddings


@pytest.mark.parametrize(("n_layers", "scalar"), [(26, 256), (46, 144)])
def test_gemma_2_of_27_billion_divides_scores_by_the_width_of_its_heads(
    n_layers: int, scalar: int
) -> None:
    """llama.cpp takes d_model / n_heads for Gemma 2 27B, and d_head for the others."""
    sizes = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 256}
    stated = {"model_type": "gemma2", "num_hidden_layers": n_layers, **sizes}
    assert complete_fields("a file", {}, stated)["query_pre_attn_scalar"] == scalar


def test_a_file_that_turns_a_part_of_heads_which_the_model_turns_whole_is_refused() -> None:
    stated = {"model_type": "qwen3", "head_dim": 16, "num_attention_heads": 4}
    with pytest.raises(UserError, match=r"a file states rope\.dimension_count = 8, which"):
        complete_fields("a file", {"rope.dimension_count": 8}, stated)
