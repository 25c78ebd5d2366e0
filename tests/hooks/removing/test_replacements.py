"""A model with a replaced projection equals one whose weights and biases are set by hand."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from support.decoders import write_decoder
from support.edited_model import WEIGHTS, edited, output_means
from support.hooked_runs import (
    errors_above,
    hooked_run,
    hooks_left,
    random_matrix,
    replaced_weights,
    replacement_errors,
)
from support.rounding import NETWORK, assert_same, rounding
from support.tiny_models import ByName, ModelOf, tokens

from nope_probe.errors import UserError
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.hooks.removing.replacements import Place, random_rows
from nope_probe.hooks.removing.stand_ins import CONSTANT_OUTPUTS, REPLACEMENTS, STAND_INS
from nope_probe.models.load import load
from nope_probe.studies.ablation.study import run_ablations

MODELS = ("bridge:llama", "bridge:phi3", "bridge:qwen3", "bridge:smollm3", "hooked:smollm3-rope")
OTHERS = tuple(name for name in REPLACEMENTS if name != "identity")


def covering(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return each weight alone, all weights, and with each other component: 13 of 128 subsets."""
    alone = [(name,) for name in WEIGHTS]
    others = [name for name in names if name not in WEIGHTS]
    return [*alone, *((*WEIGHTS, other) for other in others), *pairwise(WEIGHTS), names]


@pytest.mark.parametrize("replacement", OTHERS)
@pytest.mark.parametrize("spec", [*MODELS, "bridge:gpt2", "hooked:smollm3-nope"])
def test_each_replacement_equals_an_edited_model(
    spec: str, replacement: Any, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    assert not replacement_errors(model, tiny(name), replacement, covering(components(model)))


@pytest.mark.parametrize("name", ["olmo", "olmoe"])
def test_outputs_that_a_model_clips_in_place_are_clipped_alike(name: str, tmp_path: Path) -> None:
    tiny = write_decoder(name, tmp_path, clip_qkv=0.5, num_key_value_heads=6)
    model = load(str(tiny.folder)).model
    for replacement in ("identity", "mean"):
        assert not replacement_errors(model, tiny, replacement, [(weight,) for weight in WEIGHTS])


def test_one_token_that_is_clipped_leaves_the_constant_as_it_is(tmp_path: Path) -> None:
    tiny = write_decoder("olmo", tmp_path, clip_qkv=0.5)
    model: Any = load(str(tiny.folder)).model
    point = layers_of(model)[0].point("attn.q.hook_out")
    written: list[torch.Tensor] = []

    def keep(q: torch.Tensor, hook: object) -> None:
        written.append(q.clone())

    removal = Ablation(remove="w_q", replacement="mean")
    with ablated(model, removal, tokens=tiny.tokens), hooks_attached([(point, keep)]):
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
        r = random_rows(layer, name, seed=3)
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
        for head, rows in enumerate(random_rows(layer, name, seed))
    }
    flat = torch.stack(list(drawn.values())).flatten(1)
    overlap = (flat @ flat.T / layers[0].d_head).fill_diagonal_(0).abs().max()
    assert overlap < 0.5
    assert torch.equal(random_rows(layers[1], "w_k", 1), random_rows(layers[1], "w_k", 1))


