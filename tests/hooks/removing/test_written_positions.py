"""The position that a component writes is taken away, against hooks on plain transformers."""

from typing import Any

import pytest
import torch
from support.edited_model import Outputs, attention, edited, plain_run
from support.hooked_runs import hooked_run, hooks_left, largest_error
from support.plain_attention import blocks_of
from support.plain_states import calls_of, of_all, of_others
from support.rounding import NETWORK
from support.tiny_models import N_POS, ByName, ModelOf, distance, tokens
from torch.utils.hooks import RemovableHandle

from nope_probe import UserError, ablated, calibrate, capture_scores
from nope_probe.hooks.ablation import directly_ablated
from nope_probe.hooks.removing.weights import AS_INTACT
from nope_probe.removal import Writer

SPECS = [
    *("bridge:llama", "bridge:phi3", "bridge:gpt2", "bridge:gemma2", "bridge:neox"),
    *("hooked:smollm3-nope", "hooked:smollm3-rope"),
]
WRITERS = ["embed", "L0H1", "ATTN0", "MLP0", "L1H2", "MLP1"]


def writing_module(hf: Any, writer: str) -> Any:
    """Return the module of plain transformers whose output is added to the residual stream."""
    if writer in ("embed", "pos_embed"):
        body = getattr(hf, hf.base_model_prefix)
        names = ("embed_tokens", "embed_in", "wte") if writer == "embed" else ("wpe",)
        return next(getattr(body, name) for name in names if hasattr(body, name))
    block = blocks_of(hf)[int(writer.split("H")[0].strip("LATNMP"))]
    if writer.startswith("MLP"):
        return getattr(block, "post_feedforward_layernorm", block.mlp)
    if hf.config.model_type in ("gemma2", "olmo2"):
        return block.post_attention_layernorm
    return output_projection(block)


def output_projection(block: Any) -> Any:
    attn = block.attention if hasattr(block, "attention") else attention(block)
    names = ("o_proj", "c_proj", "dense")
    return next(getattr(attn, name) for name in names if hasattr(attn, name))


def outputs_of(hf: Any, writer: str, text: torch.Tensor) -> torch.Tensor:
    """Return what a component writes: of a head, its values through W_O, as a norm scales it."""
    layer, _, head = writer[1:].partition("H") if writer.startswith("L") else ("0", "", "")
    projection = output_projection(blocks_of(hf)[int(layer)])
    modules = {"writing": writing_module(hf, writer), "heads": projection}
    calls = calls_of(hf, modules, text)
    written, (z, behind) = calls["writing"].output, calls["heads"]
    if not head:
        return written
    head = int(head)
    weight = projection.weight if hasattr(projection, "out_features") else projection.weight.T
    width = weight.shape[1] // hf.config.num_attention_heads
    columns = slice(head * width, (head + 1) * width)
    own = z[..., columns] @ weight[:, columns].T
    return own * (written / behind)  # 1 but for a norm without mean or bias


def output_less(module: Any, vectors: torch.Tensor) -> RemovableHandle:
    return module.register_forward_hook(lambda m, i, o: o - vectors)


