"""Packed sequences are documents end to end: no token is lost, repeated or padding."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.tiny_models import tokenizer

import nope_probe.data.documents as data_sets
from nope_probe.data.sequences import pack_documents, separator_of, sequences
from nope_probe.errors import UserError

PLAIN, WITH_BOS = tokenizer(), tokenizer(forces_bos=True)
PLAIN.add_special_tokens({"eos_token": "<eos>"})  # 263, no text's own token
TEXTS = [f"{i} " + "the quick brown fox " * (1 + i % 7) for i in range(59)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.jsonl"
    pd.DataFrame({"text": TEXTS}).to_json(path, orient="records", lines=True)
    return str(path)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(*lengths: int) -> list[list[int]]:
    """Return documents of distinct tokens: document d holds 1000 d, 1000 d + 1, ..."""
    return [[1000 * d + t for t in range(length)] for d, length in enumerate(lengths, 1)]


def test_packing_keeps_every_token_once_and_a_separator_after_each_document() -> None:
    ids = numbered(5, 3, 11, 1)  # and four separators: 24 tokens
    joined = pack_documents(ids, 6, 4, -7, generator()).tokens.flatten().tolist()
    rest = joined
    documents = []
    while rest:
        end = rest.index(-7)
        documents.append(rest[:end])
        rest = rest[end + 1 :]
    assert sorted(documents) == ids


def test_packed_sequences_continue_across_documents() -> None:
    ids = numbered(5, 3)
    orders = {
        tuple(pack_documents(ids, 2, 5, -7, generator(seed)).tokens.flatten().tolist())
        for seed in range(9)
    }
    first, second = ([*document, -7] for document in ids)
    assert orders == {tuple(first + second), tuple(second + first)}


def test_a_packed_sequence_counts_as_the_document_that_most_of_it_is_from() -> None:
    for seed in range(5):
        windows = pack_documents(numbered(11, 3, 2), 3, 6, -7, generator(seed))
        owners = list[int]()
        for token in windows.tokens.flatten().tolist():  # a separator belongs to what it ends
            owners.append(owners[-1] if token == -7 else token // 1000 - 1)
        for index, document in enumerate(windows.documents.tolist()):
            ours = owners[6 * index : 6 * index + 6]
            assert ours.count(document) == max(map(ours.count, ours))


def test_a_bos_before_each_packed_sequence_replaces_no_token(text: str) -> None:
    with_bos = sequences(text, tokenizer=WITH_BOS, n_seqs=29, seq_len=17, pack=True)
    without = sequences(text, tokenizer=WITH_BOS, n_seqs=29, seq_len=16, pack=True, bos="never")
    assert (with_bos.bos, without.bos) == (True, False)
    assert (with_bos.inputs[:, 0] == 0).all()
    assert torch.equal(with_bos.inputs[:, 1:], without.inputs)


def test_of_a_data_set_no_more_is_read_than_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def counted(source: str) -> Any:
        for text in TEXTS * 5:
            read.append(text)
            yield text

    monkeypatch.setattr(data_sets, "stream_texts", counted)
    taken = sequences("any/set", tokenizer=PLAIN, n_seqs=29, seq_len=17, pack=True).inputs
    assert len(read) == 64  # one batch
    needed, total = [], 0
    for text in TEXTS:
        needed.append(text)
        total += len(PLAIN(text, add_special_tokens=False)["input_ids"]) + 1
        if total >= 29 * 17:
            break
    pieces = PLAIN.decode(taken.flatten()).split("<eos>")
    assert set(pieces[:-1]) <= set(needed)
    assert len(needed) - 1 <= len(pieces) <= len(needed) + 1


def test_too_few_tokens_are_counted(text: str) -> None:
    message = r"2 documents hold 10 tokens with their separators, which give 3 sequences of 3, 4"
    with pytest.raises(UserError, match=message):
        pack_documents(numbered(5, 3), 4, 3, -7, generator())
    assert len(pack_documents(numbered(5, 3), 3, 3, -7, generator()).tokens) == 3
    with pytest.raises(
        UserError, match=r"59 documents hold .* 9999 were asked for; lower --n-seqs"
    ):
        sequences(text, tokenizer=PLAIN, n_seqs=9999, seq_len=17, pack=True)


def test_packing_without_an_eos_token_is_an_error() -> None:
    without = tokenizer()
    without.eos_token = None
    with pytest.raises(UserError, match="after each document, and the model's tokenizer has none"):
        separator_of(without)
