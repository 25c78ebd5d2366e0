"""Sequences are a function of the seed, do not overlap, and are refused where there are too few.

Packed ones are documents end to end: no token is lost, repeated or padding.
"""

from collections import Counter
from hashlib import sha256
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from platform import python_version
from typing import Any

import pandas as pd
import pytest
import torch
from support.rounding import assert_same, rounding
from support.tiny_models import D_VOCAB, tokenizer

from nope_probe import Sequences, UserError, gaussian, sequences
from nope_probe.data.documents import documents
from nope_probe.data.sequences import random_twice
from nope_probe.data.tokenizing import cut, pack_documents, padding_note, permuted

PLAIN, WITH_BOS = tokenizer(), tokenizer(forces_bos=True)
PLAIN.add_special_tokens({"eos_token": "<eos>"})  # 263, no text's own token
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "is")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of twelve different documents of about 300 tokens."""
    rows = [" ".join(WORDS[i * j * j % 11] for j in range(60)) + f" {i}" for i in range(1, 13)]
    pd.DataFrame({"text": rows}).to_json(tmp_path / "text.jsonl", orient="records", lines=True)
    return str(tmp_path / "text.jsonl")


def draw(source: str, **options: Any) -> torch.Tensor:
    settings = {"tokenizer": PLAIN, "n_seqs": 29, "seq_len": 17} | options
    return sequences(source, **settings).inputs


def numbered(*lengths: int) -> list[list[int]]:
    """Return documents of distinct tokens: document d holds 1000 d, 1000 d + 1, ..."""
    return [[1000 * d + t for t in range(length)] for d, length in enumerate(lengths)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("source", "options"),
    [("text", {}), ("text", {"shuffle": True}), ("text", {"pack": True}), ("random", {})],
)
def test_sequences_are_a_function_of_the_seed(source: str, options: Any, text: str) -> None:
    source = text if source == "text" else source
    first, again, other = (draw(source, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sequences_do_not_overlap_and_are_contiguous_in_one_document() -> None:
    taken, documents = cut(numbered(40, 57, 13, 7, 99), 15, 13, generator())
    assert taken.flatten().unique().numel() == 15 * 13
    assert torch.equal(taken, taken[:, :1] + torch.arange(13))
    assert set((taken // 1000).unique().tolist()) == {0, 1, 2, 4}
    assert torch.equal(taken[:, 0] // 1000, documents)


def test_each_document_gives_one_sequence_before_any_gives_two() -> None:
    owners = cut(numbered(99, 99, 99, 26), 9, 13, generator())[1].tolist()
    assert [sorted(owners[:4]), sorted(owners[4:8])] == [[0, 1, 2, 3]] * 2


def test_sequences_keep_their_documents_when_they_are_shuffled_and_random_ones_have_none(
    text: str,
) -> None:
    plain, shuffled = (
        sequences(text, tokenizer=PLAIN, n_seqs=5, seq_len=17, shuffle=shuffle)
        for shuffle in (False, True)
    )
    assert torch.equal(plain.documents, shuffled.documents)
    assert plain.n_documents == len(set(plain.documents.tolist()))
    drawn = sequences("random", tokenizer=PLAIN, n_seqs=5, seq_len=17)
    assert drawn.documents is None
    assert drawn.n_documents == 5


def test_sequences_begin_anywhere_in_a_document() -> None:
    starts = {int(cut(numbered(20), 1, 11, generator(seed))[0][0, 0]) for seed in range(200)}
    assert starts == set(range(10))


def test_shuffling_keeps_the_tokens_of_each_sequence_and_its_bos(text: str) -> None:
    settings = {"tokenizer": WITH_BOS, "seed": 4}
    plain, shuffled = draw(text, **settings), draw(text, shuffle=True, **settings)
    assert (shuffled[:, 0] == 0).all()
    assert not torch.equal(plain, shuffled)
    for before, after in zip(plain.tolist(), shuffled.tolist(), strict=True):
        assert Counter(before) == Counter(after)


def test_shuffling_makes_every_order_equally_likely() -> None:
    """The first token of a sequence is moved to every position equally often."""
    settings = {"tokenizer": PLAIN, "n_seqs": 7000, "seq_len": 7, "seed": 1}
    drawn = sequences("random", **settings).inputs
    mixed = sequences("random", shuffle=True, **settings).inputs
    unique = [len(set(w)) == 7 for w in drawn.tolist()]
    positions = (mixed == drawn[:, :1]).float()[torch.tensor(unique)].mean(0)
    assert (positions - 1 / 7).abs().max() < 5 * (6 / 49 / sum(unique)) ** 0.5


@pytest.mark.parametrize(
    ("tokenizer", "bos", "begins"),
    [
        (PLAIN, "always", True),
        (PLAIN, "auto", False),
        (WITH_BOS, "never", False),
        (WITH_BOS, "auto", True),
    ],
)
def test_sequences_begin_with_bos_where_the_tokenizer_adds_it_or_as_it_is_set(
    tokenizer: Any, bos: Any, begins: bool, text: str
) -> None:
    data = sequences(text, tokenizer=tokenizer, n_seqs=5, seq_len=17, bos=bos)
    assert data.bos is begins
    assert data.inputs.shape == (5, 17)
    assert (data.inputs[:, 0] == 0).all().item() is begins
    assert (data.inputs[:, 1:] != 0).all()


def test_sequences_begin_with_the_token_that_is_named(text: str) -> None:
    intact = sequences(text, tokenizer=WITH_BOS, n_seqs=5, seq_len=17)
    token = WITH_BOS.decode([11])
    named = sequences(text, tokenizer=WITH_BOS, n_seqs=5, seq_len=17, bos=token)
    assert named.inputs[:, 0].tolist() == [11] * 5
    assert torch.equal(named.inputs[:, 1:], intact.inputs[:, 1:])
    assert (named.bos, named.bos_token) == (True, token)
    assert Sequences.from_tensors(named.to_tensors()).bos_token == token
    with pytest.raises(UserError, match=r"--bos 'Always ever': .* the text of one token"):
        sequences(text, tokenizer=WITH_BOS, n_seqs=5, seq_len=17, bos="Always ever")


def test_prose_is_the_language_reference_of_this_python() -> None:
    (note,) = sequences("prose", tokenizer=PLAIN, n_seqs=3, seq_len=7, bos="never").notes
    topics = [value for _, value in sorted(import_module("pydoc_data.topics").topics.items())]
    joined = "".join(text for n, text in enumerate(topics) if text not in topics[:n])
    assert sha256(joined.encode()).hexdigest()[:16] in note
    assert f"Python {python_version()}" in note


def test_sequences_at_the_start_are_the_first_tokens_of_long_enough_documents(text: str) -> None:
    taken, owners = cut(numbered(40, 12, 13, 99), 3, 13, generator(), "start")
    assert sorted(owners.tolist()) == [0, 2, 3]
    assert torch.equal(taken, 1000 * owners[:, None] + torch.arange(13))
    with pytest.raises(UserError, match=r"2 documents of 13 tokens .* 3 were asked .* --windows"):
        cut(numbered(40, 30, 7), 3, 13, generator(), "start")
    first = sequences(text, tokenizer=WITH_BOS, n_seqs=12, seq_len=17, windows="start").inputs
    ids = WITH_BOS(documents(text))["input_ids"]
    assert sorted(first.tolist()) == sorted(document[:17] for document in ids)


def test_random_tokens_are_all_tokens_but_special_ones() -> None:
    drawn = draw("random", n_seqs=997, seq_len=7).unique()
    assert drawn.tolist() == list(range(1, D_VOCAB))  # 0 is <bos>


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_gaussian_inputs_are_unit_vectors_with_the_expected_inner_product(alpha: float) -> None:
    """At d = 64 the exact expectation is a little below alpha."""
    x = gaussian(4001, 5, 64, alpha=alpha, seed=2).inputs
    assert_same(x.norm(dim=-1), torch.ones(4001, 5), 2 * rounding(x.shape[-1]))
    pairs = (x @ x.mT)[:, ~torch.eye(5).bool()].mean(1)
    expected = {0.0: 0.0, 0.5: 0.4970566}[alpha]
    assert abs(pairs.mean() - expected) < 4 * pairs.std() / 4001**0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "takes no text: use --data random"),
        ({"n_seqs": 0}, "at least 1 sequence of 3 tokens, got 0 of 17"),
        ({"seq_len": 2, "tokenizer": WITH_BOS}, "got 29 of 2"),
        ({"seq_len": 1000}, "every document is too short: the longest has .* 1000 are needed"),
        ({"n_seqs": 10_000}, "12 documents of 17 tokens or more give .* 10000 were asked for"),
    ],
)
def test_impossible_sequences_are_an_error(
    options: dict[str, Any], message: str, text: str
) -> None:
    with pytest.raises(UserError, match=message):
        draw(text, **options)


def test_the_shipped_text_gives_the_default_number_of_sequences() -> None:
    shipped = sequences(tokenizer=WITH_BOS)
    assert shipped.inputs.shape == (512, 64)
    assert (shipped.name, shipped.bos) == ("shipped", True)


TEXTS = [f"{i} " + "the quick brown fox " * (1 + i % 7) for i in range(59)]


@pytest.fixture
def short_text(tmp_path: Path) -> str:
    """A file of documents of up to 40 tokens or so."""
    path = tmp_path / "short.jsonl"
    pd.DataFrame({"text": TEXTS}).to_json(path, orient="records", lines=True)
    return str(path)


def test_packing_keeps_every_token_once_and_a_separator_after_each_document() -> None:
    ids = numbered(5, 3, 11, 1)  # and four separators: 24 tokens
    joined = pack_documents(ids, 6, 4, -7, generator())[0].flatten().tolist()
    ends = [-1, *(place for place, token in enumerate(joined) if token == -7)]
    assert sorted(joined[end + 1 : stop] for end, stop in pairwise(ends)) == ids
    assert ends[-1] == 23


def test_packed_sequences_continue_across_documents() -> None:
    ids = numbered(5, 3)
    orders = {
        tuple(pack_documents(ids, 2, 5, -7, generator(seed))[0].flatten().tolist())
        for seed in range(9)
    }
    first, second = ([*document, -7] for document in ids)
    assert orders == {tuple(first + second), tuple(second + first)}


def test_a_packed_sequence_counts_as_the_document_that_most_of_it_is_from() -> None:
    for seed in range(5):
        tokens, documents = pack_documents(numbered(11, 3, 2), 3, 6, -7, generator(seed))
        owners = list[int]()
        for token in tokens.flatten().tolist():  # a separator belongs to what it ends
            owners.append(owners[-1] if token == -7 else token // 1000)
        for index, document in enumerate(documents.tolist()):
            actual = owners[6 * index : 6 * index + 6]
            assert actual.count(document) == max(map(actual.count, actual))


def test_a_bos_before_each_packed_sequence_replaces_no_token(short_text: str) -> None:
    with_bos = sequences(short_text, tokenizer=WITH_BOS, n_seqs=29, seq_len=17, pack=True)
    without = sequences(
        short_text, tokenizer=WITH_BOS, n_seqs=29, seq_len=16, pack=True, bos="never"
    )
    assert (with_bos.bos, without.bos) == (True, False)
    assert (with_bos.inputs[:, 0] == 0).all()
    assert torch.equal(with_bos.inputs[:, 1:], without.inputs)


def test_too_few_tokens_are_counted(short_text: str) -> None:
    message = r"2 documents hold 10 tokens with their separators, which give 3 sequences of 3, 4"
    with pytest.raises(UserError, match=message):
        pack_documents(numbered(5, 3), 4, 3, -7, generator())
    assert len(pack_documents(numbered(5, 3), 3, 3, -7, generator())[0]) == 3
    with pytest.raises(
        UserError, match=r"59 documents hold .* 9999 were asked for; lower --n-seqs"
    ):
        sequences(short_text, tokenizer=PLAIN, n_seqs=9999, seq_len=17, pack=True)


def test_packing_without_an_eos_token_is_an_error() -> None:
    without = tokenizer()
    without.eos_token = None
    with pytest.raises(UserError, match="after each document, and the model's tokenizer has none"):
        sequences(["a b c"], tokenizer=without, n_seqs=1, seq_len=3, pack=True)


def test_permuted_rows_hold_the_same_numbers_in_other_orders_behind_the_first() -> None:
    index = torch.arange(23).double().expand(7, 23)
    shuffled = permuted(index, generator(), first=2)
    assert torch.equal(shuffled.sort(-1).values, index)
    assert torch.equal(shuffled[:, :2], index[:, :2])
    assert len(shuffled.unique(dim=0)) == 7


def test_random_tokens_come_twice_after_each_sequences_bos() -> None:
    tokens = torch.tensor([[7, 1, 2, 3], [7, 4, 5, 6], [7, 8, 9, 10]])
    data = Sequences(inputs=tokens, name="", bos=True)
    copies = random_twice(data, 5, tokenizer(), seed=3)
    assert copies[:, 0].tolist() == [7, 7, 7]
    assert torch.equal(copies[:, 1:6], copies[:, 6:])
    drawn = sequences(
        "random", tokenizer=tokenizer(), n_seqs=3, seq_len=5, seed=3, bos="never"
    ).inputs
    assert torch.equal(copies[:, 1:6], drawn)


def test_rows_that_begin_or_end_with_padding_are_counted_with_their_tokens() -> None:
    words = tokenizer()  # BOS and EOS are token 0
    rows = torch.tensor([[5, 5, 9, 9], [9, 5, 9, 9], [9, 9, 9, 5], [5, 5, 5, 5], [7, 9, 5, 0]])
    assert padding_note(rows, words) == padding_note(rows, None) == ""
    words.pad_token = words.convert_ids_to_tokens(5)
    assert padding_note(rows, words).startswith("3 of 5 rows begin or end with the pad token")
    assert ", 7 tokens in all" in padding_note(rows, words)
    assert ", 7 tokens in all" in padding_note(rows.flip(1), words)


def test_a_pad_token_that_is_bos_or_eos_counts_in_runs_beyond_bos() -> None:
    words = tokenizer()
    words.pad_token = words.eos_token
    text = torch.tensor([[0, 9, 8, 7], [0, 8, 9, 0], [0, 8, 0, 9]])
    assert padding_note(text, words, bos=True) == padding_note(text, words) == ""
    padded = torch.tensor([[0, 0, 0, 7], [0, 9, 0, 0], [0, 9, 8, 7]])
    assert "2 of 3 rows" in padding_note(padded, words, bos=True)
    assert ", 4 tokens" in padding_note(padded, words, bos=True)
    assert ", 5 tokens" in padding_note(padded, words)
