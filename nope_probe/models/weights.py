"""The files of a model's weights: safetensors, in one file or several, and an adapter next to them.

Of several sets of weights in a folder, the one that transformers reads is read. Only the tensors of
the wanted layers are read, and only the files that hold them are opened, or downloaded from the
Hub. Pickled weights are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nope_probe.errors import UserError
from nope_probe.files import read_json, reading
from nope_probe.hooks.layers.attention import relative_error
from nope_probe.hooks.layers.bridges import merge_adapters
from nope_probe.hooks.layers.reference import (
    probed,
    text_config_of,
    validate_within,
    with_reference,
)
from nope_probe.models.names import ADAPTER, is_gguf

SINGLE, INDEX = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME  # in the order of transformers
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_PEFT = "base_model.model."  # how the names of an adapter's tensors begin
_ENDINGS = (".safetensors", ".safetensors.index.json")
_OF_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf)$|(pytorch_model|consolidated).*\.(bin|pth)$"
    r"|.*\.(safetensors|bin)\.index\.json$"
)
_PICKLED = "pytorch_model"  # how the names of files begin that transformers converts
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks|blk)\.(\d+)\.")


def read_weights(
    source: str,
    *,
    n_layers: int | None = None,
    revision: str | None = None,
    named: str | None = None,
) -> dict[str, Tensor]:
    """Read the tensors of a model, or of its first blocks.

    In a sharded checkpoint, only the files that hold these tensors are opened, or downloaded from
    the Hub.

    Args:
        source: a Hub id or a local folder.
        n_layers: how many first blocks; all by default.
        revision: a Hub revision.
        named: the file, or the index of files, that the configuration names.

    Raises:
        UserError: for pickled weights, or for a missing or broken file, which it names.
    """
    index, files = weight_files(source, revision, named)
    weights: dict[str, Tensor] = {}
    for name, keys in files.items():
        if keys and not any(is_wanted(key, n_layers) for key in keys):
            continue
        file = find_file(source, name, revision)
        if file is None:
            raise UserError(f"{source} lacks {name}, which its {index} lists")
        weights |= _read(file, n_layers, keys)
    return weights


def weight_files(
    source: str, revision: str | None = None, named: str | None = None
) -> tuple[str, dict[str, list[str]]]:
    """Return the file of a model's weights, or their index, and the tensors listed for each file.

    The order is transformers': the file that the configuration names, the single file, the index.

    Args:
        source: a Hub id or a local folder.
        revision: a Hub revision.
        named: the file, or the index of files, that the configuration names.

    Raises:
        UserError: if there are no such weights, or for a broken index.
    """
    leads_out = os.path.normpath(named or "").startswith(("..", os.sep))
    if named and (leads_out or not named.endswith(_ENDINGS)):
        raise UserError(
            f"the configuration of {source} says that its weights are in {named} "
            "(transformers_weights), which is no safetensors file or index in its folder"
        )
    for name in (named,) if named else (SINGLE, INDEX):
        file = find_file(source, name, revision)
        if file is not None:
            return name, shards_of(file) if name.endswith(".json") else {name: []}
    # The Hub is not asked for a list of files: there, pickled weights are likely.
    others = unread_weights(source, ()) if Path(source).is_dir() else (_PICKLED,)
    if not any(name.startswith(_PICKLED) for name in others):
        only = f", only {', '.join(others)}" if others else ""
        raise UserError(f"{source} has no weights: neither {SINGLE} nor {INDEX}{only}")
    raise UserError(
        f"{source} has no safetensors weights, and pickled ones (.bin) are refused; "
        f'convert those that you trust: python -c "{_conversion(source)}"'
    )


def _conversion(source: str) -> str:
    """Return the code that converts pickled weights; of the Hub's, into a folder of their name."""
    folder, kinds = source, ["AutoModelForCausalLM"]
    if not Path(source).is_dir():
        folder, kinds = Path(source).name, ["AutoModelForCausalLM", "AutoTokenizer"]
    saved = [f"{kind}.from_pretrained({source!r}).save_pretrained({folder!r})" for kind in kinds]
    return "; ".join([f"from transformers import {', '.join(kinds)}", *saved])


def unread_weights(source: str, read: Collection[str]) -> tuple[str, ...]:
    """Return the files of weights that lie in a local folder next to the files that are read."""
    if Path(source, ADAPTER).is_file():
        read = {*read, _ADAPTER_WEIGHTS}
    files = {file.name for file in Path(source).iterdir() if _OF_WEIGHTS.match(file.name)}
    return tuple(sorted(files - {*read}))


def shards_of(index: Path) -> dict[str, list[str]]:
    """Return the tensors in each file of an index.

    Raises:
        UserError: for a broken index.
    """
    files: dict[str, list[str]] = {}
    with reading(f"{index} is no valid index of safetensors files"):
        for key, file in read_json(index)["weight_map"].items():
            files.setdefault(file, []).append(key)
    return files


def is_wanted(key: str, n_layers: int | None) -> bool:
    """Return whether a tensor belongs to no block or to one of the first n_layers.

    Example:
        >>> is_wanted("model.layers.2.mlp.up_proj.weight", 2), is_wanted("model.norm.weight", 2)
        (False, True)
        >>> is_wanted("bert.encoder.layer.2.output.dense.weight", 2)
        False
    """
    block = _BLOCK.search(key)
    return n_layers is None or block is None or int(block[1]) < n_layers


