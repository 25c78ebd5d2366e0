"""Public functions take any object that holds a model, and leave it exactly as it was."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import PromptTuningConfig, get_peft_model
from support.adapters import adapted
from support.decoders import write_decoder
from support.edited_model import edited
from support.hooked_runs import by_whole_passes
from support.plain_attention import plain_maps
from support.plain_states import plain_losses
from support.rounding import NETWORK, assert_same
from support.tiny_models import D_VOCAB, ByName, distance, tokenizer, tokens
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.llama.modeling_llama import LlamaMLP

from nope_probe import (
    UserError,
    ablated,
    calibrate,
    capture_attention,
    capture_losses,
    capture_scores,
    head_scores,
    load,
    untrained,
)
from nope_probe.hooks.ablation import foreign_hooks
from nope_probe.hooks.layers.objects import model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")  # peft's
TOKENS = tokens(5, 11)


def in_training(hf: Any) -> Any:
    hf.model.layers[0].requires_grad_(True)
    hf.gradient_checkpointing_enable()
    return hf.train()


def dispatched(hf: Any) -> Any:
    device_map = {"model": "cpu", "lm_head": "cpu"}
    return dispatch_model(hf, device_map, main_device="cpu", force_hooks=True)


def compiled_in_place(hf: Any) -> Any:
    hf.forward = torch.compile(hf.forward, backend="eager")
    return hf


def of_nnsight(hf: Any) -> Any:
    return SimpleNamespace(_module=hf, tokenizer=tokenizer(forces_bos=True))


OBJECTS: dict[str, Callable[[Any], Any]] = {
    "a model": lambda hf: hf,
    "in training": in_training,
    "another attention": lambda hf: hf.set_attn_implementation("sdpa") or hf,
    "bfloat16": lambda hf: hf.bfloat16(),
    "on devices by accelerate": dispatched,
    "compiled": lambda hf: torch.compile(hf, backend="eager"),
    "compiled in place": compiled_in_place,
    "in parallel": nn.DataParallel,
    "nnsight": of_nnsight,
    "LoRA": adapted,
    "DoRA": lambda hf: adapted(hf, use_dora=True),
    "a module to save": lambda hf: adapted(hf, modules_to_save=["lm_head"]),
    "modules to save": lambda hf: adapted(hf, modules_to_save=["mlp"]),
}


@pytest.fixture(params=OBJECTS)
def given(request: pytest.FixtureRequest, tiny: ByName) -> Any:
    """An object, and the model of plain transformers in it."""
    hf = deepcopy(tiny("llama").hf)
    return OBJECTS[request.param](hf), hf


def state_of(hf: nn.Module) -> Iterator[object]:
    """Yield all that measuring could change in a model."""
    config: Any = hf.config
    yield config.to_json_string(), config._attn_implementation
    for name, module in hf.named_modules():
        yield name, type(module), module.training, sorted(vars(module))
        yield [hook for table in hooks_of(module) for hook in table.items()]
    for name, weight in (*hf.named_parameters(), *hf.named_buffers()):
        yield name, weight.data_ptr(), weight.dtype, weight.requires_grad, weight.grad
        yield weight.detach().float().sum().item()


def hooks_of(module: nn.Module) -> list[Any]:
    tables = (value for name, value in vars(module).items() if name.endswith("_hooks"))
    return [table for table in tables if isinstance(table, dict)]


@pytest.mark.parametrize("removed", [None, "mask", "rope"])
def test_the_scores_of_any_object_are_those_of_plain_transformers(
    given: Any, removed: str | None
) -> None:
    what, hf = given
    before = [*state_of(hf)]
    if removed is None:
        scores = capture_scores(what, TOKENS).mean
    else:
        with ablated(what, removed) as model:
            scores = capture_scores(model, TOKENS).mean
    assert [*state_of(hf)] == before
    vars(hf).pop("forward", None)  # compiling takes longer than the test
    bound = 0.05 if hf.dtype == torch.bfloat16 else NETWORK
    for of_layer, expected in zip(
        scores, plain_maps(hf.eval(), TOKENS, without=removed), strict=True
    ):
        assert_same(of_layer, expected, bound)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
def test_the_yielded_model_is_ablated_and_the_callers_own_refuses_to_run(
    name: str, tiny: ByName
) -> None:
    hf = deepcopy(tiny(name).hf)
    intact, expected = hf(TOKENS).logits, edited(hf, ["mask"])(TOKENS).logits
    for given in (hf, load(hf)):
        with ablated(given, "mask") as model:
            assert distance(model(TOKENS), expected) <= NETWORK
            assert torch.equal(model.original_model(TOKENS).logits, model(TOKENS))
            for what in (capture_losses, capture_scores, ablated(hf, "mask").__enter__):
                with pytest.raises(UserError, match="call the model that `ablated` yields"):
                    what(*[] if what.__name__ == "__enter__" else (hf, TOKENS))
            with pytest.raises(UserError, match="ablated already"), ablated(model, "mask"):
                pass
        assert torch.equal(hf(TOKENS).logits, intact)


def compiled_before(hf: Any) -> Any:
    run = torch.compile(lambda tokens: hf(tokens).logits.exp(), backend="eager")
    run(TOKENS)
    return run


def through_blocks(hf: Any) -> Any:
    states = hf.model.embed_tokens(TOKENS)
    turns = hf.model.rotary_emb(states, torch.arange(TOKENS.shape[1])[None])
    return lambda tokens: hf.model.layers[1](states, position_embeddings=turns)


RUNS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "itself": lambda hf: hf,
    "its backbone": lambda hf: hf.model,
    "a block": through_blocks,
    "other parameters": lambda hf: lambda x: functional_call(hf, dict(hf.named_parameters()), x),
    "a compiled function": compiled_before,
    "compiled": lambda hf: hf.compile(backend="eager") or hf,
    "an adapter": adapted,
    "text": lambda hf: lambda x: hf.generate(x, max_new_tokens=2, use_cache=False),
}


@pytest.mark.parametrize("run", RUNS)
def test_each_way_to_run_the_callers_model_inside_ablated_says_what_to_call(
    run: str, tiny: ByName
) -> None:
    hf = deepcopy(tiny("llama").hf)
    call = RUNS[run](hf)
    call(TOKENS)
    with ablated(hf, "mask"), pytest.raises(UserError, match=r"`model\.original_model`, a tr"):
        call(TOKENS)
    call(TOKENS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gptj"])
def test_what_is_done_to_the_yielded_model_acts(name: str, tmp_path: Path) -> None:
    """Hooks on its modules, dropout in training, and gradients of the caller's weights."""
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.25)
    dropout = rates if name.startswith("gpt") else {"attention_dropout": 0.25}
    settings = dropout | ({"sliding_window": None} if name == "phi3" else {})
    hf = write_decoder(name, tmp_path, **settings).hf.requires_grad_()
    hf.set_attn_implementation("eager")
    n = TOKENS.shape[1]
    seen = {"use_cache": False, "attention_mask": torch.zeros(len(TOKENS), 1, n, n)}

    def outputs(model: Any, **options: Any) -> Iterator[Tensor]:
        for seed, is_training in ((3, True), (3, False), (5, True)):
            torch.manual_seed(seed)
            yield model.train(is_training)(TOKENS, **options).logits

    def slopes(model: Any, **options: Any) -> dict[str, Tensor]:
        model.eval()(TOKENS, **options).logits.logsumexp(-1).sum().backward()
        found = {path: w.grad.clone() for path, w in hf.named_parameters() if w.grad is not None}
        hf.zero_grad()
        return found

    plain, plain_slopes = [*outputs(hf, **seen)], slopes(hf, **seen)
    with ablated(hf, "mask") as model:
        for logits, expected in zip(outputs(model.original_model), plain, strict=True):
            assert distance(logits, expected) <= NETWORK
        found = slopes(model.original_model)
        head = model.original_model.get_output_embeddings()
        with head.register_forward_hook(lambda _, args, output: 0 * output):
            assert not model(TOKENS).any()
    assert found.keys() == plain_slopes.keys()
    for path, slope in plain_slopes.items():
        if slope.abs().max() > 1e-3:  # a key's bias has none
            assert distance(found[path], slope) <= NETWORK


