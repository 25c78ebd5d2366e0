"""What the folder of every finished run holds, whatever the command."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from safetensors.numpy import load_file


def assert_whole(folder: Path) -> None:
    """Check that a run has the files of its manifest, and numbers that can be.

    No number is infinite, and a value lies within its interval.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"]
    files = {path.name for path in folder.iterdir()}
    assert files == {"manifest.json", *manifest["checksums"]}
    for path in folder.glob("*.csv"):
        assert_table(pd.read_csv(path), path.name)
    for path in folder.glob("*.safetensors"):
        for name, values in load_file(path).items():
            assert not np.isinf(values).any(), f"{path.name}: {name}"


def assert_table(table: pd.DataFrame, file: str) -> None:
    """Check the columns of numbers of a table."""
    numbers = table.select_dtypes("number")
    for name in numbers:
        assert not np.isinf(numbers[name]).any(), f"{file}: {name}"
        if f"{name}_low" in numbers:
            outside = (numbers[name] < numbers[f"{name}_low"]) | (
                numbers[name] > numbers[f"{name}_high"]
            )
            assert not outside.any(), f"{file}: {name} is outside of its interval"
