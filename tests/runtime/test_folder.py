"""A run on disk is complete or absent."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nope_probe.errors import UserError
from nope_probe.runtime.folder import Run, check_output_dir, read_run, settings_hash, write_run

SETTINGS = {"model": "rope-tiny", "layers": 3, "players": ["mask", "w_q"]}


def a_run() -> Run:
    maps = {"score/mask": np.arange(18, dtype=np.float32).reshape(2, 3, 3)}
    tokens = {"tokens": np.arange(7)[None]}
    table = pd.DataFrame({"layer": [1, 2], "share": [0.5, float("nan")]})
    return Run(
        manifest={"settings": SETTINGS},
        arrays={"maps": maps, "tokens": tokens},
        tables={"sources": table, "empty": pd.DataFrame()},
        page="<html></html>",
    )


def test_what_is_written_is_read_back(tmp_path: Path):
    write_run(tmp_path / "deep" / "run", a_run())
    run = read_run(tmp_path / "deep" / "run")
    np.testing.assert_array_equal(
        run.arrays["maps"]["score/mask"], np.arange(18.0).reshape(2, 3, 3)
    )
    assert run.tables["sources"]["share"].isna().tolist() == [False, True]
    assert run.tables["empty"].empty
    assert run.manifest["complete"] is True
    assert not list((tmp_path / "deep").glob(".*"))


def test_a_link_in_the_way_of_a_run_is_removed_and_what_it_leads_to_stays(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / ".run.unfinished").mkdir()
    (tmp_path / ".run.unfinished" / "run").symlink_to(tmp_path / "elsewhere")
    write_run(tmp_path / "run", a_run())
    assert read_run(tmp_path / "run").manifest["complete"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run"]
    assert (tmp_path / "elsewhere" / "kept").is_file()


def test_a_run_without_tokens_is_read_from_a_path_as_text(tmp_path: Path):
    maps = {"score/alpha=0": np.ones((2, 3, 3), np.float32)}
    write_run(tmp_path / "run", Run(manifest={"settings": {}}, arrays={"maps": maps}))
    run = read_run(str(tmp_path / "run"))
    assert set(run.arrays) == {"maps"}
    np.testing.assert_array_equal(run.maps["score/alpha=0"], maps["score/alpha=0"])


def test_whoever_may_read_the_page_may_read_the_arrays(tmp_path: Path):
    write_run(tmp_path / "run", a_run())
    modes = {path.stat().st_mode for path in (tmp_path / "run").iterdir()}
    assert len(modes) == 1


def test_a_changed_file_is_noticed(tmp_path: Path):
    write_run(tmp_path / "run", a_run())
    (tmp_path / "run" / "sources.csv").write_text("layer,share\n1,0.6\n")
    with pytest.raises(UserError, match=r"sources\.csv is not the file that the run wrote"):
        read_run(tmp_path / "run")


def test_nothing_is_left_of_a_run_that_fails_while_it_is_written(tmp_path: Path):
    class Unwritable(pd.DataFrame):
        def to_csv(self, *args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

    run = Run(manifest={}, tables={"sources": Unwritable()})
    with pytest.raises(UserError, match=r"cannot write the run to .*: No space left on device"):
        write_run(tmp_path / "run", run)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_the_same_settings_is_a_finished_run(tmp_path: Path):
    assert check_output_dir(tmp_path / "run", SETTINGS) is False
    write_run(tmp_path / "run", a_run())
    assert check_output_dir(tmp_path / "run", SETTINGS) is True


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path):
    write_run(tmp_path / "run", a_run())
    with pytest.raises(UserError, match="other settings"):
        check_output_dir(tmp_path / "run", {**SETTINGS, "layers": 5})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="it is a file"):
        check_output_dir(tmp_path / "file", SETTINGS)
    with pytest.raises(UserError, match="file is a file"):
        check_output_dir(tmp_path / "file" / "run", SETTINGS)
    with pytest.raises(UserError, match="holds other files"):
        check_output_dir(tmp_path, SETTINGS)


def test_an_empty_folder_may_be_used(tmp_path: Path):
    (tmp_path / "run").mkdir()
    assert check_output_dir(tmp_path / "run", SETTINGS) is False
    write_run(tmp_path / "run", a_run())
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["complete"]


def test_a_broken_manifest_is_a_users_error(tmp_path: Path):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="its manifest cannot be read"):
        read_run(tmp_path)


def test_different_settings_have_different_hashes():
    assert settings_hash(SETTINGS) == settings_hash(dict(reversed(SETTINGS.items())))
    assert settings_hash(SETTINGS) != settings_hash({**SETTINGS, "layers": 5})
