"""What a run needs is held against what is here, less what it has saved."""

from pathlib import Path

import pytest

from nope_probe.errors import UserError
from nope_probe.experiments.simulation.theory import Settings, print_critical_alphas
from nope_probe.runtime import resources
from nope_probe.runtime.folder import checkpoint_dir
from nope_probe.runtime.places import Needs, validate_room


def test_what_is_saved_is_not_needed_again_and_the_page_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "run", 4_800_000
    monkeypatch.setattr(resources, "disk_here", lambda folder: 10_000_000)
    validate_room(Needs(disk=10_000_000 - page), out, "--seq-len")
    with pytest.raises(UserError, match="at least 10 MB of disk space, and 10 MB are free at"):
        validate_room(Needs(disk=10_000_001 - page), out, "--seq-len")
    checkpoint_dir(out).mkdir()
    (checkpoint_dir(out) / "maps").write_bytes(bytes(1_000))
    validate_room(Needs(disk=10_001_000 - page), out, "--seq-len")
    with pytest.raises(UserError, match="of disk space"):
        validate_room(Needs(disk=10_001_001 - page), out, "--seq-len")
    validate_room(Needs(disk=10**15), None, "--seq-len")


def test_theory_needs_the_maps_that_the_mean_field_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "memory_here", lambda: 16 * 10**9)
    with pytest.raises(UserError, match=r"at least 25\.1 GB of memory, and 16 GB are here; l"):
        print_critical_alphas(Settings(seq_len=4096))
