"""The layers command is right in every row on models whose configuration is known."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import refused, run_command
from support.decoders import write_decoder
from support.plain_states import plain_states
from support.rounding import MEASURE
from support.tiny_models import tokens

from nope_probe import build, layers, load, parameter_free
from nope_probe.hooks.layers.model import hugging_face_config
from nope_probe.studies.layers.expect import mismatches, parse_expectation
from nope_probe.studies.layers.probe import LayerFindings, probe_layers

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
# What configurations say wrongly: `cfg` says "rotary" of all layers, and RoPE is forced off.
WRONG = {
    "smollm3": ("L1: ", "positional_embedding_type is 'rotary'"),
    "llama-without-rope": ("L0, L1: ", "config.rope_parameters is set, but no score depends on"),
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
def test_every_row_is_right_and_a_wrong_configuration_is_told(
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
    told = mismatches(model.cfg, hugging_face_config(model), findings)
    if name in WRONG:
        layers_said, field = WRONG[name]
        assert any(line.startswith(layers_said) and field in line for line in told), told
    elif name != "cohere":
        assert told == []


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
    expected = ["--expect", "qk_norm_layers=1,3", "--expect", "mla_layers=none"]
    code, out, _ = run_layers(capsys, "--model", folder, *expected)
    alike = [line for line in out.splitlines() if line.startswith("L")]
    assert [line.split("  ")[0] for line in alike] == ["L0, L2", "L1, L3"]
    code, out, _ = run_layers(capsys, "--model", folder, *expected, "--verbose")
    rows = [line.split() for line in out.splitlines() if line.startswith("L")][2:]
    assert (code, [row[0] for row in rows]) == (0, ["L0", "L1", "L2", "L3"])
    assert [" ".join(row[5:7]) for row in rows] == ["no attention", "causal per"] * 2


def test_a_wrong_no_rope_layers_is_told(bridge: Callable[[str], Any], monkeypatch: Any):
    model = bridge("smollm3")
    findings = findings_of(model)
    monkeypatch.setattr(model.original_model.config, "no_rope_layers", [0, 1, 1])
    lines = mismatches(model.cfg, hugging_face_config(model), findings)
    for layer, said in ((0, 0), (1, 1)):
        field = f"L{layer}: config.no_rope_layers[{layer}] is {said}"
        assert any(line.startswith(field) for line in lines)


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
# Of a model's layers: the first pair's frequency, and how many times slower the last pair turns.
SCALES: dict[str, tuple[str, dict[str, Any], list[tuple[float, float]]]] = {
    "Gemma 3": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
        [(1, 1), (1 / 8, 8), (1, 1)],
    ),
    "Gemma 3, unscaled": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
        [(1, 1)] * 3,
    ),
    "linear": ("llama", {"rope_parameters": LINEAR | {"factor": 2.5}}, [(1 / 2.5, 2.5)] * 3),
    "one pair": ("gpt_neox", {"rope_parameters": LINEAR | {"factor": 4.0}}, [(1 / 4, 4)] * 3),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA_3, "head_dim": 22}, [(1, 5)] * 3),
    "the other way": ("nanochat", {}, [(-1, 1)] * 3),
}


@pytest.mark.parametrize("name", SCALES)
def test_scalings_that_keep_the_ratios_of_frequencies_are_found(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    kind, settings, expected = SCALES[name]
    folder = write_decoder(kind, tmp_path, **settings).folder
    capsys.readouterr()
    first, scale = expected[1]
    keys = [f"rope_first={first}", f"rope_scale={scale}"]
    flags = [] if len({*expected}) > 1 else [flag for key in keys for flag in ("--expect", key)]
    code, out, _ = run_layers(capsys, "--model", folder, "--json", *flags)
    report = json.loads(out)
    assert code == 0
    assert report["configuration_differs"] == []
    for row, layer in zip(report["layers"], expected, strict=True):
        assert (row["rope_first"], row["rope_scale"]) == pytest.approx(layer, rel=MEASURE)
    code, out, err = run_layers(capsys, "--model", folder, "--expect", "rope_scale=7")
    assert (code, err.splitlines()[0][:27]) == (1, "rope_scale: expected 7, fou")
    headings = {word for line in out.splitlines() if line[:7] == "layers " for word in line.split()}
    assert ("first" in headings, "slowed" in headings) == (first != 1, scale != 1)
    said = f"RoPE's first pair turns by {first:.4g}, not by 1"
    assert (f"L1: {said}" in out) == (first != 1)
    slowed = f"(RoPE is scaled, up to {scale:.4g} times slower)"
    assert (slowed in " ".join(out.split())) == (name == "Llama 3.1")


def test_a_wrong_factor_of_the_configuration_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    model = load(str(write_decoder("llama", tmp_path).folder)).model
    findings = findings_of(model)
    monkeypatch.setattr(model.original_model.config, "rope_parameters", LINEAR | {"factor": 3.0})
    config = hugging_face_config(model)
    [base, scale] = mismatches(model.cfg, config, findings)
    assert "but the RoPE base is 1e+04" in base
    said = "config.rope_parameters has rope_type 'linear' and factor 3, but the RoPE scale is 1"
    assert scale == f"L0, L1, L2: {said}"


def test_a_window_longer_than_the_batch_is_not_claimed(bridge: Callable[[str], Any]):
    model = bridge("mistral")
    findings = findings_of(model, n=5)
    assert (findings[0].mask.kind, findings[0].mask.n_positions) == ("causal", 5)
    assert mismatches(model.cfg, hugging_face_config(model), findings) == []


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


MET = ("no_rope_layers=1", "rope_layers=0,2", "rope_base=2e6", "bos=none", "soft_cap=none")
NOT_MET = {
    "no_rope_layers=1,2": "expected 1,2, found 1; missing 2",
    "no_rope_layers=none": "expected none, found 1; not expected 1",
    "rope_base=10000": "expected 10000, found 2e+06 in L0, 2e+06 in L2",
    "sliding_window=7": "expected 7, found none",
    "bos=forced": "expected forced, found none",
}


@pytest.mark.parametrize("expected", [MET, *((text,) for text in NOT_MET)])
def test_an_expectation_that_is_not_met_ends_with_exit_code_1_and_says_so(
    expected: tuple[str, ...], tiny: Callable[[str], Any], capsys: Any
):
    flags = [flag for expectation in expected for flag in ("--expect", expectation)]
    code, out, err = run_layers(capsys, "--model", tiny("smollm3").folder, *flags, "--json")
    missed = [
        f"{expectation.split('=')[0]}: {NOT_MET[expectation]}"
        for expectation in expected
        if expectation in NOT_MET
    ]
    assert code == len(missed)
    assert err.splitlines() == missed
    assert json.loads(out)["expectations_not_met"] == missed


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
    assert report["configuration_differs"] == []
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
        (["--expect", "no_rope_layers=0,0,1"], "a layer is named twice; expected layer numbers"),
        (["--expect", "no_rope_layer=1"], "expected KEY=VALUE with a KEY of rope_layers, no_rope"),
        (["--expect", "no_rope_layers=a"], "expected layer numbers such as no_rope_layers=3,7,11"),
        (["--expect", "rope_base=big"], "expected a number or none, got 'big'"),
        (["--expect", "bos=maybe"], "expected bos=forced or bos=none"),
        (["--expect", "no_rope_layers=4"], "there is no L4"),
        (["--expect", "sliding_window=4096"], "a length of 4096 shows on longer sequences only"),
        (["--seq-len", 3], "--seq-len 3: expected 4 <= seq-len <= "),
        (["--model", "nope-tinny"], "unknown model 'nope-tinny'"),
        (["--seq-len", 9999], "--seq-len 9999 is beyond the model's context"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[object], message: str, capfd: Any, tmp_path: Any):
    assert message in refused(capfd, tmp_path, layers, *arguments)


def test_none_is_the_empty_list_of_layers():
    assert parse_expectation("rope_layers=none").value == frozenset()
