"""Every kind of model is of the protocols, and takes vectors and tokens through its blocks."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decoders import write_decoder
from support.plain_states import block_outputs
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, distance, tokens

import nope_probe
from nope_probe import capture_losses, capture_scores
from nope_probe.hooks.layers.hook_points import HookPoint, hooks_attached
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.layers.passes import run_blocks, run_forward
from nope_probe.hooks.layers.tap import StopForward
from nope_probe.models.load import load

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
    spec: str, model_of: ModelOf, tiny: ByName
) -> None:
    model, name = model_of(spec)
    hf = tiny(name).hf
    x = vectors(hf)
    with torch.inference_mode():
        output = run_blocks(model, x)
    expected = block_outputs(hf, inputs_embeds=EMBEDDINGS[name](x, hf))[-1]
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
