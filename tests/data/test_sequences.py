"""Windows are drawn by the seed, disjoint and whole, and refused where they cannot be."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.tiny_models import D_VOCAB, tokenizer

from nope_probe.data.documents import documents
from nope_probe.data.sequences import cut, forces_bos, gaussian, sequences, starts
from nope_probe.data.stdlib import is_held_out, split, stdlib_documents
from nope_probe.errors import UserError

PLAIN, WITH_BOS = tokenizer(), tokenizer(forces_bos=True)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "is")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Twelve documents of about 300 tokens each, no two alike."""
    rows = [" ".join(WORDS[i * j * j % 11] for j in range(60)) + f" {i}" for i in range(1, 13)]
    pd.DataFrame({"text": rows}).to_json(tmp_path / "text.jsonl", orient="records", lines=True)
    return str(tmp_path / "text.jsonl")


def draw(source: str, **options: Any) -> torch.Tensor:
    settings = {"tokenizer": PLAIN, "n_seqs": 29, "seq_len": 17} | options
    return sequences(source, **settings).inputs


def numbered(*lengths: int) -> list[list[int]]:
    """Documents whose every token is another number: a token tells where it is from."""
    return [[1000 * d + t for t in range(length)] for d, length in enumerate(lengths)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("source", ["text", "random"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_windows_are_a_function_of_the_seed(source: str, shuffle: bool, text: str) -> None:
    source = text if source == "text" else source
    first, again, other = (draw(source, seed=seed, shuffle=shuffle) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_windows_do_not_overlap_and_are_whole_stretches_of_one_document() -> None:
    taken = cut(numbered(40, 57, 13, 7, 99), 15, 13, generator())
    assert taken.flatten().unique().numel() == 15 * 13
    assert torch.equal(taken, taken[:, :1] + torch.arange(13))
    assert set((taken // 1000).unique().tolist()) == {0, 1, 2, 4}


def test_each_document_gives_one_window_before_any_gives_two() -> None:
    owners = [int(w[0]) // 1000 for w in cut(numbered(99, 99, 99, 26), 9, 13, generator())]
    assert [sorted(owners[:4]), sorted(owners[4:8])] == [[0, 1, 2, 3]] * 2


def test_windows_begin_anywhere_in_a_document() -> None:
    starts = {int(cut(numbered(20), 1, 11, generator(seed))[0, 0]) for seed in range(200)}
    assert starts == set(range(10))


def test_windows_are_text_of_the_source(text: str) -> None:
    whole = documents(text)
    for window in draw(text):
        assert any(PLAIN.decode(window) in document for document in whole)


def test_shuffling_keeps_the_tokens_of_each_window_and_its_bos(text: str) -> None:
    settings = {"tokenizer": WITH_BOS, "seed": 4}
    plain, shuffled = draw(text, **settings), draw(text, shuffle=True, **settings)
    assert (shuffled[:, 0] == 0).all()
    assert not torch.equal(plain, shuffled)
    for before, after in zip(plain.tolist(), shuffled.tolist(), strict=True):
        assert Counter(before) == Counter(after)


def test_shuffling_makes_every_order_alike() -> None:
    """A token that is at place 0 of every window lands everywhere equally often."""
    settings = {"tokenizer": PLAIN, "n_seqs": 7000, "seq_len": 7, "seed": 1}
    drawn = sequences("random", **settings).inputs
    mixed = sequences("random", shuffle=True, **settings).inputs
    unique = [len(set(w)) == 7 for w in drawn.tolist()]
    places = (mixed == drawn[:, :1]).float()[torch.tensor(unique)].mean(0)
    assert (places - 1 / 7).abs().max() < 5 * (6 / 49 / sum(unique)) ** 0.5


def test_bos_is_forced_where_the_tokenizer_forces_it(text: str) -> None:
    assert forces_bos(WITH_BOS)
    assert not forces_bos(PLAIN)
    forced = sequences(text, tokenizer=WITH_BOS, n_seqs=5, seq_len=17)
    assert forced.bos
    assert forced.inputs.shape == (5, 17)
    assert (forced.inputs[:, 0] == 0).all()
    assert (forced.inputs[:, 1:] != 0).all()
    free = sequences(text, tokenizer=PLAIN, n_seqs=5, seq_len=17)
    assert not free.bos
    assert (free.inputs != 0).all()


@pytest.mark.parametrize(
    ("tokenizer", "bos", "begins"),
    [(PLAIN, "always", True), (WITH_BOS, "never", False), (WITH_BOS, "auto", True)],
)
def test_the_bos_policy_is_kept(tokenizer: Any, bos: Any, begins: bool, text: str) -> None:
    seen = sequences(text, tokenizer=tokenizer, n_seqs=5, seq_len=17, bos=bos)
    assert seen.bos is begins
    assert seen.inputs.shape == (5, 17)
    assert (seen.inputs[:, 0] == 0).all().item() is begins
    assert (seen.inputs[:, 1:] != 0).all()


def test_a_bos_token_that_does_not_exist_cannot_be_put_first(text: str) -> None:
    without = tokenizer()
    without.bos_token = None
    with pytest.raises(UserError, match="--bos always: the model's tokenizer has no BOS token"):
        sequences(text, tokenizer=without, n_seqs=5, seq_len=17, bos="always")


def test_windows_at_the_start_are_the_first_tokens_of_each_document_that_has_them(
    text: str,
) -> None:
    taken = starts(numbered(40, 12, 13, 99), 3, 13, generator())
    assert sorted(taken[:, 0].tolist()) == [0, 2000, 3000]
    assert torch.equal(taken, taken[:, :1] + torch.arange(13))
    first = sequences(text, tokenizer=WITH_BOS, n_seqs=12, seq_len=17, start="start").inputs
    ids = WITH_BOS(documents(text))["input_ids"]
    assert sorted(first.tolist()) == sorted(document[:17] for document in ids)


def test_too_few_documents_for_windows_at_the_start_are_counted() -> None:
    with pytest.raises(UserError, match="2 documents have 13 tokens or more, 3 were asked for"):
        starts(numbered(40, 30, 7), 3, 13, generator())


def test_random_tokens_are_all_ordinary_tokens() -> None:
    seen = draw("random", n_seqs=997, seq_len=7).unique()
    assert seen.tolist() == list(range(1, D_VOCAB))  # 0 is <bos>


def test_the_checksum_is_of_the_inputs(text: str) -> None:
    one, two = (sequences(text, tokenizer=PLAIN, n_seqs=5, seq_len=17, seed=s) for s in (0, 1))
    assert len(one) == 5
    assert one.sha256 == sequences(text, tokenizer=PLAIN, n_seqs=5, seq_len=17).sha256
    assert one.sha256 != two.sha256


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_gaussian_inputs_are_unit_vectors_with_the_expected_inner_product(alpha: float) -> None:
    """At d = 64 the exact expectation is a little below alpha: .1985039 and .4970566."""
    x = gaussian(4001, 5, 64, alpha=alpha, seed=2).inputs
    assert torch.allclose(x.norm(dim=-1), torch.ones(4001, 5), atol=1e-6)
    pairs = (x @ x.mT)[:, ~torch.eye(5).bool()].mean(1)
    expected = {0.0: 0.0, 0.2: 0.1985039, 0.5: 0.4970566}[alpha]
    assert abs(pairs.mean() - expected) < 4 * pairs.std() / 4001**0.5


@pytest.mark.parametrize("alpha", [-0.1, 1.0])
def test_an_alpha_that_cannot_be_is_an_error(alpha: float) -> None:
    with pytest.raises(UserError, match="expected 0 <= alpha < 1"):
        gaussian(3, 5, 8, alpha=alpha)


def test_text_files_of_every_kind_are_read_alike(tmp_path: Path) -> None:
    rows = pd.DataFrame({"n": [1, 2], "text": ["one: é", "two"]})
    rows.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    rows.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("one: é", encoding="utf-8")
    assert documents(str(tmp_path / "a.jsonl")) == ["one: é", "two"]
    assert documents(str(tmp_path / "a.parquet")) == ["one: é", "two"]
    assert documents(str(tmp_path / "a.txt")) == ["one: é"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "no data .* expected shipped, stdlib, random, gaussian or a file"),
        ("a.csv", b"text", r"cannot read .* expected a \.txt, \.jsonl or \.parquet"),
        ("a.txt", b"abc\xff", "is not text: byte 3 is not UTF-8"),
        ("a.txt", b"abc\0", "holds NUL bytes"),
        ("a.txt", b" \n", "is empty"),
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"", "has no column 'text'; its columns: none"),
        ("a.jsonl", b'{"text": "abc\xff"}', "is not text: byte .* is not UTF-8"),
        ("a.jsonl", b'{"words": "abc"}', "has no column 'text'; its columns: words"),
        ("a.jsonl", b'{"text": ', "is no valid jsonl file"),
        ("a.jsonl", b'{"text": 7}', "holds something else than text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', "holds something else than text"),
        ("a.jsonl", b'{"text": " "}', "is empty"),
        ("a.parquet", b"PAR1 and no more", "is no valid parquet file"),
        ("a.parquet", b"", "is no valid parquet file"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        documents(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "takes no text: use --data gaussian"),
        ({"n_seqs": 0}, "at least 1 window of 3 tokens, got 0 of 17"),
        ({"seq_len": 1}, "got 29 of 1"),
        ({"seq_len": 2, "tokenizer": WITH_BOS}, "got 29 of 2"),
        ({"seq_len": 1000}, "every document is shorter .* longest has .* 1000 are needed"),
        ({"n_seqs": 10_000}, "12 documents of 17 tokens or more give .* 10000 were asked for"),
    ],
)
def test_windows_that_cannot_be_cut_are_an_error(
    options: dict[str, Any], message: str, text: str
) -> None:
    with pytest.raises(UserError, match=message):
        draw(text, **options)


def test_the_error_says_how_many_windows_there_are() -> None:
    with pytest.raises(UserError, match="2 documents of 13 tokens or more give 5 windows, 6 were"):
        cut(numbered(40, 30, 7), 6, 13, generator())
    assert len(cut(numbered(40, 30, 7), 5, 13, generator())) == 5


def test_a_module_is_cut_before_top_level_statements_and_nothing_is_lost() -> None:
    function = "@decorated\ndef f():\n" + "    x = 1\n" * 60 + "\n"
    source = '"""A module."""\n\nimport this\n\n' + function * 7
    parts = split(source)
    assert "".join(parts) == source
    assert len(parts) > 1
    assert all(part.startswith("@decorated") for part in parts[1:])
    assert all(len(part) >= 1200 for part in parts[:-1])


def test_a_source_of_another_syntax_stays_whole() -> None:
    assert split("print 'two'\n" * 200) == ["print 'two'\n" * 200]


def test_no_document_of_a_windows_length_is_both_held_out_and_trained_on() -> None:
    """Some modules end alike, in a line or two that calls main()."""
    ours, theirs = (
        {document for document in stdlib_documents(held_out) if len(document) >= 1200}
        for held_out in (True, False)
    )
    assert not ours & theirs
    assert 0.05 < len(ours) / len(ours | theirs) < 0.3


def test_what_is_held_out_depends_on_the_modules_name_alone() -> None:
    names = [Path(f"package/module_{i}.py") for i in range(2000)]
    share = sum(map(is_held_out, names)) / len(names)
    assert abs(share - 0.13) < 4 * (0.13 * 0.87 / 2000) ** 0.5
    assert is_held_out(names[0]) == is_held_out(Path("package") / "module_0.py")


def test_the_shipped_text_gives_the_default_number_of_windows() -> None:
    shipped = sequences(tokenizer=WITH_BOS)
    assert shipped.inputs.shape == (512, 64)
    assert (shipped.name, shipped.bos) == ("shipped", True)
