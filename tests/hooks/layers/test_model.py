"""Every kind of model takes vectors, tokens and texts, or refuses them in one line."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.plain_states import block_outputs
from support.rounding import NETWORK
from support.tiny_models import D_VOCAB, ByName, ModelOf, distance, tokens

import nope_probe
from nope_probe import (
    LoadedModel,
    UserError,
    calibrate,
    capture_losses,
    capture_scores,
    capture_stages,
    load,
    run_ablations,
)
from nope_probe.hooks.layers.hook_points import HookPoint, hooks_attached
from nope_probe.hooks.layers.model import as_inputs, layers_of
from nope_probe.hooks.layers.passes import run_blocks, run_forward
from nope_probe.hooks.layers.tap import StopForward

N_SEQS, N_POS = 3, 11

# The embeddings for which the vectors x enter the first block of plain transformers.
EMBEDDINGS = {
    "llama": lambda x, hf: x,
    "gpt2": lambda x, hf: x - hf.transformer.wpe.weight[: x.shape[1]],
    "gemma2": lambda x, hf: x,
    "smollm3-nope": lambda x, hf: x,
}


def vectors(hf: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N_SEQS, N_POS, hf.config.hidden_size, generator=generator)


@pytest.mark.parametrize(
    "spec", ["bridge:llama", "bridge:gpt2", "bridge:gemma2", "hooked:smollm3-nope"]
)
def test_vectors_enter_the_first_block_as_they_are_whatever_is_added_to_embeddings(
    spec: str, model_of: ModelOf
) -> None:
    model, tiny = model_of(spec)
    x = vectors(tiny.hf)
    with torch.inference_mode():
        output = run_blocks(model, x)
    expected = block_outputs(tiny.hf, inputs_embeds=EMBEDDINGS[tiny.name](x, tiny.hf))[-1]
    assert distance(output, expected) <= NETWORK


def test_a_hook_at_the_first_block_reads_the_vectors_and_may_replace_them(
    bridge: ByName, tiny: ByName
) -> None:
    model, x = bridge("gpt2"), vectors(tiny("gpt2").hf)
    point, read = layers_of(model)[0].point("hook_resid_pre"), []

    def halve(tensor: torch.Tensor, hook: object) -> torch.Tensor:
        read.append(tensor.clone())
        return tensor / 2

    with torch.inference_mode():
        halved = run_blocks(model, x / 2)
        with hooks_attached([(point, halve)]):
            assert run_blocks(model, x).equal(halved)
    assert read[0].equal(x)


def test_no_hook_is_left_after_vectors_also_when_a_hook_raises(
    bridge: ByName, tiny: ByName
) -> None:
    model, x = bridge("gpt2"), vectors(tiny("gpt2").hf)
    tokens = tiny("gpt2").tokens
    before = model(tokens)

    def stop(tensor: torch.Tensor, hook: object) -> None:
        raise StopForward

    point = layers_of(model)[0].point("attn.hook_pattern")
    for hook, ends in ((stop, nullcontext()), (fails, pytest.raises(ZeroDivisionError))):
        with hooks_attached([(point, hook)]), ends:
            run_forward(model, x)
        assert not layers_of(model)[0].point("hook_resid_pre").fwd_hooks
    assert model(tokens).equal(before)


def test_a_model_loaded_in_inference_mode_leaves_other_models_their_gradients(
    tiny: ByName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.hooks.layers.block_kinds._ROWS", {})
    folder = str(tiny("gpt2").folder)
    with torch.inference_mode():
        load(folder)
    assert load(folder).model(tiny("gpt2").tokens).isfinite().all()


# Names by which a file asks which kind a model is, and the files that may.
KINDS = ("is_bridge", "HookedLayer", "BridgeLayer", "original_model", "original_component")
BLOCKS = ("hooks/layers/block_kinds.py",)
LAYERS = ("bridges.py", "linear_maps.py", "model.py", "objects.py", "passes.py")
HOMES = (*BLOCKS, *(f"hooks/layers/{name}" for name in LAYERS), "models/")


def test_only_the_homes_of_the_kinds_ask_which_kind_a_model_is() -> None:
    root = Path(nope_probe.__file__).parent
    files = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    assert {name for name in files if name.startswith(HOMES)} > {*BLOCKS, "hooks/layers/model.py"}
    others = {name: text for name, text in files.items() if not name.startswith(HOMES)}
    assert not [name for name, text in others.items() if any(kind in text for kind in KINDS)]


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama"])
def test_a_model_in_training_mode_is_measured_without_dropout_and_stays_in_it(
    name: str, tmp_path: Path
) -> None:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5)
    settings = {"attention_dropout": 0.5} if name == "llama" else dropout
    decoder, given = write_decoder(name, tmp_path, **settings), tokens(5, 13)
    model = load(str(decoder.folder)).model
    with torch.inference_mode():
        expected = float(decoder.hf(given, labels=given).loss)
    scores = capture_scores(model, given, n_folds=5).folds
    model.train()
    layers_of(model)[1].block.eval()
    modes = modes_of(model)
    assert {*modes} == {False, True}
    assert float(capture_losses(model, given).mean()) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(
        capture_scores(model, given, n_folds=5).folds.nan_to_num(), scores.nan_to_num()
    )
    failing = (layers_of(model)[0].point("hook_resid_pre"), fails)
    with pytest.raises(ZeroDivisionError), hooks_attached([failing]):
        run_forward(model, given)
    assert modes_of(model) == modes


def fails(tensor: torch.Tensor, hook: HookPoint) -> None:
    raise ZeroDivisionError


def modes_of(model: Any) -> list[bool]:
    modules = [*model.modules(), *model.original_model.modules()]
    return [module.training for module in modules]


TEXT = "for each in range(9):\n    print(each)"


@pytest.fixture(scope="module")
def ids(rope_tiny: LoadedModel) -> list[int]:
    """The tokens of the text, BOS first, from the tokenizer alone."""
    assert rope_tiny.tokenizer is not None
    return rope_tiny.tokenizer(TEXT)["input_ids"]


def test_a_text_texts_ids_and_one_sequence_are_the_tokens_they_stand_for(
    rope_tiny: LoadedModel, ids: list[int]
) -> None:
    expected = torch.tensor([ids])
    one = torch.tensor(ids)
    for given in (TEXT, [TEXT], ids, [ids], one, [one], expected.int()):
        assert as_inputs(rope_tiny.model, given).equal(expected)
    assert as_inputs(rope_tiny.model, [TEXT, ids]).equal(expected.expand(2, -1))


def test_one_sequence_of_vectors_is_a_batch_of_one() -> None:
    x = torch.randn(5, 64)
    assert as_inputs(load("parameter-free", n_layers=1).model, x).equal(x[None])


def test_every_capture_takes_a_text(rope_tiny: LoadedModel, ids: list[int]) -> None:
    model, tokens = rope_tiny.model, torch.tensor([ids])
    assert capture_losses(model, TEXT).equal(capture_losses(model, tokens))
    for capture in (capture_scores, capture_stages, calibrate):
        of_text, expected = (capture(model, given).to_tensors() for given in (TEXT, tokens))
        assert all(
            torch.equal(of_text[name].nan_to_num(), x.nan_to_num()) for name, x in expected.items()
        )


@pytest.mark.usefixtures("unenforced")
def test_documents_of_another_type_are_an_error_that_says_what_to_pass(
    rope_tiny: LoadedModel,
) -> None:
    documents: Any = [0, 0, 1, 1]
    tokens = torch.randint(9, (4, 5))
    with pytest.raises(UserError, match=r"expected documents as a tensor, got \[0, 0, 1, 1\]"):
        capture_scores(rope_tiny.model, tokens, documents=documents)


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
    given: Any, message: str, rope_tiny: LoadedModel
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        as_inputs(rope_tiny.model, given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [torch.ones(2, 257, dtype=torch.long), TEXT * 99])
def test_a_hooked_transformer_ends_at_its_context_and_a_bridge_with_rope_does_not(
    given: Any, rope_tiny: LoadedModel
) -> None:
    if rope_tiny.info.kind == "TransformerBridge":
        assert as_inputs(rope_tiny.model, given).shape[1] > 256
        return
    with pytest.raises(UserError, match=r"have \d+ tokens, .* context is 256"):
        as_inputs(rope_tiny.model, given)


def test_learned_positions_end_where_the_context_does_and_rope_goes_on(
    bridge: ByName, tiny: ByName
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


def test_studies_take_texts(rope_tiny: LoadedModel) -> None:
    texts = [TEXT.replace("9", digit) for digit in "13579"]
    study = run_ablations(rope_tiny.model, texts, remove=["sources"])
    assert study.manifest.skip_keys == 1
