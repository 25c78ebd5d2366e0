"""Masks and attention of long sequences, a block of queries at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.rounding import NETWORK
from support.tiny_models import tokens

from nope_probe import load
from nope_probe.hooks.layers import attention as module
from nope_probe.hooks.layers.attention import AttentionMask
from nope_probe.hooks.layers.passes import read_attention, run_blocks

N = 61


@pytest.mark.parametrize("model_type", ["llama", "mistral", "llama4_text", "gemma2", "gpt_oss"])
def test_blocks_of_queries_give_the_residual_stream_of_all_queries_at_once(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(str(write_decoder(model_type, tmp_path).folder)).model
    whole = run_blocks(model, tokens(2, N))
    monkeypatch.setattr(module, "WHOLE", 7)
    monkeypatch.setattr(module, "BLOCK_CELLS", 11 * N)
    assert (run_blocks(model, tokens(2, N)) - whole).abs().max() <= NETWORK * whole.abs().max()


@pytest.mark.parametrize(
    ("changed", "sees"),
    [(lambda mask: mask, 5), (AttentionMask.both_ways, 9), (AttentionMask.without_window, 31)],
)
def test_rows_of_a_mask_are_those_of_all_its_cells(
    changed: Callable[[AttentionMask], AttentionMask], sees: int, tmp_path: Path
) -> None:
    model = load(str(write_decoder("mistral", tmp_path).folder)).model  # a window of 5
    first, *_ = read_attention(model, tokens(1, N), lambda layer, attention: attention.mask)
    mask, rows = changed(first), torch.tensor([30, 7, 60])
    assert torch.equal(mask.rows(rows), mask.rows()[..., rows, :])
    assert int(mask.rows(rows)[0, 0, 0].sum()) == sees
    assert torch.equal(mask.of_queries(slice(7, 19)).rows(), mask.rows()[..., 7:19, :])
