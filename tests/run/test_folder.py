"""A run on disk is complete or absent."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pandas as pd
import pytest

from nope_probe import Run, UserError, read_run
from nope_probe.files import json_checksum
from nope_probe.run.flags import folder_of
from nope_probe.run.folder import is_finished, write_run
from nope_probe.run.manifest import Manifest, read_manifest
from nope_probe.run.settings import FORMAT
from nope_probe.studies.ablate import Settings as Ablate
from nope_probe.studies.compare import Settings

SETTINGS = {"model": "rope-tiny", "layers": 3, "remove": ["w_q"]}


def a_run() -> Run:
    maps = {"score/mask": np.arange(18, dtype=np.float32).reshape(2, 3, 3)}
    table = pd.DataFrame({"layer": [1, 2], "share": [0.5, float("nan")]})
    return Run(
        manifest=Manifest(settings=SETTINGS),
        arrays={"maps": maps},
        tables={"sources": table, "empty": pd.DataFrame()},
        page="<html></html>",
    )


def test_what_is_written_is_read_back_by_whoever_may_read_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    folder.mkdir(parents=True)  # an empty one may be used
    assert is_finished(folder, SETTINGS, {}) is False
    write_run(folder, a_run())
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    (folder / "extra.csv").write_text("layer\n1\n")
    run = read_run(str(folder))
    assert set(run.tables) == {"sources", "empty"}
    assert set(run.arrays) == {"maps"}
    np.testing.assert_array_equal(run.maps["score/mask"], np.arange(18.0).reshape(2, 3, 3))
    assert run.tables["sources"]["share"].isna().tolist() == [False, True]
    assert run.tables["empty"].empty
    assert not list((tmp_path / "deep" / ".run.unfinished").iterdir())


def test_a_link_in_the_way_of_a_run_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / ".run.unfinished").mkdir()
    (tmp_path / ".run.unfinished" / "run").symlink_to(tmp_path / "elsewhere")
    write_run(tmp_path / "run", a_run())
    assert set(read_run(tmp_path / "run").tables) == {"sources", "empty"}
    assert not list((tmp_path / ".run.unfinished").iterdir())
    assert (tmp_path / "elsewhere" / "kept").is_file()


def test_one_flipped_bit_of_any_file_is_noticed(tmp_path: Path) -> None:
    write_run(tmp_path / "run", a_run())
    for path in (tmp_path / "run").iterdir():
        content = path.read_bytes()
        for place in range(0, len(content), 1 + len(content) // 3):
            flipped = bytes([content[place] ^ 1])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
            with pytest.raises(UserError, match=f"remove {tmp_path / 'run'} and run again"):
                read_run(tmp_path / "run")
        path.write_bytes(content)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    older = {name: value for name, value in manifest.items() if name != "checksum"}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(older))
    with pytest.raises(UserError, match="is not the file that the run wrote"):
        is_finished(tmp_path / "run", SETTINGS, {})


@pytest.mark.parametrize("written", [None, FORMAT - 1, FORMAT + 1])
def test_a_run_of_another_format_is_refused_wherever_it_is_read(
    written: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    write_run(folder, a_run())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == FORMAT
    entries = {k: v for k, v in manifest.items() if k not in ("checksum", "format")}
    entries |= {} if written is None else {"format": written}
    entries["checksum"] = json_checksum(entries)
    (folder / "manifest.json").write_text(json.dumps(entries))
    other = copytree(folder, tmp_path / "other")
    said = "an earlier format" if written is None else f"format {written}"
    message = f"holds a run of {said}, and .* reads format {FORMAT}: .* run its command again"
    for use in (
        read_run,
        read_manifest,
        lambda folder: is_finished(folder, SETTINGS, {}),
        lambda folder: Settings(runs=(folder, other)).validate(),
    ):
        with pytest.raises(UserError, match=message):
            use(folder)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000])
def test_a_broken_manifest_says_what_to_remove(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    for use in (read_run, lambda folder: is_finished(folder, SETTINGS, {})):
        with pytest.raises(UserError, match=f"its manifest cannot be read; remove {tmp_path} and"):
            use(tmp_path)


def test_nothing_is_left_of_a_run_that_fails_while_it_is_written(tmp_path: Path) -> None:
    class Unwritable(pd.DataFrame):
        def to_csv(self, *args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

    run = Run(tables={"sources": Unwritable()})
    with pytest.raises(UserError, match=r"cannot write the run to .*: No space left on device"):
        write_run(tmp_path / "run", run)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / ".run.unfinished").iterdir())


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    assert is_finished(tmp_path / "run", SETTINGS, {}) is False
    write_run(tmp_path / "run", a_run())
    assert is_finished(tmp_path / "run", SETTINGS, {}) is True
    with pytest.raises(UserError, match="other settings"):
        is_finished(tmp_path / "run", {**SETTINGS, "layers": 5}, {})
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="it is a file"):
        is_finished(tmp_path / "file", SETTINGS, {})
    with pytest.raises(UserError, match="holds other files"):
        is_finished(tmp_path, SETTINGS, {})


def test_different_settings_have_different_folders_by_default() -> None:
    first, same, other = (
        folder_of(Ablate(model="gpt2"), settings)
        for settings in (SETTINGS, dict(reversed(SETTINGS.items())), {**SETTINGS, "layers": 5})
    )
    assert first == same != other
