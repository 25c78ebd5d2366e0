"""Passes that begin with a kept residual stream give the maps of passes that begin with tokens."""

from typing import Any

import pytest
import torch
from support.plain_states import agree
from support.stream_checkpoints import Recorded, Stopped, Stopping, out_of_memory_above
from support.tiny_models import ModelOf, tokens

from nope_probe.conditions import Writer
from nope_probe.hooks.ablation import Ablation, ablated, directly_ablated
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.reading.capture import capture_losses, capture_scores
from nope_probe.hooks.reading.streaming import ResidualCache, may_skip_blocks
from nope_probe.models.load import load

SPECS = ("bridge:llama", "bridge:phi3", "bridge:gpt2", "hooked:smollm3-rope")
INPUTS = tokens(n_seqs=7, n_pos=13)
N_BATCHES, N_BYTES = 3, 7 * 13 * 42 * 4  # of block 0's output on all sequences of a Llama


def capture(model: Any, residuals: ResidualCache | None = None, **options: Any) -> Any:
    options = {"layers": [1], "n_folds": 3, "batch_size": 3, **options}
    return capture_scores(model, INPUTS, residuals=residuals, **options)


def same(actual: Any, expected: Any) -> bool:
    return torch.equal(actual.folds.nan_to_num(7e7), expected.folds.nan_to_num(7e7))


@pytest.mark.parametrize("spec", SPECS)
def test_removals_in_the_last_block_share_the_blocks_before(spec: str, model_of: ModelOf):
    model, _ = model_of(spec)
    calibration, residuals = calibrate(model, INPUTS), ResidualCache()
    capture(model, residuals, layers=[0, 1])
    assert residuals.n_run == residuals.n_needed == 2 * N_BATCHES
    for remove in (["mask"], ["w_q"], ["mask", "w_k"]):
        with ablated(model, Ablation(remove=remove, layers=[1]), calibration):
            expected, before = capture(model), residuals.n_run
            assert same(capture(model, residuals), expected)
        assert residuals.n_run == before + N_BATCHES
    assert residuals.n_needed == 4 * 2 * N_BATCHES


@pytest.mark.parametrize("spec", SPECS)
def test_a_removal_in_the_first_block_is_shared_with_its_like_alone(spec: str, model_of: ModelOf):
    model, _ = model_of(spec)
    calibration, other = calibrate(model, INPUTS), calibrate(model, INPUTS + 1)
    residuals = ResidualCache()
    capture(model, residuals)
    first = Ablation(remove=["w_o", "mask"], layers=[0])
    for ablation, gains, n_run in (
        (first, calibration, 2),
        (first, other, 2),
        (first, calibration, 1),
        (Ablation(remove=["mask", "w_o"]), calibration, 1),
        (Ablation(remove=["mask", "w_o"], replacement="zero"), calibration, 2),
        (Ablation(remove=["mask"], prefix=5), None, 2),
        (Ablation(remove=["w_o"], heads={0: [1]}), calibration, 2),
    ):
        with ablated(model, ablation, gains):
            expected, before = capture(model), residuals.n_run
            assert same(capture(model, residuals), expected)
        assert residuals.n_run == before + n_run * N_BATCHES


def test_a_pass_begins_behind_the_last_block_that_no_removal_changes():
    model, residuals = load("parameter-free").model, ResidualCache()
    vectors = torch.randn(7, 13, 64, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"n_folds": 3, "batch_size": 3}
    capture_scores(model, vectors, residuals=residuals, **options)
    before = residuals.n_run
    for layer in range(4):
        with ablated(model, Ablation(remove=["mask"], layers=[layer])):
            expected = capture_scores(model, vectors, layers=[3], **options)
            maps = capture_scores(model, vectors, layers=[3], residuals=residuals, **options)
        assert same(maps, expected)
        assert residuals.n_run == before + (4 - layer) * N_BATCHES
        before = residuals.n_run


@pytest.mark.parametrize(("name", "n_run"), [("embed", 3), ("L1H0", 2), ("MLP1", 2)])
def test_a_pass_begins_with_the_block_that_loses_a_writers_position(
    name: str, n_run: int, bridge: Any
):
    """In the writer's block all later blocks lose it, in the reader's that block alone."""
    model, residuals, writer = bridge("smollm3"), ResidualCache(), Writer(name)
    calibration = calibrate(model, INPUTS, writers=[writer])
    intact = capture(model, residuals, layers=[0, 1, 2])
    for removed, n_blocks in (
        (ablated(model, Ablation(remove=[writer.removal]), calibration), n_run),
        (directly_ablated(model, writer, calibration.positions[writer], 2), 1),
    ):
        with removed:
            expected, before = capture(model, layers=[2]), residuals.n_run
            assert same(capture(model, residuals, layers=[2]), expected)
        assert residuals.n_run == before + n_blocks * N_BATCHES
        assert not torch.equal(expected.folds[:, 0].nan_to_num(), intact.folds[:, 2].nan_to_num())
    assert same(capture(model, layers=[0, 1, 2]), intact)


