"""HookedTransformers that no Hugging Face model converts into, and tokenizers that pad.

One model has LayerNorm with biases, biases in every projection, q/k-norm, a soft cap and adjacent
rotary pairs, one has ALiBi. The oracle is a copy of the model whose parameters are set by hand;
without mask, RoPE or ALiBi, each attention module gets a configuration of its own. Whole sequences
have the causal mask, however a tokenizer pads.
"""

from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from support.edited_model import SEVEN, rectangular_identity
from support.plain_attention import plain_maps
from support.plain_states import plain_losses
from support.rounding import NETWORK, assert_same
from support.tiny_models import N_POS, distance, hooked_transformer, plain, tokens

from nope_probe import Ablation, ablated, capture_losses, capture_scores, load, run_ablations
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import evaluated, run_blocks
from nope_probe.hooks.removing.components import components
from nope_probe.models.names import CHECKPOINTS
from nope_probe.studies.engine import irreplaceable

pytestmark = pytest.mark.hooked_transformer


SETTINGS: dict[str, dict[str, Any]] = {
    "rotary": {
        **{"d_model": 23, "d_head": 10, "n_heads": 3, "d_mlp": 37, "act_fn": "gelu"},
        **{"normalization_type": "LN", "positional_embedding_type": "rotary", "rotary_dim": 6},
        **{"rotary_adjacent_pairs": True, "use_qk_norm": True, "attn_scores_soft_cap": 5.0},
    },
    "alibi": {
        **{"d_model": 12, "d_head": 3, "n_heads": 4, "attn_only": True},
        **{"normalization_type": "RMS", "positional_embedding_type": "alibi"},
    },
}


@cache
def model_of(name: str) -> Any:
    model = hooked_transformer(**SETTINGS[name])
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter_name.endswith((".w", "norm.weight"))
        size = 1.0 if "embed.W" in parameter_name else 0.25
        parameter.requires_grad_(False).copy_(is_norm + size * noise)
    return model


@cache
def copied_of(name: str) -> Any:
    return deepcopy(model_of(name))


def edited(copied: Any, model: Any, remove: Iterable[str]) -> Any:
    """Set weights, biases, ALiBi and configuration of a copy by hand; c = 1."""
    copied.load_state_dict(model.state_dict())
    remove, cfg = set(remove), model.cfg
    if "pos_embed" in remove:
        copied.pos_embed.W_pos[:N_POS] = model.pos_embed.W_pos[:N_POS].mean(0)
    width = cfg.n_heads * cfg.d_head
    for block in copied.blocks:
        attn = block.attn
        for name in {"w_q", "w_k", "w_v"} & remove:
            p = rectangular_identity(name, (width, cfg.d_model))
            per_head = rearrange(p, "(head h) m -> head m h", head=cfg.n_heads)
            getattr(attn, name.upper()).copy_(per_head)
            getattr(attn, f"b_{name[-1].upper()}").zero_()
        if "w_o" in remove:
            p = rectangular_identity("w_o", (cfg.d_model, width))
            attn.W_O.copy_(rearrange(p, "m (head h) -> head h m", head=cfg.n_heads))
            attn.b_O.zero_()
        if "mlp" in remove:
            block.mlp.W_out.zero_()
            block.mlp.b_out.zero_()
        attn.cfg = copy(cfg)
        attn.cfg.attention_dir = "bidirectional" if "mask" in remove else "causal"
        if "rope" in remove:
            attn.cfg.positional_embedding_type = "standard"
        if cfg.positional_embedding_type == "alibi":  # None: made in the next pass
            attn.alibi = torch.zeros(cfg.n_heads, 64, 64) if "alibi" in remove else None
    return copied


@pytest.mark.parametrize("name", SETTINGS)
@given(st.data())
def test_an_ablation_equals_a_copy_edited_by_hand(name: str, data: st.DataObject) -> None:
    model, inputs = model_of(name), tokens(3)
    has = [name for name in components(model) if name not in irreplaceable(model)]
    remove = data.draw(st.lists(st.sampled_from(has), unique=True))
    expected = edited(copied_of(name), model, remove)(inputs)
    with ablated(model, Ablation(remove=remove, replacement="identity", gain="identity")):
        assert distance(model(inputs), expected) <= NETWORK


@pytest.mark.parametrize("name", SETTINGS)
def test_each_removal_changes_the_model(name: str) -> None:
    model, inputs = model_of(name), tokens(3)
    intact = model(inputs)
    for component in set(components(model)) - set(irreplaceable(model)):
        changed = edited(deepcopy(model), model, [component])(inputs)
        assert distance(changed, intact) > 1e-2, component


