"""Heads are measured where attention makes its angles itself."""

from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.plain_attention import plain_attention
from support.rounding import NETWORK, assert_same

from nope_probe import head_scores, load

FAMILIES = ["gptj", "codegen", "recurrent_gemma", "nanochat", "hunyuan_v1_dense"]


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_measured_as_by_plain_transformers(name: str, tmp_path: Path) -> None:
    tiny = write_decoder(name, tmp_path)
    tokens = torch.randint(3, 60, (8, 13), generator=torch.Generator().manual_seed(0))
    heads = head_scores(load(str(tiny.folder)), tokens)
    assert heads[["induction", "induction_high"]].notna().all(axis=None)
    for layer, plain in plain_attention(tiny.hf, tokens).items():
        weights = plain.scores.double().nan_to_num(neginf=-1e9, nan=-1e9).softmax(-1).mean(0)
        of_layer = heads[heads["layer"] == layer]
        assert_same(of_layer["first_key"], weights[:, 1:, 0].mean(-1), NETWORK)
        before = weights.diagonal(-1, dim1=-2, dim2=-1)[:, 1:].mean(-1)
        assert_same(of_layer["previous_token"], before, NETWORK)
