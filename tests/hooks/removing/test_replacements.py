"""What weights are replaced by; tests/hooks/test_ablation.py compares whole models."""

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.ablations import calibration_of, edited_as, own_weight
from support.edited_model import WEIGHTS, plain_run, rectangular_identity
from support.hooked_runs import hooked_run, hooks_left, largest_error
from support.plain_states import calls_of
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import ByName, ModelOf, distance, tokens

from nope_probe import (
    Ablation,
    Calibration,
    UserError,
    ablated,
    build,
    calibrate,
    parameter_free,
    run_ablations,
    untrained,
)
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import run_blocks
from nope_probe.hooks.removing.weights import STD, Place
from nope_probe.models.load import to_hooked


@pytest.mark.parametrize("name", ["olmo", "olmoe"])
def test_outputs_that_a_model_clips_in_place_are_clipped_alike(name: str, decoder: ModelOf) -> None:
    model, tiny = decoder(name, clip_qkv=0.5, num_key_value_heads=6)
    for replacement in ("identity", "mean"):
        for weight in WEIGHTS:
            ablation = Ablation(remove=[weight], replacement=replacement, gain="output")
            expected = plain_run(edited_as(ablation, model, tiny), tiny.tokens)
            with ablated(model, ablation, calibration_of(model, tiny, 0)):
                assert largest_error(hooked_run(model, tiny.tokens), expected) <= NETWORK


def rows_of(layer: Any, name: Any, seed: int) -> torch.Tensor:
    return Place(
        layer=layer, name=name, ablation=Ablation(replacement="random", seed=seed)
    ).random_rows()


def test_one_token_that_is_clipped_leaves_the_constant_as_it_is(decoder: ModelOf) -> None:
    model, tiny = decoder("olmo", clip_qkv=0.5)
    point, written = layers_of(model)[0].point("attn.q.hook_out"), list[torch.Tensor]()
    keep = hooks_attached([(point, lambda q, hook: written.append(q.clone()))])
    with ablated(model, "w_q", tokens=tiny.tokens), keep:
        model(tiny.tokens[:1, :1])
        model(tiny.tokens[:1, :1])
    assert written[0].abs().max() > 0.5
    assert written[1].equal(written[0])


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:qwen3", "hooked:smollm3-rope"])
def test_a_random_replacement_has_orthonormal_rows_and_its_transpose_columns(
    spec: str, model_of: ModelOf
) -> None:
    layer = layers_of(model_of(spec)[0])[1]
    for name in WEIGHTS:
        r = rows_of(layer, name, seed=3)
        assert r.shape == (layer.n_heads, layer.d_head, layer.d_model)
        n_terms = layer.d_head * layer.d_model  # of the reflections that make the rows
        assert_same(r @ r.mT, torch.eye(layer.d_head).expand_as(r @ r.mT), rounding(n_terms))


def test_random_replacements_differ_between_heads_layers_projections_and_seeds_and_repeat(
    bridge: ByName,
) -> None:
    layers = layers_of(bridge("llama"))
    drawn = {
        (layer.index, name, seed, head): rows
        for layer in layers
        for name in WEIGHTS
        for seed in (0, 1)
        for head, rows in enumerate(rows_of(layer, name, seed))
    }
    flat = torch.stack(list(drawn.values())).flatten(1)
    overlap = (flat @ flat.T / layers[0].d_head).fill_diagonal_(0).abs().max()
    assert overlap < 0.5
    assert torch.equal(rows_of(layers[1], "w_k", 1), rows_of(layers[1], "w_k", 1))


@pytest.mark.usefixtures("unenforced")  # the type check wants a layer
def test_heads_wider_than_the_residual_stream_get_blocks_of_orthonormal_rows() -> None:
    class Wide:
        index, n_heads, d_head, d_model = 0, 2, 7, 3

    r = rows_of(Wide(), "w_q", 0)
    assert r.shape == (2, 7, 3)
    for rows in (r[:, :3], r[:, 3:6]):
        assert_same(rows @ rows.mT, torch.eye(3).expand(2, 3, 3), rounding(3 * 3))
    assert_same(r.norm(dim=-1), torch.ones(2, 7), rounding(3 * 3))


@pytest.mark.parametrize(
    ("replacement", "what", "options"),
    [
        ("identity", "the gain 'output'", ""),
        ("mean", "the mean output", ""),
        ("random", "the gain 'output'", ", seed=3"),
    ],
)
def test_a_replacement_that_has_to_be_measured_first_is_an_error_without_or_with_another_seed(
    replacement: Any, what: str, options: str, bridge: ByName
) -> None:
    model, removed = bridge("llama"), Ablation(remove=["w_v"], replacement=replacement, seed=3)
    way = f"pass tokens=tokens or calibration=calibrate(model, tokens{options})"
    message = re.escape(f"{what} of w_v has to be measured first: {way}")
    measured = [calibrate(model, tokens(7), seed=seed) for seed in (None, 4)]
    for calibration in (None, Calibration(), *(measured if options else ())):
        with pytest.raises(ValueError, match=f"^{message}$"):
            ablated(model, removed, calibration).__enter__()
    assert not hooks_left(model)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_tensor_of_the_users_own_is_the_weight_of_all_heads(spec: str, model_of: ModelOf) -> None:
    model, tiny = model_of(spec)
    layer, inputs = layers_of(model)[1], tiny.tokens
    for name in WEIGHTS:
        weight = layer.weight_per_head(name)
        own = own_weight(weight, Place(layer=layer, name=name, ablation=Ablation()))
        outputs = []
        for given in (own, own_weight):
            with ablated(model, Ablation(remove=[name], layers=[1], replacement=given)):
                outputs.append(hooked_run(model, inputs).logits)
        assert torch.equal(*outputs)


