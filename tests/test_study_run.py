"""What ends a study early, and what is left of it."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from test_stream import out_of_memory_above

from nope_probe.errors import UserError
from nope_probe.hooks.capture import ScoreMaps, capture_scores
from nope_probe.results import unfinished
from nope_probe.scores_run import Settings, run
from nope_probe.study_run import StudyRun, run_study

SMALL = {"model": "nope-tiny", "layers": 1, "n_seqs": 13, "seq_len": 17, "folds": 4}
MAPS = ScoreMaps(folds=torch.zeros(4, 1, 17, 17).double(), counts=torch.tensor([4, 3, 3, 3]))


def run_out_of_memory(study: StudyRun) -> None:
    study.journal.maps("scores", lambda keeper: MAPS)
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_batch_that_does_not_fit_is_halved_with_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    settings = Settings(**SMALL | {"layers": 2}, batch_size=7)
    maps = []

    def capture_with_little_memory(study: StudyRun) -> None:
        model, inputs = study.loaded.model, study.windows("inputs").inputs
        with out_of_memory_above(4, model, layer=0):
            capture = partial(capture_scores, model, inputs, batch_size=7, n_folds=4)
            maps.append(study.journal.maps("scores", lambda keeper: capture(keeper=keeper)))

    run_study(tmp_path / "run", {}, settings, capture_with_little_memory)
    assert "a batch does not fit into memory: going on with 3 at a time" in capfd.readouterr().err
    assert maps[0].counts.sum() == 13


def test_want_of_memory_is_one_line_and_keeps_what_was_done(tmp_path: Path):
    settings = Settings(**SMALL)
    with pytest.raises(UserError, match="a single window of 17 tokens, or the model, does not fit"):
        run_study(tmp_path / "run", {}, settings, run_out_of_memory)
    assert (unfinished(tmp_path / "run") / "scores.safetensors").is_file()
    assert not (tmp_path / "run").exists()


def test_what_a_process_left_that_was_killed_after_it_wrote_the_run_is_cleared(tmp_path: Path):
    settings = Settings(**SMALL, out=tmp_path / "run")
    run(settings)
    manifest = (tmp_path / "run" / "manifest.json").read_bytes()
    unfinished(tmp_path / "run").mkdir()
    (unfinished(tmp_path / "run") / "about.json").touch()
    run(settings)
    assert (tmp_path / "run" / "manifest.json").read_bytes() == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_manifest_tells_the_weights_from_others(tmp_path: Path):
    def weights(name: str, model: str) -> str:
        run(Settings(**SMALL | {"model": model}, out=tmp_path / name))
        return json.loads((tmp_path / name / "manifest.json").read_text())["model"]["weights"]

    assert weights("a", "nope-tiny") == weights("b", "nope-tiny") != weights("c", "rope-tiny")
