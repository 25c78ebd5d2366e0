"""What a command imports, and so waits for, in processes that begin without anything loaded."""

from pathlib import Path

from import_rule import modules
from test_imports import HEAVY, imported


def test_a_finished_run_is_shown_again_without_torch(tmp_path: Path) -> None:
    flags = ["--model", "rope-tiny", "--layers", "1", "--n-seqs", "8", "--seq-len", "11"]
    typed = ["ablate", "--remove", "none", *flags, "--out", str(tmp_path / "run")]
    code = f"import sys\nfrom nope_probe import ablate\nsys.argv = {typed}\nablate.main()"
    first, again = imported(code), imported(code)
    assert "torch" in first
    assert not HEAVY & again


def test_a_run_waits_for_transformer_lens_only_where_it_loads_a_model() -> None:
    runs = [name for name in modules() if ".studies." in name and name.endswith(".study")]
    loaded = imported("\n".join(f"import {name}" for name in runs))
    assert "torch" in loaded
    assert "transformer_lens" not in loaded


def test_hooks_import_no_transformer_lens() -> None:
    loaded = imported("import nope_probe.hooks.ablation, nope_probe.hooks.reading.capture")
    assert "transformer_lens" not in loaded
