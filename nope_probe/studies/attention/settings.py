"""The `attention` command's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from nope_probe.data.documents import read_text, validate_text
from nope_probe.errors import UserError
from nope_probe.files import JsonObject, reading, validate_regular
from nope_probe.maps import default_rows
from nope_probe.models.info import ModelInfo
from nope_probe.removal import Writer
from nope_probe.run.flags import COUNT, LAYERS, Bounds
from nope_probe.run.settings import LAYERS_ARG, MIN_KEYS, memory_of
from nope_probe.studies.removing import RemovingSettings

ALL_ROWS, ROWS = 256, 128  # the maps of all heads are many times those of all layers
MAP_BYTES = 2**30  # of the heads' maps that are in memory at once
TEXT_TOKENS = 512  # of a text on the page
TEXT_BYTES = 1_000_000  # of a text before it is cut into tokens
N_SEQS = 512  # of other texts
ALONE = "the text alone"  # the `data` of a run without other texts
# Flags about other texts.
OF_OTHERS = ("windows", "pack", "alpha", "shuffle", "seq_len", "beyond_context", "folds")


@dataclass(frozen=True, kw_only=True)
class Settings(RemovingSettings):
    """Split each head's attention into position, the same in every text, and content.

    Measures in nats how far each head's attention weights are from uniform, whether it decides
    about the first key or among the other keys, and which part of it is the same in every text.

    Attributes:
        data: Other texts, named as in `ablate` [shipped; with --text none, unless --n-seqs].
        n_seqs: How many sequences of other texts [512; with --text none, unless --data].
        query_rows: Queries of the maps: evenly spread; all up to 256 tokens, 128 above.
        text: A text of up to 512 tokens: the page shows where each head looks in it. With --n-seqs
            or --data it is compared with other texts, and has up to --seq-len tokens.
        text_file: A file (UTF-8) with this text.
        why: A head (L1H3) of the text: why it looks where it looks from --query, exactly, by
            position and by what each earlier component wrote.
        query: The token of the text that --why asks about: its number (-1 is the last), or a word.
        steps: Steps back from --why: 2 also says from which tokens the heads that wrote the most
            attended key, or the query, moved it, and why they looked there; what each moved is
            taken out of the model too, to measure what the score loses.
    """

    # None becomes a value as soon as settings are made: a text that comes alone is read alone.
    data: str | None = None  # type: ignore[assignment]
    n_seqs: Annotated[int | None, COUNT] = None  # type: ignore[assignment]
    layers: Annotated[int | str, LAYERS, LAYERS_ARG] = "all"
    query_rows: Annotated[int | None, COUNT] = None

    text: str | None = None
    text_file: Path | None = None
    why: str | None = None
    query: int | str = -1
    steps: Annotated[int, Bounds(1, 100)] = 1

    def __post_init__(self) -> None:
        is_alone = self._has_text and self.data is None and self.n_seqs is None
        data, n_seqs = (ALONE, 1) if is_alone else ("auto", N_SEQS)
        if self.data is None:
            object.__setattr__(self, "data", data)
        if self.n_seqs is None:
            object.__setattr__(self, "n_seqs", n_seqs)
        super().__post_init__()

    @property
    def shortest(self) -> int:
        """The fewest tokens of a sequence that has a query which is measured."""
        return MIN_KEYS

    @property
    def _has_text(self) -> bool:
        return self.text is not None or self.text_file is not None

    @property
    def reads_corpus(self) -> bool:
        """Whether the run reads other texts than the one that it is given."""
        return self.data != ALONE

    def without_effect(self) -> dict[str, str]:
        """Return by name why settings have no effect next to the others."""
        if self.reads_corpus:
            return super().without_effect()
        return dict.fromkeys(OF_OTHERS, "on a text alone: --n-seqs reads other texts too")

    def validate(self) -> None:
        """Check the settings that need no model."""
        super().validate()
        if self.shown_text is not None:
            self._validate_text(self.shown_text)
        if self.why is not None:
            self._validate_why(self.why)
        for flag, is_given in (("--query", self.query != -1), ("--steps", self.steps > 1)):
            if self.why is None and is_given:
                raise UserError(f"{flag} asks about a head: name it with --why")

    def _validate_text(self, text: str) -> None:
        if self.text is not None and self.text_file is not None:
            raise UserError("--text and --text-file are two texts: take one")
        if not text or len(text) > TEXT_BYTES:
            size = f"has {len(text):,} characters" if text else "is empty"
            raise UserError(f"the text {size}: expected one of up to {TEXT_TOKENS} tokens")
        validate_text(self.text_file or "--text", text)
        reason = "the text is read next to the mean of every query"
        if self.query_rows is not None:
            raise UserError(f"{reason}: leave out --query-rows")
        if self.seq_len > TEXT_TOKENS:
            raise UserError(f"{reason}: take {self.length_of(TEXT_TOKENS)} or less")

    def _validate_why(self, why: str) -> None:
        if not self._has_text:
            raise UserError("--why asks about a text: give it with --text")
        writer = Writer.parse(why)
        if writer is None or writer.head is None:
            raise UserError(f"--why {why}: expected a head, such as L1H3")
        replaced = [name for name in self.removed.ordered if name in ("w_q", "w_k")]
        if replaced:
            raise UserError(
                "--why splits the queries and keys that W_Q and W_K make: it has no terms without "
                f"{' and '.join(replaced)}"
            )

    @property
    def asked(self) -> tuple[int, int] | None:
        """The layer and head that `why` asks about, if any."""
        if self.why is None:
            return None
        writer = Writer(self.why)
        return writer.block, writer.head or 0

    def validate_layers(self, info: ModelInfo) -> None:
        """Check that the layers and the head of `why` exist.

        Raises:
            UserError: naming the possible heads.
        """
        super().validate_layers(info)
        layers = self.layers_with_maps(info)
        if self.asked is not None and (
            self.asked[0] not in layers or self.asked[1] >= info.n_heads
        ):
            raise UserError(
                f"--why {self.why}: there are L{layers[0]} to L{layers[-1]}, with the heads H0 to "
                f"H{info.n_heads - 1}"
            )

    @property
    def shown_text(self) -> str | None:
        """The text to show on the page, if any.

        Raises:
            UserError: for a file that cannot be read.
        """
        if self.text_file is None:
            return self.text
        validate_regular(self.text_file)
        failure = f"cannot read --text-file {self.text_file}"
        with reading(failure):
            return read_text(self.text_file, TEXT_BYTES + 1)

    def recorded(self) -> JsonObject:
        """Return the settings that identify the run: the text itself, wherever it comes from."""
        return super().recorded() | {"text": self.shown_text}

    unrecorded = (*RemovingSettings.unrecorded, "text_file")

    @property
    def removes(self) -> bool:
        """Whether the run removes components."""
        return bool(self.remove)

    @property
    def rows(self) -> int:
        """How many queries the maps have."""
        if self.query_rows is not None:
            return self.query_rows
        if self._has_text:
            return self.seq_len
        return default_rows(self.seq_len) if self.seq_len <= ALL_ROWS else ROWS

    def layers_at_a_time(self, info: ModelInfo) -> int:
        """Return how many layers' maps fit in memory at once, at least 1."""
        of_layer = 8 * self.folds * info.n_heads * self.rows * self.seq_len
        return max(1, MAP_BYTES // of_layer)

    def n_maps(self, info: ModelInfo) -> int:
        """Return how many maps the run holds; the weights and scores of a head count as one."""
        n_layers = min(self.layers_at_a_time(info), len(self.layers_with_maps(info)))
        every_row = self.query_rows or default_rows(self.seq_len)  # as `memory_of` counts
        return -(-n_layers * info.n_heads * self.rows // every_row)

    @property
    def least_memory(self) -> int:
        """The bytes of the sequences and of one head's fold maps, before the model is known."""
        return memory_of(replace(self, query_rows=self.rows), n_maps=1)
