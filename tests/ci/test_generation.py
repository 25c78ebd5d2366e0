"""Inside an ablation, text is generated as by whole forward passes, and padding stays hidden."""

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from support.ablations import identities
from support.hooked_runs import GREEDY, by_whole_passes
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, distance, tokens
from transformers import AutoTokenizer, DynamicCache

from nope_probe import Ablation, ablated
from nope_probe.hooks.removing.components import components
from nope_probe.models.load import to_hooked

SPECS = ("bridge:llama", "bridge:gpt2", "hooked:smollm3-rope")
N_NEW, PROMPT = 5, tokens(n_seqs=2, n_pos=7)


def generated(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=N_NEW, **GREEDY, **options)


def removals(model: Any) -> list[Ablation]:
    """Return every component alone, bands, norms, a prefix, some heads, and all at once."""
    names = components(model)
    one = [identities(name) for name in (*names, "norms", "qk")]
    one += [Ablation(remove=["mask"], prefix=3), identities(*names)]
    some = {0: [1], 1: [0, 2]}
    one += [replace(identities(name), heads=some) for name in ("mask", "w_q", "w_k", "w_v", "w_o")]
    if "rope" in names:
        one += [Ablation(remove=[name]) for name in ("rope_high", "rope_low", "rope[0:2]")]
        one += [Ablation(remove=["rope"], heads={0: [1, 3]})]
    return one


