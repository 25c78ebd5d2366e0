"""A model is for one thread at a time: others wait, and other models do not."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Event, Thread, current_thread
from time import sleep
from typing import Any

import pytest
import torch
from support.hooked_runs import hooks_left
from support.plain_attention import plain_attention
from support.rounding import NETWORK, assert_same
from support.tiny_models import D_VOCAB, ByName
from transformers import AutoModelForCausalLM, PreTrainedModel

from nope_probe import Ablation, ablated, capture_attention, capture_losses, capture_scores
from nope_probe.hooks.layers import threads
from nope_probe.hooks.layers.tap import positions_far_apart
from nope_probe.hooks.layers.threads import used_alone
from nope_probe.hooks.reading.streaming import StreamCheckpoint
from nope_probe.models.load import load, to_hooked
from nope_probe.models.names import CHECKPOINTS

ModelOf = Callable[[str], tuple[Any, str]]
PlainOf = Callable[[str], tuple[Any, PreTrainedModel]]
SEEDS = range(7)


@pytest.fixture
def plain_of(bridge: Callable[[str], Any], tiny: ByName) -> PlainOf:
    """Return a fresh model, and the same in plain transformers; `shipped` has no bridge in 3.9."""

    def make(name: str) -> tuple[Any, PreTrainedModel]:
        if name != "shipped":
            return bridge(name), tiny(name).hf
        folder = CHECKPOINTS["rope-tiny"]
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return to_hooked(hf), hf

    return make


def batch(seed: int, n: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, D_VOCAB, (n, 11), generator=generator)


def in_threads(run: Callable[[int], Any], n: int = 3) -> list[Any]:
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, SEEDS))


@pytest.mark.parametrize("name", ["shipped", "llama", "gpt2"])
def test_captures_of_one_model_in_threads_equal_plain_transformers(
    plain_of: PlainOf, name: str
) -> None:
    model, hf = plain_of(name)
    maps = in_threads(lambda seed: capture_scores(model, batch(seed), batch_size=5).mean)
    for seed, measured in zip(SEEDS, maps, strict=True):
        plain = plain_attention(hf, batch(seed))
        expected = torch.stack([layer.map for layer in plain.values()])
        assert_same(measured, expected, NETWORK)
    assert hooks_left(model) == []


def test_passes_beside_captures_are_intact_and_leave_the_captures_alone(
    plain_of: PlainOf,
) -> None:
    """From the first capture on, whose model has no lock yet when the passes begin."""
    (model, hf), ends = plain_of("shipped"), Event()
    logits = hf(batch(1)).logits.detach()
    expected = torch.stack([layer.map for layer in plain_attention(hf, batch(0)).values()])
    outputs: list[torch.Tensor] = []

    def run() -> None:
        with torch.inference_mode():
            while not ends.is_set():
                outputs.append(model(batch(1)))

    passes = Thread(target=run)
    passes.start()
    try:
        maps = [capture_scores(model, batch(0), batch_size=2).mean for _ in range(11)]
    finally:
        ends.set()
        passes.join()
    assert all(measured.nan_to_num().equal(maps[0].nan_to_num()) for measured in maps)
    assert_same(maps[0], expected, NETWORK)
    for output in (outputs[0], outputs[-1]):
        assert_same(output, logits, NETWORK)


def test_a_pass_that_runs_already_is_not_read(plain_of: PlainOf) -> None:
    """It began before the model had a lock, and goes on in the middle of a capture."""
    model, hf = plain_of("shipped")
    begun, goes_on, outputs = Event(), Event(), list[torch.Tensor]()

    def wait(tensor: torch.Tensor, hook: object) -> None:
        if current_thread() is passes:
            begun.set()
            goes_on.wait(60)

    class Between(StreamCheckpoint):
        def advance(self, n_seqs: int) -> None:
            goes_on.set()
            passes.join(60)

    passes = Thread(target=lambda: outputs.append(model(batch(1)).detach()))
    model.blocks[0].hook_resid_pre.add_hook(wait)
    passes.start()
    assert begun.wait(60)
    maps = capture_scores(model, batch(0), batch_size=5, checkpoint=Between()).mean
    expected = [layer.map for layer in plain_attention(hf, batch(0)).values()]
    assert_same(maps, torch.stack(expected), NETWORK)
    assert_same(outputs[0], hf(batch(1)).logits.detach(), NETWORK)


def test_other_threads_wait_outside_of_ablated(tiny: ByName) -> None:
    model: Any = load(str(tiny("llama").folder)).model
    intact, losses = model(batch(0)), capture_losses(model, batch(0))
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: model(batch(0)),
        lambda: model.original_model(batch(0)).logits,
        lambda: model.run_with_cache(batch(0))[0],
        lambda: capture_losses(model, batch(0)),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        with ablated(model, Ablation(remove="mask")):
            waiting = [pool.submit(call) for call in calls]
            without = model(batch(0))
            assert not any(future.done() for future in waiting)
        outputs = [future.result(timeout=60) for future in waiting]
    assert not torch.allclose(without, intact)
    for output, expected in zip(outputs, [intact, intact, intact, losses], strict=True):
        assert_same(output, expected, NETWORK)


def test_ablations_of_one_model_in_threads_follow_each_other(tiny: ByName) -> None:
    model: Any = load(str(tiny("qwen3").folder)).model
    removals = ["mask", "rope", "w_q", "w_k", "w_v", "w_o", "mlp"]

    def run(seed: int) -> torch.Tensor:
        ablation = Ablation(remove=removals[seed], replacement="zero")
        with ablated(model, ablation):
            return capture_attention(model, batch(0)).mean

    for alone, beside in zip(map(run, SEEDS), in_threads(run), strict=True):
        assert beside.equal(alone)


def test_two_models_in_two_threads_do_not_wait_for_each_other(tiny: ByName) -> None:
    one, other = (to_hooked(tiny(name).hf) for name in ("llama", "qwen3"))
    expected = capture_scores(other, batch(3)).mean
    with ablated(one, Ablation(remove="mask")), ThreadPoolExecutor(1) as pool:

        def run() -> torch.Tensor:
            with ablated(other, Ablation(remove="rope")):
                pass
            return capture_scores(other, batch(3)).mean

        assert pool.submit(run).result(timeout=60).nan_to_num().equal(expected.nan_to_num())


def test_the_first_look_at_a_model_leaves_masks_of_other_models_alone(tiny: ByName) -> None:
    """Its two positions are far apart, beyond the window of any model."""
    mistral: Any = load(str(tiny("mistral").folder)).model
    expected = mistral(batch(0))
    begins, ends = Event(), Event()

    def look() -> None:
        with positions_far_apart():
            begins.set()
            ends.wait(60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look)
        begins.wait(60)
        beside = mistral(batch(0))
        ends.set()
    assert beside.equal(expected)


def test_a_thread_that_waits_long_says_for_what(
    tiny: ByName, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = to_hooked(tiny("llama").hf)
    monkeypatch.setattr(threads, "PATIENCE", 0.01)

    def wait() -> None:
        with ThreadPoolExecutor(1) as pool:
            with used_alone(model):
                waiting = pool.submit(model, batch(0))
                sleep(0.1)
            waiting.result(60)

    with pytest.warns(UserWarning, match="another thread reads or has ablated"):
        wait()


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("spec", "copied"),
    [("hooked:llama", deepcopy), ("hooked:llama", pickled), ("bridge:llama", deepcopy)],
)
def test_a_copy_of_a_model_waits_for_the_copy_alone(
    model_of: ModelOf, spec: str, copied: Callable[[Any], Any]
) -> None:
    model, _ = model_of(spec)
    expected = capture_scores(model, batch(0)).mean
    copy = copied(copied(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    try:
        with used_alone(model), ThreadPoolExecutor(1) as pool:
            maps = pool.submit(capture_scores, copy, batch(0)).result(timeout=60)
    finally:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)
    assert maps.mean.nan_to_num().equal(expected.nan_to_num())
