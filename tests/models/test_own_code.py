"""What a user put on a model is run, or refused by name; other causes are named as they are."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from shutil import copy
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import load_file, save_file
from support.rounding import NETWORK
from support.tiny_models import N_SEQS, distance, tokens, write_tiny
from torch import distributed
from torch.ao.quantization import quantize_dynamic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    masking_utils,
)
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import eager_attention_forward

from nope_probe import Ablation, UserError, ablated, capture_scores, load, untrained

TEXT = tokens(N_SEQS, 13)


class Derived(LlamaForCausalLM):
    """A user's subclass, of a name that no library knows."""


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    return write_tiny("llama", tmp_path).hf


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Derived])
def test_a_model_made_from_its_configuration_is_read_and_left_as_it_is(
    kind: type, llama: Any
) -> None:
    config = LlamaConfig(**{**llama.config.to_dict(), "architectures": None})
    made = kind(config).eval()
    made.load_state_dict(llama.state_dict())
    maps = capture_scores(made, TEXT).mean
    expected = capture_scores(llama, TEXT).mean
    below = torch.ones(maps.shape[-2:]).tril().bool()
    assert distance(maps[:, below], expected[:, below]) <= NETWORK
    assert made.config.architectures is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.1.self_attn", "forward"),
        ("", "forward"),
        ("model.layers.0.mlp", "_old_forward"),
    ],
)
def test_a_function_on_the_object_in_place_of_a_forward_is_refused_by_the_name_of_its_module(
    path: str, name: str, llama: Any
) -> None:
    module = llama.get_submodule(path)
    if name == "_old_forward":
        add_hook_to_module(module, ModelHook())
    assert load(llama).info.architecture == "LlamaForCausalLM"
    run = getattr(module, name)
    setattr(module, name, lambda *args, **options: run(*args, **options))
    with pytest.raises(UserError, match=f"forward of {path or 'the model'} was replaced.*hook"):
        load(llama)


def test_a_method_on_the_object_is_run_and_attention_past_the_interface_refused_by_its_layer(
    llama: Any,
) -> None:
    mlp, attention = llama.model.layers[1].mlp, llama.model.layers[1].self_attn
    mlp.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)
    with torch.no_grad():
        expected = llama(TEXT).logits
    with ablated(llama, Ablation()) as model, torch.no_grad():
        assert distance(model(TEXT), expected) <= NETWORK
    attention.forward = MethodType(
        lambda self, hidden_states, **_: (hidden_states, None), attention
    )
    with pytest.raises(UserError, match="L1, a LlamaAttention, does not attend through"):
        load(llama)


def test_attention_and_masks_of_the_users_are_refused_by_their_names(llama: Any) -> None:
    for kind, attend, hide in (
        (
            "attention",
            lambda *args, **options: eager_attention_forward(*args, **options),
            sdpa_mask,
        ),
        ("mask", eager_attention_forward, lambda *args, **options: eager_mask(*args, **options)),
    ):
        AttentionInterface.register("mine_of_a_test", attend)
        AttentionMaskInterface.register("mine_of_a_test", hide)
        llama.set_attn_implementation("mine_of_a_test")
        with pytest.raises(UserError, match=f"{kind} function 'mine_of_a_test'"):
            load(llama)
    llama.set_attn_implementation("sdpa")
    assert load(llama).info.parity["logits"] <= NETWORK


def far(n: int) -> torch.Tensor:
    """Return the cells of keys 3 or more before a query, other than the first."""
    i = torch.arange(n)
    return (i[:, None] - i >= 3) & (i > 0)


def hidden(mask: torch.Tensor | None, n: int) -> torch.Tensor | None:
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(far(n), torch.finfo(mask.dtype).min)


def boolean(mask: torch.Tensor | None, n: int) -> torch.Tensor:
    assert mask is None or mask.dtype == torch.bool
    return ~far(n) & torch.ones(n, n).tril().bool()


