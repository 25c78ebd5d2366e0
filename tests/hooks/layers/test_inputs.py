"""In whatever form inputs are given, the model runs on their tokens, or they are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_models import D_VOCAB, ByName

from nope_probe import (
    calibrate,
    capture_losses,
    capture_scores,
    capture_stages,
    load,
    run_ablations,
)
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import as_inputs
from nope_probe.models.info import LoadedModel

TEXT = "for each in range(9):\n    print(each)"


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    return load("rope-tiny", n_layers=1)


@pytest.fixture(scope="module")
def ids(shipped: LoadedModel) -> list[int]:
    """The tokens of the text, BOS first, from the tokenizer alone."""
    assert shipped.tokenizer is not None
    return shipped.tokenizer(TEXT)["input_ids"]


def test_a_text_texts_ids_and_one_sequence_are_the_tokens_they_stand_for(
    shipped: LoadedModel, ids: list[int]
) -> None:
    expected = torch.tensor([ids])
    one = torch.tensor(ids)
    for given in (TEXT, [TEXT], ids, [ids], one, [one], expected.int()):
        assert as_inputs(shipped.model, given).equal(expected)
    assert as_inputs(shipped.model, [TEXT, ids]).equal(expected.expand(2, -1))


def test_one_sequence_of_vectors_is_a_batch_of_one() -> None:
    x = torch.randn(5, 64)
    assert as_inputs(load("parameter-free", n_layers=1).model, x).equal(x[None])


def test_every_capture_takes_a_text(shipped: LoadedModel, ids: list[int]) -> None:
    model, tokens = shipped.model, torch.tensor([ids])
    assert capture_losses(model, TEXT).equal(capture_losses(model, tokens))
    for capture in (capture_scores, capture_stages, calibrate):
        of_text, expected = (capture(model, given).to_tensors() for given in (TEXT, tokens))
        assert all(
            torch.equal(of_text[name].nan_to_num(), x.nan_to_num()) for name, x in expected.items()
        )


@pytest.mark.usefixtures("unenforced")
def test_documents_of_another_type_are_an_error_that_says_what_to_pass(
    shipped: LoadedModel,
) -> None:
    documents: Any = [0, 0, 1, 1]
    tokens = torch.randint(9, (4, 5))
    with pytest.raises(UserError, match=r"expected documents as a tensor, got \[0, 0, 1, 1\]"):
        capture_scores(shipped.model, tokens, documents=documents)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([TEXT, "x"], r"have 2 to \d+ tokens.* sequences\(texts, tokenizer=.* cuts them"),
        ([[1, 2, 3], [1, 2]], "have 2 to 3 tokens"),
        (torch.randn(2, 5, 7), "7 dimensions, .* d_model is 128"),
        (torch.ones(0, 5, dtype=torch.long), r"1 sequence of 1 token or more, .*\[0, 5"),
        (torch.ones(3, 5, dtype=torch.bool), r"got bool \[3, 5\]"),
        ({"input_ids": [1, 2]}, "expected texts, tokens or vectors, got {'input_ids'"),
        ([], r"got \[\]"),
        ([None], "expected texts, tokens or vectors, got None"),
        (torch.ones(3, 5, device="meta"), "got a meta tensor, which holds no numbers"),
    ],
)
def test_inputs_that_no_model_can_run_are_refused_in_one_line(
    given: Any, message: str, shipped: LoadedModel
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        as_inputs(shipped.model, given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [torch.ones(2, 257, dtype=torch.long), TEXT * 99])
def test_a_hooked_transformer_ends_at_its_context_and_a_bridge_with_rope_does_not(
    given: Any, shipped: LoadedModel
) -> None:
    if shipped.info.kind == "TransformerBridge":
        assert as_inputs(shipped.model, given).shape[1] > 256
        return
    with pytest.raises(UserError, match=r"have \d+ tokens, .* context is 256"):
        as_inputs(shipped.model, given)


def test_learned_positions_end_where_the_context_does_and_rope_goes_on(
    bridge: Callable[[str], Any], tiny: ByName
) -> None:
    model = bridge("gpt2")
    n_ctx = tiny("gpt2").hf.config.n_positions
    beyond = torch.arange(n_ctx + 1) % D_VOCAB
    with pytest.raises(UserError, match=f"have {n_ctx + 1} tokens, .* context is {n_ctx}"):
        capture_losses(model, beyond)
    assert capture_losses(model, beyond[1:]).shape == (1, n_ctx - 1)
    rotated = bridge("llama")
    n_pos = tiny("llama").hf.config.max_position_embeddings + 3
    assert capture_losses(rotated, torch.arange(n_pos) % D_VOCAB).shape == (1, n_pos - 1)


def test_studies_take_texts(shipped: LoadedModel) -> None:
    texts = [TEXT.replace("9", digit) for digit in "13579"]
    study = run_ablations(shipped.model, texts, remove=["sources"])
    assert study.manifest.skip_keys == 1
