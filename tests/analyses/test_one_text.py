"""Terms of one text's scores: they add up, and a removed writer changes the score by its term."""

from typing import Any

import pytest
import torch
from support.edited_model import plain_run
from support.models_by_hand import N_VOCAB, induction_model
from support.plain_states import calls_of
from support.rounding import NETWORK
from support.tiny_models import ByName, ModelOf, tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nope_probe.analyses.one_text import (
    Look,
    Side,
    moved_terms,
    query_terms,
    rows_of,
    steps_back,
    steps_table,
    why_table,
)
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.positions import ReaderSums

N_POS, QUERY, HEAD = 11, 9, 1
INPUTS, TEXT = tokens(n_seqs=13, n_pos=N_POS), tokens(n_seqs=1, n_pos=N_POS, seed=5)
SEEN = torch.arange(N_POS) <= QUERY


def centred_over(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return values less their mean over some positions, 0 elsewhere."""
    return (x - x[seen].mean()).where(seen, 0.0)


def sums_of(model: HookedModel, inputs: torch.Tensor, head: int, **options: Any) -> ReaderSums:
    """Return the sums of a head of L1, in one fold."""
    sums = capture_positions(model, inputs, layers=[1], per_head=True, n_folds=1, **options)
    return dict(sums.readers[1].heads())[head]


def terms_of(
    model: HookedModel, text: torch.Tensor, inputs: torch.Tensor, head: int, kept: int = 0
) -> dict[str, torch.Tensor]:
    own, others = (sums_of(model, x, head, kept_positions=kept) for x in (text, inputs))
    return query_terms(own, others, QUERY, kept_positions=kept)


def assert_adds_up(terms: dict[str, torch.Tensor]) -> None:
    """Check that the terms add up to the scores of the keys that the query sees."""
    scores = terms["scores"][SEEN]
    added = sum(x[SEEN] for name, x in terms.items() if name != "scores")
    assert (added - scores).abs().max() <= NETWORK * scores.abs().max()


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_the_terms_add_up_to_the_scores(name: str, kept: int, bridge: ByName) -> None:
    terms = terms_of(bridge(name), TEXT, INPUTS, 1, kept)
    assert_adds_up(terms)
    assert terms["scores"][~SEEN].isnan().all()


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_with_alibi_its_bias_is_a_term(name: str, decoder: ModelOf) -> None:
    model, tiny = decoder(name)
    inputs = tiny.tokens[:, :N_POS]
    terms = terms_of(model, inputs[:1], inputs[1:], 1)
    assert_adds_up(terms)
    steps = terms["position/alibi"][SEEN].diff()
    assert steps.min() > 0
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=1e-6, atol=1e-7)


def plain(hf: Any, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return block 0's values, weights and what its MLP writes, and what block 1 reads."""
    first, second = hf.model.layers[:2]
    parts = {"v": first.self_attn.v_proj, "mlp": first.mlp, "norm": second.input_layernorm}
    calls = calls_of(hf, parts, inputs)
    kept = {"v": calls["v"].output, "mlp": calls["mlp"].output, "stream": calls["norm"].input}
    kept["weights"] = plain_run(hf, inputs).patterns[0]
    return {name: x.double() for name, x in kept.items()}


def scale_of(hf: Any, stream: torch.Tensor) -> torch.Tensor:
    """Return the scale that block 1's norm has for vectors."""
    epsilon = hf.model.layers[1].input_layernorm.variance_epsilon
    return (stream.square().mean(-1, keepdim=True) + epsilon).rsqrt()


@torch.no_grad()
def projected(
    hf: Any, vectors: torch.Tensor, stream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and keys of L1H1 of vectors, with the norm's scale for a stream."""
    norm, own = hf.model.layers[1].input_layernorm, hf.model.layers[1].self_attn
    q, k = (
        (vectors * scale_of(hf, stream) * norm.weight.double()) @ w.weight.double().T
        + w.bias.double()
        for w in (own.q_proj, own.k_proj)
    )
    q, k = (x.unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for x in (q, k))
    cos, sin = hf.model.rotary_emb(torch.zeros(1), torch.arange(N_POS)[None])
    q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
    return q[:, HEAD] * own.scaling, k[:, HEAD * k.shape[1] // q.shape[1]]


def test_a_writers_term_is_what_its_removal_changes_with_the_norms_scale_held(
    tiny: ByName, bridge: ByName
) -> None:
    """Plain transformers: the MLP's vector at each key, less its mean over other texts."""
    hf = tiny("llama").hf
    text, others = plain(hf, TEXT), plain(hf, INPUTS)
    mean = (others["mlp"] * scale_of(hf, others["stream"])).mean(0)
    removed = text["mlp"] - mean / scale_of(hf, text["stream"])
    q, k = projected(hf, text["stream"], text["stream"])
    _, without = projected(hf, text["stream"] - removed, text["stream"])
    scores = k[0] @ q[0, QUERY]
    lost = centred_over(scores - without[0] @ q[0, QUERY], SEEN)
    terms, largest = terms_of(bridge("llama"), TEXT, INPUTS, HEAD), scores.abs().max()
    whole = centred_over(scores, SEEN)
    assert (terms["scores"] - whole)[SEEN].abs().max() <= NETWORK * largest
    assert lost.abs().max() > 0.01 * largest
    assert (terms["key/MLP0"] - lost)[SEEN].abs().max() <= NETWORK * largest


@pytest.mark.parametrize("side", ["key", "query"])
def test_a_moved_term_is_what_the_score_loses_without_it_with_the_norms_scale_held(
    side: Side, tiny: ByName, bridge: ByName
) -> None:
    """Plain transformers: A[j, t] v_t W_O of one head of the first block, out of one token."""
    hf, writing, key = tiny("llama").hf, 2, 6
    to, attention = key if side == "key" else QUERY, hf.model.layers[0].self_attn
    text, d_head = plain(hf, TEXT), attention.head_dim
    stream, others = text["stream"], plain(hf, INPUTS)["stream"]
    v = text["v"][0].unflatten(-1, (-1, d_head))
    value = v[:, writing * v.shape[1] // (attention.o_proj.in_features // d_head)]
    w_o = attention.o_proj.weight.double()[:, writing * d_head : (writing + 1) * d_head]
    q, k = projected(hf, stream, stream)
    mean_k = projected(hf, others, others)[1].mean(0)
    expected = torch.zeros(N_POS, dtype=torch.float64)
    for token in range(to + 1):
        without = stream.clone()
        without[0, to] -= text["weights"][0, writing, to, token] * value[token] @ w_o.T
        changed_q, changed_k = projected(hf, without, stream)
        if side == "key":
            expected[token] = q[0, QUERY] @ (k - changed_k)[0, key]
        else:
            expected[token] = (q - changed_q)[0, QUERY] @ mean_k[key]
    model = bridge("llama")
    own, moved = sums_of(model, TEXT, HEAD), sums_of(model, TEXT, HEAD, moved_to=to)
    parts = moved.first_keys if side == "key" else moved.first_queries
    others_sums = sums_of(model, INPUTS, HEAD)
    terms = moved_terms(own, others_sums, QUERY, key, parts[f"L0H{writing}"], side)
    assert expected.abs().max() > 0
    assert (terms - expected).abs().max() <= NETWORK * expected.abs().max()


def test_an_induction_heads_score_is_the_term_of_the_previous_token_head() -> None:
    model = induction_model(N_POS)
    text = torch.tensor([[0, 3, 5, 1, 2, 6, 4, 0, 2, 3, 5]])
    inputs = (text + torch.arange(N_VOCAB)[:, None]) % N_VOCAB  # every token once at each position
    terms = terms_of(model, text, inputs, head=0)
    same = (text[0].roll(1) == text[0, QUERY]).double()
    same[0] = float(text[0, 0] == text[0, QUERY])  # the first token sees itself alone
    expected = centred_over(3 * same, SEEN)
    assert expected[2] > 2, "the token after the earlier 3"
    for found in (terms.pop("scores"), terms.pop("key/L0H0")):
        assert (found - expected)[SEEN].abs().max() <= 1e-5
    assert all(x.abs().max() <= 1e-5 for x in terms.values())


def test_the_rows_of_a_look_are_its_largest_terms_and_add_up_to_its_score() -> None:
    """By hand: terms above 1 of the score of 10, and parts above 1.2 of the head's 6."""
    look, writers = Look(2, 1, 4, 3), {"L0H1": 6.0, "L1H0": -2.0, "MLP1": 1.5, "ATTN0": 1.25}
    terms = {f"key/{name}": x for name, x in writers.items()} | {"key/embed": 0.5}
    terms |= {"scores": 10.0, "position/rotation": 1.0, "query/embed": 1.75}
    state = {look.prefix + name: torch.tensor([9.0, 9.0, 9.0, x]) for name, x in terms.items()}
    state[look.moved("key", "L0H1")] = torch.tensor([0.5, 4.0, -1.5, 2.0])
    rows = [*rows_of(look, state)]
    assert [row[1:] for row in rows] == [
        ("rotation", "position", None, 1.0),
        ("L0H1", "key", None, 6.0),
        ("L0H1", "key", 1, 4.0),
        ("L0H1", "key", 3, 2.0),
        ("L0H1", "other", None, -1.0),
        ("L0H1", "mean", None, 1.0),
        ("L1H0", "key", None, -2.0),
        ("MLP1", "key", None, 1.5),
        ("embed", "query", None, 1.75),
        ("other writers", "other", None, 1.75),
    ]
    assert [row.before for row in rows if row.before] == [(0, 1, 3, 1), (0, 1, 3, 3)]
    state[f"{look.prefix}scores"] = torch.tensor([torch.nan, 9.0, 9.0, 10.0])
    before = [Look(0, 1, 3, 1), Look(0, 1, 3, 3)]
    assert steps_back(look._replace(key=-1), [state]) == ([rows], before)
    state["effects"] = torch.tensor([[1.0, 0.5, 0.25], [2.0, 0.5, 0.125]])
    again = {
        f"{before[0].prefix}{name}": torch.tensor([0, 5.0, 0, 0])
        for name in ("scores", "query/L0H1")
    }
    again[before[0].moved("query", "L0H1")] = torch.tensor([0, 0, 0, 5.0])
    assert steps_back(look, [state, again])[1] == [], "the look at key 3 was followed before"
    table = steps_table(look, [state, {**again, "effects": torch.zeros(1, 3)}, {}])
    assert table["step"].value_counts().to_dict() == {1: 10, 2: 6}
    moved = table[table["moved_from"].notna()]
    assert moved["effect"].tolist() == [1.0, 2.0, 0.0]
    assert table["weight_without"].count() == 3


def test_the_ten_writers_whose_terms_differ_most_have_rows_and_the_others_one() -> None:
    terms = {f"key/L0H{head}": torch.tensor([head, -head, 99.0 - 9 * head]) for head in range(12)}
    terms["scores"] = torch.tensor([66.0, -66.0, torch.nan])
    table = why_table(terms, torch.tensor([0.75, 0.25, 0.0]), ["a", "b", "c"])
    assert table["key"].unique().tolist() == [0, 1]
    of_key = table[table["key"] == 1]
    assert {*of_key["weight"]} == {0.25}
    assert {*of_key["token"]} == {"b"}
    nats = {f"L0H{head}": -head for head in range(2, 12)} | {"other writers": -1}
    assert dict(zip(of_key["term"], of_key["nats"], strict=True)) == nats