@pytest.mark.filterwarnings("ignore:generating without a KV cache")
@pytest.mark.parametrize("spec", SPECS)
def test_generated_tokens_are_those_of_whole_forward_passes_for_every_removal(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    wrong = []
    for ablation in removals(model):
        with ablated(model, ablation):
            if not torch.equal(generated(model, PROMPT), by_whole_passes(model, PROMPT, N_NEW)):
                wrong.append(ablation)
    assert not wrong


@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_cache_is_turned_off_with_one_warning_where_it_cannot_hold(
    spec: str, model_of: ModelOf, recwarn: pytest.WarningsRecorder
) -> None:
    model, _ = model_of(spec)
    with ablated(model, identities("w_q", "w_o", "mlp", "norms")):
        generated(model, PROMPT)
    with ablated(model, identities("w_o", "mask")):
        generated(model, PROMPT, use_past_kv_cache=False)
    assert not said(recwarn)
    with ablated(model, identities("w_o", "w_k")):
        generated(model, PROMPT)
        generated(model, PROMPT)
    assert said(recwarn) == ["generating without a KV cache: it is wrong without w_k"]


@pytest.mark.filterwarnings("ignore:generating without a KV cache")
@pytest.mark.parametrize("spec", ["bridge:llama", "hooked:smollm3-rope"])
def test_a_cache_that_is_asked_for_by_position_is_turned_off_too(
    spec: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    defaults = signature(model.generate).bind()
    defaults.apply_defaults()
    options = defaults.arguments | {"input": PROMPT, "max_new_tokens": N_NEW} | GREEDY
    names = [*options]
    by_position = [options[name] for name in names[: names.index("use_past_kv_cache") + 1]]
    with ablated(model, Ablation(remove=["w_k"], replacement="zero")):
        assert torch.equal(model.generate(*by_position, verbose=False), generated(model, PROMPT))


def said(warnings: pytest.WarningsRecorder) -> list[str]:
    """Return the warnings about caches; TransformerLens has others."""
    return [text for warning in warnings if "KV cache" in (text := str(warning.message))]


@pytest.mark.filterwarnings("ignore:generating without a KV cache")
def test_streams_and_hugging_face_generate_without_a_cache_too(model_of: ModelOf) -> None:
    model, _ = model_of("bridge:llama")
    with ablated(model, Ablation(remove=["mask"])):
        expected = by_whole_passes(model, PROMPT, N_NEW)
        *_, streamed = model.generate_stream(PROMPT, max_new_tokens=N_NEW, **GREEDY)
        options = {"do_sample": False, "stop_at_eos": False, "eos_token_id": -1}
        assert torch.equal(model.hf_generate(PROMPT, max_new_tokens=N_NEW, **options), expected)
    assert torch.equal(streamed, expected[:, -streamed.shape[1] :])


@pytest.mark.parametrize("remove", ["mask", "rope", "rope_high", "w_k", "w_v"])
def test_keys_and_values_of_a_users_own_cache_are_refused(remove: str, model_of: ModelOf) -> None:
    model, _ = model_of("bridge:llama")
    cache = DynamicCache()
    with ablated(model, identities(remove)):
        model(PROMPT, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match=r"9 keys for 2 queries.*pass whole sequences"):
            model(PROMPT[:, -2:], past_key_values=cache, use_cache=True)


@pytest.mark.hooked_transformer
def test_a_cache_of_transformer_lens_is_refused(model_of: ModelOf) -> None:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model, _ = model_of("hooked:smollm3-rope")
    ones = torch.ones(2, 7, dtype=torch.long)
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    for remove in ("w_k", "w_v"):
        with (
            ablated(model, identities(remove)),
            pytest.raises(ValueError, match="each query head has a key or value head: pass whole"),
        ):
            model(PROMPT, past_kv_cache=cache, attention_mask=ones)
    for remove in ("mask", "rope", "rope[0:2]"):
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
        with ablated(model, identities(remove)):
            model(PROMPT, past_kv_cache=cache, attention_mask=ones)
            with pytest.raises(ValueError, match=r"9 keys for 2 queries.*pass whole sequences"):
                model(PROMPT[:, -2:], past_kv_cache=cache, attention_mask=ones[:, -2:])


LENGTHS = (7, 4, 11)


def padded(rows: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the given lengths, filled up with other tokens, and their attention mask."""
    n = max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), n, dtype=torch.long)
    filled = torch.full_like(mask, 17)
    for row, length in enumerate(LENGTHS):
        real = slice(length) if side == "right" else slice(n - length, n)
        mask[row, real], filled[row, real] = 1, rows[row, :length]
    return filled, mask


def padding_error(model: Any, side: str) -> float:
    """Return by how much logits of a padded batch differ from those of each sequence alone."""
    rows = tokens(len(LENGTHS), max(LENGTHS))
    batch, mask = padded(rows, side)
    with torch.inference_mode():
        logits = model(batch, attention_mask=mask)
        return max(
            distance(logits[row][mask[row] == 1], model(rows[row : row + 1, :length])[0])
            for row, length in enumerate(LENGTHS)
        )


@pytest.mark.parametrize(
    ("spec", "side"),
    [
        *((spec, "left") for spec in (*SPECS, "bridge:mistral")),
        *((spec, "right") for spec in ("bridge:llama", "hooked:smollm3-rope")),
    ],
)
def test_padding_stays_hidden_or_is_refused_for_every_removal(
    spec: str, side: str, model_of: ModelOf
) -> None:
    model, _ = model_of(spec)
    assert padding_error(model, side) <= NETWORK
    errors = {}
    for ablation in removals(model):
        with ablated(model, ablation):
            if any(name.of_length for name in ablation.condition):
                with pytest.raises(ValueError, match="pass sequences of one length, without padd"):
                    padding_error(model, side)
            else:
                errors[repr(ablation)] = padding_error(model, side)
    assert not {ablation: error for ablation, error in errors.items() if not error <= NETWORK}


@pytest.mark.parametrize(
    ("remove", "is_refused"), [("mask", True), ("rope_low", True), ("w_k", False)]
)
@pytest.mark.parametrize("kind", ["bridge", "hooked"])
def test_texts_that_are_padded_unseen_are_refused(
    kind: str, remove: str, is_refused: bool, tiny: ByName, model_of: ModelOf
) -> None:
    model, _ = model_of("bridge:llama")
    if kind == "hooked":
        model = to_hooked(
            tiny("smollm3-rope").hf, AutoTokenizer.from_pretrained(tiny("smollm3-rope").folder)
        )
    with ablated(model, identities(remove)):
        logits = model(["never"])
        assert distance(model(["never", "never"])[:1], logits) <= NETWORK
        if is_refused:
            with pytest.raises(ValueError, match=f"without {remove} padding .* texts one by one"):
                model(["never", "in winter"])
        else:
            n_pos = logits.shape[1]
            assert distance(model(["never", "in winter"])[:1, :n_pos], logits) <= NETWORK
