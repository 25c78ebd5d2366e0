"""The attribution in memory is the ablate command's, for any model of TransformerLens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from nope_probe import Ablation, ablated, capture_scores, load, run_ablations, sequences
from nope_probe.experiments.ablation.run import Settings, run
from nope_probe.experiments.ablation.study import AblationStudy

SMALL = {"n_seqs": 23, "seq_len": 17, "seed": 3}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load("rope-tiny", n_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command, with every part that it can have."""
    return run(
        Settings(
            **SMALL,
            model="rope-tiny",
            layers=2,
            folds=5,
            batch_size=7,
            players=("mask", "rope", "qk"),
            reparametrise=1,
            out=tmp_path_factory.mktemp("runs") / "run",
        )
    )


@pytest.fixture(scope="module")
def study(loaded: Any) -> AblationStudy:
    """The same in memory."""
    data, shuffled = (
        sequences(tokenizer=loaded.tokenizer, shuffle=shuffle, **SMALL) for shuffle in (False, True)
    )
    return run_ablations(
        loaded.model,
        data,
        players=["mask", "rope", "qk"],
        n_folds=5,
        batch_size=7,
        shuffled=shuffled,
        reparametrise=1,
        seed=3,
    )


def test_the_tables_are_those_that_the_command_writes(folder: Path, study: AblationStudy) -> None:
    written = {path.stem: path.read_text() for path in folder.glob("*.csv")}
    assert written.keys() == study.tables.keys()
    for name, table in study.tables.items():
        assert table.to_csv(index=False, float_format="%.8g") == written[name]


def test_the_maps_are_those_that_the_command_writes(folder: Path, study: AblationStudy) -> None:
    written = load_file(folder / "maps.safetensors")
    assert written.keys() == study.maps.keys()
    for name, values in study.maps.items():
        np.testing.assert_array_equal(values, written[name])


def test_the_parts_have_names_of_their_own(study: AblationStudy) -> None:
    assert set(study.sources["term"]) == {"content", "mask", "rope", "mask_x_rope", "position"}
    assert list(study.players.query("layer == 1")["player"]) == ["mask", "rope", "qk"]
    assert set(study.patterns["kept"]) >= {"mask+rope+w_q+w_k", "rope+w_q+w_k", "none"}
    assert set(study.controls["tokens"]) == {"text", "shuffled"}
    assert study.skip_keys == 1
    assert study.tables["pattern"] is study.patterns


def test_a_progress_bar_counts_every_condition(
    loaded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = sequences(tokenizer=loaded.tokenizer, **SMALL)
    run_ablations(loaded.model, data, players=["sources"], n_folds=5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{4 * 23}/{4 * 23}" in shown.err  # all, without mask, without RoPE, without either


def test_tokens_that_begin_alike_leave_the_first_key_out(loaded: Any) -> None:
    tokens = sequences(tokenizer=loaded.tokenizer, **SMALL).inputs
    skipped = {
        name: run_ablations(loaded.model, inputs, players=["sources"], n_folds=5).skip_keys
        for name, inputs in (("bos", tokens), ("none", tokens[:, 1:]))
    }
    assert skipped == {"bos": 1, "none": 0}


@pytest.mark.parametrize("spec", ["bridge:gpt2", "hooked:llama"])
def test_a_model_of_ones_own_is_studied(
    spec: str, model_of: Callable[[str], tuple[Any, str]]
) -> None:
    model, _ = model_of(spec)
    tokens = torch.randint(200, (19, 11), generator=torch.Generator().manual_seed(0))
    position = "pos_embed" if spec == "bridge:gpt2" else "rope"
    study = run_ablations(model, tokens, players=["sources"], n_layers=1, n_folds=4)
    terms = ["content", "mask", position, f"mask_x_{position}", "position"]
    assert list(study.sources["term"]) == terms
    with ablated(model, Ablation(remove=[position])):
        truth = capture_scores(model, tokens, layers=[0]).mean.float().numpy()
    np.testing.assert_allclose(study.maps["score/mask"], truth, rtol=1e-5, atol=1e-5)


def test_a_parameter_free_model_takes_vectors() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(13, 11, 64), dim=-1)
    study = run_ablations(load("parameter-free", n_layers=2).model, vectors, n_folds=4)
    assert study.skip_keys == 0
    assert list(study.players["player"]) == ["mask", "mask"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_folds": 3}, "expected from 4 to 23 folds for 23 sequences, got 3"),
        ({"n_folds": -1}, "expected from 4 to 23 folds for 23 sequences, got -1"),
        ({"n_folds": 24}, "expected from 4 to 23 folds for 23 sequences, got 24"),
        ({"n_layers": 3}, "expected from 1 to 2 layers, got 3"),
        ({"skip_keys": 15}, "expected from 0 to 14 skipped keys at 17 positions, got 15"),
        ({"players": ["mlp", "w_x"]}, "unknown player 'w_x'"),
        ({"players": ["pos_embed"]}, "the model has no pos_embed; it has mask, rope"),
        ({"players": ["sources"], "reparametrise": 1}, "reparametrise has no effect where no"),
        ({"players": [f"rope[{n}:{n + 1}]" for n in range(11)]}, "11 players have 2,048 cond"),
    ],
)
def test_mistakes_are_named_before_anything_is_run(
    settings: dict[str, Any], message: str, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = sequences(tokenizer=loaded.tokenizer, **SMALL).inputs
    monkeypatch.setattr("nope_probe.hooks.reading.streaming.run_forward", None)
    with pytest.raises(ValueError, match=message):
        run_ablations(loaded.model, tokens, **settings)


def test_few_sequences_are_as_many_folds_and_fewer_than_four_have_no_intervals(
    loaded: Any,
) -> None:
    tokens = sequences(tokenizer=loaded.tokenizer, **SMALL).inputs
    few = run_ablations(loaded.model, tokens[:5], players=["mask"])
    same = run_ablations(loaded.model, tokens[:5], players=["mask"], n_folds=5)
    assert few.sources.equals(same.sources)
    with pytest.raises(ValueError, match="expected 4 sequences or more for intervals, got 3"):
        run_ablations(loaded.model, tokens[:3])


def test_the_model_is_what_it_was_afterwards(loaded: Any, study: AblationStudy) -> None:
    untouched = load("rope-tiny", n_layers=2).model
    tokens = torch.arange(1, 12)[None]
    assert torch.equal(loaded.model(tokens), untouched(tokens))


def test_shuffled_tokens_have_no_shuffled_control(loaded: Any) -> None:
    tokens = sequences(tokenizer=loaded.tokenizer, shuffle=True, **SMALL)
    with pytest.raises(ValueError, match="the tokens are shuffled already"):
        run_ablations(loaded.model, tokens, shuffled=tokens)