MASKS: dict[str, Any] = {
    "hidden": hidden,
    "hidden in place": lambda mask, n: mask.masked_fill_(far(n), -1e9),
    "biased": lambda mask, n: mask + torch.where(far(n), -2.0, 0.0),
    "absent": lambda mask, n: None,
    "boolean": boolean,
}


@pytest.mark.parametrize(
    ("implementation", "change"),
    [*(("eager", name) for name in [*MASKS][:4]), ("sdpa", "hidden"), ("sdpa", "boolean")],
)
@pytest.mark.parametrize("place", ["layers", "layers.self_attn", "create_causal_mask"])
def test_masks_that_a_users_code_changes_hide_what_they_hide_in_transformers(
    implementation: str, change: str, place: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(module: Any, args: Any, options: Any) -> Any:
        n = (args or [options["hidden_states"]])[0].shape[1]
        return args, {**options, "attention_mask": MASKS[change](options["attention_mask"], n)}

    if place == "create_causal_mask":
        make = modeling_llama.create_causal_mask

        def made(**options: Any) -> Any:
            return MASKS[change](make(**options), options["inputs_embeds"].shape[1])

        monkeypatch.setattr(modeling_llama, place, made)
    else:
        for block in llama.model.layers:
            module = block.get_submodule(place.removeprefix("layers").lstrip("."))
            module.register_forward_pre_hook(before, with_kwargs=True)
    llama.set_attn_implementation(implementation)
    with torch.no_grad():
        expected = llama(TEXT).logits
    with ablated(llama, Ablation()) as model, torch.no_grad():
        assert distance(model(TEXT), expected) <= NETWORK


@pytest.mark.parametrize(
    ("home", "name", "implementation"),
    [
        (modeling_llama, "eager_attention_forward", "eager"),
        (masking_utils, "sdpa_mask", "eager"),
        (torch.nn.functional, "scaled_dot_product_attention", "sdpa"),
    ],
)
def test_other_functions_in_the_places_of_those_that_are_not_run_fail_parity(
    home: Any, name: str, implementation: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = getattr(home, name)

    def mine(*args: Any, **options: Any) -> Any:
        output = replaced(*args, **options)
        if name == "sdpa_mask":
            return output & ~far(output.shape[-1])
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    llama.set_attn_implementation(implementation)
    monkeypatch.setattr(home, name, mine)
    since = ", from L[01] on" if implementation == "eager" else ""
    with pytest.raises(UserError, match=rf"fails parity: logits off by .*{since}; .*was replaced"):
        load(llama)


def test_a_forward_on_the_attention_of_a_hooked_model_is_refused(llama: Any) -> None:
    for model in (load("rope-tiny").model, load(llama).model):
        model.blocks[1].attn.forward = lambda *_, **__: None
        with pytest.raises(UserError, match=r"blocks\.1\.attn was replaced"):
            capture_scores(model, TEXT)


@pytest.mark.parametrize("of_block", [False, True])
def test_a_module_of_two_layers_is_refused_by_the_layers_numbers(
    of_block: bool, llama: Any
) -> None:
    first, *_ = blocks = llama.model.layers
    if of_block:
        blocks[1] = first
    else:
        blocks[1].self_attn = first.self_attn
    with pytest.raises(UserError, match=r"layers\.0\.self_attn and .*layers\.1\.self_attn are one"):
        load(llama)


def test_packed_layers_are_run_and_a_packed_head_is_refused_by_its_name(llama: Any) -> None:
    quantize_dynamic(llama.model, {torch.nn.Linear}, inplace=True)
    with torch.no_grad():
        expected = llama(TEXT).logits
    with ablated(llama, Ablation()) as model, torch.no_grad():
        assert distance(model(TEXT), expected) <= NETWORK
    quantize_dynamic(llama, {torch.nn.Linear}, inplace=True)
    with pytest.raises(UserError, match=r"lm_head is quantised .*quantise all layers but"):
        load(llama)


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_model_sharded_by_fsdp_is_refused_by_the_name_of_its_part(llama: Any, mesh: Any) -> None:
    fully_shard(llama.model.layers[1], mesh=mesh)
    with pytest.raises(UserError, match=r"FSDP has sharded model\.layers\.1.*device_map='auto'"):
        capture_scores(llama, TEXT)
    fully_shard(llama, mesh=mesh)
    with pytest.raises(UserError, match="FSDP has sharded the model"), ablated(llama, "mask"):
        pass


@pytest.mark.parametrize("removed", ["mask", "w_q", "w_v+w_o"])
def test_weights_spread_over_processes_are_removed_and_drawn_as_whole_ones(
    removed: str, llama: Any, mesh: Any
) -> None:
    spread = deepcopy(llama)
    for block in spread.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(block, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})
    outputs, draws = [], []
    for model in (llama, spread):
        with ablated(model, removed, tokens=TEXT) as changed, torch.no_grad():
            outputs.append(changed(TEXT))
        with untrained(model) as changed, torch.no_grad():
            draws.append(changed(TEXT))
    assert distance(*outputs) <= NETWORK
    assert distance(*draws) <= NETWORK
    maps = [capture_scores(model, TEXT).mean.nan_to_num() for model in (spread, llama)]
    assert distance(*maps) <= NETWORK


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float, tmp_path: Path) -> None:
    tiny = write_tiny("llama", tmp_path)
    file = tiny.folder / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    weights[name][:] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} holds NaN"):
        load(str(tiny.folder))
    hooked = load("rope-tiny").model
    hooked.blocks[1].mlp.W_in.data[3, 5] = value
    with pytest.raises(UserError, match=r"\.1\..*mlp\..*(W_in|weight) holds NaN"):
        capture_scores(hooked, TEXT)


