"""Broken copies of a model's folder, in a folder each: what is broken, and what the line says."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Break = Callable[[Path], object]
Rows = dict[str, tuple[Break, str]]
DEEP = "[" * 100_000
CONFIG, TOKENIZER, ABOUT_TOKENIZER = "config.json", "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def change(**fields: Any) -> Break:
    """Change fields of the config.json; None leaves a field out."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text()) | fields
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return apply


def rope(**fields: Any) -> Break:
    return change(rope_parameters={"rope_theta": 1e4, **fields})


def put(name: str, content: str | bytes) -> Break:
    """Put other content into a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def vocabulary(**fields: Any) -> Break:
    """Change fields of the tokenizer's model."""

    def apply(folder: Path) -> None:
        tokenizer = json.loads((folder / TOKENIZER).read_text())
        tokenizer["model"] |= fields
        (folder / TOKENIZER).write_text(json.dumps(tokenizer))

    return apply


def tokenizer_with(**parts: Any) -> Break:
    """Change parts of the tokenizer, such as its normalizer."""

    def apply(folder: Path) -> None:
        tokenizer = json.loads((folder / TOKENIZER).read_text()) | parts
        (folder / TOKENIZER).write_text(json.dumps(tokenizer))

    return apply


def template(*single: Any) -> Break:
    """Put these pieces around every text."""
    parts = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    return tokenizer_with(post_processor=parts)


def added(**fields: Any) -> Break:
    """Add one token to the tokenizer's vocabulary."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return tokenizer_with(added_tokens=[{"id": 0, "content": "<s>", **flags, **fields}])


def described(**fields: Any) -> Break:
    """Describe the tokenizer by these fields."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **fields}
    return put(ABOUT_TOKENIZER, json.dumps(about))


def tensors(edit: Callable[[dict[str, Any]], object]) -> Break:
    """Edit the tensors."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        edit(found)
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def listed(weight_map: Any) -> Break:
    """Replace the weights by an index."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def without(*names: str) -> Break:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def under(part: str, rows: Iterable[tuple[str, Break, str]]) -> Rows:
    return {f"{part}: {what}": (apply, says) for what, apply, says in rows}


SIZES = [
    ("1e9 layers", change(num_hidden_layers=10**9), "num_hidden_layers 1000000000: expected 1 to"),
    ("no layers", change(num_hidden_layers=0), "num_hidden_layers 0: expected 1 to 10000"),
    ("-1 layers", change(num_hidden_layers=-1), "num_hidden_layers -1: expected 1 to 10000"),
    (
        "1e9 layers in a part",
        change(model_type="gemma3", text_config={"num_hidden_layers": 10**9}),
        "num_hidden_layers 1000000000",
    ),
    ("layers as a string", change(num_hidden_layers="2"), "config.json: "),
    ("a layer too many", change(num_hidden_layers=3), "lacks weights, such as model.layers.2."),
    ("no heads", change(num_attention_heads=0), "config.json: "),
    ("-6 heads", change(num_attention_heads=-6), "num_attention_heads -6: expected a positive"),
    ("6 heads for 4 keys", change(num_key_value_heads=4), "6 attention heads, which cannot share"),
    ("no key heads", change(num_key_value_heads=0), "num_key_value_heads 0: expected a positive"),
    ("no d_model", change(hidden_size=0), "hidden_size 0: expected a positive number"),
    ("d_model 1e30", change(hidden_size=6 * 10**30), "config.json: "),
    (
        "head_dim 1e12",
        change(head_dim=10**12),
        "a model of 1.37e+15 numbers, and its weights hold 4",
    ),
    ("fewer tokens", change(vocab_size=7), "has ids up to 262, but the model embeds only 7"),
    ("no context", change(max_position_embeddings=0), "max_position_embeddings 0: expected"),
]
CONFIGS = [
    ("empty", put(CONFIG, ""), "config.json: "),
    ("a list", put(CONFIG, "[]"), "a config.json that is no JSON object"),
    ("null", put(CONFIG, "null"), "config.json: "),
    ("deep", put(CONFIG, DEEP), "config.json: "),
    ("escapes", change(model_type="\x1b[31mred"), r"\x1b[31mred"),
    ("unknown activation", change(hidden_act="swoosh"), "(KeyError in"),
    (
        "rope of another width",
        rope(
            rope_type="longrope",
            factor=2.0,
            short_factor=[1],
            long_factor=[1, 2, 3],
            original_max_position_embeddings=32,
        ),
        "forward pass: ",
    ),
    ("architecture a number", change(architectures=[7]), "holds a 7, not a causal decoder"),
    ("code a number", change(auto_map={"AutoModelForCausalLM": 7}), "needs remote code (7)"),
]
TOKENIZERS = [
    ("a list", put(TOKENIZER, "[]"), "tokenizer: "),
    ("empty", put(TOKENIZER, ""), "tokenizer: "),
    ("deep", put(TOKENIZER, DEEP), "tokenizer: "),
    ("absent", without(TOKENIZER), "tokenizer: "),
    ("unknown model", vocabulary(type="Nope"), "tokenizer: "),
    ("an added token too many", added(id=9999, content="zzz"), "has ids up to 263, but the model"),
    # The parser panics: it has a message of its own, which is not printed.
    ("long prefix", vocabulary(continuing_subword_prefix=9 * "#"), "(PanicException in"),
    (
        "a template without its token",
        template({"SpecialToken": {"id": "X", "type_id": 0}}),
        "tokenizer: ",
    ),
    ("code a number", described(auto_map=[7]), "needs remote code (7)"),
]
# A tokenizer whose fault the text shows, not the file.
NO_TOKENS = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
WEIGHT_FILES = [
    ("absent", without(WEIGHTS), "has no safetensors weights"),
    ("empty", put(WEIGHTS, ""), "is a broken safetensors file: "),
    ("cut", cut, "is a broken safetensors file: "),
    ("without a norm", tensors(lambda t: t.pop("model.norm.weight")), "lacks weights, such as"),
    (
        "of another shape",
        tensors(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:41].clone()})),
        "has weights of other shapes than its config.json has, such as model.norm.weight",
    ),
]
INDICES = [
    ("a list", put(INDEX, "[]"), "is no valid index of safetensors files"),
    ("deep", put(INDEX, DEEP), "is no valid index of safetensors files"),
    ("of a number", listed({"model.norm.weight": 7}), "is no valid index of safetensors files"),
    ("of null", listed({"model.norm.weight": None}), "is no valid index of safetensors files"),
    ("of no files", listed({}), "lacks weights, such as"),
    ("outside", listed({"model.norm.weight": "../a.safetensors"}), "no safetensors file beside it"),
    ("of an absent file", listed({"model.norm.weight": "a.safetensors"}), "lacks a.safetensors"),
    ("of escapes", listed({"a": "\x1b[31m"}), r"lists '\x1b[31m', which is no safetensors"),
    ("of a long name", listed({"a": "x" * 300 + ".safetensors"}), "lacks xxxx"),
]
ROWS = {
    **under("sizes", SIZES),
    **under("config", CONFIGS),
    **under("tokenizer", TOKENIZERS),
    **under("weights", WEIGHT_FILES),
    **under("index", INDICES),
}
