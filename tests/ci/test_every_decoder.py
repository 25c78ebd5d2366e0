"""Maps of every decoder that TransformerLens reads are plain transformers' own scores."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from ci.decoder_commands import COMMANDS, run_command
from support.decoder_errors import map_error, removals_of
from support.decoders import DECODERS, SIZES, TYPES, tiny_config, write_decoder
from support.finished_runs import assert_whole
from support.plain_attention import Recorder, blocks_of, plain_attention, recording
from support.plain_states import calls_of, plain_losses
from support.rounding import NETWORK, assert_same
from support.tiny_models import Tiny, change, distance
from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES
from transformer_lens.tools.model_registry import HF_SUPPORTED_ARCHITECTURES
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nope_probe import (
    Ablation,
    Calibration,
    LoadedModel,
    UserError,
    ablated,
    calibrate,
    capture_losses,
    capture_scores,
    head_scores,
    load,
)
from nope_probe.models.context import has_position_table
from nope_probe.models.names import FETCHED, resolve

# Decoders that attend and that `load` refuses: docs/models.md says why.
REFUSED = ("deepseek_v4", "hrm_text", "zamba2")
# JetMoE's experts make its queries; the RoPE of the others turns no pairs that are recognised.
NO_PAIRS = ("codegen", "gptj", "hunyuan_v1_dense", "nanochat", "recurrent_gemma")
# OLMo's tiny model clips queries and keys, which are then no sum of writers' parts.
NOT_RUN = {(name, "trace") for name in ("jetmoe", "olmo", *NO_PAIRS)}
ROOT = Path(__file__).parents[2]


each_decoder = pytest.mark.parametrize("decoder", DECODERS, indirect=True)


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_decoder(request.param, tmp_path_factory.mktemp("decoders"))


@pytest.fixture(scope="module")
def loaded(decoder: Tiny) -> LoadedModel | None:
    """A decoder as it is read; None if it does not attend or is refused."""
    is_read = removals_of(decoder) and decoder.name not in REFUSED
    return load(str(decoder.folder)) if is_read else None


@each_decoder
def test_the_recording_function_attends_as_transformers_itself_does(decoder: Tiny) -> None:
    with torch.inference_mode():
        logits = decoder.hf(decoder.tokens).logits
        with recording(decoder.hf, Recorder()):
            recorded = decoder.hf(decoder.tokens).logits
    assert distance(recorded, logits) <= NETWORK


@each_decoder
def test_maps_are_plain_transformers_own_intact_and_without_each_component(
    decoder: Tiny, loaded: LoadedModel | None
) -> None:
    if loaded is None:
        with pytest.raises(UserError, match=r"no attention|positions off"):
            load(str(decoder.folder))
        return
    errors = {r: map_error(loaded.model, decoder, r) for r in removals_of(decoder)}
    assert max(errors.values()) <= NETWORK, errors


@each_decoder
def test_every_weight_is_removed_with_a_measured_gain_or_refused(
    decoder: Tiny, loaded: LoadedModel | None
) -> None:
    if loaded is None:
        return
    layers = list(plain_attention(decoder.hf, decoder.tokens))
    masked = capture_scores(loaded.model, decoder.tokens, layers=layers).mean.isnan()
    for weight in ("w_q", "w_k", "w_v", "w_o", "mlp"):
        try:
            with ablated(loaded.model, Ablation(remove=[weight]), tokens=decoder.tokens):
                maps = capture_scores(loaded.model, decoder.tokens, layers=layers).mean
        except ValueError:  # what commands tell in one line
            continue
        assert maps.isnan().equal(masked), weight


@pytest.mark.usefixtures("undrawn")
@each_decoder
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs_with_its_defaults_or_is_refused_in_one_line(
    decoder: Tiny, command: str, tmp_path: Path
) -> None:
    """A run is whole, and a refusal leaves no folder."""
    out, is_read = tmp_path / "run", decoder.name not in REFUSED and removals_of(decoder)
    if is_read and (decoder.name, command) not in NOT_RUN:
        run_command(command, decoder, out)
        assert_whole(out)
        return
    with pytest.raises(UserError, match=r"^.+$"):
        run_command(command, decoder, out)
    assert not [*tmp_path.iterdir()]


def test_the_page_of_models_has_an_exact_or_refused_row_for_every_decoder() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table, refused = page.split("## What is refused")
    _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "]
    assert sum(len(names.split(", ")) for _, names, *_ in rows) == len(DECODERS)
    for _, names, result, *_ in rows:
        if result == "refused":
            assert all(name in refused for name in names.split(", ")), names
        else:
            assert float(result) <= NETWORK, names


def test_the_readme_states_the_pages_count() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    attend, exact = re.search(r"(\d+) of them attend, and the maps of (\d+) of", page).groups()
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"reads {attend} architectures of text decoders that attend; the maps of {exact}" in readme
    )


def test_every_name_and_alias_of_transformer_lens_resolves_to_its_hub_id() -> None:
    aliases = {alias: source for source in MODEL_ALIASES for alias in MODEL_ALIASES[source]}
    names = {source: source for source in OFFICIAL_MODEL_NAMES} | aliases
    assert len(names) > 500
    on_the_hub = {name: hub_id for name, hub_id in names.items() if name not in FETCHED}
    assert {name: resolve(name) for name in on_the_hub} == on_the_hub


def test_the_list_of_decoders_is_that_of_transformer_lens() -> None:
    """Types that read pictures, and types whose class is another type's, are left out."""
    pictures = ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe")
    same = ("gpt-sw3", "internlm3", "iquestcoder")
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {"phimoe": "PhiMoEForCausalLM"}
    read = {kind for kind, name in classes.items() if name in HF_SUPPORTED_ARCHITECTURES}
    assert read - {*pictures, *same} == {*TYPES}


