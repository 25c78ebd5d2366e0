"""What a session needs to know of a command's settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nope_probe.runtime.resources import Needs

if TYPE_CHECKING:
    from nope_probe.models.info import ModelInfo
    from nope_probe.models.load import LoadedModel


@runtime_checkable
class SessionSettings(Protocol):
    """The settings of a command that runs in a session."""

    @property
    def out(self) -> Path | None:
        """The folder of the run; None for the default."""

    @property
    def device(self) -> str:
        """The torch device, or `auto`."""

    @property
    def checkpoint_every(self) -> int:
        """Batches between two saved states."""

    @property
    def subject(self) -> str:
        """What the default folder is named after."""

    def validate(self) -> None:
        """Check what can be checked without the model."""

    def validate_reach(self) -> None:
        """Check that model and data are within reach, without loading them."""

    def needs(self, info: ModelInfo | None = None) -> Needs:
        """Return what the run needs at least, of the model once it is loaded."""

    def recorded(self) -> dict[str, Any]:
        """Return the settings that identify the run, as the manifest holds them."""

    def sources(self) -> dict[str, Path | None]:
        """Return where the files of the model and of the data are; None for those elsewhere."""

    def load_model(self, device: str) -> LoadedModel | None:
        """Load the model of the run; None for a run without a model."""
