"""Several threads use a model: captures are of a thread, ablations of the model, nothing waits."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from threading import Barrier, Event, get_ident
from typing import Any

import pytest
import torch
from support.edited_model import edited
from support.hooked_runs import hooks_left
from support.plain_attention import plain_attention
from support.rounding import NETWORK, assert_same
from support.tiny_models import D_VOCAB, ByName
from transformers import AutoModelForCausalLM, PreTrainedModel

from nope_probe import Ablation, ablated, calibrate, capture_losses, capture_scores, untrained
from nope_probe.errors import UserError
from nope_probe.hooks.layers.hook_points import hooks_detached
from nope_probe.hooks.layers.tap import positions_far_apart
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.models.load import load, to_hooked
from nope_probe.models.names import CHECKPOINTS

ModelsOf = Callable[[str], tuple[Any, PreTrainedModel]]
# Of joint projections, position embeddings, frequencies of the length, windows and soft caps.
KINDS = ["hooked", "gpt2", "phi3-longrope", "gemma2", "own"]


@pytest.fixture
def models_of(bridge: ByName, tiny: ByName) -> ModelsOf:
    """Return a model and the same in plain transformers, by kind.

    `hooked` is a HookedTransformer in TransformerLens 3.9, and `own` a bridge that we did not make.
    """

    def make(kind: str) -> tuple[Any, PreTrainedModel]:
        if kind == "hooked":
            folder = CHECKPOINTS["rope-tiny"]
            hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            return to_hooked(hf), hf
        if kind == "own":
            from transformer_lens.model_bridge import TransformerBridge

            llama, hf = tiny("llama"), deepcopy(tiny("llama").hf)
            hf.set_attn_implementation("eager")
            tokenizer = load(str(llama.folder)).tokenizer
            boot = TransformerBridge.boot_transformers
            return boot(str(llama.folder), hf_model=hf, tokenizer=tokenizer), llama.hf
        return bridge(kind), tiny(kind).hf

    return make


def batch(seed: int, n: int = 13, length: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, D_VOCAB, (n, length), generator=generator)


def plain_maps(hf: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer.map for layer in plain_attention(hf, tokens).values()])


@contextmanager
def passes_go_on(run: Callable[[int], Any], n_threads: int = 1) -> Iterator[list[Any]]:
    """Run passes in threads for as long as the context lasts, then yield their results."""
    ends, results = Event(), list[Any]()

    def repeat(thread: int) -> None:
        with torch.inference_mode():
            results.append((thread, run(thread)))
            while not ends.is_set():
                results.append((thread, run(thread)))

    with ThreadPoolExecutor(n_threads) as pool:
        threads = [pool.submit(repeat, thread) for thread in range(n_threads)]
        try:
            yield results
        finally:
            ends.set()
            [future.result(60) for future in threads]


@pytest.mark.parametrize("kind", KINDS)
def test_eight_captures_in_two_threads_equal_plain_transformers(
    models_of: ModelsOf, kind: str
) -> None:
    model, hf = models_of(kind)
    before = model(batch(0))

    batches = [batch(seed, length=(11, 29)[seed % 2]) for seed in range(8)]
    with ThreadPoolExecutor(2) as pool:
        maps = pool.map(lambda tokens: capture_scores(model, tokens, batch_size=5).mean, batches)
        for measured, tokens in zip(maps, batches, strict=True):
            assert_same(measured, plain_maps(hf, tokens), NETWORK)
    assert hooks_left(model) == []
    assert model(batch(0)).equal(before)


def test_two_passes_of_unequal_batches_are_embedded_at_once(models_of: ModelsOf) -> None:
    model, hf = models_of("gpt2")
    capture_scores(model, batch(0))
    both, ended = Barrier(2), Event()

    def wait(tensor: torch.Tensor, hook: object) -> None:
        both.wait(60)
        if len(tensor) == 7:
            assert ended.wait(60)

    model.embed.hook_out.add_hook(wait)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(model, batch(1, 7))
            output = model(batch(0, 5))
            ended.set()
            assert_same(other.result(60).detach(), hf(batch(1, 7)).logits.detach(), NETWORK)
    finally:
        ended.set()
        model.reset_hooks()
    assert_same(output.detach(), hf(batch(0, 5)).logits.detach(), NETWORK)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_a_pass_from_before_or_into_a_capture_runs_to_its_end(
    models_of: ModelsOf, kind: str
) -> None:
    """One pass stops in block 0 before the capture, one in its middle; both go on behind it."""
    model, hf = models_of(kind)
    mine, begun, goes_on = get_ident(), Barrier(2), Event()

    def wait(tensor: torch.Tensor, hook: object) -> None:
        if get_ident() != mine:
            begun.wait(60)
            assert goes_on.wait(60)

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return model(batch(1))

    with ThreadPoolExecutor(2) as pool:
        passes = []

        class InTheMiddle(StreamCheckpoint):
            def advance(self, n_seqs: int) -> None:
                if len(passes) == 1:
                    passes.append(pool.submit(run))
                    begun.wait(60)

        model.blocks[0].hook_resid_pre.add_hook(wait)
        try:
            passes.append(pool.submit(run))
            begun.wait(60)
            maps = capture_scores(model, batch(0), batch_size=5, checkpoint=InTheMiddle()).mean
        finally:
            goes_on.set()
            model.reset_hooks()
        for output in passes:
            assert_same(output.result(60), hf(batch(1)).logits.detach(), NETWORK)
    assert_same(maps, plain_maps(hf, batch(0)), NETWORK)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_a_pool_inside_ablated_runs_and_reads_the_ablated_model(
    models_of: ModelsOf, kind: str
) -> None:
    model, _ = models_of(kind)
    intact = model(batch(0))
    names = ["mask", "w_q", "w_k", "w_v", "w_o"]
    removed = Ablation(remove=names, replacement="identity")
    calibration = calibrate(model, batch(0))
    with ablated(model, removed, calibration), torch.inference_mode():
        expected = [model(batch(seed, 5 + seed)) for seed in range(3)]
        maps = capture_scores(model, batch(0)).mean
        with passes_go_on(lambda thread: model(batch(thread, 5 + thread)), 3) as outputs:
            for _ in range(5):
                assert_same(capture_scores(model, batch(0), batch_size=5).mean, maps, NETWORK)
        with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="ablated already"):
            pool.submit(ablated(model, "mask").__enter__).result(60)
    for thread, output in outputs:
        assert_same(output, expected[thread], NETWORK)
    assert not torch.allclose(expected[0], intact[:5])
    assert model(batch(0)).equal(intact)


@pytest.mark.parametrize("kind", ["hooked", "own"])
def test_an_ablation_is_left_in_whichever_thread_leaves_it(models_of: ModelsOf, kind: str) -> None:
    model, hf = models_of(kind)
    intact, stack = model(batch(0)), ExitStack()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            stack.enter_context(ablated(model, "mask"))
            output = pool.submit(model, batch(0)).result(60)
            assert_same(output, edited(hf, ["mask"])(batch(0)).logits, NETWORK)
            pool.submit(stack.close).result(60)
            assert pool.submit(model, batch(0)).result(60).equal(intact)
        assert model(batch(0)).equal(intact)
        maps = pool.submit(capture_scores, model, batch(0)).result(60).mean
    assert_same(maps, plain_maps(hf, batch(0)), NETWORK)
    assert hooks_left(model) == []


def test_coroutines_and_their_threads_run_the_ablated_model(models_of: ModelsOf) -> None:
    model, _ = models_of("llama")
    with ablated(model, "mask"):
        logits, losses = model(batch(0)), capture_losses(model, batch(0))

    async def serve() -> list[torch.Tensor]:
        with ablated(model, "mask"):
            await asyncio.sleep(0)
            calls = [asyncio.to_thread(capture_losses, model, batch(0)) for _ in range(3)]
            return [model(batch(0)), *await asyncio.gather(*calls)]

    for output, expected in zip(asyncio.run(serve()), [logits, *3 * [losses]], strict=True):
        assert_same(output, expected, NETWORK)


def test_the_yielded_model_of_a_transformers_model_is_ablated_in_all_threads(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    intact, expected = hf(batch(0)).logits, edited(tiny("llama").hf, ["mask"])(batch(0)).logits
    with ThreadPoolExecutor(1) as pool:
        with ablated(hf, "mask") as model:
            assert_same(pool.submit(model, batch(0)).result(60), expected, NETWORK)
            for call in (lambda: hf(batch(0)), ablated(hf, "mask").__enter__):
                with pytest.raises(UserError, match="this model is not ablated here"):
                    pool.submit(call).result(60)
        assert pool.submit(hf, batch(0)).result(60).logits.equal(intact)


def test_weights_are_drawn_once_whichever_thread_asks(models_of: ModelsOf) -> None:
    model, _ = models_of("llama")
    intact = model(batch(0))
    with untrained(model), ThreadPoolExecutor(1) as pool:
        with pytest.raises(UserError, match="untrained already"):
            pool.submit(untrained(model).__enter__).result(60)
        assert not torch.allclose(model(batch(0)), intact)
    assert model(batch(0)).equal(intact)


@pytest.mark.parametrize("kind", ["hooked", "own"])
def test_overlapping_captures_of_a_model_in_training_have_no_dropout(
    models_of: ModelsOf, kind: str
) -> None:
    """The capture that began first ends while the other is in its middle."""
    model, hf = models_of(kind)
    expected, meet = plain_maps(hf, batch(0)), Barrier(2)

    class Meet(StreamCheckpoint):
        def advance(self, n_seqs: int) -> None:
            meet.wait(60)

    def capture(size: int) -> torch.Tensor:
        return capture_scores(model, batch(0), batch_size=size, checkpoint=Meet()).mean

    model.train()
    model.blocks[0].hook_resid_pre.add_hook(
        lambda x, hook: torch.nn.functional.dropout(x, 0.5, model.training)
    )
    with ThreadPoolExecutor(2) as pool:
        for maps in pool.map(capture, [7, 7]):
            assert_same(maps, expected, NETWORK)
    assert model.training
    model.reset_hooks()
    model.eval()


def test_hooks_are_detached_for_the_thread_that_detaches_them(models_of: ModelsOf) -> None:
    model, _ = models_of("llama")
    intact = model(batch(0))
    model.blocks[0].hook_resid_post.add_hook(lambda x, hook: 2 * x)
    with ablated(model, Ablation(remove="w_o", replacement="zero")):
        changed = model(batch(0))
        with hooks_detached(model), ThreadPoolExecutor(1) as pool:
            assert pool.submit(model, batch(0)).result(60).equal(changed)
            assert model(batch(0)).equal(intact)
        assert model(batch(0)).equal(changed)
    model.reset_hooks()
    assert not torch.allclose(changed, intact)
    assert model(batch(0)).equal(intact)


def test_the_first_look_at_a_model_leaves_masks_of_other_models_alone(tiny: ByName) -> None:
    """Its two positions are far apart, beyond the window of any model."""
    mistral: Any = load(str(tiny("mistral").folder)).model
    expected = mistral(batch(0))
    with positions_far_apart(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(mistral, batch(0)).result(60).equal(expected)
