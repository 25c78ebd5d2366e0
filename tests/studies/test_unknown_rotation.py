"""Heads are measured where attention makes its own angles, but for what needs the rotation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.plain_attention import plain_attention
from support.rounding import NETWORK, assert_same

from nope_probe import head_scores, load, read_run
from nope_probe.errors import UserError
from nope_probe.studies.scores.settings import Settings
from nope_probe.studies.scores.study import run

FAMILIES = ["gptj", "codegen", "recurrent_gemma", "nanochat", "hunyuan_v1_dense"]


@pytest.mark.parametrize("name", FAMILIES)
def test_shares_that_need_the_rotation_are_empty_and_all_else_is_plain_transformers(
    name: str, tmp_path: Path
) -> None:
    tiny = write_decoder(name, tmp_path)
    tokens = torch.randint(3, 60, (8, 13), generator=torch.Generator().manual_seed(0))
    heads = head_scores(load(str(tiny.folder)), tokens)
    assert heads[["positional", "symbolic", "positional_low"]].isna().all(axis=None)
    assert (
        heads[["first_key", "previous_token", "induction", "induction_high"]].notna().all(axis=None)
    )
    for layer, plain in plain_attention(tiny.hf, tokens).items():
        weights = plain.scores.double().nan_to_num(neginf=-1e9, nan=-1e9).softmax(-1).mean(0)
        of_layer = heads[heads["layer"] == layer]
        assert_same(of_layer["first_key"], weights[:, 1:, 0].mean(-1), NETWORK)
        before = weights.diagonal(-1, dim1=-2, dim2=-1)[:, 1:].mean(-1)
        assert_same(of_layer["previous_token"], before, NETWORK)


def settings_of(folder: Path, place: Path) -> Settings:
    """Return the settings of a small run of all layers, into `run` of a place."""
    return Settings(
        model=str(folder),
        data="random",
        layers="all",
        n_seqs=8,
        seq_len=13,
        out=place / "run",
    )


@pytest.mark.usefixtures("undrawn")
def test_scores_says_before_the_capture_which_shares_are_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = write_decoder("gptj", tmp_path)
    settings = replace(settings_of(tiny.folder, tmp_path), per_head=True)
    result = read_run(run(settings))
    note = "Positional and symbolic shares of heads are empty: RoPE's pairs"
    told = capsys.readouterr().err
    assert told.index(note) < told.index("running 1 pass;")
    assert result.tables["heads"]["positional"].isna().all()
    assert result.manifest.without_shares == (0, 1, 2)
    assert note.partition(":")[0] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_bands_of_an_unknown_rotation_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    tiny = write_decoder(name, tmp_path)
    settings = replace(settings_of(tiny.folder, tmp_path), bands=2)
    with pytest.raises(UserError, match="--bands: RoPE's pairs of coordinates were not recognised"):
        run(settings)
