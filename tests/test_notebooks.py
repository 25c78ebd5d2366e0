"""The notebooks run without network, and their two files hold the same code."""

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = (
    "01_parameter_free",
    "02_hook_experiments",
    "03_attribution",
    "04_language_models",
    "05_behaviour",
)


def test_these_are_all_the_notebooks() -> None:
    for ending in ("py", "ipynb"):
        assert sorted(path.stem for path in FOLDER.glob(f"*.{ending}")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_holds_the_same_cells_and_no_output(name: str) -> None:
    text = jupytext.read(FOLDER / f"{name}.py")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    ours, theirs = ([(c.cell_type, c.source) for c in each.cells] for each in (text, notebook))
    assert ours == theirs
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_uses_public_names_alone(name: str) -> None:
    code = (FOLDER / f"{name}.py").read_text()
    assert "from nope_probe import " in code
    assert not re.findall(r"nope_probe\.\w+", code)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(shown) >= 2
