"""Is the middle of a text lost? Influence, rollout, attention and scores of one model.

Each text has a draw of untrained weights; scores are those of one draw.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from math import exp
from typing import Any

import torch

from claims import Row, jackknife, load_once, run, typical
from nope_probe import LoadedModel, ablated, capture_scores, measure, sequences, untrained
from profiles import draw, largest_change, part_rows, profiles

MODELS = ("smollm2-135m",)
SAME = 1.1  # profiles whose parts differ by a smaller factor count as identical


@contextmanager
def state(loaded: LoadedModel, weights: str, rope: str, seed: int = 0) -> Iterator[Any]:
    """Run a model with trained or untrained weights, and without RoPE if it is removed."""
    with ExitStack() as stack:
        if weights == "untrained":
            stack.enter_context(untrained(loaded, seed))
        if rope == "RoPE removed":
            stack.enter_context(ablated(loaded, "rope"))
        yield loaded.model


def rows_of(name: str, n_seqs: int = 12, n_pos: int = 256) -> Iterator[Row]:
    """Yield the rows of a model."""
    loaded = load_once(name)
    data = sequences(tokenizer=loaded.tokenizer, n_seqs=n_seqs, seq_len=n_pos)
    ropes = ("RoPE", "RoPE removed") if any(loaded.info.rope_layers) else ("no RoPE",)
    influence = {}
    for weights, rope in product(("untrained", "trained"), ropes):
        where, parts, size = f"{weights}, {rope}", [], 1 if weights == "untrained" else 4
        for first in range(0, n_seqs, size):
            with state(loaded, weights, rope, seed=first) as model:
                parts.append(profiles(model, data.inputs[first : first + size], first))
        stacked = {of: torch.cat([part[of] for part in parts]) for of in parts[0]}
        for of, values in stacked.items():
            yield from part_rows(name, of, where, values)
        influence[where] = stacked["influence"]
        with state(loaded, weights, rope) as model:
            _, *layers = measure(capture_scores(model, data)).values()
        for of in ("lead", "amplitude", "locality"):
            is_claimed = of == "locality" and weights == "untrained" and rope != "RoPE"
            bound = {"above": 0.0} if is_claimed else {}
            yield Row.of("near_keys", name, f"scores: {where}: {of}", typical(layers, of), **bound)
    for weights in ("untrained", "trained") if len(ropes) == 2 else ():
        pair = torch.stack([influence[f"{weights}, {rope}"] for rope in ropes], 1)
        ends = map(exp, jackknife(pair, largest_change))
        bound = {"below": SAME} if weights == "untrained" else {}
        yield Row.of("same", name, f"influence: {weights}: largest change", ends, **bound)


if __name__ == "__main__":
    run(rows_of, draw, MODELS)
