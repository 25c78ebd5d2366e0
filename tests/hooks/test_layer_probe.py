"""What a pass reads of every block: which cells each head may attend to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import tokens

from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layer_probe import visible_cells

CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


def test_each_block_has_its_own_visible_cells(bridge: Callable[[str], Any]) -> None:
    windowed, causal = visible_cells(bridge("gemma2"), tokens(3, 11))
    assert all(torch.equal(head, CAUSAL & ~CAUSAL.tril(-5)) for head in windowed)
    assert all(torch.equal(head, CAUSAL) for head in causal)


@pytest.mark.parametrize("head", [0, 2])
def test_a_head_without_the_mask_sees_every_key(head: int, bridge: Callable[[str], Any]) -> None:
    model = bridge("llama")
    with ablated(model, Ablation(remove=["mask"], heads={1: [head]})):
        first, second = visible_cells(model, tokens(3, 11))
    assert bool((first == CAUSAL).all())
    for index, cells in enumerate(second):
        assert torch.equal(cells, torch.ones_like(CAUSAL) if index == head else CAUSAL)