def test_a_gradient_that_would_reach_an_adapter_is_refused(tiny: ByName) -> None:
    model = adapted(deepcopy(tiny("llama").hf))
    with ablated(model, "mask") as yielded:
        total = yielded(TOKENS).sum()
        with pytest.raises(UserError, match="get no gradients: train the caller's model outside"):
            total.backward()
    for weight in model.parameters():
        weight.requires_grad_(False)
    model.get_base_model().lm_head.weight.requires_grad_()
    with ablated(model, "mask") as yielded:
        yielded(TOKENS).sum().backward()
    assert model.get_base_model().lm_head.weight.grad.any()


@pytest.mark.parametrize("is_training", [True, False])
def test_the_yielded_model_is_in_the_mode_of_the_callers(is_training: bool, tiny: ByName) -> None:
    with ablated(deepcopy(tiny("llama").hf).train(is_training), "mask") as model:
        assert {part.training for part in model.original_model.modules()} == {is_training}


def test_transformers_generates_from_whole_sequences_of_the_yielded_model(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    plain = edited(hf, ["mask"])
    expected = by_whole_passes(lambda given: plain(given).logits, TOKENS[:, :5], 3)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    with ablated(hf, "mask") as model:
        with pytest.warns(UserWarning, match="generating without a KV cache"):
            text = model.original_model.generate(TOKENS[:, :5], **options)
        assert torch.equal(text, expected)
        cache = model.original_model(TOKENS[:, :5], use_cache=True).past_key_values
        with pytest.raises(UserError, match="use_cache=False"):
            model.original_model(TOKENS[:, 5:6], past_key_values=cache)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_weights_are_shared_and_a_change_of_them_is_seen(name: str, tiny: ByName) -> None:
    """Of joint projections too, which TransformerLens splits."""
    hf = deepcopy(tiny(name).hf)
    loaded = load(hf, tokenizer())
    shared = {weight.data_ptr() for weight in hf.parameters()}
    bridge: Any = loaded.model
    new = [w for w in bridge.original_model.parameters() if w.data_ptr() not in shared]
    assert {weight.numel() for weight in new} <= {D_VOCAB}  # TransformerLens's bias of W_U
    assert loaded.info.parity.keys() == {"logits", "pattern"}
    before = capture_losses(loaded, TOKENS)
    with torch.no_grad():
        for weight in hf.parameters():
            weight.mul_(1.1)
    assert distance(before, plain_losses(hf, TOKENS)) > 1e-3
    assert distance(capture_losses(loaded, TOKENS), plain_losses(hf, TOKENS)) <= NETWORK


def doubled_adapter(adapted: Any) -> None:
    for path, weight in adapted.named_parameters():
        if "lora_B" in path:
            weight.data.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "numbers of an adapter": doubled_adapter,
    "an adapter off": lambda model: model.base_model.disable_adapter_layers(),
    "an adapter's scale": lambda model: within(model).q_proj.scale_layer(7.0),
    "a matrix under an adapter": lambda model: within(model).q_proj.base_layer.weight.data.mul_(2),
    "a hook": lambda model: within(model).register_forward_hook(lambda *_: None),
    "a module": lambda model: setattr(within(model), "o_proj", nn.Linear(60, 42)),
    "a parameter": lambda model: setattr(
        within(model).o_proj, "weight", nn.Parameter(2 * within(model).o_proj.weight)
    ),
    "a setting": lambda model: setattr(within(model), "scaling", 0.5),
}


