"""The standard library's documents, and which of them are held out."""

from nope_probe.data.stdlib import is_held_out, split, stdlib_documents


def test_a_module_is_split_before_top_level_statements_and_nothing_is_lost() -> None:
    function = "@decorated\ndef f():\n" + "    x = 1\n" * 60 + "\n"
    source = '"""A module."""\n\nimport this\n\n' + function * 7
    parts = split(source)
    assert "".join(parts) == source
    assert len(parts) > 1
    assert all(part.startswith("@decorated") for part in parts[1:])
    assert all(len(part) >= 1200 for part in parts[:-1])
    assert split("print 'two'\n" * 200) == ["print 'two'\n" * 200]  # not this Python


def test_no_long_document_is_both_held_out_and_for_training() -> None:
    """Some modules end alike, in a line or two that calls main()."""
    ours, theirs = (
        {document for document in stdlib_documents(held_out) if len(document) >= 1200}
        for held_out in (True, False)
    )
    assert not ours & theirs
    assert 0.05 < len(ours) / len(ours | theirs) < 0.3


def test_13_percent_of_names_are_held_out() -> None:
    names = [f"package/module_{i}.py" for i in range(2000)]
    share = sum(map(is_held_out, names)) / len(names)
    assert abs(share - 0.13) < 4 * (0.13 * 0.87 / 2000) ** 0.5
