"""Text files are read as documents, and unreadable ones are refused in one line."""

from pathlib import Path

import pandas as pd
import pytest

from nope_probe.data.documents import documents
from nope_probe.errors import UserError


def test_text_files_of_every_kind_give_the_same_documents(tmp_path: Path) -> None:
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
def test_an_unreadable_source_is_one_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        documents(str(tmp_path / name))
    assert "\n" not in str(error.value)