def within(adapted: Any) -> Any:
    return adapted.get_base_model().model.layers[1].self_attn


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_since_it_was_loaded_is_refused(change: str, tiny: ByName) -> None:
    model = adapted(deepcopy(tiny("llama").hf))
    loaded = load(model)
    model(TOKENS)
    model.train().gradient_checkpointing_enable()  # training changes nothing that is measured
    capture_losses(loaded, TOKENS)
    changed = r"changed since it was loaded .* load it again"
    with ablated(loaded, "mask") as yielded:
        CHANGES[change](model)
        with pytest.raises(UserError, match=changed):
            yielded(TOKENS)
    with pytest.raises(UserError, match=changed):
        capture_losses(loaded, TOKENS)
    assert capture_losses(load(model), TOKENS).isfinite().all()


def test_hooks_act_as_in_the_model_and_are_seen_when_they_come(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    hook = hf.model.layers[1].mlp.register_forward_hook(lambda _, args, output: 3 * output)
    changed = plain_losses(hf, TOKENS)
    assert distance(capture_losses(hf, TOKENS), changed) <= NETWORK
    hook.remove()
    intact = plain_losses(hf, TOKENS)
    assert distance(capture_losses(hf, TOKENS), intact) <= NETWORK < distance(intact, changed)


def test_every_public_function_takes_a_model_and_texts_with_its_tokenizer(tiny: ByName) -> None:
    hf, known = tiny("llama").hf, load(str(tiny("llama").folder))
    nnsight = of_nnsight(hf)
    maps, expected = (capture_attention(model, "a text") for model in (nnsight, known))
    for name, tensor in maps.to_tensors().items():
        assert torch.equal(tensor.nan_to_num(), expected.to_tensors()[name].nan_to_num())
    assert calibrate(hf, TOKENS).checksum == calibrate(known, TOKENS).checksum
    columns = head_scores(nnsight, TOKENS, n_folds=4)
    assert columns.equals(head_scores(known, TOKENS, n_folds=4))
    with pytest.raises(UserError, match=r"no tokenizer, .*; load\(model, tokenizer\) gives it one"):
        capture_scores(hf, "a text")


@pytest.mark.usefixtures("unenforced")
def test_an_error_lists_what_is_taken(tiny: ByName) -> None:
    for given in (nn.Linear(2, 3), "rope-tiny", None):
        with pytest.raises(UserError, match=r"expected a transformers model .*, or what load\("):
            capture_scores(given, TOKENS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a LlamaModel is not taken; what is taken is a transf"):
        model_of(tiny("llama").hf.model)
    with pytest.raises(UserError, match="a model in memory is taken as it is"):
        load(tiny("llama").hf, n_layers=1)
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match="a PromptTuningConfig, adds no numbers to weights"):
        model_of(get_peft_model(deepcopy(tiny("llama").hf), prompts))


class Grown(LlamaMLP):
    calls, step = 2, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.step
        return self.calls * super().forward(x)


def test_the_forward_of_a_users_subclass_is_run_and_refused_where_passes_differ(
    tiny: ByName,
) -> None:
    hf = deepcopy(tiny("llama").hf)
    intact, mlp = hf(TOKENS).logits, hf.model.layers[0].mlp
    mlp.__class__ = Grown
    doubled = hf(TOKENS).logits
    assert distance(intact, doubled) > 0.1
    with torch.inference_mode():
        assert distance(model_of(hf)(TOKENS), doubled) <= NETWORK
    mlp.step = 1
    with pytest.raises(UserError, match=r"fails parity: logits off by .*, from L1 on"):
        model_of(hf)


@pytest.mark.parametrize("model_type", ["gemma2", "gptj", "opt", "gpt_oss"])
def test_the_transformers_model_of_a_bridge_returns_attention_weights_where_they_are_asked_for(
    model_type: str, tmp_path: Path
) -> None:
    """By the interface, with sinks, in line, and where the head's class skips its backbone."""
    tiny = write_decoder(model_type, tmp_path)
    with torch.inference_mode():
        expected = tiny.hf(tiny.tokens, output_attentions=True).attentions
    run: Any = load(tiny.hf).model.original_model
    assert not run(tiny.tokens).attentions
    tiny.hf.config.output_attentions = True
    by_configuration: Any = load(tiny.hf).model.original_model
    tiny.hf.config.output_attentions = False
    asked = {"output_attentions": True}
    for part, options in ((run, asked), (run.base_model, asked), (by_configuration, {})):
        with torch.inference_mode():
            found = part(tiny.tokens, **options).attentions
        assert len(found) == len(expected)
        assert all(distance(*pair) <= NETWORK for pair in zip(found, expected, strict=True))
    with ablated(tiny.hf, "mask") as model, torch.inference_mode():
        (weights, *_) = model.original_model(tiny.tokens, output_attentions=True).attentions
    assert (weights.triu(1).sum((-2, -1)) > 0).all()


def test_an_untrained_model_in_peft_is_the_one_that_is_yielded(tiny: ByName) -> None:
    given = adapted(deepcopy(tiny("llama").hf))
    with torch.inference_mode():
        before = given(TOKENS).logits
    fresh = capture_scores(given, TOKENS)
    with untrained(given, seed=5) as model, ablated(model, "mask") as without:
        redrawn = capture_scores(without, TOKENS)
        for run in (given, partial(capture_scores, given)):
            with pytest.raises(UserError, match=r"the model that `ablated` yields.*so does"):
                run(TOKENS)
    with untrained(tiny("llama").hf, seed=5) as model, ablated(model, "mask"):
        expected = capture_scores(model, TOKENS)
    assert distance(redrawn.mean, expected.mean) == 0, "the same numbers, without the adapter"
    assert distance(capture_scores(given, TOKENS).mean.nan_to_num(), fresh.mean.nan_to_num()) == 0
    with torch.inference_mode():
        assert torch.equal(given(TOKENS).logits, before)


def test_only_the_users_hooks_count_as_hooks_of_an_ablated_model(tiny: ByName) -> None:
    with ablated(deepcopy(tiny("llama").hf), "mask") as model:
        assert foreign_hooks(model) == []
        model.blocks[1].register_forward_hook(lambda _, args, output: output)
        assert foreign_hooks(model) == ["blocks.1"]
