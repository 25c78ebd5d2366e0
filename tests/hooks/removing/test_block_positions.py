"""The position that blocks write is taken out of a causal model, against hooks on transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.hooked_runs import hooks_left
from support.plain_states import of_all, of_others
from support.rounding import NETWORK, rounding
from support.tiny_models import ModelOf, distance, tokens
from torch import Tensor

from nope_probe import Ablation, UserError, ablated, capture_scores, load, measure
from nope_probe.analyses.attribution import contrast_grams
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.reading.written import capture_written
from nope_probe.hooks.removing.written import fingerprints

N_TEXTS, N_POS = 11, 13
# Plain blocks, a fused one, learned positions, post-norms with windows, experts, linear attention.
KINDS = ("llama", "phi3", "gpt2", "gemma3_text", "mixtral", "qwen3_next", "gpt_neox")
Change = Callable[[int, Tensor], Tensor]


def places(hf: Any) -> list[tuple[Any, bool]]:
    """Return the modules whose outputs are added, and whether a module is a whole block."""
    body = getattr(hf, hf.base_model_prefix)
    found: list[tuple[Any, bool]] = []
    names = ("self_attn", "attn", "attention"), ("mlp", "block_sparse_moe")
    for block in body.h if hasattr(body, "h") else body.layers:
        if not any(hasattr(block, name) for name in names[0]):
            found.append((block, True))
        elif hasattr(block, "post_feedforward_layernorm"):
            found.append((block.post_attention_layernorm, False))
            found.append((block.post_feedforward_layernorm, False))
        else:
            parts = (next(getattr(block, x) for x in of if hasattr(block, x)) for of in names)
            found += [(part, False) for part in parts]
    return found


@torch.no_grad()
def run_changed(hf: Any, text: Tensor, change: Change) -> Tensor:
    """Return logits of plain transformers where every output that is added is changed."""

    def hook(place: int, is_block: bool) -> Any:
        def act(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            whole = output[0] if isinstance(output, tuple) else output
            before = (args[0] if args else kwargs["hidden_states"]) if is_block else 0.0
            changed = before + change(place, whole - before)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return act

    handles = [
        module.register_forward_hook(hook(place, is_block), with_kwargs=True)
        for place, (module, is_block) in enumerate(places(hf))
    ]
    try:
        return hf(text, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


def plain_removed(
    hf: Any, text: Tensor, new: Tensor, kept: int = 1, rounded: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the logits of texts, without the means of the others of a half, and of new texts.

    The numbers that are added to the stream of the texts are `rounded`, up or down by chance.
    """
    full: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(3)

    def of_texts(place: int, output: Tensor) -> Tensor:
        full[place] = of_all(output, kept)
        changed = output - of_others(output, kept)
        up = torch.rand(output.shape, generator=generator) < 0.5
        return changed * (1 + rounded * torch.where(up, 1.0, -1.0))

    logits = run_changed(hf, text, of_texts)
    return logits, run_changed(hf, new, lambda place, output: output - full[place])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kept", [1, 0])
def test_without_written_position_a_model_is_plain_transformers_with_its_means_subtracted(
    name: str, kept: int, decoder: ModelOf
) -> None:
    model, tiny = decoder(name)
    text, new = tokens(N_TEXTS, N_POS, seed=1), tokens(3, N_POS, seed=2)
    expected, expected_new = plain_removed(tiny.hf, text, new, kept)
    # Linear attention amplifies a rounding, by how much depends on the weights.
    last_sum = rounding(tiny.hf.config.hidden_size)
    rounded, _ = plain_removed(tiny.hf, text, new, kept, last_sum)
    with torch.inference_mode():
        intact = model(text)
        with ablated(model, Ablation(remove=["written"], kept_positions=kept), tokens=text):
            logits, logits_new = model(text), model(new)
            in_pieces = torch.cat([model(piece) for piece in text.split(2)])
        again = model(text)
    change = (expected - intact).abs().max()
    allowed = max(NETWORK * intact.abs().max(), (rounded - expected).abs().max())
    assert change > 0.1 * intact.abs().max() > 100 * allowed
    assert (logits - expected).abs().max() <= allowed
    assert (logits_new - expected_new).abs().max() <= allowed
    assert (in_pieces - expected).abs().max() <= allowed
    assert torch.equal(again, intact)
    assert not hooks_left(model)