def find_file(source: str, name: str, revision: str | None) -> Path | None:
    """Return a file's path in a local folder, or in the cache after downloading it from the Hub.

    Return None if there is no such file.
    """
    if Path(source).is_dir():
        file = Path(source, name)
        return file if os.path.isfile(file) else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except LocalEntryNotFoundError:
        if name in (SINGLE, ADAPTER):  # offline, the cache of a model may lack either
            return None
        raise
    except EntryNotFoundError:
        return None


def _read(file: Path, n_layers: int | None, keys: Collection[str] = ()) -> dict[str, Tensor]:
    """Read the first blocks' tensors of a file, by default of all that it holds."""
    with (
        reading(f"{file} is a broken safetensors file"),
        safetensors.safe_open(file, framework="pt") as opened,
    ):
        wanted = [key for key in keys or opened.keys() if is_wanted(key, n_layers)]
        return {key: opened.get_tensor(key) for key in wanted}


def cut_to_depth(weights: dict[str, Tensor], model: PreTrainedModel) -> None:
    """Keep the first layers' part of tensors that have a part for each layer, such as Gemma 4's.

    Args:
        weights: a model's tensors, those outside of its blocks as in its files.
        model: a model of fewer layers, whose weights are anything of the right shape.
    """
    config = model.config.get_text_config()
    depth, n_layers = config.depth_in_files, config.num_hidden_layers
    for name, wanted in model.named_parameters():
        if name in weights and weights[name].ndim == wanted.ndim:
            for dim, size in enumerate(wanted.shape):
                whole = weights[name].shape[dim]
                if size < whole and size * depth == whole * n_layers:
                    weights[name] = weights[name].narrow(dim, 0, size).clone()


def merge_adapter(
    source: str, model: PreTrainedModel, n_layers: int | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, str | None, set[str]]:
    """Add the adapter in a model's folder to the model's weights, as transformers does.

    Return the model, the adapter's kind (such as `LORA`; None without an adapter) and the adapter's
    tensors that the model does not use.

    Args:
        source: a Hub id or a local folder.
        model: its model, or the model's first layers; changed in place.
        n_layers: how many first layers the model has; all by default.
        revision: a Hub revision.

    Raises:
        UserError: without the package peft, or for an adapter that does not fit the model or whose
            effect is not one on weights.
    """
    described = None if is_gguf(source) else find_file(source, ADAPTER, revision)
    if described is None:
        return model, None, set()
    if find_spec("peft") is None:
        raise UserError(
            f"{source} has an adapter ({ADAPTER}), which needs the package peft: pip install peft"
        )
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from peft import set_peft_model_state_dict as set_weights

    config = PeftConfig.from_pretrained(str(described.parent), inference_mode=True)
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    file = find_file(source, _ADAPTER_WEIGHTS, revision)
    if file is None:
        raise UserError(f"{source} has an adapter ({ADAPTER}) without {_ADAPTER_WEIGHTS}")
    weights = _read(file, n_layers)
    if not weights:  # the adapter changes later layers alone
        return model, kind, set()
    if text_config_of(model.config) is not model.config and _is_of_text(weights, model):
        model, _ = with_reference(model)
    config.base_model_name_or_path = model.name_or_path  # peft warns of another name
    _resize(model, weights)
    adapted: Any = None if config.is_prompt_learning else get_peft_model(model, config)
    if not hasattr(adapted, "merge_and_unload"):
        raise UserError(
            f"{source} has an adapter of the kind {kind}, which adds no numbers to weights: only "
            "adapters that do, such as LORA, are read"
        )
    lacking = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - weights
    if lacking:
        raise UserError(f"the adapter of {source} lacks weights, such as {min(lacking)}")
    loaded: Any = set_weights(adapted, weights)
    model = adapted.eval().get_base_model()
    expected = probed(model).logits
    merge_adapters(model)
    errors = {"logits": relative_error(probed(model).logits, expected)}
    validate_within(f"{source}, an adapter that is merged into the weights,", errors, model.dtype)
    return model, kind, set(loaded.unexpected_keys)


def _is_of_text(weights: Collection[str], model: PreTrainedModel) -> bool:
    """Return whether an adapter was made for the class of a multimodal model's text decoder."""
    found = (_BLOCK.search(name) for name in weights)
    blocks = {match.string[: match.end() - 1].removeprefix(_OF_PEFT) for match in found if match}
    whole, text = ({*dict(part.named_modules())} for part in (model, model.get_decoder()))
    return not blocks & whole and bool(
        (blocks | {name.partition(".")[2] for name in blocks}) & text
    )


def _resize(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Resize a model's embedding to as many tokens as its adapter's has, if there is one."""
    embedding = model.get_input_embeddings()
    named = next(name for name, module in model.named_modules() if module is embedding)
    for name, weight in weights.items():
        is_whole = name.endswith((f".{named}.weight", f".{named}.base_layer.weight"))
        if is_whole and len(weight) != len(embedding.weight):
            model.resize_token_embeddings(len(weight), mean_resizing=False)
