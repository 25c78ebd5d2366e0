"""A random reparametrisation changes the weights and nothing that the model computes."""

import pytest
import torch
from support.tiny_models import ModelOf, distance
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.capture import capture_scores
from nope_probe.hooks.removing.edited_weights import complex_map, invertible_map, reparametrised

MODELS = [
    "hooked:smollm3-rope",
    "hooked:smollm3-nope",
    "bridge:llama",
    "bridge:phi3",
    "bridge:qwen3",
    "bridge:gpt2",
    "bridge:neox",
    "bridge:cohere",  # adjacent pairs
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("spec", MODELS)
def test_a_reparametrisation_leaves_scores_and_outputs_as_they_are(model_of: ModelOf, spec: str):
    model, _ = model_of(spec)
    tokens = torch.randint(200, (5, 11), generator=generator())
    scores, logits = capture_scores(model, tokens, n_folds=5).mean, model(tokens)
    with reparametrised(model, generator()):
        again, turned = capture_scores(model, tokens, n_folds=5).mean, model(tokens)
    below = torch.ones(11, 11, dtype=torch.bool).tril()
    scale = scores[:, below].abs().max()
    assert float((again - scores)[:, below].abs().max() / scale) < 1e-5
    assert distance(turned, logits) < 1e-5
    assert model(tokens).equal(logits)


@pytest.mark.parametrize("spec", ["hooked:smollm3-rope", "bridge:llama"])
def test_it_changes_the_scores_without_a_single_matrix_but_not_without_a_circuit(
    model_of: ModelOf, spec: str
):
    model, _ = model_of(spec)
    tokens = torch.randint(200, (5, 11), generator=generator())

    def without(remove: list[str]) -> torch.Tensor:
        with ablated(model, Ablation(remove=remove, gain="identity")):
            return capture_scores(model, tokens, n_folds=5).mean.nan_to_num()

    def change(remove: list[str]) -> float:
        before = without(remove)
        with reparametrised(model, generator()):
            after = without(remove)
        return float((after - before).abs().max() / before.abs().max())

    assert change(["w_q"]) > 0.01
    assert change(["w_o"]) > 0.01
    assert change(["w_q", "w_k"]) < 1e-5
    assert change(["w_o", "w_v"]) < 1e-5


def test_weights_are_restored_bit_by_bit_when_the_body_raises(
    model_of: ModelOf,
):
    model, _ = model_of("bridge:llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), reparametrised(model, generator()):
        raise RuntimeError("stop")
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("adjacent", [False, True])
def test_a_complex_map_commutes_with_rope(adjacent: bool):
    coordinates = torch.arange(6)
    pairs = coordinates.view(3, 2) if adjacent else coordinates.view(2, 3).T
    turn = complex_map(3, 10, generator(), pairs)
    x = torch.randn(2, 7, 3, 10, generator=generator()).double()
    angle = torch.arange(7).double()[:, None] * torch.tensor([1.0, 0.3, 0.1]).repeat(2)
    cos, sin = angle.cos()[None], angle.sin()[None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        rotate = rotate_adjacent if adjacent else rotate_halves
        turned, _ = rotate(x[..., :6], x[..., :6], cos, sin, unsqueeze_dim=2)
        return torch.cat((turned, x[..., 6:]), -1)

    one = rotated(torch.einsum("bphd,hde->bphe", x, turn))
    other = torch.einsum("bphd,hde->bphe", rotated(x), turn)
    torch.testing.assert_close(one, other)


def test_random_bases_are_well_conditioned_and_differ_between_heads():
    maps = invertible_map(5, 11, generator())
    assert float(torch.linalg.cond(maps).max()) < 100
    assert float((maps[0] - maps[1]).abs().max()) > 0.1