def test_what_a_hooked_transformer_has_is_known() -> None:
    assert components(model_of("rotary")) == SEVEN
    assert components(model_of("alibi")) == ("mask", "w_q", "w_k", "w_o", "w_v", "alibi")


def test_alibi_in_named_heads_equals_a_copy_without_their_slopes() -> None:
    model, inputs = model_of("alibi"), tokens(3)
    model(inputs)  # makes the bias
    copied = deepcopy(model)
    copied.blocks[1].attn.alibi[[0, 2]] = 0
    with ablated(model, Ablation(remove=["alibi"], heads={1: [0, 2]})):
        assert distance(model(inputs), copied(inputs)) <= NETWORK


def test_alibi_is_the_source_of_the_first_layers_pattern_and_the_mask_is_not() -> None:
    study = run_ablations(model_of("alibi"), tokens(32, 17), remove=["sources"])
    first = study.tables["pattern"].query("layer == 0").set_index("removed")["order"]
    assert list(first.index)[:4] == ["intact", "mask", "alibi", "mask+alibi"]
    assert first["mask"] == pytest.approx(first["intact"], rel=NETWORK)
    assert abs(first["alibi"]) < 0.1 * first["intact"]
    terms = study.tables["terms"].query("layer == 0 and of == 'pattern'")["term"]
    assert list(terms) == ["mask", "alibi", "mask_x_alibi", "without_sources"]


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_attn_mlp": True},
        {"use_normalization_before_and_after": True},
        {"positional_embedding_type": "shortformer"},
    ],
)
def test_other_formulas_of_a_hooked_transformer_are_an_error(
    settings: dict[str, Any],
) -> None:
    sizes = {"d_model": 6, "d_head": 3, "act_fn": "relu", "normalization_type": "RMS"}
    with pytest.raises(NotImplementedError, match="read through TransformerBridge"):
        layers_of(hooked_transformer(**sizes, **settings))


Change = Callable[[Any], None]


def pad_with_bos(model: Any) -> None:
    model.tokenizer.pad_token = model.tokenizer.bos_token


def pad_with_a_token_of_the_text(model: Any) -> None:
    model.tokenizer.pad_token_id = 7


def prepend_nothing(model: Any) -> None:
    pad_with_bos(model)
    model.cfg.default_prepend_bos = False


def begun(n_bos: int) -> torch.Tensor:
    drawn = torch.randint(1, 19, (7, 13), generator=torch.Generator().manual_seed(0))
    drawn[:, :n_bos] = 0
    drawn[0, n_bos : n_bos + 3] = 7
    return drawn


@pytest.mark.parametrize("n_bos", [0, 1, 2])
@pytest.mark.parametrize("change", [pad_with_bos, pad_with_a_token_of_the_text, prepend_nothing])
def test_scores_and_losses_are_plain_transformers_whatever_the_tokenizer_pads(
    change: Change, n_bos: int
) -> None:
    hf, model = plain(CHECKPOINTS["rope-tiny"]), load("rope-tiny").model
    change(model)
    model.tokenizer.padding_side = "left"
    given = begun(n_bos)
    assert_same(capture_scores(model, given).mean, plain_maps(hf, given), NETWORK)
    assert_same(capture_losses(model, given), plain_losses(hf, given), NETWORK)
    with ablated(model, Ablation(remove="mask")):
        maps = capture_scores(model, given).mean
    assert_same(maps, plain_maps(hf, given, without="mask"), NETWORK)
    assert model.tokenizer.padding_side == "left"


def test_learned_positions_count_from_the_first_token() -> None:
    model: Any = load("nope-tiny").model
    model.pos_embed.W_pos.data.normal_(generator=torch.Generator().manual_seed(0))
    given = begun(n_bos=2)
    with torch.inference_mode():
        expected = run_blocks(model, given)
        pad_with_bos(model)
        model.tokenizer.padding_side = "left"
        assert run_blocks(model, given).equal(expected)


def test_an_attention_mask_of_the_callers_hides_what_it_says() -> None:
    model: Any = load("rope-tiny").model
    given, mask = begun(n_bos=1), torch.ones(7, 13, dtype=torch.long)
    mask[:, :5] = 0
    shorter = model(given[:, 5:])
    pad_with_bos(model)
    model.tokenizer.padding_side = "left"
    with evaluated(model):
        assert_same(model(given, attention_mask=mask)[:, 5:], shorter, NETWORK)