def test_removed_position_embeddings_change_what_enters_every_block(bridge: Any):
    model, residuals = bridge("gpt2"), ResidualCache()
    capture(model, residuals)
    with ablated(model, Ablation(remove=["pos_embed"], layers=[1])):
        assert same(capture(model, residuals), capture(model))


@pytest.mark.parametrize("limit", [0, N_BYTES // 2, N_BYTES])
def test_no_more_is_kept_than_allowed(limit: int, bridge: Any):
    model, residuals = bridge("llama"), ResidualCache(limit)
    first = capture(model, residuals)
    assert residuals.n_bytes <= limit
    assert same(capture(model, residuals), first)
    n_kept = {0: 0, N_BYTES // 2: 1, N_BYTES: 3}[limit]
    assert residuals.n_run == residuals.n_needed - n_kept
    residuals.clear()
    assert residuals.n_bytes == 0


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_hook_of_the_users_fires_in_every_pass(when: str, bridge: Any):
    model, residuals, sizes = bridge("llama"), ResidualCache(), []

    def negate(tensor: Any, hook: Any) -> Any:
        sizes.append(len(tensor))
        return -tensor

    user = [(layers_of(model)[0].point("hook_mlp_out"), negate)]
    intact = capture(model)
    if when == "between":
        capture(model, residuals)
    with hooks_attached(user):
        changed = capture(model)
        assert same(capture(model, residuals), changed)
        assert same(capture(model, residuals), changed)
    assert sizes == 3 * [3, 3, 1]
    assert not same(changed, intact)
    assert same(capture(model, residuals), intact)


def test_a_pytorch_hook_of_the_users_fires_in_every_pass(bridge: Any):
    model, residuals, fired = bridge("llama"), ResidualCache(), []
    capture(model, residuals)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(model.blocks[0], register)(lambda *args: fired.append(1))
        capture(model, residuals)
        handle.remove()
    assert len(fired) == 2 * N_BATCHES


def test_other_sequences_share_nothing(bridge: Any):
    model, residuals = bridge("llama"), ResidualCache()
    capture(model, residuals)
    other = tokens(n_seqs=7, n_pos=13, seed=9)
    options: dict[str, Any] = {"layers": [1], "n_folds": 3, "batch_size": 3}
    maps = capture_scores(model, other, residuals=residuals, **options)
    assert same(maps, capture_scores(model, other, **options))


def test_a_batch_that_does_not_fit_is_halved_with_a_cache_too(bridge: Any):
    model, residuals, checkpoint = bridge("llama"), ResidualCache(), Recorded()
    expected = capture(model)
    with out_of_memory_above(2, model, 0):  # a hook, with which nothing is shared
        assert agree(capture(model, residuals, checkpoint=checkpoint).folds, expected.folds)
    assert checkpoint.sizes == [1]
    assert residuals.n_bytes == 0


def test_a_stopped_stream_goes_on_with_what_was_kept(bridge: Any):
    model, residuals, checkpoint = bridge("llama"), ResidualCache(), Stopping(after=2)
    expected = capture(model)
    with pytest.raises(Stopped):
        capture(model, residuals, checkpoint=checkpoint)
    checkpoint.after = 9
    assert same(capture(model, residuals, checkpoint=checkpoint), expected)
    assert same(capture(model, residuals), expected)
    assert residuals.n_run == residuals.n_needed - N_BATCHES


def test_blocks_have_their_own_forward_pass_afterwards(bridge: Any):
    model, residuals = bridge("llama"), ResidualCache()
    before = [dict(layer.block.__dict__) for layer in layers_of(model)]
    capture(model, residuals)
    capture(model, residuals)
    assert ["forward" in layer.block.__dict__ for layer in layers_of(model)] == [
        "forward" in attributes for attributes in before
    ]


def test_hooks_that_transformers_leaves_after_attentions_do_not_hinder_sharing(model_of: ModelOf):
    model, _ = model_of("bridge:llama")
    with torch.no_grad():
        model.original_model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    assert may_skip_blocks(model)


@pytest.mark.parametrize("spec", SPECS)
def test_losses_without_a_head_start_at_its_block_from_the_intact_models_streams(
    spec: str, model_of: ModelOf
):
    model, _ = model_of(spec)
    calibration, residuals = calibrate(model, INPUTS), ResidualCache()

    def losses(kept: ResidualCache | None = None) -> torch.Tensor:
        return capture_losses(model, INPUTS, batch_size=3, residuals=kept)

    assert torch.equal(losses(residuals), losses())
    n_blocks, n_bytes = residuals.n_run // N_BATCHES, residuals.n_bytes
    of_block = 4 * INPUTS.numel() * model.cfg.d_model
    assert n_bytes == (n_blocks - 1) * of_block  # no pass starts after the last block
    for layer, n_run in ((0, n_blocks), (1, n_blocks - 1)):
        with ablated(model, Ablation(remove=["w_q"], heads={layer: [1]}), calibration):
            expected, before = losses(), residuals.n_run
            assert torch.equal(losses(residuals), expected)
        assert residuals.n_run == before + n_run * N_BATCHES
    assert residuals.n_bytes == n_bytes  # no pass starts with the streams of another condition
