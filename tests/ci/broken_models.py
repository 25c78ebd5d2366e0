"""Broken copies of a model's folder: what is broken, and what the line says that refuses them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Break = Callable[[Path], object]
DEEP = "[" * 100_000
WEIGHTS = "model.safetensors"


def change(**fields: Any) -> Break:
    """Change fields of the config.json."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return apply


def put(name: str, content: str) -> Break:
    """Put other content into a file."""
    return lambda folder: (folder / name).write_text(content)


def tensors(edit: Callable[[dict[str, Any]], object]) -> Break:
    """Edit the tensors."""

    def apply(folder: Path) -> None:
        result = load_file(folder / WEIGHTS)
        edit(result)
        save_file(result, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def break_index(folder: Path) -> None:
    """Replace the weights by an index that is no JSON."""
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(DEEP)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


# What a library says of a file follows after the part; the words are not ours to test.
ROWS: dict[str, tuple[Break, str]] = {
    "config of a list": (put("config.json", "[]"), "config.json: "),
    "config with an unknown type": (change(model_type="\x1b[31mred"), r"\x1b[31mred"),
    "config with an unknown activation": (change(hidden_act="swoosh"), "(KeyError)"),
    "a layer too many": (change(num_hidden_layers=3), "lacks weights, such as model.layers.2."),
    "an encoder": (
        change(model_type="bert", architectures=["BertForMaskedLM"]),
        "is a BertForMaskedLM, not a causal decoder",
    ),
    "tokenizer of no JSON": (put("tokenizer.json", DEEP), "tokenizer: "),
    "tokenizer of more tokens": (
        change(vocab_size=7),
        "has ids up to 262, but the model embeds only 7 tokens",
    ),
    "weights absent": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "has no weights: neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights cut": (cut, "model.safetensors is a broken safetensors file: "),
    "weights without a norm": (
        tensors(lambda result: result.pop("model.norm.weight")),
        "lacks weights, such as model.norm.weight",
    ),
    "weights of another shape": (
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:41].clone()})),
        "has weights of other shapes than its config.json has, such as model.norm.weight",
    ),
    "index of no JSON": (break_index, "is no valid index of safetensors files: "),
    "quantised weights": (
        change(quantization_config={"quant_method": "own"}),
        "is quantised (own), and its weights cannot be read as plain numbers",
    ),
}
