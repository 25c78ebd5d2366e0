"""The progress bar: which phase and condition it names, and where it resumes."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nope_probe.runtime.checkpoint import RunCheckpoint
from nope_probe.runtime.progress import phase_of

STATE = {"sum": torch.ones(3)}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gains", "calibration"),
        ("score/mask+w_q", "scores, condition mask+w_q"),
        ("score-random/mask/L2", "scores (random), condition mask, L2"),
        ("shuffled/none", "shuffled tokens, condition none"),
        ("reparametrised-1/gains", "reparametrised (1), condition gains"),
        ("alpha=0.2", "alpha=0.2"),
    ],
)
def test_a_stream_is_named_by_its_phase_and_condition(key: str, words: str) -> None:
    assert phase_of(key) == words


def test_the_bar_names_the_stream_its_place_and_estimates_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunCheckpoint() as run, run.progress(["gains", "score/mask"], 7):
        with run.stream("gains") as stream:
            stream.advance(7)
        with run.stream("score/mask") as stream:
            stream.advance(7)
    shown = capsys.readouterr().err
    assert "calibration (1 of 2):   0%|" in shown
    assert "scores, condition mask (2 of 2): " in shown
    assert " left" in shown
    assert "resuming" not in shown


def interrupt(folder: Path) -> None:
    """Finish the first of two streams of 11, and two batches of the second."""
    with suppress(KeyboardInterrupt), RunCheckpoint(folder, every=1) as run:
        run.save("a", STATE)
        with run.progress(["a", "b"], 11), run.stream("b") as stream:
            for size in (3, 2):
                stream.save(STATE)
                stream.advance(size)
            raise KeyboardInterrupt


def test_a_resumed_run_says_where_and_counts_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "run")
    assert "resuming at 50%" in capsys.readouterr().err  # a was finished, of a and b
    with RunCheckpoint(tmp_path / "run") as run, run.progress(["a", "b"], 11):
        with run.stream("b") as stream:
            assert stream.restore().keys() == STATE.keys()
            for size in (3, 2, 6):
                stream.advance(size)
        assert run.bar is not None
        assert run.bar.n == 22
    assert capsys.readouterr().err.startswith(
        "resuming at 64%\n"
    )  # 14 of 22: a state is saved before its batch counts


def test_another_streams_state_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "run")
    capsys.readouterr()
    with RunCheckpoint(tmp_path / "run") as run, run.progress(["c", "d"], 11):
        pass
    assert "resuming" not in capsys.readouterr().err
