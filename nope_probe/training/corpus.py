"""What a preset is trained on: tokenizer, training and held-out sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from nope_probe.data.cutting import cut
from nope_probe.data.held_out import is_held_out
from nope_probe.data.stdlib import stdlib_documents

if TYPE_CHECKING:
    from nope_probe.training.recipes import Recipe


BOS = "<bos>"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Windows to train on and to evaluate on, each with a BOS token in front."""

    train: Dataset | IterableDataset
    held_out: Dataset


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Train the tiny models' byte-level BPE, or fetch the large ones' tokenizer."""
    if recipe.size != "tiny":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(recipe.tokenizer)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(stdlib_documents(held_out=False), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=BOS)


def corpus_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> Corpus:
    """Cut the recipe's text into windows."""
    if recipe.data == "stdlib":
        return _library(recipe, tokenizer, seed)
    stream = load_dataset(recipe.data, split="train", streaming=True)
    # The documents that `--data fineweb-edu` studies are never trained on.
    few = stream.filter(_is_kept_out).take(2_000)
    rest = stream.filter(lambda row: not _is_kept_out(row))
    kwargs = {"tokenizer": tokenizer, "recipe": recipe}
    held_out = Dataset.from_generator(_packed, gen_kwargs={"stream": few, **kwargs})
    train = IterableDataset.from_generator(_packed, gen_kwargs={"stream": rest, **kwargs})
    return Corpus(train=train, held_out=held_out)


def _is_kept_out(row: dict[str, Any]) -> bool:
    return is_held_out(row["text"])


def _library(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> Corpus:
    """Windows at random places of the library, cut anew for each pass over it."""
    generator = torch.Generator().manual_seed(seed)
    length = recipe.seq_len - 1
    n_wanted = recipe.steps * recipe.batch_tokens // recipe.seq_len
    ids = _ids(stdlib_documents(held_out=False), tokenizer)
    passes: list[torch.Tensor] = []
    while sum(map(len, passes)) < n_wanted:
        n_windows = sum(len(document) // length for document in ids)
        passes.append(cut(ids, n_windows, length, generator))
    held_out = _ids(stdlib_documents(held_out=True), tokenizer)
    n_held_out = min(1024, sum(len(document) // length for document in held_out))
    return Corpus(
        train=_dataset(torch.cat(passes)[:n_wanted], tokenizer),
        held_out=_dataset(cut(held_out, n_held_out, length, generator), tokenizer),
    )


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _dataset(windows: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    bos = torch.full((len(windows), 1), tokenizer.bos_token_id)
    rows = torch.cat([bos, windows], 1).numpy()
    return Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def _packed(
    stream: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> Iterator[dict[str, list[int]]]:
    """Join documents with BOS tokens between them and cut the stream into windows."""
    pool: list[int] = []
    for row in stream:
        pool += [
            tokenizer.bos_token_id,
            *tokenizer(row["text"], add_special_tokens=False).input_ids,
        ]
        while len(pool) >= recipe.seq_len:
            window, pool = pool[: recipe.seq_len], pool[recipe.seq_len :]
            yield {"input_ids": window, "labels": window}
