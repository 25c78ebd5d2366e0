"""The folder of a run whose folder was not named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nope_probe.runtime.folder import settings_hash


def default_output_dir(command: str, subject: str, recorded: dict[str, Any]) -> Path:
    """Return the folder named after a run's command, its subject and the hash of its settings.

    Example:
        >>> default_output_dir("scores", "meta-llama/Llama-3.1-8B", {"seed": 0}).as_posix()
        'runs/scores-Llama-3.1-8B-de7d7744'
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(subject).name or subject).strip("-")
    parts = [command, *([name] if name else []), settings_hash(recorded)]
    return Path("runs") / "-".join(parts)