@pytest.mark.usefixtures("unenforced")  # the type check wants a layer
def test_heads_wider_than_the_residual_stream_get_blocks_of_orthonormal_rows() -> None:
    class Wide:
        index, n_heads, d_head, d_model = 0, 2, 7, 3

    r = random_rows(Wide(), "w_q", 0)
    assert r.shape == (2, 7, 3)
    for rows in (r[:, :3], r[:, 3:6]):
        assert_same(rows @ rows.mT, torch.eye(3).expand(2, 3, 3), rounding(3 * 3))
    assert_same(r.norm(dim=-1), torch.ones(2, 7), rounding(3 * 3))


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_random_replacement_with_the_gain_output_has_the_rms_of_the_weights_output(
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    inputs = tokens(23, seed=9)
    weights = replaced_weights("random", model, tiny(name).hf, inputs, seed=5)
    calibration = calibrate(model, inputs, batch_size=7, seed=5)
    for (projection, layer), (weight, _) in weights.items():
        expected = weight / random_matrix(model, projection, layer, seed=5)
        c = calibration.gains["random"][projection][layer]
        assert c == pytest.approx(float(expected.nanmedian()), rel=NETWORK), (projection, layer)


@pytest.mark.parametrize("batch_size", [7, 32])
@pytest.mark.parametrize("spec", [*MODELS, "bridge:gpt2"])
def test_means_are_those_of_plain_transformers_own_projections(
    spec: str, batch_size: int, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    inputs = tokens(23, seed=9)
    means = calibrate(model, inputs, batch_size=batch_size).means
    for (projection, layer), expected in output_means(tiny(name).hf, inputs).items():
        actual = means[projection][layer].float()
        if projection in ("w_k", "w_v"):  # one per key head, the oracle's one per query head
            n_kv, group = layers_of(model)[layer].n_kv_heads, layers_of(model)[layer].n_heads
            actual = actual.unflatten(0, (n_kv, -1)).repeat_interleave(group // n_kv, 0).flatten()
        assert_same(actual, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "the gain 'output' of w_v has to be measured first: pass tokens=tokens or calibration=",
        ),
        ({"replacement": "mean"}, "the mean output of w_v has to be measured first: pass tokens="),
        ({"replacement": "random"}, "the gain 'output' of w_v has to be measured first"),
    ],
)
def test_a_replacement_that_has_to_be_measured_first_is_an_error_without(
    settings: dict[str, Any], message: str, bridge: ByName
) -> None:
    error = pytest.raises(ValueError, match=f"^{re.escape(message)}")
    with error, ablated(bridge("llama"), Ablation(remove=["w_v"], **settings)):
        pass
    assert not hooks_left(bridge("llama"))


def test_another_seed_than_the_one_calibrated_is_an_error(bridge: ByName) -> None:
    model, random = bridge("llama"), Ablation(remove=["w_q"], replacement="random", seed=3)
    for seed in (None, 4):
        calibration = calibrate(model, tokens(7), seed=seed)
        error = pytest.raises(ValueError, match="random replacement of seed 3 is not calibrated")
        with error, ablated(model, random, calibration):
            pass


@pytest.mark.parametrize("replacement", CONSTANT_OUTPUTS)
def test_a_replacement_without_a_gain_is_one_output_for_all_inputs_and_gains(
    replacement: Any, bridge: ByName, tiny: ByName
) -> None:
    model, inputs, logits = bridge("llama"), tiny("llama").tokens, []
    calibration = calibrate(model, inputs)
    for gain in ("output", "norm", "identity"):
        ablation = Ablation(remove=["w_q", "w_o"], replacement=replacement, gain=gain)
        with ablated(model, ablation, calibration):
            logits.append(hooked_run(model, inputs).logits)
    assert all(torch.equal(logit, logits[0]) for logit in logits)
    layer = layers_of(model)[0]
    place = Place(layer=layer, name="w_q", replacement=replacement, calibration=calibration)
    outputs = STAND_INS[replacement].make(place).outputs(torch.randn(2, 3, layer.d_model))
    assert torch.equal(outputs, outputs[:1, :1].expand_as(outputs))


def own_weight(weight: torch.Tensor, place: Any) -> torch.Tensor:
    """Return a weight of a size of its own, drawn for its place."""
    return 0.3 * torch.randn(weight.shape, generator=place.generator)


def by_hand(model: Any, own: Any) -> dict[Any, Any]:
    """Return the weights of `own` and biases of 0 as plain transformers has them, ungrouped."""
    weights = {}
    for layer in layers_of(model):
        for name in WEIGHTS:
            new = own(layer.weight_per_head(name), Place(layer=layer, name=name, replacement=""))
            new = new.repeat_interleave(layer.n_heads // len(new), 0)
            shape = "h d m -> m (h d)" if name == "w_o" else "h m d -> (h d) m"
            matrix = rearrange(new, shape)
            weights[name, layer.index] = matrix, torch.zeros(len(matrix))
    return weights


@pytest.mark.parametrize("spec", [*MODELS, "bridge:gpt2", "hooked:smollm3-nope"])
def test_a_function_of_the_users_own_equals_an_edited_model(
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    weights = by_hand(model, own_weight)
    cases = [
        (
            Ablation(remove=remove, replacement=own_weight, heads=heads),
            edited(tiny(name).hf, remove, replaced=weights, **where),
        )
        for remove in [("w_q",), ("w_k",), ("w_o",), WEIGHTS]
        for heads, where in [(None, {}), ({1: [1, 3]}, {"layers": [1], "heads": [1, 3]})]
    ]
    assert not errors_above(1e-5, model, tiny(name).tokens, cases)


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_tensor_of_the_users_own_equals_an_edited_model_and_the_weight_itself_changes_nothing(
    name: Any, spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, architecture = model_of(spec)
    hf, inputs, layer = tiny(architecture).hf, tiny(architecture).tokens, layers_of(model)[1]
    own = own_weight(layer.weight_per_head(name), Place(layer=layer, name=name, replacement=""))
    weights = by_hand(model, lambda weight, place: own)
    ablation = Ablation(remove=[name], layers=[1], replacement=own)
    plain = edited(hf, [name], layers=[1], replaced=weights)
    assert not errors_above(1e-5, model, inputs, [(ablation, plain)])
    same = Ablation(remove=[name], layers=[1], replacement=lambda weight, place: weight)
    unbiased = by_hand(model, lambda weight, place: weight)
    plain = edited(hf, [name], layers=[1], replaced=unbiased)
    assert not errors_above(1e-5, model, inputs, [(same, plain)])


def test_the_gain_norm_gives_a_weight_of_the_users_own_the_norm_of_the_weight(
    bridge: ByName,
) -> None:
    model, inputs, logits = bridge("llama"), tokens(7), []
    for factor, gain in [(1.0, "norm"), (5.0, "norm"), (1.0, None), (1.0, "identity")]:
        own = Ablation(
            remove=["w_k"], replacement=lambda weight, place, f=factor: f * weight, gain=gain
        )
        with ablated(model, own):
            logits.append(hooked_run(model, inputs).logits)
    for again in logits[1:]:
        torch.testing.assert_close(again, logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            torch.zeros(3, 5),
            r"w_k in L0: expected the shape \[2, 42, 10\] or \[6, 42, 10\] "
            r"\(head, d_model, d_head\), got \[3, 5\]",
        ),
        (lambda weight, place: None, "expected a tensor, or a function that returns one, got None"),
    ],
)
@pytest.mark.usefixtures("unenforced")  # the type check wants a tensor
def test_a_weight_of_another_shape_or_none_is_an_error_that_names_both(
    own: Any, message: str, bridge: ByName
) -> None:
    model = bridge("llama")
    with (
        pytest.raises(ValueError, match=message),
        ablated(model, Ablation(remove=["w_k"], replacement=own)),
    ):
        pass
    assert not hooks_left(model)


def test_a_weight_of_the_users_own_has_no_measured_gain() -> None:
    with pytest.raises(ValueError, match="takes 'norm' or 'identity'"):
        Ablation(remove=["w_k"], replacement=torch.zeros(2, 3, 5), gain="output")


def test_a_run_refuses_a_weight_of_the_users_own_in_one_line(bridge: ByName) -> None:
    for own in (torch.zeros(2, 3, 5), own_weight):
        with pytest.raises(UserError, match=r"^a run takes replacements by name") as error:
            run_ablations(bridge("llama"), tokens(7), replacement=own)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_every_replacement_has_a_record_with_its_words() -> None:
    assert tuple(STAND_INS) == REPLACEMENTS
    for record in STAND_INS.values():
        assert record.note
        assert record.column