def test_contexts_that_change_what_models_compute_are_named(llama: Any) -> None:
    with torch.autocast("cpu"), pytest.raises(UserError, match=r"torch\.autocast \(cpu\)"):
        load(llama)
    with torch.device("meta"), pytest.raises(UserError, match="no numbers"):
        load("nope-tiny")


def test_files_that_are_none_are_named_with_what_they_are(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path).folder
    file, adapter, packed = folder / "model.safetensors", tmp_path / "adapter", tmp_path / "packed"

    def refused(match: str, given: Path | str = folder, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            load(given, **options)

    refused(f"is a file, and a model is the folder .*: name {folder}", file)
    (tmp_path / "README.md").write_text("of no model")
    refused(r"README\.md is no model: name a folder with a config", tmp_path / "README.md")
    pointer = folder / "tokenizer.json"
    saved = pointer.read_bytes()
    pointer.write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    refused(r"tokenizer\.json is a pointer of Git LFS.*git lfs pull")
    packed.mkdir()
    for name in ("a.gguf", "b.gguf"):  # the only one of its folder, then one of two
        copy(pointer, packed / name)
        for given in (packed / name, str(packed / name), packed):
            refused(r"[ab]\.gguf is a pointer of Git LFS", given)
    adapter.mkdir()
    copy(pointer, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    pointer.write_bytes(saved)
    refused(r"adapter_model\.safetensors is a pointer of Git LFS", adapter=adapter)
    file.unlink()
    file.symlink_to("../blobs/0123")
    refused(r"leads to \.\./blobs/0123, which is not there")


def test_a_path_is_never_the_name_of_a_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("llama", tmp_path).folder.rename(tmp_path / "nope-tiny")
    monkeypatch.chdir(tmp_path)
    of_folder = [load(Path("nope-tiny")), load("./nope-tiny")]
    assert {one.info.architecture for one in of_folder} == {"LlamaForCausalLM"}
    assert not caplog.messages
    assert load("nope-tiny").info.architecture == "SmolLM3ForCausalLM"
    assert "the folder of that name here is ./nope-tiny" in caplog.text