def test_the_gain_norm_gives_a_weight_of_the_users_own_the_norm_of_the_weight(
    bridge: ByName,
) -> None:
    model, inputs, logits = bridge("llama"), tokens(7), []
    for factor, gain in [(1.0, "norm"), (5.0, "norm"), (1.0, None), (1.0, "identity")]:
        own = lambda weight, place, factor=factor: factor * weight  # noqa: E731
        with ablated(model, Ablation(remove=["w_k"], replacement=own, gain=gain)):
            logits.append(hooked_run(model, inputs).logits)
    for again in logits[1:]:
        torch.testing.assert_close(again, logits[0], atol=1e-5, rtol=0)


def test_a_weight_of_the_users_own_has_no_measured_gain_and_no_run(bridge: ByName) -> None:
    with pytest.raises(ValueError, match="takes 'norm' or 'identity'"):
        Ablation(remove=["w_k"], replacement=torch.zeros(2, 3, 5), gain="output")
    for own in (torch.zeros(2, 3, 5), own_weight):
        with pytest.raises(UserError, match=r"^a run takes replacements by name") as error:
            run_ablations(bridge("llama"), tokens(7), replacement=own)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("n_heads", [4, 6])  # 4 * 11 values are no multiple of 6 coordinates
def test_heads_lose_the_columns_of_w_o_that_read_their_values_where_these_have_their_own_width(
    n_heads: int, decoder: ModelOf
) -> None:
    sizes = {"num_attention_heads": n_heads, "num_key_value_heads": n_heads}
    model, written = decoder("deepseek_v3", **sizes)
    inputs, heads = written.tokens, [1, 3]
    w_o = written.hf.model.layers[1].self_attn.o_proj
    [(z, output)] = calls_of(written.hf, {"w_o": w_o}, inputs).values()
    calibration = calibrate(model, inputs, seed=0)
    replaced = z @ rectangular_identity("w_o", w_o.weight.shape).T
    gain = calibration.gains["identity"]["w_o"][1]
    assert gain == pytest.approx(float(output.norm() / replaced.norm()), rel=1e-5)
    assert distance(calibration.mean("z", 1), z.mean((0, 1))) <= 1e-5
    for head in heads:
        w_o.weight[:, 11 * head : 11 * (head + 1)] = 0
    with ablated(model, Ablation(remove=["w_o"], heads={1: heads}, replacement="zero")):
        logits = hooked_run(model, inputs).logits
    assert distance(logits, written.hf(inputs).logits) <= 1e-5


def test_plain_norms_change_nothing_where_norms_have_no_weights():
    model = build(parameter_free(n_layers=2, d_model=10))
    x = torch.randn(3, 7, 10)
    before = run_blocks(model, x)
    with ablated(model, "norms"):
        assert distance(run_blocks(model, x), before) < NETWORK


@pytest.mark.hooked_transformer
def test_a_norm_weight_of_0_is_an_error(tiny: ByName):
    model = to_hooked(tiny("smollm3-rope").hf)
    model.blocks[0].ln2.w.data[3] = 0.0
    with pytest.raises(ValueError, match="L0 ln2 has a weight of 0, which cannot be divided out"):
        ablated(model, "norms").__enter__()


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("spec", ["bridge:llama", "bridge:gpt2", "hooked:smollm3-nope"])
def test_weights_are_random_inside_and_the_trained_ones_after_an_error(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    before = parameters_of(model)
    with suppress(KeyError), untrained(model, seed=3):
        drawn = parameters_of(model)
        raise KeyError
    assert all(torch.equal(after, before[name]) for name, after in parameters_of(model).items())
    for name, weights in drawn.items():
        is_bias = name.rpartition(".")[2].lstrip("_").startswith("b")
        if is_bias or not before[name].any():
            assert not weights.any(), name
        elif weights.ndim == 1:
            assert bool((weights == 1).all()), name
        else:
            assert float(weights.detach().std()) == pytest.approx(STD, rel=0.2), name
            assert not torch.equal(weights, before[name])


def test_the_same_seed_draws_the_same_weights(bridge: ByName) -> None:
    model, drawn = bridge("llama"), []
    for seed in (5, 5, 6):
        with untrained(model, seed):
            drawn.append(next(model.parameters()).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with untrained(model, 5):
        with untrained(model, 6):
            assert torch.equal(next(model.parameters()), drawn[2])
        assert torch.equal(next(model.parameters()), drawn[0]), "left, the outer one is back"
