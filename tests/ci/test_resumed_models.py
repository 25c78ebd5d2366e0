"""A run of a model in memory is resumed with the same weights, buffers and hooks alone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nope_probe import Ablation, Sequences, UserError, ablated, load
from nope_probe.run.session import Session
from nope_probe.studies.trace import Settings


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("rope-tiny")


@contextmanager
def without_mask(model: Any) -> Iterator[None]:
    with ablated(model, Ablation(remove=["mask"])):
        yield


@contextmanager
def with_hook(model: Any) -> Iterator[None]:
    """Write at the last position only."""

    def change(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.cat((tensor[:, :-1], 3 * tensor[:, -1:]), 1)

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", change)]):
        yield


@contextmanager
def with_hook_of_pytorch(model: Any) -> Iterator[None]:
    handle = model.blocks[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    yield
    handle.remove()


@contextmanager
def with_frequencies(model: Any) -> Iterator[None]:
    """Turn faster, by buffers that are not stored with the weights."""
    names = ("rotary_sin", "inv_freq")  # of a HookedTransformer, and of a bridge
    buffer = next(x for name, x in model.named_buffers() if name.endswith(names))
    before = buffer.clone()
    buffer.mul_(-1)
    yield
    buffer.copy_(before)


@contextmanager
def with_weight(model: Any) -> Iterator[None]:
    weight = model.blocks[1].attn.W_Q
    before = weight.detach().clone()
    weight.data[0, 0, 0] += 1e-3
    yield
    weight.data.copy_(before)


STATES = (without_mask, with_hook, with_hook_of_pytorch, with_frequencies, with_weight)


@pytest.mark.parametrize("changed", STATES)
def test_an_unfinished_run_is_resumed_with_the_same_weights_buffers_and_hooks_alone(
    changed: Callable[[Any], AbstractContextManager[None]], loaded: Any, tmp_path: Path
) -> None:
    settings = Settings(model="rope-tiny", n_seqs=17, seq_len=23, out=tmp_path / "run", confirm=0)

    def start() -> Sequences:
        with Session(settings, model=loaded).opened() as session:
            return session.sequences()

    first = start()
    error = pytest.raises(UserError, match=r"run.unfinished holds an unfinished run with other")
    with changed(loaded.model), error:
        start()
    assert torch.equal(start().inputs, first.inputs)
