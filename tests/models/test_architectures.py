"""Maps and terms that a command writes are those of eager transformers' scores."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import run_command
from support.edited_model import edited
from support.plain_attention import plain_scores
from support.plain_states import agree
from support.rounding import NETWORK
from support.tiny_models import ByName

from nope_probe import ablate

pytestmark = pytest.mark.usefixtures("undrawn")

N_SEQS = 23


def maps_of(command: Any, folder: Path, out: Path, *arguments: object) -> dict[str, torch.Tensor]:
    """Run a command as a user types it, and return its maps and tokens."""
    small = ["--n-seqs", N_SEQS, "--folds", 5, "--batch-size", 11, "--data", "random"]
    given = [*small, "--layers", "all", "--model", folder, "--out", out, *arguments]
    run_command(command, *given)
    return load_file(out / "maps.safetensors") | load_file(out / "tokens.safetensors")


def test_the_maps_of_a_command_are_the_mean_of_transformers_softmax_inputs(
    tiny: ByName, tmp_path: Path
) -> None:
    model = tiny("neox")
    of_run = ("--remove", "none", "--seq-len", 13, "--per-head")
    maps = maps_of(ablate, model.folder, tmp_path / "run", *of_run)
    true = plain_scores(model.hf, maps["tokens"])
    assert true.shape[:2] == (model.hf.config.num_hidden_layers, N_SEQS)
    assert agree(maps["score/intact"], true.mean((1, 2)).float())
    assert agree(maps["score_per_head/intact"], true.mean(1).float())


@pytest.fixture(scope="module")
def gpt2(tiny: ByName, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The maps of GPT-2's sources and weights that the `ablate` command writes."""
    out = tmp_path_factory.mktemp("runs") / "gpt2"
    arguments = ["--seq-len", 13, "--replacement", "identity", "--gain", "norm"]
    arguments += ["--remove", "qk"]
    return maps_of(ablate, tiny("gpt2").folder, out, *arguments)


def pattern(scores: torch.Tensor) -> torch.Tensor:
    """Return each row less its mean over the keys between the first and the query, row by row."""
    centred = torch.full_like(scores, torch.nan)
    for i in range(2, scores.shape[-1]):
        row = scores[..., i, 1:i]
        centred[..., i, 1:i] = row - row.mean(-1, keepdim=True)
    return centred


def flattened(hf: Any, n_pos: int) -> Any:
    """Return a copy whose first n_pos position embeddings are their mean."""
    copied = deepcopy(hf)
    copied.transformer.wpe.weight[:n_pos] = copied.transformer.wpe.weight[:n_pos].mean(0)
    return copied


def test_gpt2s_sources_are_mask_and_learned_positions_and_add_up_to_the_pattern(
    gpt2: dict[str, torch.Tensor], tiny: ByName
) -> None:
    terms = {name.removeprefix("term/") for name in gpt2 if name.startswith("term/")}
    assert terms == {"without_sources", "mask", "pos_embed", "mask_x_pos_embed"}
    whole = pattern(plain_scores(tiny("gpt2").hf, gpt2["tokens"]).mean((1, 2)))
    added = torch.stack([gpt2[f"term/{name}"].double() for name in terms]).sum(0)
    assert agree(added[..., 1:], whole[..., 1:])


def test_each_of_gpt2s_sources_is_a_difference_of_edited_models(
    gpt2: dict[str, torch.Tensor], tiny: ByName
) -> None:
    hf, inputs = tiny("gpt2").hf, gpt2["tokens"]
    patterns = {}
    for remove in ((), ("mask",), ("pos_embed",), ("mask", "pos_embed")):
        model = flattened(hf, inputs.shape[1]) if "pos_embed" in remove else hf
        model = edited(model, [name for name in remove if name == "mask"])
        patterns[remove] = pattern(plain_scores(model, inputs).mean((1, 2)))
    neither = patterns["mask", "pos_embed"]
    true = {
        "without_sources": neither,
        "mask": patterns[("pos_embed",)] - neither,
        "pos_embed": patterns[("mask",)] - neither,
        "mask_x_pos_embed": patterns[()] - patterns[("mask",)] - patterns[("pos_embed",)] + neither,
    }
    scale = patterns[()].nan_to_num().abs().max()
    for name, term in true.items():
        error = (gpt2[f"term/{name}"].double() - term).nan_to_num().abs().max()
        assert error <= NETWORK * scale, name
    assert true["pos_embed"].nan_to_num().abs().max() > 0.1 * scale
