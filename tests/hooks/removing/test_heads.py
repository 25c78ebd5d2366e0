"""Removals in named heads; tests/hooks/test_ablation.py compares them with edited models."""

import re
from pathlib import Path

import pytest
from support.decoders import write_decoder
from support.edited_model import (
    rectangular_identity,
)
from support.hooked_runs import hooked_run
from support.tiny_models import ByName, distance

from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.reading.calibration import calibrate
from nope_probe.hooks.removing.removals import Ablation
from nope_probe.models.load import load

HEADS = [1, 3]  # of six query heads, of which three share a key head


@pytest.mark.parametrize("n_heads", [4, 6])  # 4 * 11 values are no multiple of 6 coordinates
def test_heads_lose_the_columns_of_w_o_that_read_their_values_where_these_have_their_own_width(
    n_heads: int, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": n_heads, "num_key_value_heads": n_heads}
    written = write_decoder("deepseek_v3", tmp_path, **sizes)
    model, inputs = load(str(written.folder)).model, written.tokens
    w_o, read = written.hf.model.layers[1].self_attn.o_proj, []
    handle = w_o.register_forward_hook(lambda _, z, output: read.append((z[0], output)))
    written.hf(inputs)
    handle.remove()
    [(z, output)] = read
    calibration = calibrate(model, inputs, seed=0)
    replaced = z @ rectangular_identity("w_o", w_o.weight.shape).T
    gain = calibration.gains["identity"]["w_o"][1]
    assert gain == pytest.approx(float(output.norm() / replaced.norm()), rel=1e-5)
    assert distance(calibration.mean("z", 1), z.mean((0, 1))) <= 1e-5
    for head in HEADS:
        w_o.weight[:, 11 * head : 11 * (head + 1)] = 0
    with ablated(model, Ablation(remove=["w_o"], heads={1: HEADS}, replacement="zero")):
        logits = hooked_run(model, inputs).logits
    assert distance(logits, written.hf(inputs).logits) <= 1e-5


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [1, 6]}, "L0 has the query heads 0 to 5, not 6"),
        ({1: [-1]}, "L1 has the query heads 0 to 5, not -1"),
        ({2: [1]}, "expected layers from 0 to 1, got [2]"),
    ],
)
def test_a_head_or_layer_that_does_not_exist_is_an_error_that_lists_those_that_do(
    heads: dict[int, list[int]], message: str, bridge: ByName
) -> None:
    error = pytest.raises(ValueError, match=f"^{re.escape(message)}$")
    with error, ablated(bridge("llama"), Ablation(remove=["mask"], heads=heads)):
        pass