@pytest.mark.parametrize("kept", [1, 0])
def test_the_mark_of_a_first_token_is_in_the_mean_and_a_massive_output_elsewhere_is_not(
    kept: int, tmp_path: Path
) -> None:
    hf = write_decoder("llama", tmp_path).hf
    scale = torch.ones(N_TEXTS, N_POS, 1)
    scale[:, 0], scale[2, 5] = 53.0, 59.0

    def grow(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * scale[: output.shape[0], : output.shape[1]]

    text, writer = tokens(N_TEXTS, N_POS, seed=1), "MLP0"
    hf.model.layers[0].mlp.register_forward_hook(grow)
    expected, _ = plain_removed(hf, text, text, kept)
    model = load(hf).model
    positions = capture_written(model, text, kept_positions=kept)
    assert positions.outputs[writer].counts[:, [0, 5, 7]].tolist() == [[6, 5, 6], [5, 5, 5]]
    assert positions.n_left_out == 1
    with torch.inference_mode():
        size = model(text).abs().max()
        with ablated(model, Ablation(remove=["written"], kept_positions=kept), tokens=text):
            assert (model(text) - expected).abs().max() <= NETWORK * size


def test_in_a_union_the_position_is_that_of_the_model_without_the_others(
    decoder: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, tiny), text = decoder("llama"), tokens(N_TEXTS, N_POS, seed=1)
    forward = tiny.hf.model.rotary_emb.forward
    at_0 = lambda x, position_ids: forward(x, torch.zeros_like(position_ids))  # noqa: E731
    monkeypatch.setattr(tiny.hf.model.rotary_emb, "forward", at_0)
    expected, _ = plain_removed(tiny.hf, text, text)
    with ablated(model, Ablation(remove=["rope+written"]), tokens=text), torch.inference_mode():
        assert distance(model(text), expected) <= NETWORK


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_where_weights_are_replaced_their_new_outputs_lose_what_they_write(
    spec: str, model_of: ModelOf
) -> None:
    model, text = model_of(spec)[0], tokens(12, N_POS, seed=1)
    point, size = layers_of(model)[1].point("hook_attn_out"), {}
    for removed in ("w_o", "w_o+written"):
        kept = list[Tensor]()
        ablation = Ablation(remove=[removed], replacement="identity", kept_positions=0)
        keep = (point, lambda x, hook, kept=kept: kept.append(x.double().mean(0)))
        with ablated(model, ablation, tokens=text), hooks_attached([keep]):
            model(text)
        size[removed] = (kept[0] - kept[0].mean(0)).norm()
    # The means of all texts are 0 where each loses the means of the others of its half.
    assert size["w_o+written"] <= NETWORK * size["w_o"]


def test_the_null_has_the_means_of_permuted_positions_and_keeps_the_first(
    decoder: ModelOf,
) -> None:
    (model, _), text = decoder("llama"), tokens(N_TEXTS, N_POS, seed=1)
    null = capture_written(model, text, null_seed=3, kept_positions=1)
    assert null.order.sort(1).values.equal(torch.arange(N_POS).expand(N_TEXTS, -1))
    assert null.order[:, 0].eq(0).all()
    assert len({tuple(row) for row in null.order.tolist()}) == N_TEXTS
    plain = capture_written(model, text, kept_positions=1)
    first = plain.outputs["ATTN0"], null.outputs["ATTN0"]
    totals = [(of.mean * of.counts[..., None])[:, 1:].sum(1) for of in first]
    torch.testing.assert_close(*totals, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first[0].mean[:, 1:], first[1].mean[:, 1:], atol=1e-2)


def test_batches_and_dtype_of_storage_change_nothing(decoder: ModelOf) -> None:
    (model, tiny), text = decoder("llama"), tokens(N_TEXTS, N_POS, seed=1)
    whole, pieces = (capture_written(model, text, batch_size=size) for size in (N_TEXTS, 2))
    stored = type(pieces).from_tensors(pieces.to_tensors())
    names = [f"{kind}{layer}" for layer in range(model.cfg.n_layers) for kind in ("ATTN", "MLP")]
    assert [*whole.outputs] == names
    assert sorted(stored.outputs) == sorted(whole.outputs)
    of_texts = fingerprints(tiny.hf.model.embed_tokens(text))
    assert stored.texts.tolist() == of_texts.tolist()
    for name, of in whole.outputs.items():
        assert distance(stored.outputs[name].mean, of.mean) <= NETWORK


def test_what_cannot_be_done_is_refused_with_the_way_out(decoder: ModelOf) -> None:
    (model, _), text = decoder("llama"), tokens(N_TEXTS, N_POS, seed=1)
    with pytest.raises(UserError, match="1 more in a half"):
        capture_written(model, text[:3])
    documents = torch.arange(N_TEXTS) // 2
    with ablated(model, "written", tokens=text), pytest.raises(UserError, match="other halves"):
        capture_scores(model, text, documents=documents)
    with pytest.raises(UserError, match="no later positions"):
        capture_written(model, text, kept_positions=N_POS)
    for options, message in (
        ({"layers": [0]}, r"position\[ATTN1\]"),
        ({"heads": {0: [1]}}, "has no heads"),
        ({"remove": ["written", "position[MLP0]"]}, "share the position"),
    ):
        with pytest.raises(UserError, match=message):
            Ablation(**{"remove": ["written"]} | options)
    written = ablated(model, Ablation(remove=["written"]), tokens=text)
    with written, pytest.raises(ValueError, match=f"sequences of {N_POS - 1} tokens"):
        model(text[:, : N_POS - 1])


def rows_of(folds: Tensor) -> Tensor:
    """Return fold maps' cells 1 <= j < i, less each row's mean, 0 elsewhere."""
    cells = torch.ones(folds.shape[-2:]).tril(-1).bool()
    cells[:, 0], cells[:2] = False, False
    inside = folds.double().masked_fill(~cells, 0)
    means = inside.sum(-1, keepdim=True) / cells.sum(-1, keepdim=True).clamp(min=1)
    return (inside - means)[..., cells]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_products_of_a_row_with_means_of_its_texts_take_an_even_and_an_odd_fold(
    name: str, decoder: ModelOf
) -> None:
    (model, _), text = decoder(name), tokens(24, N_POS, seed=1)
    intact = capture_scores(model, text, n_folds=4)
    with ablated(model, "written", tokens=text):
        written = capture_scores(model, text, n_folds=4)
    row, column = torch.ones(N_POS, N_POS).tril(-1).bool().nonzero().T
    row, column = (x[(column > 0) & (row > 1)] for x in (row, column))
    design = torch.zeros(len(row), 2 * N_POS).double()
    design[torch.arange(len(row)), row] = 1
    design[torch.arange(len(row)), N_POS + row - column] = 1
    of_intact, of_written = (rows_of(of.by_layer[1].folds.maps) for of in (intact, written))
    fitted = design @ torch.linalg.pinv(design) @ of_written.T
    rest = of_written - fitted.T
    square = (rest[::2].mean(0) * rest[1::2].mean(0)).mean()
    measured = measure(written)[1]
    assert signed_square(measured.not_by_distance.value) == pytest.approx(float(square), rel=1e-6)
    crossed = (of_written[::2].mean(0) * of_intact[1::2].mean(0)).mean()
    crossed += (of_written[1::2].mean(0) * of_intact[::2].mean(0)).mean()
    pairs = of_intact @ of_intact.T / len(row)
    all_pairs = (pairs.sum() - pairs.trace()) / 12
    patterns = [of.by_layer[1].pattern for of in (intact, written)]
    gram = contrast_grams(dict(zip(("intact", "written"), patterns, strict=True)))["pattern"]
    for one, expected in (("written", crossed / 2), ("intact", all_pairs)):
        product = gram.product({one: 1.0}, {"intact": 1.0}).values[0]
        assert float(product) == pytest.approx(float(expected), rel=1e-6)


def signed_square(x: float) -> float:
    """Return the mean square of which a number is the RMS."""
    return x * abs(x)
