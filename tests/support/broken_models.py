"""Broken copies of a model's folder, in a folder each: what is broken, and what the line says."""

import json
import struct
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


def charsmap(encoded: str) -> Break:
    return tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": encoded})


def replacing(expression: str) -> Break:
    replace = {"type": "Replace", "pattern": {"Regex": expression}, "content": ""}
    return tokenizer_with(normalizer=replace)


def nested_normalizers(depth: int) -> Break:
    normalizer: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    return tokenizer_with(normalizer=normalizer)


def broken_tail(folder: Path) -> None:
    (folder / TOKENIZER).write_text((folder / TOKENIZER).read_text() + "x")


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


def header(text: str, n_bytes: int = 8) -> Break:
    """Write a safetensors file with this header."""
    return put(WEIGHTS, struct.pack("<Q", len(text)) + text.encode() + bytes(n_bytes))


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
    ("layers as a string", change(num_hidden_layers="2"), "'num_hidden_layers' expected int"),
    ("layers as a list", change(num_hidden_layers=[2]), "'num_hidden_layers' expected int"),
    ("a layer too many", change(num_hidden_layers=3), "lacks weights, such as model.layers.2."),
    ("heads as a string", change(num_attention_heads="6"), "'num_attention_heads' expected int"),
    ("no heads", change(num_attention_heads=0), "config.json: "),
    ("-6 heads", change(num_attention_heads=-6), "num_attention_heads -6: expected a positive"),
    ("5 heads for 2 keys", change(num_attention_heads=5), "not a multiple of the number of"),
    ("6 heads for 4 keys", change(num_key_value_heads=4), "6 attention heads, which cannot share"),
    ("no key heads", change(num_key_value_heads=0), "num_key_value_heads 0: expected a positive"),
    ("d_model 43", change(hidden_size=43, head_dim=None), "hidden size (43) is not a multiple"),
    ("no d_model", change(hidden_size=0), "hidden_size 0: expected a positive number"),
    ("d_model 1e30", change(hidden_size=6 * 10**30), "config.json: "),
    ("odd head_dim", change(head_dim=9), "RoPE requires an even rotary dimension"),
    (
        "head_dim 1e12",
        change(head_dim=10**12),
        "a model of 1.37e+15 numbers, and its weights hold 4",
    ),
    ("MLP of 1e12", change(intermediate_size=10**12), "config.json of a model of 2.56e+14 numbers"),
    ("1e12 tokens", change(vocab_size=10**12), "config.json of a model of 8.4e+13 numbers"),
    ("fewer tokens", change(vocab_size=7), "has ids up to 262, but the model embeds only 7"),
    ("no context", change(max_position_embeddings=0), "max_position_embeddings 0: expected"),
]
CONFIGS = [
    ("empty", put(CONFIG, ""), "is not a valid JSON file"),
    ("a list", put(CONFIG, "[]"), "a config.json that is no JSON object"),
    ("null", put(CONFIG, "null"), "config.json: argument of type 'NoneType'"),
    ("a number", put(CONFIG, "7"), "config.json: argument of type 'int'"),
    ("deep", put(CONFIG, DEEP), "config.json: maximum recursion depth"),
    ("deep and closed", put(CONFIG, DEEP + "]" * 100_000), "config.json: maximum recursion depth"),
    ("deep objects", put(CONFIG, '{"a":' * 100_000), "config.json: maximum recursion depth"),
    ("binary", put(CONFIG, bytes(range(256))), "is not a valid JSON file"),
    ("no type", change(model_type=None), "Should have a `model_type` key"),
    ("type a list", change(model_type=["llama"]), "config.json: unhashable type: 'list'"),
    ("escapes", change(model_type="\x1b[31mred"), r"model type `\x1b[31mred`"),
    ("unknown activation", change(hidden_act="swoosh"), "config.json: 'swoosh' (KeyError in"),
    ("unknown rope type", rope(rope_type="curly"), "config.json: 'curly' (KeyError in"),
    ("rope a list", change(rope_parameters=[1]), "'rope_parameters' with value [1]"),
    ("rope without factors", rope(rope_type="llama3"), "Missing required keys in"),
    (
        "rope of another width",
        rope(
            rope_type="longrope",
            factor=2.0,
            short_factor=[1],
            long_factor=[1, 2, 3],
            original_max_position_embeddings=32,
        ),
        "forward pass: The size of tensor",
    ),
    ("too few layer types", change(layer_types=["full_attention"]), "must be equal to the number"),
    ("unknown layer types", change(layer_types=["a", "b"]), "`layer_types` entries must be in"),
    ("architecture a number", change(architectures=[7]), "holds a 7, not a causal decoder"),
    ("unknown dtype", change(dtype="float7"), "config.json: module 'torch' has no attribute"),
    ("code a number", change(auto_map={"AutoModelForCausalLM": 7}), "needs remote code (7)"),
    ("quantised by a list", change(quantization_config=[1]), "'list' object has no attribute"),
    ("padding beyond", change(pad_token_id=300), "Padding_idx must be within num_embeddings"),
]
TOKENIZERS = [
    ("{}", put(TOKENIZER, "{}"), "tokenizer: 'added_tokens' (KeyError in"),
    ("a list", put(TOKENIZER, "[]"), "tokenizer: 'str' object cannot be"),
    ("empty", put(TOKENIZER, ""), "tokenizer: Expecting value"),
    ("deep", put(TOKENIZER, DEEP), "tokenizer: maximum recursion depth"),
    ("binary", put(TOKENIZER, bytes(range(256))), "tokenizer: 'utf-8' codec can't decode"),
    ("absent", without(TOKENIZER), "tokenizer: Couldn't instantiate the backend tokenizer"),
    ("unknown model", vocabulary(type="Nope"), "tokenizer: data did not match any variant"),
    ("a list of tokens", vocabulary(vocab=[]), "tokenizer: invalid type: sequence"),
    ("unknown merges", vocabulary(merges=["no pe"]), "tokenizer: Token `no` out of vocabulary"),
    ("deep and closed", put(TOKENIZER, DEEP + "]" * 100_000), "tokenizer: maximum recursion depth"),
    ("deep objects", put(TOKENIZER, '{"a":' * 100_000), "tokenizer: maximum recursion depth"),
    ("a deep normalizer", nested_normalizers(200), "tokenizer: recursion limit exceeded"),
    ("text after it", broken_tail, "tokenizer: Extra data"),
    ("a model that is null", tokenizer_with(model=None), "tokenizer: data did not match any"),
    ("another version", tokenizer_with(version="9.9"), "Unknown tokenizer version '9.9'"),
    ("an id of 2**40", vocabulary(vocab={"a": 2**40}, merges=[]), "expected u32"),
    ("an id below 0", vocabulary(vocab={"a": -1}, merges=[]), "expected u32"),
    ("no tokens and a merge", vocabulary(vocab={}, merges=[["a", "b"]]), "Token `a` out of vocab"),
    ("a merge of three", vocabulary(merges=[["a", "b", "c"]]), "enum MergeType"),
    ("added text", tokenizer_with(added_tokens="x"), "tokenizer: 'str' object has no attribute"),
    ("an added string", tokenizer_with(added_tokens=["x"]), "tokenizer: 'str' object has no"),
    ("an added id of 2**40", added(id=2**40), "tokenizer: invalid value: integer"),
    ("an added null", added(content=None), "tokenizer: invalid type: null, expected a string"),
    ("an added token too many", added(id=9999, content="zzz"), "has ids up to 263, but the model"),
    ("unknown normalizer", tokenizer_with(normalizer={"type": "Fold"}), "NormalizerUntagged"),
    ("half a regular expression", replacing("("), "Oniguruma error: end pattern with unmatched"),
    # The parser panics: it has a message of its own, which is not printed.
    ("long prefix", vocabulary(continuing_subword_prefix=9 * "#"), "(PanicException in"),
    ("charsmap of nothing", charsmap(""), 'Precompiled: Error("Cannot parse precompiled_charsmap"'),
    ("charsmap not base64", charsmap("%%"), 'Precompiled: Error("Invalid byte 37, offset 0."'),
    ("charsmap out of bounds", charsmap("BAAAAP////8="), "index out of bounds: the len is 1"),
    (
        "pieces of no length",
        tokenizer_with(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "tokenizer: chunk size must be non-zero",
    ),
    (
        "a template without its token",
        template({"SpecialToken": {"id": "X", "type_id": 0}}),
        "no entry",
    ),
    (
        "a template of a second text",
        template({"Sequence": {"id": "B", "type_id": 0}}),
        "out of bou",
    ),
    ("described by a list", put(ABOUT_TOKENIZER, "[]"), "tokenizer: 'list' object"),
    ("described deep", put(ABOUT_TOKENIZER, DEEP), "tokenizer: maximum recursion depth"),
    ("class a number", described(tokenizer_class=7), "tokenizer: 'int' object"),
    ("BOS a number", described(bos_token=7), "tokenizer: Special token bos_token has to be"),
    ("length a string", described(model_max_length="x"), "tokenizer: '>' not supported"),
    ("code a number", described(auto_map=[7]), "needs remote code (7)"),
]
# What tokenizers of other kinds do not hold: shown by the text, not by the file.
NO_TOKENS = {
    "WordLevel": (
        {"unk_token": "[UNK]", "vocab": {"a": 0}},
        "WordLevel error: Missing [UNK] token",
    ),
    "WordPiece": (
        {
            "unk_token": "[UNK]",
            "vocab": {"a": 0},
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "WordPiece error: Missing [UNK] token",
    ),
    "Unigram": (
        {"unk_id": None, "vocab": [["a", -1.0]]},
        "an unknown token but `unk_id` is missing",
    ),
    "BPE": ({"unk_token": "?", "vocab": {"a": 0}, "merges": []}, "Unk token `?` not found in the"),
}
WEIGHT_FILES = [
    ("absent", without(WEIGHTS), "has no safetensors weights"),
    ("empty", put(WEIGHTS, ""), "is a broken safetensors file: "),
    ("cut", cut, "is a broken safetensors file: "),
    ("a pointer", put(WEIGHTS, "version https://git-lfs.github.com/spec/v1"), "header too large"),
    ("a header of a list", header("[]", 0), "invalid JSON in header"),
    (
        "a dtype unknown",
        header('{"a":{"dtype":"F7","shape":[2],"data_offsets":[0,8]}}'),
        "unknown variant `F7`",
    ),
    (
        "a shape beyond its bytes",
        header('{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}'),
        "invalid shape, data type, or offset",
    ),
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
