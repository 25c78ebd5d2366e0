"""Each claim of recipes/claims/ holds in a model made so that it does, and fails in one made so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import early_sinks
import frequencies
import page
import sink_position
import temperature
import u_shape
from claims import jackknife, judge, overall, share_above, table
from nope_probe import LoadedModel, load, sequences
from nope_probe.models.parameter_free import has_hooked_transformer

pytestmark = [
    pytest.mark.usefixtures("unenforced"),
    pytest.mark.skipif(not has_hooked_transformer(), reason="built from a HookedTransformer"),
]

N_LAYERS, N_POS, N_SEQS = 3, 24, 4
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SCORES: dict[str, Scores] = {
    "uniform": lambda query, key: 0.0 * key,
    "near": lambda query, key: 0.1 * key,
    "far": lambda query, key: -0.1 * key,
    "own": lambda query, key: 99.0 * (key == query),
    "middle": lambda query, key: 20.0 * ((key >= N_POS // 4) & (key < 3 * N_POS // 4)),
}


def only(number: int) -> Scores:
    """Return scores by which every head looks at one key alone, where it sees it."""
    return lambda query, key: 99.0 * (key == number)


def looking(scores: Scores | str, name: str = "nope-tiny") -> LoadedModel:
    """Return a model in which the scores of all heads are a function of query and key."""
    loaded = load(name, n_layers=N_LAYERS)
    function = SCORES[scores] if isinstance(scores, str) else scores

    def write(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        places = torch.arange(tensor.shape[-1])
        made = function(places[:, None], places[None]).to(tensor)
        return torch.where(tensor.isfinite(), made, tensor)

    for layer in range(N_LAYERS):
        loaded.model.add_hook(f"blocks.{layer}.attn.hook_attn_scores", write, is_permanent=True)
    return loaded


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., pd.DataFrame]:
    def rows(script: Any, loaded: LoadedModel, **options: Any) -> pd.DataFrame:
        monkeypatch.setattr(script, "load_once", lambda name, **_: loaded)
        if script is not temperature:  # attention was made without regard to tokens
            at_random = lambda *source, **options: sequences("random", **options)  # noqa: E731
            monkeypatch.setattr(script, "sequences", at_random)
        return table([*script.rows_of("constructed", **options)])

    return rows


def verdict(rows: pd.DataFrame, claim: str, quantity: str = "") -> str:
    of_claim = rows[(rows["claim"] == claim) & rows["quantity"].str.startswith(quantity)]
    return overall([*of_claim["verdict"]])


def value(rows: pd.DataFrame, quantity: str) -> float:
    return float(rows.set_index("quantity")["value"][quantity])


def profiles_of(rows_of: Any, scores: Scores | str, name: str = "nope-tiny") -> pd.DataFrame:
    return rows_of(u_shape, looking(scores, name), n_seqs=N_SEQS, n_pos=N_POS)


def test_uniform_attention_collapses_as_the_product_of_cesaro_means_and_influence_is_a_u(
    rows_of: Any,
):
    rows = profiles_of(rows_of, "uniform")
    cesaro = torch.tensor([[(j <= i) / (i + 1) for j in range(N_POS)] for i in range(N_POS)])
    expected = (cesaro.double() @ cesaro.double() @ cesaro.double())[-1]
    share = value(rows, "rollout: untrained, no RoPE: share of the first key")
    assert share == pytest.approx(float(expected[0]), rel=1e-4)
    assert value(rows, "rollout: trained, no RoPE: last") == pytest.approx(
        float(expected[-1] / expected[6:18].mean()), rel=1e-4
    )
    assert value(rows, "attention: trained, no RoPE: first") == pytest.approx(1, rel=1e-4)
    assert verdict(rows, "u_untrained") == "holds"


def test_influence_is_no_u_where_all_heads_look_at_the_middle(rows_of: Any):
    rows = profiles_of(rows_of, "middle")
    assert verdict(rows, "u_untrained", "influence: untrained, no RoPE: first") == "fails"
    assert verdict(rows, "collapse") == "fails"


def test_a_residual_delays_the_collapse_onto_the_first_key_by_its_weight(rows_of: Any):
    rows = profiles_of(rows_of, only(0))
    assert verdict(rows, "collapse") == "holds"
    for residual, name in ((0.5, "1/2"), (0.9, "9/10")):
        share = value(rows, f"rollout, residual {name}: trained, no RoPE: share of the first key")
        assert share == pytest.approx(1 - residual**N_LAYERS, rel=1e-4)
    assert verdict(rows, "residual", "rollout, residual 1/2") == "fails"
    assert verdict(rows, "residual", "rollout, residual 9/10") == "holds"
    assert verdict(rows, "residual") == "depends"
    assert verdict(profiles_of(rows_of, "own"), "residual") == "holds"


@pytest.mark.parametrize(("scores", "expected"), [("near", "holds"), ("far", "fails")])
def test_near_keys_are_favoured_where_scores_rise_with_the_position_of_the_key(
    scores: str, expected: str, rows_of: Any
):
    rows = profiles_of(rows_of, scores)
    assert verdict(rows, "near_keys") == expected
    sign = 1 if expected == "holds" else -1
    assert value(rows, "scores: trained, no RoPE: locality") == pytest.approx(sign)


def test_influence_is_the_same_without_rope_where_scores_ignore_it(rows_of: Any):
    rows = profiles_of(rows_of, "uniform", "rope-tiny")
    assert value(rows, "influence: untrained: largest change") == pytest.approx(1, abs=1e-4)
    assert verdict(rows, "same") == "holds"
    loaded = load("rope-tiny", n_layers=N_LAYERS)
    for layer in range(N_LAYERS):  # untrained queries and keys are small
        point = f"blocks.{layer}.attn.hook_attn_scores"
        loaded.model.add_hook(point, lambda scores, hook: 3000 * scores, is_permanent=True)
    rows = rows_of(u_shape, loaded, n_seqs=N_SEQS, n_pos=N_POS)
    assert value(rows, "influence: untrained: largest change") > u_shape.SAME


def test_early_heads_are_sinks_or_not_by_the_length_of_the_text(rows_of: Any):
    rows = rows_of(early_sinks, looking("uniform"))
    for n in early_sinks.LENGTHS:
        mean = sum(1 / i for i in range(1, n + 1)) / n
        of_length = f"<bos> first: {n} tokens: largest weight"
        assert value(rows, of_length) == pytest.approx(mean, rel=1e-4)
    assert verdict(rows, "early_sinks") == "holds"
    rows = rows_of(early_sinks, looking(only(0)))
    assert verdict(rows, "early_sinks") == "fails"
    assert value(rows, "any token first: 16 tokens: share above 0.5") == 1


@pytest.mark.parametrize(("key", "expected"), [(0, "holds"), (5, "fails")])
def test_sinks_are_on_the_first_position_or_on_another(key: int, expected: str, rows_of: Any):
    rows = rows_of(sink_position, looking(only(key)), n_pos=N_POS)
    assert verdict(rows, "sink_position") == expected
    assert value(rows, "random tokens: share on key 0") == (key == 0)


@pytest.mark.parametrize("positional", ["fast", "slow"])
def test_the_rank_correlation_has_the_sign_of_the_pairs_that_positional_heads_use(
    positional: str, rows_of: Any
):
    loaded = load("rope-tiny", n_layers=2)
    for block in loaded.model.blocks:
        attn, n_pairs = block.attn, loaded.model.cfg.d_head // 2
        fast = torch.arange(loaded.model.cfg.d_head) % n_pairs < n_pairs // 2
        of_position = fast if positional == "fast" else ~fast
        keys = attn._W_K if hasattr(attn, "_W_K") else attn.W_K
        biases = attn._b_K if hasattr(attn, "_b_K") else attn.b_K
        with torch.no_grad():
            keys[..., of_position] = 0
            biases.copy_(9.0 * of_position)
            attn.W_Q[::2] = 0  # every other head: no content
            attn.W_Q[..., of_position] = 0
            attn.b_Q.zero_()
            attn.b_Q[::2] = 9.0 * of_position
    rows = rows_of(frequencies, loaded, n_seqs=64, n_pos=32)
    assert verdict(rows, "fast_is_position") == ("holds" if positional == "fast" else "fails")


@pytest.mark.parametrize(("factor", "expected"), [(1 / 1.35, "holds"), (1.5, "fails")])
def test_scaling_scores_helps_a_model_of_cooled_scores_and_harms_one_of_heated_scores(
    factor: float, expected: str, rows_of: Any
):
    loaded = load("nope-tiny")
    tokens = torch.randint(5, 90, (N_SEQS, N_POS), generator=torch.Generator().manual_seed(0))
    as_trained = temperature.losses(loaded, tokens, 1.0)
    for block in loaded.model.blocks:
        block.attn.W_Q.data *= factor
        block.attn.b_Q.data *= factor
    torch.testing.assert_close(
        temperature.losses(loaded, tokens, 1 / factor), as_trained, rtol=1e-4, atol=1e-4
    )
    beyond = replace(loaded, info=replace(loaded.info, n_ctx=N_POS))
    rows = rows_of(temperature, beyond, n_pos=2 * N_POS)
    assert verdict(rows, "nope_scales") == expected


def test_a_model_within_its_context_gets_no_verdict_on_its_length(rows_of: Any):
    rows = rows_of(temperature, load("rope-tiny", n_layers=1), n_pos=N_POS)
    assert verdict(rows, "not_with_rope") == "undecided"


def test_a_verdict_needs_the_whole_interval():
    assert [judge(*ends, above=1.0, below=None) for ends in ((1.1, 2), (0.9, 2), (0.5, 1))] == [
        "holds",
        "undecided",
        "fails",
    ]
    assert judge(0.5, 0.9, above=None, below=1.0) == "holds"
    assert overall(["", "holds", "undecided"]) == overall([]) == "undecided"


def test_the_jackknife_of_a_mean_is_students_interval():
    units = torch.tensor([1.0, 2.0, 4.0, 7.0])
    half = float(3.1824463 * units.std() / 2)  # the quantile .975 of t with 3 degrees of freedom
    assert jackknife(units) == pytest.approx((3.5, 3.5 - half, 3.5 + half), rel=1e-5)
    heads = torch.tensor([[0.2, 0.4, 0.0], [0.2, 0.4, 0.7]])
    assert share_above(heads, 0.3) == pytest.approx((2 / 3, 1 / 3, 2 / 3))


def test_every_script_is_at_most_seventy_lines():
    folder = Path(page.__file__).parent
    lines = {name: len((folder / f"{name}.py").read_text().splitlines()) for name in SCRIPTS}
    assert max(lines.values()) <= 70, lines


SCRIPTS = [*page.WORDS["scripts"]]


def test_the_page_is_that_of_the_stored_rows_and_each_number_of_it_is_stored():
    stored = pd.read_csv(page.STORED, keep_default_na=False)
    assert page.PAGE.read_text(encoding="utf-8") == page.page(stored), (
        "python recipes/claims/page.py draw"
    )
    assert {*stored["claim"]} == {*page.WORDS["claims"]}
    for name, words in page.WORDS["claims"].items():
        quantities = stored[stored["claim"] == name]["quantity"]
        assert all(quantities.str.startswith(shown).any() for shown in words["numbers"])
    assert {image.stem for image in page.IMAGES.iterdir()} == {*SCRIPTS}