@pytest.mark.parametrize(
    ("model_type", "layer", "weight", "end"),
    [
        ("qwen3_next", 3, "w_k", "k_proj"),  # of L3, the second layer that attends
        ("deepseek_v3", 1, "w_o", "o_proj"),  # the only projection that is one matrix
        ("gemma4_text", 1, "w_q", "q_proj"),  # wider than in L0
        ("nemotron_h", 2, "w_v", "v_proj"),
    ],
)
def test_means_are_of_plain_transformers_own_projections(
    model_type: str, layer: int, weight: str, end: str, tmp_path: Path
) -> None:
    tiny = write_decoder(model_type, tmp_path)
    named = blocks_of(tiny.hf)[layer].named_modules()
    projection = next(module for name, module in named if name.endswith(end))
    [call] = calls_of(tiny.hf, {end: projection}, tiny.tokens).values()
    calibration = calibrate(load(str(tiny.folder)).model, tiny.tokens)
    stored = Calibration.from_tensors(calibration.to_tensors())
    assert distance(stored.mean(weight, layer), call.output.mean((0, 1))) <= NETWORK


@pytest.mark.parametrize(
    ("model_type", "has_table"),
    [
        ("gpt2", True),
        ("opt", True),
        ("gptj", True),
        ("mpt", True),
        ("xglm", False),
        ("bloom", False),
        ("llama", False),
        ("falcon-with-alibi", False),
    ],
)
def test_a_model_has_a_table_of_positions_where_transformers_ends_at_its_context(
    model_type: str, has_table: bool, tmp_path: Path
) -> None:
    config = tiny_config(model_type)
    config.save_pretrained(tmp_path)
    assert has_position_table(str(tmp_path)) == has_table
    beyond = torch.ones(1, SIZES["max_position_embeddings"] + 7, dtype=torch.long)
    ends = pytest.raises((IndexError, RuntimeError)) if has_table else nullcontext()
    with ends, torch.inference_mode():
        AutoModelForCausalLM.from_config(config)(beyond)


@pytest.mark.parametrize("name", NO_PAIRS)
def test_heads_are_measured_where_attention_makes_its_angles_itself(
    name: str, tmp_path: Path
) -> None:
    tiny = write_decoder(name, tmp_path)
    tokens = torch.randint(3, 60, (8, 13), generator=torch.Generator().manual_seed(0))
    heads = head_scores(load(str(tiny.folder)), tokens)
    assert heads[["induction", "induction_high"]].notna().all(axis=None)
    for layer, plain in plain_attention(tiny.hf, tokens).items():
        weights = plain.scores.double().nan_to_num(neginf=-1e9, nan=-1e9).softmax(-1).mean(0)
        of_layer = heads[heads["layer"] == layer]
        assert_same(of_layer["first_key"], weights[:, 1:, 0].mean(-1), NETWORK)
        before = weights.diagonal(-1, dim1=-2, dim2=-1)[:, 1:].mean(-1)
        assert_same(of_layer["previous_token"], before, NETWORK)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("mistral", "sliding_window"),
        ("gemma3_text", "sliding_window"),
        ("gpt_neo", "window_size"),
        ("recurrent_gemma", "attention_window_size"),
        ("llama4_text", "attention_chunk_size"),
    ],
)
def test_a_window_of_no_tokens_is_refused_by_its_name(
    name: str, setting: str, size: int, tmp_path: Path
) -> None:
    folder = write_decoder(name, tmp_path).folder
    change(folder, **{setting: size})
    with pytest.raises(UserError, match=f"{setting} {size} in its configuration"):
        load(str(folder))


def test_a_window_that_no_layer_has_may_have_any_size(tmp_path: Path) -> None:
    full = ["full_attention"] * 3
    tiny = write_decoder("gemma3_text", tmp_path, layer_types=full, sliding_window=0)
    losses, expected = (
        capture_losses(load(tiny.folder), tiny.tokens),
        plain_losses(tiny.hf, tiny.tokens),
    )
    assert_same(losses, expected, NETWORK)
