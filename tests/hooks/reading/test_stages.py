"""The Gram map of every stage equals that of plain transformers' own states."""

from typing import Any

import pytest
import torch
from support.plain_attention import per_fold
from support.rounding import NETWORK
from support.tiny_models import N_POS, ByName, ModelOf, distance, hooked_transformer, tokens

from nope_probe import UserError, capture_stages
from nope_probe.hooks.layers.base_layer import Layer
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.accumulators import STAGES, available, hook_name
from nope_probe.stages import LETTERS

N_SEQS, N_FOLDS = 19, 3
INPUTS = tokens(N_SEQS, seed=5)


def numbered(model: Any) -> dict[int, Layer]:
    return {layer.index: layer for layer in layers_of(model)}


@pytest.mark.hooked_transformer
def test_a_stage_after_a_layer_norm_includes_its_weight_and_bias() -> None:
    """HookedTransformer's hook_normalized leaves both out."""
    sizes = {"n_layers": 1, "d_model": 10, "d_head": 5, "n_heads": 3}
    model = hooked_transformer(**sizes, act_fn="gelu", normalization_type="LN", seed=2)
    x = torch.randn(N_SEQS, N_POS, 10)
    ln = model.blocks[0].ln1
    for parameter in (ln.w, ln.b):
        parameter.data.normal_()
    expected = torch.nn.functional.layer_norm(x, (10,), ln.w, ln.b, model.cfg.eps)
    maps = capture_stages(model, x, stages=["a"], n_folds=N_FOLDS)
    flat = expected.detach().double()
    assert distance(maps.folds["a"], per_fold(flat @ flat.mT, N_FOLDS)) <= NETWORK


@pytest.mark.parametrize(
    ("spec", "layer", "letters"),
    [
        *[(f"bridge:{name}", 0, "abcdefghi") for name in ("llama", "phi3", "gpt2")],
        *[(spec, 1, "abcdefg") for spec in ("bridge:llama", "hooked:smollm3-rope")],
        ("bridge:gemma2", 0, "abcdghi"),  # norms after attention and MLP
        ("bridge:cohere", 0, "abcdghi"),  # attention and MLP in parallel
    ],
)
def test_a_block_has_the_stages_that_mean_what_the_paper_means(
    spec: str, layer: int, letters: str, model_of: ModelOf
) -> None:
    assert "".join(available(numbered(model_of(spec)[0]), layer)) == letters


def test_an_attention_only_block_has_no_stages_e_and_f() -> None:
    from nope_probe import build, parameter_free

    layers = numbered(build(parameter_free(2, 8)))
    assert "".join(available(layers, 0)) == "abcdghi"
    assert "".join(available(layers, 1)) == "abcdg"


def test_the_letters_are_the_papers_and_their_points_are_transformer_lens_hook_points(
    bridge: ByName, hooked: ByName
) -> None:
    assert tuple(STAGES) == LETTERS == tuple("abcdefghi")
    for model in (bridge("llama"), hooked("smollm3-rope")):
        layers = numbered(model)
        for letter in available(layers, 0):
            stage = STAGES[letter]
            name = hook_name(stage, layers[stage.block])
            assert f"blocks.{stage.block}.{name}" in model.hook_dict


def test_the_first_block_is_the_default_and_a_pass_ends_before_the_next_blocks_output(
    bridge: ByName,
) -> None:
    model, ran = bridge("llama"), list[int]()
    points = [(layer.index, layer.point("hook_mlp_out")) for layer in layers_of(model)]
    hooks = [(point, lambda x, hook, number=number: ran.append(number)) for number, point in points]
    with hooks_attached(hooks):
        maps = capture_stages(model, INPUTS, n_folds=N_FOLDS)
    assert {"h", "i"} <= {*maps.folds}
    assert set(ran) == {0}


def test_a_stage_that_a_block_lacks_or_a_block_that_the_model_lacks_is_an_error(
    bridge: ByName,
) -> None:
    with pytest.raises(UserError, match="block 1 has the stages a b c d e f g, not h i"):
        capture_stages(bridge("llama"), INPUTS, layer=1, stages=["a", "h", "i"])
    for layer in (-1, 2):
        with pytest.raises(UserError, match=f"from 0 to 1, got {layer}"):
            capture_stages(bridge("llama"), INPUTS, layer=layer)
