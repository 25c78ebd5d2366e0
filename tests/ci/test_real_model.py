"""Real language models from the package index, SmolLM2-135M-Instruct and Gemma 3 270M."""

from functools import cache

import pytest
import torch
from support.decoder_errors import map_error
from support.tiny_models import Tiny
from transformers import AutoConfig, AutoModelForCausalLM

from nope_probe import (
    LoadedModel,
    capture_attention,
    load,
    run_ablations,
    run_attention,
    sequences,
    split_attention,
)
from nope_probe.models.names import FETCHED

FIRST = {"smollm2-135m": 4, "gemma-3-270m": 6}  # layers; Gemma's L5 is its first without a window


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not FETCHED[name].is_file(), reason="make real fetches the model")


pytestmark = needs("smollm2-135m")


@cache
def first_layers(name: str) -> tuple[LoadedModel, Tiny]:
    """The first layers, and the same in plain transformers with 17 sequences of 64 tokens."""
    file, real = FETCHED[name], load(name, n_layers=FIRST[name])
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**place)
    config.num_hidden_layers = FIRST[name]
    hf = AutoModelForCausalLM.from_pretrained(
        **place, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = sequences("shipped", tokenizer=real.tokenizer, n_seqs=17, seq_len=64).inputs
    return real, Tiny(name=name, folder=file.parent, hf=hf.eval(), tokens=inputs)


@pytest.fixture(scope="module")
def real() -> LoadedModel:
    return first_layers("smollm2-135m")[0]


@pytest.mark.parametrize("removal", ["intact", "mask", "rope"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in FIRST])
def test_maps_of_the_first_layers_are_plain_transformers_own(name: str, removal: str) -> None:
    real, plain = first_layers(name)
    assert map_error(real.model, plain, removal) <= 2e-5


@needs("gemma-3-270m")
def test_every_text_of_gemma_begins_with_its_bos_token() -> None:
    real, plain = first_layers("gemma-3-270m")
    assert (plain.tokens[:, 0] == real.tokenizer.bos_token_id).all()
    assert real.tokenizer("Mary").input_ids[0] == real.tokenizer.bos_token_id


def test_values_of_layers_are_those_of_plain_transformers(real: LoadedModel) -> None:
    """Lead and kept, nats, computed by plain transformers on the same 64 sequences."""
    data = sequences("shipped", tokenizer=real.tokenizer, n_seqs=64, seq_len=64)
    study = run_ablations(real.model, data, layers=4)
    known = {
        "intact": ((2.68, 0.66), (6.16, 0.95)),
        "mask": ((-0.54, 0.70), (-0.98, 1.02)),
        "rope": ((2.38, 0.01), (4.02, -0.03)),
        "mask+rope": ((0.04, 0.00), (-0.07, -0.01)),
        "w_q": ((2.30, 0.65), (5.66, 0.93)),
        "w_k": ((-0.50, 0.49), (-0.59, 0.51)),
        "w_q+w_k": ((-0.78, 0.69), (-1.12, 1.01)),
        "w_o": ((-0.52, 0.73), (-0.92, 1.01)),
    }
    table = study.tables["pattern"].set_index(["removed", "layer"])[["lead", "order"]]
    for removed, of_layers in known.items():
        for layer, values in zip((2, 3), of_layers, strict=True):
            assert table.loc[(removed, layer)].to_numpy() == pytest.approx(values, abs=0.1)


# Positional share of each head among the other keys, in %, from eager weights of transformers.
POSITIONAL = {
    1: (58, 34, 83, 29, 40, 30, 28, 42, 29),
    2: (7, 91, 68, 11, 12, 11, 12, 8, 12),
    3: (12, 10, 28, 7, 4, 2, 2, 24, 35),
}


def test_heads_have_the_known_positional_shares(real: LoadedModel) -> None:
    data = sequences("shipped", tokenizer=real.tokenizer, n_seqs=512, seq_len=64)
    assert data.documents is not None
    maps = capture_attention(real.model, data.inputs[:384], documents=data.documents[:384])
    heads = split_attention(maps)
    for layer, expected in POSITIONAL.items():
        shares = [100 * heads[layer, head].others_share.value for head in range(9)]
        assert shares == pytest.approx(expected, abs=1.5)
    split = heads[3, 0]
    information = split.information.value
    assert information == pytest.approx(2.58, abs=0.01)
    names = ("first_position", "first_content", "others_position", "others_content")
    parts = [100 * getattr(split, name).value / information for name in names]
    assert parts == pytest.approx([49, 9, 5, 37], abs=1.5)
    assert 100 * split.positional_share.value == pytest.approx(49 + 5, abs=1.5), "both rows"


def test_without_what_the_previous_token_head_moved_the_induction_head_looks_less() -> None:
    """Known from plain transformers, with L16H0's part from " Whit" taken out at "field"."""
    text = (
        "Mary Whitfield met Tom at the station. Later that day, Mary Whitfield wrote him a letter."
    )
    run = run_attention("smollm2-135m", text=text, why="L18H6", query=14, steps=2)
    steps = run.tables["why_steps"]
    row = steps.loc[steps[steps["moved_from"].notna()]["nats"].idxmax()]
    assert (row["writer"], row["key"], row["moved_from"]) == ("L16H0", 2, 1)
    assert (row["weight"], row["weight_without"]) == pytest.approx((0.988, 0.847), abs=5e-4)


def test_it_knows_the_capital_of_france() -> None:
    loaded = load("smollm2-135m")
    tokens = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        (following,) = loaded.model(tokens)[:, -1].argmax(-1).tolist()
    assert loaded.tokenizer.decode(following) == " Paris"
    assert loaded.info.gguf.file_type == "MOSTLY_Q4_1"
    assert loaded.info.gguf.tensor_types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
