"""Measure how far maps in lower precision are from those of the same model in float64.

    python benchmarks/precision.py [--model rope-tiny] [--n-seqs 256] [--seq-len 64]

Prints a row per layer and precision: the largest error of a cell of the pattern, and the error of
its amplitude, both relative to the pattern's RMS, and the RMS itself in nats. All precisions read
the same weights (the model's, rounded to the precision) and the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from jaxtyping import Float
from torch import Tensor

from nope_probe import capture_scores, load, sequences
from nope_probe.data.sequences import Sequences
from nope_probe.maps.rows import pattern_rms, row_centred

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare score maps of a model in float32, bfloat16 and float16 with float64."""

    model: str = "rope-tiny"
    n_seqs: int = 256
    seq_len: int = 64
    device: str = "cpu"


def main(settings: Settings) -> None:
    tokenizer = load(settings.model).tokenizer
    tokens = sequences(tokenizer=tokenizer, n_seqs=settings.n_seqs, seq_len=settings.seq_len)
    truth = maps_of(settings, tokens, torch.float64)
    skip = int(tokens.bos)
    print("| layer | pattern, nats | precision | RMS error | largest error | amplitude off by |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, dtype in PRECISIONS.items():
        maps = maps_of(settings, tokens, dtype)
        for layer, (found, expected) in enumerate(zip(maps, truth, strict=True)):
            print(f"| L{layer} | {' | '.join(cells(name, found, expected, skip))} |")


def maps_of(
    settings: Settings, tokens: Sequences, dtype: torch.dtype
) -> Float[Tensor, "layer query_pos key_pos"]:
    model = load(settings.model, dtype=dtype, device=settings.device).model
    return capture_scores(model, tokens.inputs).mean.double()


def cells(
    precision: str,
    found: Float[Tensor, "query_pos key_pos"],
    expected: Float[Tensor, "query_pos key_pos"],
    skip: int,
) -> list[str]:
    """Return the cells of a row: the pattern's RMS, the precision, and its errors."""
    difference = row_centred(found, skip) - row_centred(expected, skip)
    difference = difference[~difference.isnan()]
    rms, other = (float(pattern_rms(each[None], skip)[0]) for each in (expected, found))
    return [
        f"{rms:.3f}",
        precision,
        f"{float(difference.square().mean()) ** 0.5 / rms:.0e}",
        f"{float(difference.abs().max()) / rms:.0e}",
        f"{other / rms - 1:+.0e}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
