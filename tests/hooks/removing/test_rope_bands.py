"""Removing a band of RoPE equals a model whose rotary embedding is edited in these pairs."""

from copy import deepcopy
from math import pi

import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import edited, plain_run
from support.tiny_models import Tiny, distance, tokens

from nope_probe import Ablation, ablated, load
from nope_probe.hooks.layers.passes import logits_of
from nope_probe.hooks.layers.tap import RemovedPairs
from nope_probe.maps.positions import Rotation
from nope_probe.removal import Component
from nope_probe.run.session import fingerprint


def test_pairs_of_a_length_that_nothing_turns_within_are_low() -> None:
    angles = torch.arange(2)[:, None] * torch.tensor([1.0, 0.5, 0.0])
    rotary = Rotation(pairs=None, cos=angles.cos(), sin=angles.sin())
    rope = RemovedPairs(bands=[Component("rope_low")], rotary=rotary)
    assert rope.mask(7).tolist() == [False, True, True]
    assert rope.mask(13).tolist() == [False, False, True]
    assert rope.mask(6).tolist() == [True, True, True]


# Frequencies that depend on the length: LongRoPE's long factors beyond 16 tokens, and dynamic NTK,
# whose base grows beyond the context of 7.
N_LONG = 43
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
SHORT, LONG = [1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 5.0, 7.0]
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 4 / 7},
    **{"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16},
}


def frequencies_at(kind: str, n_pos: int) -> list[float]:
    """Return the angle per position of each pair, by the formulas of LongRoPE and dynamic NTK."""
    if kind == "longrope":
        factors = LONG if n_pos > 16 else SHORT
        return [100.0 ** (-f / 4) / factor for f, factor in enumerate(factors)]
    base = 100.0 * max(4.0 * n_pos / 7 - 3.0, 1.0) ** (10 / 8)
    return [base ** (-f / 5) for f in range(5)]


@pytest.fixture(scope="module")
def of_length(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """Return the folders of a LongRoPE and a dynamic NTK model by their kind."""
    folder, sizes = tmp_path_factory.mktemp("of_length"), {"num_hidden_layers": 2}
    dynamic = {"rope_parameters": DYNAMIC, "max_position_embeddings": 7, "hidden_size": 60}
    longrope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}
    return {
        "dynamic": write_decoder("llama", folder, head_dim=10, **dynamic, **sizes),
        "longrope": write_decoder("phi3", folder, hidden_size=84, **longrope, **sizes),
    }


@pytest.mark.parametrize(
    ("kind", "band", "heads"),
    [
        *[("longrope", "rope_high", None), ("longrope", "rope_low", [1])],
        *[("dynamic", "rope_high", [1]), ("dynamic", "rope_low", None)],
    ],
)
def test_bands_are_by_the_frequencies_of_the_length_that_is_run(
    kind: str, band: str, heads: list[int] | None, of_length: dict[str, Tiny]
) -> None:
    model = load(str(of_length[kind].folder)).model
    for n_pos in (N_LONG, 7, 17, N_LONG):  # after a longer sequence, as after none
        angles, given = frequencies_at(kind, n_pos), tokens(2, n_pos)
        is_high = band == "rope_high"
        pairs = [p for p, angle in enumerate(angles) if (2 * pi / angle < n_pos) == is_high]
        where = {"layers": [1]} if heads is None else {"heads": {1: heads}}
        plain = deepcopy(of_length[kind].hf)
        expected = plain_run(edited(plain, ["rope"], where={1: heads}, pairs=pairs), given)
        with ablated(model, Ablation(remove=[band], **where)):
            assert distance(logits_of(model, given), expected.logits) <= 1e-5
    short, long = (frequencies_at(kind, n) for n in (2, N_LONG))
    assert [2 * pi / f < N_LONG for f in short] != [2 * pi / f < N_LONG for f in long]


@pytest.mark.parametrize(("kind", "n_pos"), [("longrope", 11), ("dynamic", 7)])
def test_rope_forgets_longer_sequences(kind: str, n_pos: int, of_length: dict[str, Tiny]) -> None:
    tiny = of_length[kind]
    model, given = load(str(tiny.folder)).model, tokens(3, n_pos)
    fresh = type(tiny.hf).from_pretrained(tiny.folder, attn_implementation="eager")
    with torch.inference_mode():  # after load's own pass of 13 tokens, and after another
        assert distance(model(given), plain_run(fresh, given).logits) <= 1e-5
        before = fingerprint(model)
        logits_of(model, tokens(1, 31))
        assert fingerprint(model) == before
        model(tokens(1, 31))  # a user's pass, whose frequencies transformers keeps
        for batch in (given, tokens(3, 17)):
            assert distance(logits_of(model, batch), plain_run(fresh, batch).logits) <= 1e-5
