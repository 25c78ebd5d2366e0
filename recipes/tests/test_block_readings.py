"""Each block's visible cells, in a pass over a short batch."""

import pytest
import torch
from support.tiny_models import ByName, tokens

from block_readings import read_layers
from nope_probe import Ablation, ablated

CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()


def test_each_block_has_its_own_visible_cells(bridge: ByName) -> None:
    windowed, causal = (block.visible for block in read_layers(bridge("gemma2"), tokens(3, 11)))
    assert all(torch.equal(head, CAUSAL & ~CAUSAL.tril(-5)) for head in windowed)
    assert all(torch.equal(head, CAUSAL) for head in causal)


@pytest.mark.parametrize("head", [0, 2])
def test_a_head_without_the_mask_sees_every_key(head: int, bridge: ByName) -> None:
    model = bridge("llama")
    with ablated(model, Ablation(remove=["mask"], heads={1: [head]})):
        first, second = (block.visible for block in read_layers(model, tokens(3, 11)))
    assert bool((first == CAUSAL).all())
    for index, cells in enumerate(second):
        assert torch.equal(cells, torch.ones_like(CAUSAL) if index == head else CAUSAL)
