"""An ablated model equals one whose weights are set by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from support.edited_model import (
    SEVEN,
    WEIGHTS,
    edited,
    norm_sizes,
    output_sizes,
    pairs_and_most,
    plain_run,
    subsets,
)
from support.hooked_runs import errors_above, hooked_run, largest_error
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.removing.components import components

BRIDGES = ("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3")
HOOKED = ("hooked:smollm3-rope", "hooked:smollm3-nope")
ALL = (*BRIDGES, *HOOKED)


def errors(
    model: Any, tiny: Any, removals: list[tuple[str, ...]], gain: Any = "output"
) -> dict[str, float]:
    """Return the removals that differ from edited models by more than 1e-5, and by how much."""
    hf, tokens = tiny.hf, tiny.tokens
    sizes = {"norm": norm_sizes(hf), "output": output_sizes(hf, tokens)}.get(gain)
    cases = ((Ablation(remove=remove, gain=gain), edited(hf, remove, sizes)) for remove in removals)
    return errors_above(NETWORK, model, tokens, cases, calibrate(model, tokens))


@pytest.mark.parametrize("spec", ["bridge:llama", *HOOKED])
def test_all_combinations_equal_an_edited_model(spec: str, model_of: ModelOf, tiny: ByName) -> None:
    model, name = model_of(spec)
    has_rope = spec != "hooked:smollm3-nope"
    assert components(model) == tuple(c for c in SEVEN if c != "rope" or has_rope)
    assert not errors(model, tiny(name), subsets(components(model)))


@pytest.mark.parametrize("spec", [*BRIDGES[1:], "bridge:cohere"])
def test_every_pair_of_removals_equals_an_edited_model_in_other_families(
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    assert components(model) == SEVEN
    assert not errors(model, tiny(name), pairs_and_most(SEVEN))


@pytest.mark.parametrize("gain", ["identity", "norm"])
@pytest.mark.parametrize("spec", ALL)
def test_the_other_gains_equal_an_edited_model_for_every_set_of_weights(
    spec: str, gain: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    assert not errors(model, tiny(name), subsets(WEIGHTS), gain)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_removals_equal_an_edited_model_with_a_sliding_window_and_a_soft_cap(
    name: str, bridge: ByName, tiny: ByName
) -> None:
    removals = [*subsets(("mask", "rope", "w_q", "w_k")), SEVEN]
    assert not errors(bridge(name), tiny(name), removals)


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "phi3-longrope"])
def test_without_rope_every_query_and_key_is_rotated_as_at_position_0(
    name: str, bridge: ByName, tiny: ByName
) -> None:
    model, hf, tokens = bridge(name), tiny(name).hf, tiny(name).tokens
    # A mask is given, since transformers takes equal position ids for sequences of one token.
    nowhere = {"position_ids": tokens * 0, "attention_mask": torch.ones_like(tokens)}
    with ablated(model, Ablation(remove=["rope"])):
        assert largest_error(hooked_run(model, tokens), plain_run(hf, tokens, **nowhere)) <= NETWORK
    removals = [*subsets(("rope", "mask", "w_q", "w_k")), SEVEN]
    assert not errors(model, tiny(name), removals)


@pytest.mark.hooked_transformer
def test_without_rope_a_hooked_transformer_keeps_the_factor_of_yarn() -> None:
    from transformer_lens import HookedTransformer

    torch.manual_seed(0)
    model = HookedTransformer(
        {
            **{"n_layers": 2, "d_model": 21, "n_heads": 3, "d_head": 10, "d_vocab": 23},
            **{"n_ctx": 64, "act_fn": "silu", "positional_embedding_type": "rotary"},
            **{"rotary_dim": 6, "use_yarn_rope": True, "yarn_factor": 4.0},
            **{"yarn_original_max_position_embeddings": 16, "yarn_attention_factor": 1.3},
        }
    )
    tokens, at_zero = torch.randint(23, (3, 11)), deepcopy(model)
    for block in at_zero.blocks:
        for angles in (block.attn.rotary_cos, block.attn.rotary_sin):
            angles.copy_(angles[0].clone().expand_as(angles))
    for others in ((), ("w_k",), ("mask",)):
        with ablated(model, Ablation(remove=["rope", *others], gain="norm")):
            outputs = hooked_run(model, tokens)
        with ablated(at_zero, Ablation(remove=others, gain="norm")):
            assert largest_error(outputs, hooked_run(at_zero, tokens)) <= NETWORK


def test_removing_learned_positions_equals_a_model_with_their_mean(
    bridge: ByName, tiny: ByName
) -> None:
    model, tokens = bridge("gpt2"), tiny("gpt2").tokens
    flat = deepcopy(tiny("gpt2").hf)
    n_pos = tokens.shape[1]
    flat.transformer.wpe.weight[:n_pos] = flat.transformer.wpe.weight[:n_pos].mean(0)
    with ablated(model, Ablation(remove=["pos_embed"])):
        assert largest_error(hooked_run(model, tokens), plain_run(flat, tokens)) <= NETWORK


def test_removing_the_other_components_of_gpt2_equals_an_edited_model(
    bridge: ByName, tiny: ByName
) -> None:
    model = bridge("gpt2")
    assert components(model) == ("mask", "w_q", "w_k", "w_o", "w_v", "mlp", "pos_embed")
    removals = subsets([c for c in SEVEN if c != "rope"])
    assert not errors(model, tiny("gpt2"), removals, "norm")


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("bridge:llama", (0,)),
        ("bridge:llama", (1,)),
        ("bridge:phi3", (1,)),
        ("bridge:qwen3", (0,)),
        ("bridge:smollm3", (0, 2)),
        ("bridge:smollm3", (2, 1)),
        ("hooked:smollm3-rope", (0,)),
    ],
)
@pytest.mark.parametrize("remove", [*((c,) for c in SEVEN), SEVEN], ids="+".join)
def test_removals_in_some_layers_equal_a_model_edited_in_these_layers(
    remove: tuple[str, ...], layers: tuple[int, ...], spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    hf, tokens = tiny(name).hf, tiny(name).tokens
    expected = plain_run(edited(hf, remove, norm_sizes(hf), layers), tokens)
    with ablated(model, Ablation(remove=remove, layers=layers, gain="norm")):
        assert largest_error(hooked_run(model, tokens), expected) <= NETWORK


@pytest.mark.parametrize("spec", ALL)
def test_each_removal_changes_the_model(spec: str, model_of: ModelOf, tiny: ByName) -> None:
    model, name = model_of(spec)
    intact = hooked_run(model, tiny(name).tokens)
    for component in components(model):
        with ablated(model, Ablation(remove=[component], gain="norm")):
            assert largest_error(hooked_run(model, tiny(name).tokens), intact) > 1e-2, component