def edited_run(hf: Any, writer: str, text: torch.Tensor, skip: int = 0) -> Outputs:
    outputs = outputs_of(hf, writer, text).expand(len(text), -1, -1)
    with output_less(writing_module(hf, writer), of_others(outputs, skip)):
        return plain_run(hf, text)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_equals_plain_transformers_whose_outputs_lose_the_same_vectors(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    hf, text = tiny.hf, tokens(13, seed=7)
    before, new = hooked_run(model, text), tokens(3, seed=8)
    writers = [*WRITERS, "pos_embed"] if tiny.name == "gpt2" else WRITERS
    calibration = calibrate(model, text, batch_size=5, writers=writers, kept_positions=2)
    for writer in writers:
        with ablated(model, f"position[{writer}]", calibration):
            run, of_new, some = (hooked_run(model, x) for x in (text, new, text[5:7]))
        assert largest_error(run, edited_run(hf, writer, text, skip=2)) <= NETWORK, writer
        assert distance(some.logits, run.logits[5:7]) <= NETWORK, "in any batch"
        outputs = outputs_of(hf, writer, text).expand(len(text), -1, -1)
        with output_less(writing_module(hf, writer), of_all(outputs, 2)):
            assert largest_error(of_new, plain_run(hf, new)) <= NETWORK, "a new text has all"
        assert distance(run.logits, before.logits) > 1e-3, writer
    assert all(map(torch.equal, hooked_run(model, text), before))
    assert not hooks_left(model)


@pytest.mark.parametrize(
    ("name", "more"), [("olmo2", {}), ("granite", {"residual_multiplier": 0.3})]
)
def test_norms_behind_attention_and_a_factor_count(
    name: str, more: dict[str, float], decoder: ModelOf
) -> None:
    (model, tiny), text = decoder(name, **more), tokens(7, seed=7)
    for writer in ("L0H1", "ATTN1", "MLP0"):
        with ablated(model, f"position[{writer}]", tokens=text):
            run = hooked_run(model, text)
        assert largest_error(run, edited_run(tiny.hf, writer, text)) <= NETWORK, writer


def test_a_block_that_does_not_attend_writes_as_a_whole(decoder: ModelOf) -> None:
    (model, tiny), text = decoder("qwen3_next"), tokens(7, seed=7)
    block, reader = (tiny.hf.model.layers[index] for index in (0, 1))
    [(x, after)] = calls_of(tiny.hf, {"block": block}, text).values()
    vectors = of_others(after - x, 0)
    with ablated(model, "position[BLOCK0]", tokens=text):
        logits = model(text)
    less = reader.register_forward_pre_hook(lambda m, i: (i[0] - vectors, *i[1:]))
    with torch.inference_mode(), less:
        assert distance(logits, tiny.hf(text).logits) <= NETWORK


@pytest.mark.parametrize("spec", ["bridge:gpt2", "hooked:smollm3-rope"])
def test_vectors_that_enter_a_model_lose_their_position(spec: str, model_of: ModelOf) -> None:
    model, _ = model_of(spec)
    x = torch.randn(7, N_POS, model.cfg.d_model, generator=torch.Generator().manual_seed(3))
    with ablated(model, "position[embed]", tokens=x):
        maps = capture_scores(model, x, n_folds=1)
    expected = capture_scores(model, x - of_others(x, 0), n_folds=1)
    assert distance(maps.mean.nan_to_num(), expected.mean.nan_to_num()) <= NETWORK


@pytest.mark.parametrize("bad", ["L9H0", "MLP9", "pos_embed", "BLOCK0"])
def test_a_writer_that_a_model_does_not_have_is_named_beside_those_that_it_has(
    bad: str, bridge: ByName
) -> None:
    with pytest.raises(ValueError, match=f"{bad} .* embed, L0H0 to L1H5, MLP0 to MLP1, ATTN0 to"):
        calibrate(bridge("llama"), tokens(), writers=["MLP0", bad])


def test_other_lengths_padding_and_other_calibrations_are_refused(bridge: ByName) -> None:
    model, text, removed = bridge("llama"), tokens(7), "position[MLP0]"
    for calibration in (None, calibrate(model, text, writers=["L0H0"])):
        with pytest.raises(ValueError, match=r"position\[MLP0\] has to .*writers=\['MLP0'\]"):
            ablated(model, removed, calibration).__enter__()
    with ablated(model, removed, tokens=text):
        with pytest.raises(ValueError, match=f"sequences of {N_POS - 1} tokens"):
            model(text[:, 1:])
        mask = torch.ones_like(text)
        mask[:, 0] = 0
        with pytest.raises(ValueError, match="without padding"):
            model(text, attention_mask=mask)


def test_two_heads_lose_what_they_write_without_mask_and_rope(bridge: ByName, tiny: ByName) -> None:
    model, hf, text = bridge("llama"), tiny("llama").hf, tokens(13, seed=7)
    without = edited(hf, ("mask", "rope"), None)
    vectors = sum(of_others(outputs_of(without, name, text), 0) for name in ("L0H0", "L0H3"))
    with output_less(writing_module(without, "L0H0"), vectors):
        expected = plain_run(without, text)
    removed = ["mask", "rope", "position[L0H0]", "position[L0H3]"]
    with ablated(model, removed, tokens=text):
        assert largest_error(hooked_run(model, text), expected) <= NETWORK
    of_intact = calibrate(model, text, writers=["L0H0", "L0H3"])
    with pytest.raises(UserError, match=r"pass tokens=tokens$"):
        ablated(model, removed, of_intact).__enter__()


def test_a_writer_behind_another_loses_what_it_writes_without_the_others_position(
    bridge: ByName, tiny: ByName
) -> None:
    model, hf, text = bridge("llama"), tiny("llama").hf, tokens(13, seed=7)
    with output_less(writing_module(hf, "L0H1"), of_others(outputs_of(hf, "L0H1", text), 0)):
        vectors = of_others(outputs_of(hf, "MLP1", text), 0)
        with output_less(writing_module(hf, "MLP1"), vectors):
            expected = plain_run(hf, text)
    with ablated(model, ["position[MLP1]", "position[L0H1]"], tokens=text):
        assert largest_error(hooked_run(model, text), expected) <= NETWORK


def test_maps_without_a_position_of_their_texts_are_multiplied_across_the_halves(
    bridge: ByName,
) -> None:
    model, text = bridge("llama"), tokens(13, seed=7)
    calibration = calibrate(model, text, writers=["MLP0"])
    written = calibration.positions[AS_INTACT]
    assert not capture_scores(model, text).across_halves
    with ablated(model, "position[MLP0]", calibration):
        assert capture_scores(model, text).across_halves
        assert not capture_scores(model, text[:8]).across_halves, "other texts"
    with directly_ablated(model, Writer("MLP0"), written, 1):
        assert capture_scores(model, text).across_halves
