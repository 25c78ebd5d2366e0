"""A model is used by one thread at a time: other threads are refused, and no number is wrong."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from threading import Barrier, Event, get_ident
from typing import Any

import pytest
import torch
from support.edited_model import edited
from support.hooked_runs import hooks_left
from support.plain_attention import plain_maps
from support.rounding import NETWORK, assert_same
from support.tiny_models import ByName, plain, tokens, users_bridge
from transformers import PreTrainedModel

from nope_probe import UserError, ablated, capture_scores, untrained
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.models.load import to_hooked
from nope_probe.models.names import CHECKPOINTS

ModelsOf = Callable[[str], tuple[Any, PreTrainedModel]]
KINDS = ["hooked", "gpt2", "own"]
CONTEXTS = [untrained, lambda model: ablated(model, "mask")]
refused = pytest.raises(UserError, match="another thread reads or ablates this model")


@pytest.fixture
def models_of(bridge: ByName, tiny: ByName) -> ModelsOf:
    """Return a model and the same in plain transformers, by kind.

    `hooked` is a HookedTransformer in TransformerLens 3.9, and `own` a bridge that we did not make.
    """

    def make(kind: str) -> tuple[Any, PreTrainedModel]:
        if kind == "hooked":
            hf = plain(CHECKPOINTS["rope-tiny"])
            return to_hooked(hf), hf
        if kind == "own":
            hf = deepcopy(tiny("llama").hf)
            hf.set_attn_implementation("eager")
            return users_bridge(tiny("llama"), hf), tiny("llama").hf
        return bridge(kind), tiny(kind).hf

    return make


def batch(seed: int, n: int = 13) -> torch.Tensor:
    return tokens(n, 11, seed)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_neither_run_nor_read_a_model_that_is_ablated(
    models_of: ModelsOf, kind: str, context: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    model, _ = models_of(kind)
    intact, generate = model(batch(0)), getattr(model, "original_model", model).generate
    with ThreadPoolExecutor(1) as pool:
        with context(model):
            changed = model(batch(0))
            for call in (
                lambda: model(batch(1)),
                lambda: capture_scores(model, batch(1)),
                lambda: generate(batch(1), max_new_tokens=2, eos_token_id=0),
            ):
                with refused:
                    pool.submit(call).result(60)
            for enter in (ablated(model, "mlp"), untrained(model)):
                with pytest.raises(UserError, match=r"already|another thread"):
                    pool.submit(enter.__enter__).result(60)
            assert model(batch(0)).equal(changed)
        assert not torch.allclose(changed, intact)
        assert pool.submit(model, batch(0)).result(60).equal(intact)
    assert hooks_left(model) == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_are_refused_between_the_batches_of_a_capture(
    models_of: ModelsOf, kind: str
) -> None:
    model, hf = models_of(kind)
    n_refused = 0

    class Meanwhile(Stream):
        def advance(self, n_seqs: int) -> None:
            nonlocal n_refused
            for call in (model, lambda tokens: capture_scores(model, tokens)):
                with refused:
                    pool.submit(call, batch(1, 5)).result(60)
                n_refused += 1

    with ThreadPoolExecutor(1) as pool:
        maps = capture_scores(model, batch(0), batch_size=5, checkpoint=Meanwhile()).mean
        assert n_refused == 2 * 3
        assert_same(maps, plain_maps(hf, batch(0)), NETWORK)
        # One after the other, threads may.
        maps = pool.submit(capture_scores, model, batch(1)).result(60).mean
    assert_same(maps, plain_maps(hf, batch(1)), NETWORK)


@pytest.mark.parametrize("context", [*CONTEXTS, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_another_thread_had_begun_is_refused_at_the_next_block(
    models_of: ModelsOf,
    kind: str,
    context: Callable[[Any], AbstractContextManager[Any]] | None,
) -> None:
    model, hf = models_of(kind)
    mine, begun, goes_on = get_ident(), Barrier(2), Event()

    def wait(tensor: torch.Tensor, hook: object) -> None:
        if get_ident() != mine:
            begun.wait(60)
            assert goes_on.wait(60)

    class InTheMiddle(Stream):
        def advance(self, n_seqs: int) -> None:
            goes_on.set()
            with refused:
                other.result(60)

    model.blocks[0].hook_resid_pre.add_hook(wait)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(model, batch(1, 3))
            begun.wait(60)
            if context is None:
                checkpoint = InTheMiddle()
                maps = capture_scores(model, batch(0), batch_size=5, checkpoint=checkpoint).mean
                assert_same(maps, plain_maps(hf, batch(0)), NETWORK)
                return
            with context(model):
                expected = model(batch(0))
                InTheMiddle().advance(0)
                assert model(batch(0)).equal(expected)
    finally:
        goes_on.set()
        model.reset_hooks()


@pytest.mark.parametrize("kind", ["hooked", "own"])
def test_an_ablation_is_left_in_whichever_thread_leaves_it(models_of: ModelsOf, kind: str) -> None:
    model, hf = models_of(kind)
    intact, stack = model(batch(0)), ExitStack()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            stack.enter_context(ablated(model, "mask"))
            assert_same(model(batch(0)), edited(hf, ["mask"])(batch(0)).logits, NETWORK)
            pool.submit(stack.close).result(60)
            assert pool.submit(model, batch(0)).result(60).equal(intact)
        assert model(batch(0)).equal(intact)
        maps = pool.submit(capture_scores, model, batch(0)).result(60).mean
    assert_same(maps, plain_maps(hf, batch(0)), NETWORK)
    assert hooks_left(model) == []


def test_two_threads_read_two_models_at_once(bridge: ByName, tiny: ByName) -> None:
    meet = Barrier(2)

    class Meet(Stream):
        def advance(self, n_seqs: int) -> None:
            meet.wait(60)

    def capture(name: str) -> torch.Tensor:
        return capture_scores(bridge(name), batch(0), batch_size=7, checkpoint=Meet()).mean

    names = ["gpt2", "gemma2"]
    with ThreadPoolExecutor(2) as pool:
        for name, maps in zip(names, pool.map(capture, names), strict=True):
            assert_same(maps, plain_maps(tiny(name).hf, batch(0)), NETWORK)
