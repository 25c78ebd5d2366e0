"""The census of layers is right in every row on models whose configuration is known."""

import json
import math
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import refused, run_command
from support.decoders import DECODERS, write_decoder
from support.plain_states import plain_states
from support.rounding import MEASURE
from support.tiny_models import tokens

import layers
from findings_table import notes
from nope_probe import build, load, parameter_free
from probe import LayerFindings, ModelFindings, probe_layers

FULL, WINDOW = ("causal", None), ("window", 5)
# Per layer: RoPE's base (None: no RoPE), the rotary fraction, its pairs, mask, norms, cap, scale.
ROPE = (10_000, 1.0, 5, FULL, False, None, 10**-0.5)
NOPE = (None, 0.0, 0, FULL, False, None, 10**-0.5)
SMOLLM3 = (2_000_000, 1.0, 5, FULL, False, None, 10**-0.5)
TRUE: dict[str, list[tuple[Any, ...]]] = {
    "llama": [ROPE] * 2,
    "llama-without-rope": [NOPE] * 2,
    "phi3": [(10_000, 8 / 14, 4, FULL, False, None, 14**-0.5)] * 2,
    "qwen3": [(10_000, 1.0, 3, FULL, True, None, 6**-0.5)] * 2,
    "smollm3": [SMOLLM3, NOPE, SMOLLM3],
    "mistral": [(10_000, 1.0, 5, WINDOW, False, None, 10**-0.5)] * 2,
    "gemma2": [
        (10_000, 1.0, 5, WINDOW, False, 7.0, 13**-0.5),
        (10_000, 1.0, 5, FULL, False, 7.0, 13**-0.5),
    ],
    "gpt2": [(None, 0.0, 0, FULL, False, None, 7**-0.5)] * 2,
    "neox": [("one pair", 0.25, 1, FULL, False, None, 8**-0.5)] * 2,
    "cohere": [(500_000, 1.0, 7, FULL, False, None, 14**-0.5)] * 2,
}


def findings_of(model: Any, n: int = 48) -> list[LayerFindings]:
    return probe_layers(model, tokens(2, n, seed=5))


def check(result: LayerFindings, true: tuple[Any, ...], learned: bool) -> None:
    """Compare one layer's findings with what is known of it."""
    base, fraction, n_pairs, mask, norms, cap, scale = true
    assert result.rope == (base is not None)
    # In layer 1 of SmolLM3 it is 0 though RoPE is removed in L0 in the same pass.
    assert result.rope_change > 0.1 if result.rope else result.rope_change == 0.0
    assert result.rope_pairs == result.rope_pairs_acting == n_pairs
    assert result.rotary_fraction == pytest.approx(fraction)
    assert result.rope_base == (pytest.approx(base, rel=MEASURE) if isinstance(base, int) else None)
    assert (result.mask.kind, result.mask.size) == mask
    assert result.mask_same_in_all_heads
    assert (result.q_norm, result.k_norm) == (norms, norms)
    assert result.soft_cap == (None if cap is None else pytest.approx(cap, rel=1e-3))
    assert result.scale == pytest.approx(scale, rel=MEASURE)
    assert (result.learned_positions_change > 0.1) == learned
    assert result.product_error < 1e-3


@pytest.mark.parametrize("name", TRUE)
def test_every_row_is_right_and_the_model_is_left_as_it_was(
    name: str, bridge: Callable[[str], Any], kind: str
):
    if name == "cohere" and kind == "HookedTransformer":
        pytest.skip("TransformerLens 3.9 reads Cohere wrongly, and load refuses it")
    model, inputs = bridge(name), tokens(2, 13)
    before = model(inputs)
    findings = findings_of(model)
    assert torch.equal(model(inputs), before)
    for layer, true in zip(findings, TRUE[name], strict=True):
        check(layer, true, learned=name == "gpt2")
    layout = {"cohere": "adjacent", "neox": "halves"}.get(name)
    assert layout is None or findings[0].rope_layout == layout


