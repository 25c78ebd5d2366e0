"""Texts are read from files of every kind, and data sets no further than is needed."""

import gzip
from itertools import count
from pathlib import Path
from shutil import copytree
from sysconfig import get_path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from support.tiny_models import tokenizer

import nope_probe.data.documents as data_sets
from nope_probe import UserError, capture_scores, load, sequences
from nope_probe.data.documents import (
    SOURCES,
    documents,
    is_data_set,
    is_held_out,
    split,
    stdlib_documents,
    stream_texts,
)
from nope_probe.data.tokenizing import TextReader, read_documents

PLAIN = tokenizer()
TEXTS = [f"{i} " + "the quick brown fox " * (1 + i % 7) for i in range(211)]


MARK = "\ufeff"


def test_a_byte_order_mark_is_no_part_of_a_text_wherever_the_text_comes_from(
    tmp_path: Path,
) -> None:
    expected = [PLAIN(text, add_special_tokens=False)["input_ids"] for text in ("one: é", "two")]
    rows = pd.DataFrame({"text": [MARK + "one: é", "two"]})
    rows.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text(MARK + "one: é", encoding="utf-8")
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        reader = TextReader(PLAIN)
        texts = documents(str(tmp_path / name))
        assert list(reader.tokens(texts)) == expected[: len(texts)]
        (note,) = reader.notes
        assert note.endswith(f"a byte order mark, which is left out: 1 of {len(texts)}.")
    lines = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(MARK + lines.replace(r"\ufeff", ""), encoding="utf-8")
    reader = TextReader(PLAIN)
    assert list(reader.tokens(documents(str(tmp_path / "a.jsonl")))) == expected
    assert reader.notes == (), "a mark of the file is none of a text"
    (tmp_path / "a.txt").write_text(f"{MARK} \n", encoding="utf-8")
    with pytest.raises(UserError, match=r"a.txt is empty"):
        documents(str(tmp_path / "a.txt"))


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_that_spells_bos_begins_with_one_and_other_special_tokens_are_named(
    bos: bool,
) -> None:
    chat = tokenizer()
    chat.add_special_tokens({"unk_token": "<unk>", "additional_special_tokens": ["<end>"]})
    reader = TextReader(chat, bos=bos)
    texts = ["<bos>the quick<end>", "the quick", "<unk>", "the<bos>"]
    found = list(reader.tokens(texts))
    end, words = chat.convert_tokens_to_ids("<end>"), chat("the quick")["input_ids"]
    assert found[0] == [*[0] * (not bos), *words, end]
    assert found[1] == words
    assert found[3] == [*chat("the")["input_ids"], 0]
    assert reader.notes == (
        "Texts that begin with the BOS token <bos> already, "
        + ("so that no second was added: 1 of 4." if bos else "which was kept: 1 of 4."),
        "Texts that spell special tokens (<bos>, <end>), which are read as these tokens: 2 of 4.",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of two parquet files, with a column that is not read."""
    (tmp_path / "data").mkdir()
    for part in range(2):
        rows = TEXTS[:100] if part == 0 else TEXTS[100:]
        table = pd.DataFrame({"id": range(len(rows)), "text": rows})
        table.to_parquet(tmp_path / "data" / f"train-{part:05}-of-00002.parquet")
    return tmp_path / "data"


def test_a_data_set_is_streamed_in_its_own_order(folder: Path) -> None:
    assert list(stream_texts(str(folder))) == TEXTS


def test_of_fineweb_edu_only_the_held_out_documents_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(data_sets.HELD_OUT, "fineweb-edu", (str(folder), ""))
    texts = list(stream_texts("FineWeb-Edu"))
    assert texts == [text for text in TEXTS if is_held_out(text)]
    assert 0 < len(texts) < 0.3 * len(TEXTS)


def test_a_data_set_is_read_no_further_than_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(source: str) -> Any:
        for text in TEXTS:
            read.append(text)
            yield text

    monkeypatch.setattr("nope_probe.data.tokenizing.stream_texts", counted)
    result = read_documents("any/set", TextReader(PLAIN), 11, 60, is_packed=False)
    whole = [ids for ids in PLAIN(TEXTS, add_special_tokens=False)["input_ids"] if len(ids) >= 60]
    assert result == whole[:11]
    assert len(read) == 64  # one batch


def test_of_a_data_set_that_is_packed_the_first_documents_are_read_that_fill_the_sequences(
    folder: Path,
) -> None:
    ids = PLAIN(TEXTS, add_special_tokens=False)["input_ids"]
    of_five = sum(len(of_text) + 1 for of_text in ids[:5])  # a separator after each
    for n_tokens, n_documents in ((of_five - 1, 5), (of_five, 5), (of_five + 1, 6)):
        found = read_documents(str(folder), TextReader(PLAIN), n_tokens, 1, True)
        assert found == ids[:n_documents]


def test_a_data_set_without_a_document_that_is_long_enough_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"none of the 211 documents read from .* has 997 tokens"):
        sequences(str(folder), tokenizer=PLAIN, bos="never", seq_len=997)


def test_a_folder_of_text_files_is_as_many_documents_as_files(tmp_path: Path) -> None:
    """Whatever a file is called: `datasets` would take a split for `test`, and a row for a line."""
    names = ("a.txt", "test.txt", "train-b.TXT", "within/c.txt")
    (tmp_path / "within").mkdir()
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f"{number}\nthe quick\n\nbrown fox\n" * (5 + number))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "LICENSE").write_text("no text of the data set")
    with gzip.open(tmp_path / "d.txt.gz", "wt") as file:
        file.write("4\njumps over\n" * 5)
    expected = [(tmp_path / name).read_text() for name in names] + ["4\njumps over\n" * 5]
    assert sorted(stream_texts(str(tmp_path))) == expected
    cut = sequences(tmp_path, tokenizer=PLAIN, n_seqs=23, seq_len=7)
    listed = sequences(expected, tokenizer=PLAIN, n_seqs=23, seq_len=7)
    assert cut.n_documents == listed.n_documents == 5


@pytest.mark.parametrize("splits", [("train",), ("books", "train"), ("books", "code"), ()])
def test_a_saved_data_set_is_read(splits: tuple[str, ...], tmp_path: Path) -> None:
    others, texts = (Dataset.from_dict({"text": rows}) for rows in (["another"], TEXTS))
    read = "train" if "train" in splits else "books"
    named = DatasetDict({split: texts if split == read else others for split in splits})
    (named if splits else texts).save_to_disk(tmp_path / "saved")
    assert list(stream_texts(str(tmp_path / "saved"))) == TEXTS


CHAT = {"role": "user", "content": "a"}
DATA_SET = Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS})


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "given",
    [
        tuple(TEXTS),
        pd.Series(TEXTS, index=range(3, 214)),
        pd.Series(TEXTS).astype("category"),
        pd.DataFrame({"id": 1, "text": TEXTS}),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pa.table({"text": TEXTS}),
        {"id": range(211), "text": TEXTS},
        [{"text": text} for text in TEXTS],
        DATA_SET,
        DATA_SET["text"],
        DatasetDict(other=DATA_SET.select([5]), train=DATA_SET),
        DATA_SET.to_iterable_dataset(),
        IterableDatasetDict(train=DATA_SET.to_iterable_dataset()),
        iter(TEXTS),
    ],
    ids=lambda given: type(given).__name__,
)
def test_texts_are_read_from_whatever_holds_them(given: Any) -> None:
    expected = sequences(TEXTS, tokenizer=PLAIN, n_seqs=211, seq_len=7)
    found = sequences(given, tokenizer=PLAIN, n_seqs=211, seq_len=7)
    assert torch.equal(found.inputs, expected.inputs)
    assert found.n_documents == expected.n_documents


def test_of_texts_without_a_known_number_only_the_part_that_is_needed_is_read() -> None:
    endless = (f"{number} the quick brown fox" for number in count())
    assert len(sequences(endless, tokenizer=PLAIN, seq_len=7)) == 512
    assert int(next(endless).split()[0]) == 512


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([CHAT], r"texts\[0\] has no column 'text'; its columns: role, content"),
        (CHAT, "the table has no column 'text'; its columns: role, content"),
        ({}, "the table has no column 'text'; its columns: none"),
        (pd.DataFrame({"story": TEXTS}), "the table has no column 'text'; its columns: story"),
        ([*TEXTS, None], r"texts\[211\]: expected a text, got None"),
        (pd.Series(["a", float("nan")]), r"texts\[1\]: expected a text, got float"),
        ([[1, 2]], r"texts\[0\]: expected a text, got list"),
        (np.array([TEXTS]), r"texts\[0\]: expected a text, got ndarray \[211\]"),
        (np.array("one"), r"a list of texts, got ndarray \[\]"),
        ({"text": "one"}, "a list of texts, got str"),
        (b"one", "a list of texts, got bytes"),
        (3, "a list of texts, got int"),
        (None, "a list of texts, got None"),
        (pd.Series([], dtype=str), "a list of texts, got nothing"),
        (["a\0b"], r"texts\[0\] is not text: it holds NUL bytes"),
    ],
)
def test_what_holds_no_texts_is_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        sequences(given, tokenizer=PLAIN, n_seqs=3, seq_len=7)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "is_set"),
    [
        ("fineweb-edu", True),
        ("HuggingFaceFW/fineweb-edu", True),
        ("owner/name:config", True),
        ("owner/text.jsonl", False),
        ("./name", False),
        ("nowhere.txt", False),
        ("shipped", False),
    ],
)
def test_data_sets_are_distinguished_from_files(source: str, is_set: bool) -> None:
    assert is_data_set(source) is is_set


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"words": "a"}\n', "has no column 'text'; its columns: words"),
        ('{"text": 3}\n', r"\(row 1\): expected a text, got int"),
        ('{"text": ', "cannot read the data set"),
    ],
)
def test_a_broken_data_set_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        list(stream_texts(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_lone_surrogate_is_named_by_its_row_and_place_and_a_pair_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "\\ud83d\\ude00"}\n\n{"text": "ab\\ude00"}\n', encoding="ascii")
    with pytest.raises(UserError, match=r"rows\.jsonl \(line 3\) holds U\+DE00 at position 2"):
        documents(str(rows))
    rows.write_text('{"text": "\\ud83d\\ude00"}\n', encoding="ascii")
    assert documents(str(rows)) == ["\U0001f600"]
    table = pa.table({"text": pa.array([b"one", b"two\xed\xa0\xbd"]).view(pa.utf8())})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet \(row 2\).*0xed in position 3"):
        documents(str(tmp_path / "rows.parquet"))


def test_a_document_is_as_long_as_a_tokenizer_takes_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sets, "MOST_CHARACTERS", 7)
    (tmp_path / "a.txt").write_text("1234567")
    assert documents(str(tmp_path / "a.txt")) == ["1234567"]
    (tmp_path / "a.txt").write_text("12345678")
    with pytest.raises(UserError, match=r"a\.txt holds a document of 8 characters, more than 7"):
        documents(str(tmp_path / "a.txt"))


def test_a_lone_surrogate_of_a_text_in_memory_is_named_by_its_index() -> None:
    texts = [*TEXTS[:70], "ab\ud83d"]
    with pytest.raises(UserError, match=r"texts\[70\] holds U\+D83D at position 2"):
        list(TextReader(PLAIN).tokens(texts))
    model = load("rope-tiny")
    for given, name in (("a\udc80", "the text"), (["ab", "a\udc80"], r"texts\[1\]")):
        with pytest.raises(UserError, match=rf"{name} holds U\+DC80 at position 1"):
            capture_scores(model, given)


def test_an_unreachable_data_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot read the data set nobody/nothing: ") as error:
        list(stream_texts("nobody/nothing"))
    assert "\n" not in str(error.value)


def test_a_module_is_split_before_top_level_statements_and_nothing_is_lost() -> None:
    function = "@decorated\ndef f():\n" + "    x = 1\n" * 60 + "\n"
    source = '"""A module."""\n\nimport this\n\n' + function * 7
    parts = split(source)
    assert "".join(parts) == source
    assert len(parts) > 1
    assert all(part.startswith("@decorated") for part in parts[1:])
    assert all(len(part) >= 1200 for part in parts[:-1])
    assert split("print 'two'\n" * 200) == ["print 'two'\n" * 200]  # not this Python


def test_no_long_document_is_both_held_out_and_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some modules end alike, in a line or two that calls main()."""
    for package in ("asyncio", "concurrent", "email", "http", "importlib", "json", "xml"):
        copytree(Path(get_path("stdlib"), package), tmp_path / package)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    actual, theirs = (
        {document for document in stdlib_documents(held_out) if len(document) >= 1200}
        for held_out in (True, False)
    )
    assert not actual & theirs
    assert 0.05 < len(actual) / len(actual | theirs) < 0.3


def test_a_shipped_source_is_read_where_a_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = documents("prose")
    monkeypatch.chdir(tmp_path)
    for source in SOURCES:
        (tmp_path / source).mkdir()
        assert not is_data_set(source)
    assert documents("prose") == expected
