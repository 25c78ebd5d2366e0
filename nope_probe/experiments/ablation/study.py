"""The attribution of the `ablate` command from Python, of a model by name or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Literal, Unpack

import pandas as pd

from nope_probe.components import Gain, Replacement
from nope_probe.experiments.ablation.run import Settings, run
from nope_probe.experiments.given import RunOptions, run_of
from nope_probe.runtime.folder import Run

if TYPE_CHECKING:
    from nope_probe.experiments.given import Model
    from nope_probe.hooks.layers.model import Given


class AblationOptions(RunOptions, total=False):
    """The options of `run_ablations`, which are the flags of `ablate`."""

    players: Sequence[str] | None
    bands: int
    replacement: Replacement | Sequence[Replacement] | None
    gain: Gain
    scope: Literal["both", "upstream", "own"]
    reparametrise: int
    offset_bins: Literal["auto", "all"]
    residuals_gb: float


@dataclass(frozen=True, kw_only=True, repr=False)
class AblationStudy(Run):
    """Where a model's positional pattern comes from, and which weights it needs.

    Its `tables` are those of the run's CSV files: `sources`, `players`, `interactions`, `pattern`,
    `non_relative`, `controls`, `mean_covariance`, `offsets`, `queries`. Its `maps` are those of
    maps.safetensors, [layer, row, key_pos] in nats: `score/<kept>`, `pattern/all`, `source/<term>`,
    `shapley/<player>`, ...
    """

    def __repr__(self) -> str:
        """Return the shares of the sources per layer, and what else there is."""
        first = "first key" if self.skip_keys == 1 else f"first {self.skip_keys} keys"
        skipped = f", the {first} left out" if self.skip_keys else ""
        lines = []
        for layer in self.manifest["layers"]:
            terms = self.sources.query("layer == @layer and term != 'position'")  # all but content
            shares = zip(terms["term"], terms["share"], strict=True)
            lines.append(
                f"  L{layer}  " + ", ".join(f"{term} {share:.2f}" for term, share in shares)
            )
        shape = " × ".join(map(str, self.maps["pattern/all"].shape))
        return "\n".join(
            [
                f"AblationStudy: shares of the positional pattern{skipped}",
                *lines,
                f"tables: {', '.join(name for name, table in self.tables.items() if len(table))}",
                fill(
                    f"maps ({shape}): {', '.join(self.maps)}",
                    width=100,
                    subsequent_indent="  ",
                    break_on_hyphens=False,
                ),
            ]
        )

    @property
    def sources(self) -> pd.DataFrame:
        """Per layer and term (content, mask, rope, ...), its RMS in nats and its share."""
        return self.tables["sources"]

    @property
    def players(self) -> pd.DataFrame:
        """Per layer and player, its Shapley share, what is lost without it, and alone."""
        return self.tables["players"]

    @property
    def skip_keys(self) -> int:
        """How many first keys the patterns leave out."""
        return int(self.manifest["skip_keys"])


def run_ablations(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Unpack[AblationOptions],
) -> AblationStudy:
    """Find where a model's positional pattern comes from, and which weights it needs.

    Runs the model with and without its mask, position encoding and weights, as the `ablate` command
    does. A progress bar goes to stderr.

    Args:
        model: a name, as the command takes it; what `load` returns; a HookedTransformer or a
            TransformerBridge. A model that is no name is studied in all its layers by default.
        inputs: what `capture_scores` takes; vectors for a parameter-free model. By default the
            sequences that the options describe (`data`, `n_seqs`, `seq_len`, ...).
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, with underscores: `players=["mask", "qk"]`, `layers=2`,
            `folds=4`, `replacement="mean"`, ...

    Raises:
        UserError: for what cannot be done, such as players that the model lacks, too few sequences,
            or a folder that holds another run.

    Example:
        >>> from nope_probe import load, run_ablations, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=64, seq_len=16)
        >>> study = run_ablations(loaded, data, players=["mask", "qk"])
        >>> study.sources.query("layer == 2 and term == 'mask'")["share"].item() > 0.9
        True
        >>> study.maps["source/mask"].shape
        (3, 16, 16)
    """
    return AblationStudy(**vars(run_of(run, Settings, model, inputs, out, options)))
