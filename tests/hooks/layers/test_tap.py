"""The tap of every scheme of attention: what it finds, what is refused, masks of long sequences."""

import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.rounding import NETWORK
from support.tiny_models import ModelOf, distance, hooked_transformer, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformer_lens.hook_points import HookPoint
from transformers import AutoModelForCausalLM, DynamicCache, MptConfig
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from nope_probe import Ablation, UserError, ablated, capture_scores, load
from nope_probe.hooks.layers import attention as attention_module
from nope_probe.hooks.layers.attention import Attention, AttentionMask, relative_error
from nope_probe.hooks.layers.hook_points import hooks_attached
from nope_probe.hooks.layers.inline_attention import attend_inline
from nope_probe.hooks.layers.model import layers_of, tapped
from nope_probe.hooks.layers.passes import read_attention, run_blocks, traits_of
from nope_probe.hooks.layers.tap import (
    FUSED,
    NAME,
    Edits,
    HandedMask,
    Tap,
    attention_forward,
    attention_mask,
    positions_far_apart,
)
from nope_probe.hooks.removing.components import components


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"rope"}),
        ("gpt_oss", {"rope", "window", "sink"}),
        ("mistral", {"rope", "window"}),
        ("llama4_text", {"rope", "window"}),
        ("gpt_neo", {"pos_embed", "window"}),
        ("bloom", {"alibi"}),
    ],
)
def test_sources_and_sinks_are_found_by_one_short_pass(
    model_type: str, more: set[str], decoder: ModelOf
) -> None:
    weights = {"mask", "w_q", "w_k", "w_o", "w_v", "mlp"}
    assert set(components(decoder(model_type)[0])) == weights | more


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gptj", "bloom"])
def test_a_hook_on_the_pattern_alone_reads_and_writes_attention(
    model_type: str, decoder: ModelOf
) -> None:
    model, tiny = decoder(model_type)
    [layer, *_] = layers_of(model)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor, hook: object) -> None:
        kept.append(tensor.flatten(2).clone())

    def to_itself(pattern: torch.Tensor, hook: object) -> torch.Tensor:
        kept.append(pattern.clone())
        return torch.eye(pattern.shape[-1]).expand_as(pattern)

    hooks = (("attn.hook_v", keep), ("attn.hook_pattern", to_itself), ("attn.hook_z", keep))
    with (
        torch.inference_mode(),
        hooks_attached((layer.point(name), hook) for name, hook in hooks),
    ):
        model(tiny.tokens)
    v, pattern, z = kept
    with torch.inference_mode():
        expected = tiny.hf(tiny.tokens, output_attentions=True).attentions[0]
    assert distance(pattern, expected) <= 1e-5
    n_heads = pattern.shape[1]
    v = v.unflatten(-1, (-1, z.shape[-1] // n_heads))
    repeated = v.repeat_interleave(n_heads // v.shape[2], 2).flatten(2)
    assert distance(z, repeated) <= 1e-6


@pytest.mark.parametrize(
    "attach", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_hooks_of_pytorch_on_the_scores_fire_as_those_of_transformer_lens(
    attach: str, decoder: ModelOf
) -> None:
    model, _ = decoder("llama")
    shapes: list[torch.Size] = []
    point: Any = layers_of(model)[0].point("attn.hook_attn_scores")
    handle = getattr(point, attach)(lambda module, *tensors: shapes.append(tensors[0][0].shape))
    embedded = torch.randn(3, 11, model.cfg.d_model, requires_grad=True)
    model(embedded).sum().backward()
    handle.remove()
    assert shapes[-1][-2:] == (11, 11)


def attend(mask: torch.Tensor | None, n_queries: int = 5, **options: Any) -> torch.Tensor:
    """Return the output of the tap's function, of 3 sequences, 4 heads, 2 key heads and 7 keys."""
    module = torch.nn.Module()
    module.__dict__["tap"] = Tap(HookPoint(), HookPoint(), options.pop("masked", None))
    module.config = SimpleNamespace(_attn_implementation=options.pop("name", FUSED))
    vars(module).update(options.pop("of_module", {}))
    return attention_forward(module, *inputs(n_queries), mask, **options)[0]


def inputs(n_queries: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((3, 4, n_queries, 6), (3, 2, 7, 6), (3, 2, 7, 11))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def by_hand(
    visible: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
    scaling: float = 6**-0.5,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    q, k, v = inputs(visible.shape[-2])
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.mT * scaling
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = (scores + bias).exp() * visible
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return (weights / total @ v).transpose(1, 2)


LATEST = torch.ones(5, 7).tril(2).bool()  # five queries behind a cache of two keys


@pytest.mark.parametrize("masked", [None, -torch.inf])
def test_a_mask_of_booleans_and_a_mask_that_is_added_are_understood(masked: float | None) -> None:
    padded = LATEST.expand(3, 1, -1, -1).clone()
    padded[1, :, :, 0] = False
    longer = torch.cat((padded, torch.ones(3, 1, 5, 2).bool()), -1)  # of a longer cache
    lowest = torch.finfo(torch.float32).min
    numbers = torch.zeros(longer.shape).masked_fill(~longer, lowest)
    expected = by_hand(padded)
    for mask in (padded, longer, numbers[..., :7], numbers):
        assert distance(attend(mask, masked=masked), expected) <= 1e-5
    slopes = -torch.rand(3, 4, 5, 7, generator=torch.Generator().manual_seed(5))
    few = torch.zeros_like(slopes)
    few[2, 0, 3, 1] = 0.7
    for bias in (slopes, few):
        values = attend(bias.masked_fill(~padded, lowest), masked=masked)
        assert distance(values, by_hand(padded, bias)) <= 1e-5


def test_without_a_mask_all_but_single_queries_eager_and_modules_of_both_ways_are_causal() -> None:
    everything = torch.ones(5, 7).bool()
    for options, visible in (
        ({}, LATEST),
        ({"n_queries": 1}, everything[:1]),
        ({"n_queries": 2}, torch.ones(2, 7).tril(5).bool()),
        ({"of_module": {"is_causal": False}}, everything),
        ({"name": NAME}, everything),  # in eager attention nothing is added to scores
    ):
        assert distance(attend(None, **options), by_hand(visible)) <= 1e-5, options


def test_scale_soft_cap_and_sinks_are_those_that_transformers_hands_over() -> None:
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.7])
    for named, expected in (
        ({"scaling": 0.9}, {"scaling": 0.9}),
        ({"softcap": 1.3}, {"soft_cap": 1.3}),
        ({"s_aux": sinks, "sliding_window": 3}, {"sinks": sinks}),
    ):
        assert distance(attend(LATEST[None, None], **named), by_hand(LATEST, **expected)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_alibi_hides_none_of_12_000_keys(dtype: torch.dtype) -> None:
    n_keys, n_queries, n_heads = 12_000, 3, 2
    torch.manual_seed(0)
    config = MptConfig(d_model=14, n_heads=n_heads, attn_config={"alibi_bias_max": 1})
    attend = MptAttention(config, layer_idx=0).to(dtype)
    bias = 1.3 * build_mpt_alibi_tensor(n_heads, n_keys, alibi_bias_max=1)  # slopes 0.92 and 0.65
    causal = torch.ones(n_queries, n_keys).triu(1 + n_keys - n_queries).bool()
    x = torch.randn(1, n_queries, 14, dtype=dtype)
    earlier = torch.randn(2, 1, n_heads, n_keys - n_queries, 7, dtype=dtype)

    def cache() -> DynamicCache:
        kept = DynamicCache()
        kept.update(*earlier, 0)
        return kept

    tap, seen = Tap(HookPoint(), HookPoint()), list[Attention]()
    tap.edits = Edits(change=lambda attention: seen.append(attention) or attention)
    tap.scale = 7**-0.5
    options = {"attention_mask": causal, "position_bias": bias.to(dtype)}
    plain, _ = attend(x, **options, past_key_values=cache())
    ours, _ = attend_inline(tap, n_heads, attend, (x,), options | {"past_key_values": cache()})
    assert torch.equal(seen[0].mask.rows()[0, 0], ~causal)
    assert seen[0].bias is not None
    assert float(seen[0].bias.min()) < -1e4
    assert distance(ours, plain) <= 4 * torch.finfo(dtype).eps


def test_the_mask_of_openais_gpt_is_no_bias(decoder: ModelOf) -> None:
    model, _ = decoder("openai-gpt")
    seen = list[Attention]()
    with tapped(model):
        layers_of(model)[0].tap.edits = Edits(change=lambda of: seen.append(of) or of)
        real = torch.ones(2, 5, dtype=torch.long)
        real[0, 0] = 0  # padding adds to the mask
        model(tokens(2, 5), attention_mask=real)
    assert seen[0].bias is None
    rows = seen[0].mask.rows()
    assert torch.equal(rows[1, 0], torch.ones(5, 5).tril().bool())
    assert not rows[0, 0, :, 0].any()


N_LONG = 61


@pytest.mark.parametrize("model_type", ["llama", "mistral", "llama4_text", "gemma2", "gpt_oss"])
def test_blocks_of_queries_give_the_residual_stream_of_all_queries_at_once(
    model_type: str, decoder: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = decoder(model_type)[0], tokens(2, N_LONG)
    whole = run_blocks(model, given)
    monkeypatch.setattr(attention_module, "WHOLE", 7)
    monkeypatch.setattr(attention_module, "BLOCK_CELLS", 11 * N_LONG)
    assert distance(run_blocks(model, given), whole) <= NETWORK


@pytest.mark.parametrize(
    ("changed", "sees"),
    [(lambda mask: mask, 5), (AttentionMask.both_ways, 9), (AttentionMask.without_window, 31)],
)
def test_rows_of_a_mask_are_those_of_all_its_cells(
    changed: Callable[[AttentionMask], AttentionMask], sees: int, decoder: ModelOf
) -> None:
    model, given = decoder("mistral")[0], tokens(1, N_LONG)  # a window of 5
    first, *_ = read_attention(model, given, lambda layer, attention: attention.mask)
    mask, rows = changed(first), torch.tensor([30, 7, 60])
    assert torch.equal(mask.rows(rows), mask.rows()[..., rows, :])
    assert int(mask.rows(rows)[0, 0, 0].sum()) == sees


def test_selected_keys_are_refused_where_they_are_not_all_keys() -> None:
    every = torch.arange(7).expand(3, 5, 7)
    assert distance(attend(None, indices=every), by_hand(LATEST)) <= 1e-5
    with pytest.raises(UserError, match="beyond 6 tokens this model attends to selected keys only"):
        attend(None, indices=every[..., :6])


WHERE = ((7, 0, 0), (2, 5, 0), (7, 3, 3))  # queries, and the positions of the first query and key


@pytest.mark.parametrize("case", [*product((None, 3, 7), WHERE, *3 * [(False, True)])], ids=str)
def test_masks_are_those_of_transformers(case: tuple[Any, ...]) -> None:
    """Cell by cell: transformers' predicate at the positions of query and key, less padding.

    Fused attention alone goes without a mask, where keys are hidden by causality alone.
    """
    window, (n_queries, q_offset, kv_offset), is_padded, use_vmap, is_fused = case
    sees = causal_mask_function
    if window is not None:
        sees = sliding_window_causal_mask_function(window)
    seen = torch.ones(3, 7 + kv_offset)
    seen[1, : 2 + kv_offset] = 0
    seen[2, -1] = 0
    seen = seen.bool() if use_vmap else seen
    for far_apart in (False, True):
        with positions_far_apart() if far_apart else nullcontext():
            mask = attention_mask(
                mask_function=sees,
                batch_size=3,
                q_length=n_queries,
                kv_length=7,
                q_offset=q_offset,
                kv_offset=kv_offset,
                attention_mask=seen if is_padded else None,
                local_size=window,
                allow_is_causal_skip=True,
                device="cpu",
                use_vmap=use_vmap,
                config=SimpleNamespace(_attn_implementation=FUSED if is_fused else NAME),
            )
        if mask is None:
            assert (is_fused, use_vmap, is_padded, far_apart) == (True, False, False, False)
            assert (window == 3, n_queries, q_offset) == (False, 7, kv_offset)
            continue
        cells = mask if is_fused else mask == 0
        cells = mask.mask.rows() if isinstance(mask, HandedMask) else cells
        for index in product(range(3), range(n_queries), range(7)):
            row, query, key = index[0], index[1] + q_offset, index[2] + kv_offset
            distance_of_keys = query - key
            near = distance_of_keys >= 0 and (window is None or distance_of_keys < window)
            expected = distance_of_keys == 0 if far_apart and window is not None else near
            is_token = not is_padded or bool(seen[row, key])
            found = cells[row if len(cells) > 1 else 0, 0, index[1], index[2]]
            assert bool(found) == (expected and is_token)


def test_masks_are_not_far_apart_behind_an_error() -> None:
    options = {"batch_size": 1, "q_length": 5, "kv_length": 5, "local_size": 3, "device": "cpu"}
    options |= {"mask_function": sliding_window_causal_mask_function(3)}
    before = attention_mask(**options, allow_is_causal_skip=True).mask.rows()
    with suppress(KeyError), positions_far_apart():
        raise KeyError
    assert torch.equal(attention_mask(**options, allow_is_causal_skip=True).mask.rows(), before)
    assert before.sum() == 12


@pytest.mark.parametrize("name", [NAME, FUSED])
def test_a_handed_mask_is_transformers_mask_to_code_that_reads_or_writes_it(name: str) -> None:
    config = SimpleNamespace(_attn_implementation=name)
    options: dict[str, Any] = {"batch_size": 3, "q_length": 7, "kv_length": 7, "local_size": 5}
    options |= {"mask_function": sliding_window_causal_mask_function(5), "device": "cpu"}
    options |= {"allow_is_causal_skip": True}
    expected = (eager_mask if name == NAME else sdpa_mask)(**options)
    handed = attention_mask(**options, config=config)
    assert (handed.shape, handed.dtype, handed.ndim) == (expected.shape, expected.dtype, 4)
    assert "cells" not in vars(handed)  # sizes cost none
    assert torch.equal(handed[:, :, 2:4, :7], expected[:, :, 2:4])
    assert torch.equal(handed[:2, :, :, 1:3], expected[:2, :, :, 1:3])
    assert torch.equal(torch.cat([handed, handed]), torch.cat([expected, expected]))
    assert type(deepcopy(handed)) is Tensor
    handed[0, 0, 6, 2:] = expected[0, 0, 0, 6]
    assert torch.equal(handed[1:], expected[1:])
    assert handed[0, 0, 6].tolist() == [expected[0, 0, 0, 6].item()] * 7
    options |= {"local_size": None, "mask_function": causal_mask_function}
    assert (attention_mask(**options, config=config) is None) == (name == FUSED)


def test_layers_of_a_hybrid_keep_their_numbers(decoder: ModelOf) -> None:
    model, tiny = decoder("qwen3_next")
    attending = [layer.index for layer in layers_of(model)]
    assert attending == [1, 3]
    assert list(traits_of(model)) == attending
    assert len(capture_scores(model, tiny.tokens, layers=[3]).mean) == 1
    with pytest.raises(UserError, match=r"L2 does not attend; the layers that do are \[1, 3\]"):
        capture_scores(model, tiny.tokens, layers=[2])
    refused = pytest.raises(ValueError, match="L0 does not attend")
    with refused, ablated(model, Ablation(remove=["mask"], layers=[0])):
        pass


@pytest.mark.parametrize(
    ("model_type", "removal", "message"),
    [
        ("deepseek_v3", "w_k", "w_k of L0 cannot be removed: it is no separate matrix"),
        ("olmo2", "w_k", "w_k of L0 cannot be removed: a norm is over all key heads"),
        ("gptj", "rope", "RoPE of L0 cannot be removed in some"),
        ("gptj", "rope_high", "no band rope_high: the model rotates 0 pairs"),
        ("opt", "window", "the model has no window; it has"),
    ],
)
def test_what_cannot_be_removed_is_refused_before_a_pass(
    model_type: str, removal: str, message: str, decoder: ModelOf
) -> None:
    model, _ = decoder(model_type)
    options: dict[str, Any] = {"heads": {0: [1]}} if removal == "rope" else {}
    refused, ablation = (
        pytest.raises(ValueError, match=message),
        Ablation(remove=removal, **options),
    )
    with refused, ablated(model, ablation, tokens=tokens(2)):
        pass


@pytest.mark.parametrize(
    ("spec", "copied"),
    [
        ("hooked:llama", deepcopy),
        ("hooked:llama", lambda model: pickle.loads(pickle.dumps(model))),
        ("bridge:llama", deepcopy),
    ],
)
def test_a_copy_of_a_used_model_is_ablated_and_read_alone(
    model_of: ModelOf, spec: str, copied: Callable[[Any], Any]
) -> None:
    model, _ = model_of(spec)
    expected = capture_scores(model, tokens(13)).mean
    with ablated(model, Ablation(remove=["w_q", "mask"], replacement="zero")):
        pass
    copy = copied(copied(model))
    with ablated(model, "mask"), ThreadPoolExecutor(1) as pool:
        maps = pool.submit(capture_scores, copy, tokens(13)).result(60)
    assert maps.mean.nan_to_num().equal(expected.nan_to_num())


@pytest.mark.hooked_transformer
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("positional_embedding_type", "alibi"),
        ("use_attention_sinks", True),
        ("use_attn_result", True),
        ("attn_scores_soft_cap", 0.5),
    ],
)
def test_the_tap_of_a_hooked_transformer_computes_what_transformer_lens_does(
    option: str, value: Any
) -> None:
    model = option_model(option, value)
    with torch.inference_mode():
        own = model(tokens(7, 13))
        with tapped(model):
            assert relative_error(model(tokens(7, 13)), own) <= NETWORK
    plain = option_model(option, None)
    with torch.inference_mode():
        assert option == "use_attn_result" or relative_error(plain(tokens(7, 13)), own) > 1e-3


@pytest.mark.hooked_transformer
def test_what_heads_write_is_shown_where_a_hooked_transformer_keeps_it() -> None:
    model = option_model("use_attn_result", True)
    with torch.inference_mode(), tapped(model):
        _, cache = model.run_with_cache(tokens(7, 13))
        written = cache["blocks.1.attn.hook_result"].sum(2) + model.blocks[1].attn.b_O
    assert relative_error(written, cache["blocks.1.hook_attn_out"]) <= NETWORK


def option_model(option: str, value: Any) -> Any:
    settings = {"d_model": 22, "d_head": 11, "n_heads": 2, "act_fn": "silu", "seed": 3}
    chosen = {} if value is None else {option: value}
    model = hooked_transformer(**settings, initializer_range=0.5, **chosen)
    for block in model.blocks:
        if hasattr(block.attn, "sinks"):
            torch.nn.init.normal_(block.attn.sinks)
    return model


def test_the_error_of_no_values_or_of_nan_is_undefined() -> None:
    nothing = torch.zeros(0)
    assert math.isnan(relative_error(nothing, nothing))
    assert math.isnan(relative_error(torch.tensor([1.0, torch.nan]), torch.ones(2)))
    assert relative_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, -4.0])) == 9 / 4


class RecordedFused(TorchFunctionMode):
    """Records the masked scores of each call of PyTorch's fused attention."""

    scores: list[Tensor]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            (q, k, _), mask = args, options["attn_mask"]
            cells = q.new_zeros(mask.shape) if mask.dtype == torch.bool else mask
            visible = mask if mask.dtype == torch.bool else mask > -9e3
            self.scores.append((q @ k.mT / q.shape[-1] ** 0.5 + cells).masked_fill(~visible, 0))
        return func(*args, **options)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("multi_query", [False, True])
def test_falcon_attends_by_fused_attention_as_transformers_makes_it(
    alibi: bool, multi_query: bool, tmp_path: Path
) -> None:
    """It asks its configuration in each pass, and `set_attn_implementation` does not change it.

    Its eager attention adds ALiBi twice, so it is no oracle of this.
    """
    tiny = write_decoder("falcon", tmp_path, alibi=alibi, multi_query=multi_query)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.folder)
    model.set_attn_implementation("eager")
    recorded = RecordedFused()
    recorded.scores = []
    with recorded, torch.inference_mode():
        logits = model(tiny.tokens).logits
    maps = capture_scores(model, tiny.tokens).mean
    expected = torch.stack([scores.double().mean((0, 1)) for scores in recorded.scores])
    assert distance(torch.as_tensor(maps).nan_to_num(), expected) <= NETWORK
    assert distance(load(model).model(tiny.tokens), logits) <= NETWORK


def test_attention_that_shows_no_scores_is_refused(tmp_path: Path) -> None:
    tiny = write_decoder("gpt_neo", tmp_path)
    attention = tiny.hf.transformer.h[0].attn.attention

    class Kernel(type(attention)):
        def _attn(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
            return value, None

    attention.__class__ = Kernel
    with pytest.raises(UserError, match=r"a kernel computes .*='eager'"):
        capture_scores(tiny.hf, tiny.tokens)
