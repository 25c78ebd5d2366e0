"""What is captured of an ablated model is what plain transformers computes in the edited one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ablations import ablations, calibration_of, edited_as
from support.plain_attention import assert_attention, close, per_fold, plain_attention
from support.plain_states import BlockStates, plain_losses, plain_states
from support.tiny_models import N_POS, ByName, ModelOf, tokens
from torch import Tensor

from nope_probe import (
    Ablation,
    ablated,
    capture_attention,
    capture_losses,
    capture_scores,
    capture_stages,
)
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.maps.rows import choose_rows

INPUTS = tokens(13, seed=7)
SPECS = ("bridge:llama", "bridge:smollm3", "bridge:mistral", "bridge:gemma2", "hooked:smollm3-nope")


def grams(states: list[BlockStates], layer: int, n_folds: int) -> dict[str, Tensor]:
    """Return the Gram maps of the paper's Figure 3 from plain states."""
    this, after = states[layer], states[layer + 1 : layer + 2]
    vectors = {"a": this.y, "c": this.z, "d": this.written, "e": this.middle}
    vectors |= {"f": this.normed_middle, "g": this.output}
    vectors |= dict(zip("h", (states.y for states in after), strict=False))
    flat = {letter: x.flatten(2).double() for letter, x in vectors.items()}
    return {letter: per_fold(x @ x.mT, n_folds) for letter, x in flat.items()}


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_captures_of_an_ablated_model_are_those_of_plain_transformers_edited(
    spec: str, model_of: ModelOf, tiny: ByName, data: st.DataObject
) -> None:
    """Fused or by hooked scores, of all rows or some, of each head and of their mean."""
    model, name = model_of(spec)
    intact = st.just(Ablation())
    ablation = data.draw(st.one_of(intact, ablations(model, tiny(name))))
    n_rows = data.draw(st.none() | st.integers(1, N_POS))
    layer, n_folds = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 5))
    leave = hooks_attached(
        (layer.point("attn.hook_attn_scores"), lambda scores, hook: None)
        for layer in layers_of(model)[data.draw(st.sampled_from((0, 99))) :]
    )
    rows, is_product = choose_rows(N_POS, n_rows), name != "gemma2"
    options: dict[str, Any] = {"n_folds": n_folds, "query_rows": n_rows}
    hf = edited_as(ablation, model, tiny(name))
    plain = [*plain_attention(hf, INPUTS).values()]
    calibration = calibration_of(model, tiny(name), ablation.seed)
    with ablated(model, ablation, calibration), leave:
        maps = capture_scores(model, INPUTS, **options, batch_size=4, per_head=True)
        attention = capture_attention(model, INPUTS, **options, batch_size=5)
        stages = capture_stages(model, INPUTS, layer=layer, **options, batch_size=7)
        losses = capture_losses(model, INPUTS, batch_size=6)
    # Chosen rows have no later keys, also where these are seen.
    later = (torch.arange(N_POS) > rows[:, None]) & (len(rows) < N_POS)
    for place, of_layer in enumerate(plain):
        per_head = per_fold(of_layer.scores[:, :, rows], n_folds)
        hidden = per_head.isnan().any(1) | later
        close(maps.per_head[:, place], per_head.masked_fill(hidden[:, None], torch.nan))
        close(maps.folds[:, place], per_head.mean(1).masked_fill(later, torch.nan))
    if not (ablation.heads and {"mask", "window"} & {*ablation.remove}):  # heads see alike
        assert_attention(attention, plain, n_folds, rows)
    scores = {"b": layer, "i": layer + 1}
    if is_product:  # blocks of a Llama
        for letter, gram in grams(plain_states(hf, INPUTS), layer, n_folds).items():
            close(stages.folds[letter], gram[:, rows].masked_fill(later, torch.nan))
    for letter in {"b", "i"} & {*stages.folds}:
        close(stages.folds[letter], maps.folds[:, scores[letter]])
    close(losses, plain_losses(hf, INPUTS))
