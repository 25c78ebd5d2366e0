"""Public functions take any object that holds a model, and leave it exactly as it was."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from support.plain_attention import plain_attention
from support.rounding import NETWORK
from support.tiny_models import D_VOCAB, ByName, distance, tokenizer, tokens
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from nope_probe import (
    ablated,
    calibrate,
    capture_attention,
    capture_losses,
    capture_scores,
    head_scores,
    load,
)
from nope_probe.errors import UserError
from nope_probe.hooks.layers.objects import model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")  # peft's
TOKENS = tokens(5, 11)
PARTS = ("q_proj", "v_proj", "down_proj")


def in_training(hf: Any) -> Any:
    hf.model.layers[0].requires_grad_(True)
    hf.gradient_checkpointing_enable()
    return hf.train()


def flash(hf: Any) -> Any:
    hf.set_attn_implementation("sdpa")
    return hf


def dispatched(hf: Any) -> Any:
    from accelerate import dispatch_model

    device_map = {"model": "cpu", "lm_head": "cpu"}
    return dispatch_model(hf, device_map, main_device="cpu", force_hooks=True)


def compiled_in_place(hf: Any) -> Any:
    hf.forward = torch.compile(hf.forward, backend="eager")
    return hf


def adapted(hf: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    settings = LoraConfig(r=3, target_modules=[*PARTS], init_lora_weights=False, **options)
    return get_peft_model(hf, settings).eval()


def of_nnsight(hf: Any) -> Any:
    return SimpleNamespace(_module=hf, tokenizer=tokenizer(forces_bos=True))


OBJECTS: dict[str, Callable[[Any], Any]] = {
    "a model": lambda hf: hf,
    "in training": in_training,
    "another attention": flash,
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
        with ablated(what, removed):
            scores = capture_scores(what, TOKENS).mean
    assert [*state_of(hf)] == before
    vars(hf).pop("forward", None)  # compiling takes longer than the test
    expected = plain_attention(hf.eval(), TOKENS, without=removed)
    bound = 0.05 if hf.dtype == torch.bfloat16 else NETWORK
    for layer, plain in expected.items():
        assert torch.equal(plain.map.isnan(), scores[layer].isnan())
        assert distance(scores[layer].nan_to_num(), plain.map.nan_to_num()) <= bound


def losses(what: Any) -> Tensor:
    predicted = what(TOKENS).logits[:, :-1].log_softmax(-1)
    return -predicted.gather(-1, TOKENS[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
def test_a_model_is_itself_ablated_inside_ablated(name: str, tiny: ByName) -> None:
    hf = deepcopy(tiny(name).hf)
    intact = losses(hf)
    with ablated(hf, "mask") as model:
        assert torch.equal(model(TOKENS), hf(TOKENS).logits)
        assert distance(capture_losses(hf, TOKENS), losses(hf)) <= NETWORK
        with pytest.raises(UserError, match="ablated already"), ablated(hf, "mask"):
            pass
        assert distance(losses(hf), intact) > 0.1
    assert torch.equal(losses(hf), intact)


def test_weights_are_shared_and_a_change_of_them_is_seen(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    loaded = load(hf, tokenizer())
    shared = {weight.data_ptr() for weight in hf.parameters()}
    bridge: Any = loaded.model
    new = [w for w in bridge.original_model.parameters() if w.data_ptr() not in shared]
    assert {weight.numel() for weight in new} <= {D_VOCAB}  # TransformerLens's bias of W_U
    assert loaded.info.parity.keys() == {"logits", "pattern"}
    before = capture_losses(loaded, TOKENS)
    with torch.no_grad():
        hf.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert distance(before, losses(hf)) > 1e-3
    assert distance(capture_losses(loaded, TOKENS), losses(hf)) <= NETWORK


def test_hooks_act_as_in_the_model_and_are_seen_when_they_come(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    hook = hf.model.layers[1].mlp.register_forward_hook(lambda _, args, output: 3 * output)
    changed = losses(hf)
    assert distance(capture_losses(hf, TOKENS), changed) <= NETWORK
    hook.remove()
    assert distance(capture_losses(hf, TOKENS), losses(hf)) <= NETWORK
    assert distance(losses(hf), changed) > 1e-3


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


class Doubled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Growing(LlamaMLP):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(x)


def test_the_forward_of_a_users_subclass_is_run(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    intact = hf(TOKENS).logits
    hf.model.layers[0].mlp.__class__ = Doubled
    doubled = hf(TOKENS).logits
    assert distance(intact, doubled) > 0.1
    with torch.inference_mode():
        assert distance(model_of(hf)(TOKENS), doubled) <= NETWORK


def test_a_bridge_that_computes_something_else_is_refused(tiny: ByName) -> None:
    hf = deepcopy(tiny("llama").hf)
    hf.model.layers[0].mlp.__class__ = Growing
    with pytest.raises(UserError, match="fails parity: logits off by"):
        model_of(hf)
    assert hf.config.vocab_size == D_VOCAB