def test_ropes_change_of_a_score_is_that_in_plain_transformers(
    tiny: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    """Each layer reads what the intact model writes, and its queries and keys are not turned."""
    hf, causal = tiny("llama").hf, torch.ones(48, 48).tril().bool()
    turned, unturned = (
        plain_states(hf, tokens(2, 48, seed=5), rope=rope) for rope in (True, False)
    )
    for layer, one, other in zip(findings_of(bridge("llama")), turned, unturned, strict=True):
        change = (one.scores() - other.scores())[..., causal].abs().max()
        assert layer.rope_change == pytest.approx(float(change), rel=MEASURE)


def test_learned_positions_change_of_a_score_is_that_in_plain_transformers(
    tiny: Callable[[str], Any], bridge: Callable[[str], Any]
) -> None:
    """In L0 alone, where scores depend on the embeddings directly."""
    inputs, scores = tokens(2, 48, seed=5), []
    intact = tiny("gpt2").hf
    edited = deepcopy(intact)
    edited.transformer.wpe.weight[:48] = edited.transformer.wpe.weight[:48].mean(0)
    for hf in (intact, edited):
        kept: list[torch.Tensor] = []
        attention = hf.transformer.h[0].attn.c_attn
        handle = attention.register_forward_hook(lambda m, i, o, kept=kept: kept.append(o))
        hf(inputs)
        handle.remove()
        q, k, _ = (x.unflatten(-1, (5, 7)) for x in kept[0].chunk(3, -1))
        scores.append(torch.einsum("bqhd,bkhd->bhqk", q, k) / 7**0.5)
    causal = torch.ones(48, 48).tril().bool()
    change = (scores[0] - scores[1])[..., causal].abs().max()
    [first, *_] = findings_of(bridge("gpt2"))
    assert first.learned_positions_change == pytest.approx(float(change), rel=MEASURE)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What is known of the last layer of a tiny decoder."""

    base: int | None = 10_000
    factor: float = 1.0
    norm_over: str | None = None
    mla: bool = False
    sinks: bool = False
    bias: float = 0.0


N_SCHEME = 24  # positions
SCHEMES = {
    "bloom": Scheme(base=None, bias=0.5 * (N_SCHEME - 1)),  # the steepest of 6 slopes
    "mpt": Scheme(base=None, bias=0.5 * (N_SCHEME - 1)),
    "deepseek_v3": Scheme(mla=True),
    "falcon_h1": Scheme(),  # transformers multiplies its keys after W_K
    "gpt_oss": Scheme(base=150_000, factor=1 + 0.1 * math.log(32), sinks=True),
    "gptj": Scheme(),  # handed positions, not angles
    "jetmoe": Scheme(),  # W_Q in experts
    "nanochat": Scheme(norm_over="head"),  # turns the other way
    "olmo2": Scheme(norm_over="all heads"),
    "qwen3_next": Scheme(norm_over="head"),
    "recurrent_gemma": Scheme(),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_norms_biases_sinks_and_latent_attention_are_found(name: str, tmp_path: Path) -> None:
    expected, model = SCHEMES[name], load(str(write_decoder(name, tmp_path).folder)).model
    *_, findings = findings_of(model, n=N_SCHEME)
    assert (findings.norm_over, findings.mla, findings.sinks) == (
        expected.norm_over,
        expected.mla,
        expected.sinks,
    )
    assert (findings.q_norm, findings.k_norm) == (expected.norm_over is not None,) * 2
    assert findings.score_bias == pytest.approx(expected.bias)
    assert findings.rope_factor == pytest.approx(expected.factor)
    assert findings.rope_base == (expected.base and pytest.approx(expected.base, rel=MEASURE))
    assert findings.product_error < 1e-3


def test_a_norm_after_rope_leaves_its_pairs_unknown_and_says_so(
    tmp_path: Path, capsys: Any
) -> None:
    code, out, _ = run_layers(capsys, "--model", write_decoder("hunyuan_v1_dense", tmp_path).folder)
    assert (code, "?" in out) == (0, True)
    assert "L0: RoPE's pairs of coordinates were not recognised" in out


def test_layers_that_do_not_attend_are_rows_of_their_own(tmp_path: Path, capsys: Any) -> None:
    folder = write_decoder("qwen3_next", tmp_path).folder
    _, out, _ = run_layers(capsys, "--model", folder)
    alike = [line for line in out.splitlines() if line.startswith("L")]
    assert [line.split("  ")[0] for line in alike] == ["L0, L2", "L1, L3"]
    code, out, _ = run_layers(capsys, "--model", folder, "--verbose")
    rows = [line.split() for line in out.splitlines() if line.startswith("L")][2:]
    assert (code, [row[0] for row in rows]) == (0, ["L0", "L1", "L2", "L3"])
    assert [" ".join(row[5:7]) for row in rows] == ["no attention", "causal per"] * 2


@pytest.mark.hooked_transformer
@pytest.mark.parametrize(("name", "true"), [("llama", ROPE), ("smollm3-nope", NOPE)])
def test_a_hooked_transformer_is_read_like_its_bridge(
    name: str, true: tuple[Any, ...], hooked: Callable[[str], Any]
):
    for layer in findings_of(hooked(name)):
        check(layer, true, learned=False)


def test_pairs_that_are_slowed_down_are_counted(bridge: Callable[[str], Any]):
    (findings,) = findings_of(bridge("llama-scaled"))
    assert findings.rope_base == pytest.approx(100, rel=MEASURE)
    # Pairs whose wavelength is above 64 / 4 positions are slowed down: 2 pi 100^(f/11) > 16.
    assert (findings.rope_pairs, findings.rope_pairs_following) == (11, 3)


LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 5.0}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
YARN |= {"original_max_position_embeddings": 64}
# Nearly a power law, of another base.
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.1**f for f in range(8)], "long_factor": [4.0] * 8, "factor": 2.0}
QUARTER = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
GEMMA_4 = {"full_attention": QUARTER, "sliding_attention": PLAIN | {"rope_theta": 1e4}}
PARTIAL = PLAIN | {"partial_rotary_factor": 0.5}
# Of a model's layers: the base, the first pair's frequency, how many times slower the last pair
# turns, and the share of coordinates that turn.
SCALES: dict[str, tuple[str, dict[str, Any], list[tuple[float, float, float, float]]]] = {
    "Gemma 3": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
        [(1e6, 1, 1, 1), (1e6, 1 / 8, 8, 1), (1e6, 1, 1, 1)],
    ),
    "Gemma 4": (
        "gemma4_text",
        {"rope_parameters": GEMMA_4, "global_head_dim": 16},
        [(1e4, 1, 1, 1), (1e6, 1, 1, 0.25)] * 2,
    ),
    "linear": ("llama", {"rope_parameters": LINEAR}, [(1e6, 1 / 8, 8, 1)] * 3),
    "one pair": (
        "gpt_neox",
        {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.25}},
        [(1e6, 1 / 8, 8, 0.25)] * 3,
    ),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA_3, "head_dim": 22}, [(100, 1, 5, 1)] * 3),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, [(1e4, 1, 1, 1)] * 3),
    "YaRN": ("llama", {"rope_parameters": YARN}, [(1e4, 1, 4, 1)] * 3),
    "LongRoPE": ("llama", {"rope_parameters": LONG}, [(1e4, 1, 1.1**7, 1)] * 3),
    "partial": ("phi3", {"rope_parameters": PARTIAL}, [(1e6, 1, 1, 0.5)] * 3),
    "the other way": ("nanochat", {}, [(1e4, -1, 1, 1)] * 3),
}


@pytest.mark.parametrize("name", SCALES)
def test_scaled_frequencies_are_told_from_another_base(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    kind, settings, expected = SCALES[name]
    folder = write_decoder(kind, tmp_path, **settings).folder
    code, out, _ = run_layers(capsys, "--model", folder, "--json")
    report = json.loads(out)
    assert code == 0
    keys = ("rope_base", "rope_first", "rope_scale", "rotary_fraction")
    for row, layer in zip(report["layers"], expected, strict=True):
        assert tuple(row[key] for key in keys) == pytest.approx(layer, rel=MEASURE)
        # Queries of NanoChat are normed after RoPE, and its pairs are found in the queries alone.
        assert row["rope_as_configured"] is (None if name == "the other way" else True)
    _, out, _ = run_layers(capsys, "--model", folder)
    _, first, scale, _ = expected[1]
    headings = {word for line in out.splitlines() if line[:7] == "layers " for word in line.split()}
    assert ("first" in headings, "slowed" in headings) == (first != 1, scale != 1)
    said = f"RoPE's first pair turns by {first:.4g}, not by 1"
    assert (f"L1: {said}" in out) == (first != 1)
    slowed = f"(RoPE is scaled, up to {scale:.4g} times slower)"
    assert (slowed in " ".join(out.split())) == (name in ("Llama 3.1", "YaRN", "LongRoPE"))


def test_frequencies_that_transformers_does_not_compute_are_told(
    tmp_path: Path, monkeypatch: Any
) -> None:
    model = load(str(write_decoder("llama", tmp_path).folder)).model
    assert findings_of(model)[0].rope_as_configured is True
    monkeypatch.setattr(model.original_model.config, "rope_parameters", LINEAR)
    [first, *_] = findings = findings_of(model)
    assert (first.rope_as_configured, round(first.rope_base), round(first.rope_scale)) == (
        False,
        10_000,
        1,
    )
    said = "L0: RoPE's frequencies are not those that transformers computes from the configuration"
    assert notes(ModelFindings(model="m", bos="none", layers=findings))[0] == said


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_read_and_turns_as_transformers_computes(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    tiny = write_decoder(name, tmp_path)
    code, out, err = run_layers(capsys, "--model", tiny.folder, "--seq-len", 12, "--json")
    if code:
        assert (code, len(err.splitlines())) == (2, 1)
        with pytest.raises(ValueError, match=r"^.+$"):
            load(str(tiny.folder))
        return
    text = tiny.hf.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    for layer in json.loads(out)["layers"]:
        assert layer["rope_as_configured"] is not False
        rope = getattr(text, "rope_parameters", None) or {}
        rope = rope.get(kinds[layer["layer"]], rope) if kinds else rope
        if layer["rope_as_configured"] and layer["rope_pairs"] > 1:
            assert layer["rope_base"] == pytest.approx(rope["rope_theta"], rel=MEASURE)


def test_a_window_longer_than_the_batch_does_not_show(bridge: Callable[[str], Any]):
    [first, *_] = findings_of(bridge("mistral"), n=5)
    assert (first.mask.kind, first.mask.n_positions) == ("causal", 5)


@pytest.mark.parametrize("rope", [False, True])
def test_a_model_without_a_mask_is_bidirectional(rope: bool):
    model = build(parameter_free(n_layers=2, d_model=8, rope=rope, causal=False))
    vectors = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(0))
    for layer in probe_layers(model, vectors):
        assert (layer.mask.kind, layer.rope, layer.rope_pairs) == ("bidirectional", rope, 4 * rope)


def run_layers(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Run the command; return its exit code and what it printed."""
    code = 0
    capsys.readouterr()  # of writing a tiny model
    try:
        run_command(layers, *arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_all_tables_are_refused_where_json_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_layers(capsys, "--model", "nope-tiny", "--json", "--verbose")
    assert (code, out) == (2, "")
    assert "--verbose has no effect with --json" in err


def test_json_and_the_table_hold_the_findings_of_each_layer(
    tiny: Callable[[str], Any], capsys: Any
):
    code, out, _ = run_layers(capsys, "--model", tiny("mistral").folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert [row["layer"] for row in report["layers"]] == [0, 1]
    assert report["layers"][1]["mask"] == {"kind": "window", "size": 5, "n_positions": 48}
    code, out, _ = run_layers(capsys, "--model", tiny("gemma2").folder)
    assert code == 0
    [first] = [line for line in out.splitlines() if line.strip().startswith("L0")]
    for said in ("window of 5", "1/√13", "5/5"):
        assert said in first
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["rope-tiny", "nope-tiny", "parameter-free-rope"])
def test_the_models_that_have_names(name: str, capsys: Any):
    rope, shipped = "rope" in name, name.endswith("tiny")
    code, out, _ = run_layers(capsys, "--model", name, "--json")
    report = json.loads(out)
    assert (code, len(report["layers"])) == (0, 4)
    assert report["bos"] == ("forced" if shipped else "none")
    for row in report["layers"]:
        assert (row["rope"], row["mask"]["kind"]) == (rope, "causal")
        assert (row["q_norm"], row["soft_cap"]) == (False, None)
        assert row["scale"] == pytest.approx(32**-0.5 if shipped else 1 / 64, rel=MEASURE)
        assert not rope or row["rope_base"] == pytest.approx(10_000, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", 3], "--seq-len 3 should be greater than or equal to 4"),
        (["--model", "nope-tinny"], "unknown model 'nope-tinny'"),
        (["--seq-len", 9999], "--seq-len 9999 is beyond the model's context"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[object], message: str, capfd: Any, tmp_path: Any):
    assert message in refused(capfd, tmp_path, layers, *arguments)


def test_what_changes_with_length_is_found_where_it_begins(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    dynamic = write_decoder("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    [first, *_] = probe_layers(load(str(dynamic.folder)).model, tokens(2, 48), tokens(1, 131))
    assert first.rope_rescaled_from == 65  # one more than its context
    assert first.rope_rescaled_by < 1
    scaled = write_decoder("llama4_text", tmp_path, attn_temperature_tuning=True, floor_scale=64)
    findings = probe_layers(load(str(scaled.folder)).model, tokens(2, 48), tokens(1, 131))
    # Layer 1 has no RoPE, and its queries are multiplied by 1 + 0.1 log(1 + floor((i + 1) / 64)).
    assert [finding.queries_grow_from for finding in findings] == [None, 63, None]
    assert findings[1].queries_grow_by == pytest.approx(1 + 0.1 * math.log(3))


def test_an_interruption_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "load_in_float32", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        run_command(layers)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "interrupted\n")
