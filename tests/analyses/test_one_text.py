"""Terms of one text's scores: they add up, and a removed writer changes the score by its term."""

from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.induction import N_VOCAB, induction_model
from support.rounding import NETWORK
from support.tiny_models import ByName, tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nope_probe import load
from nope_probe.analyses.one_text import Side, moved_terms, query_terms
from nope_probe.hooks.layers.hook_points import HookedModel
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.positions import ReaderSums

N_POS, QUERY = 11, 9
INPUTS, TEXT = tokens(n_seqs=13, n_pos=N_POS), tokens(n_seqs=1, n_pos=N_POS, seed=5)
SEEN = torch.arange(N_POS) <= QUERY


def centred_over(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return values less their mean over some positions, 0 elsewhere."""
    return (x - x[seen].mean()).where(seen, 0.0)


def terms_of(
    model: HookedModel, text: torch.Tensor, inputs: torch.Tensor, head: int, kept: int = 0
) -> dict[str, torch.Tensor]:
    own, others = (
        dict(
            capture_positions(model, x, layers=[1], per_head=True, n_folds=1, kept_positions=kept)
            .readers[1]
            .heads()
        )[head]
        for x in (text, inputs)
    )
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
def test_with_alibi_its_bias_is_a_term(name: str, tmp_path: Path) -> None:
    tiny = write_decoder(name, tmp_path)
    model, inputs = load(str(tiny.folder)).model, tiny.tokens[:, :N_POS]
    terms = terms_of(model, inputs[:1], inputs[1:], 1)
    assert_adds_up(terms)
    steps = terms["position/alibi"][SEEN].diff()
    assert steps.min() > 0
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=1e-6, atol=1e-7)


def test_a_writers_term_is_what_its_removal_changes_with_the_norms_scale_held(
    tiny: ByName, bridge: ByName
) -> None:
    """Plain transformers: the MLP's vector at each key, less its mean over other texts."""
    hf, head = tiny("llama").hf, 1
    block, kept = hf.model.layers[1], {}
    hooks = [
        hf.model.layers[0].mlp.register_forward_hook(
            lambda module, given, out: kept.__setitem__("mlp", out)
        ),
        block.input_layernorm.register_forward_pre_hook(
            lambda module, given: kept.__setitem__("stream", given[0])
        ),
    ]

    def run(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            hf(inputs)
        square = kept["stream"].double().square().mean(-1, keepdim=True)
        scale = (square + block.input_layernorm.variance_epsilon).rsqrt()
        return kept["stream"].double(), kept["mlp"].double(), scale

    stream, out, scale = run(TEXT)
    _, others, other_scale = run(INPUTS)
    for hook in hooks:
        hook.remove()
    removed = out - (others * other_scale).mean(0) / scale

    def scores(vectors: torch.Tensor) -> torch.Tensor:
        """Return the query's scores for keys made of these vectors, the query's own as it was."""
        weight, attention = block.input_layernorm.weight.double(), block.self_attn
        q, k = (
            (x * scale * weight) @ projection.weight.double().T + projection.bias.double()
            for x, projection in ((stream, attention.q_proj), (vectors, attention.k_proj))
        )
        q, k = (x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for x in (q, k))
        cos, sin = hf.model.rotary_emb(stream.float(), torch.arange(N_POS)[None])
        q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
        key_head = head * k.shape[1] // q.shape[1]
        return k[0, key_head] @ q[0, head, QUERY] * attention.scaling

    with torch.no_grad():
        lost = centred_over(scores(stream) - scores(stream - removed), SEEN)
        terms = terms_of(bridge("llama"), TEXT, INPUTS, head)
        largest = scores(stream).abs().max()
    whole = centred_over(scores(stream), SEEN)
    assert (terms["scores"] - whole)[SEEN].abs().max() <= NETWORK * largest
    assert lost.abs().max() > 0.01 * largest
    assert (terms["key/MLP0"] - lost)[SEEN].abs().max() <= NETWORK * largest


@pytest.mark.parametrize("side", ["key", "query"])
def test_a_moved_term_is_what_the_score_loses_without_it_with_the_norms_scale_held(
    side: Side, tiny: ByName, bridge: ByName
) -> None:
    """Plain transformers: A[j, t] v_t W_O of one head of the first block, out of one token."""
    hf, head, writing, key = tiny("llama").hf, 1, 2, 6
    to = key if side == "key" else QUERY
    block, attention = hf.model.layers[1], hf.model.layers[0].self_attn
    kept: dict[str, torch.Tensor] = {}
    hooks = [
        attention.v_proj.register_forward_hook(lambda *args: kept.__setitem__("v", args[-1])),
        block.input_layernorm.register_forward_pre_hook(
            lambda module, given: kept.__setitem__("stream", given[0])
        ),
    ]
    cos, sin = hf.model.rotary_emb(torch.zeros(1), torch.arange(N_POS)[None])

    def projected(stream: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's queries and keys, with the scale that the norm has for `like`."""
        norm, own = block.input_layernorm, block.self_attn
        scale = (like.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        q, k = (
            (stream * scale * norm.weight.double()) @ w.weight.double().T + w.bias.double()
            for w in (own.q_proj, own.k_proj)
        )
        q, k = (x.unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for x in (q, k))
        q, k = apply_rotary_pos_emb(q, k, cos.double(), sin.double())
        return q[:, head] * own.scaling, k[:, head * k.shape[1] // q.shape[1]]

    with torch.no_grad():
        hf(INPUTS)
        others = kept["stream"].double()
        weights = hf(TEXT, output_attentions=True).attentions[0][0, writing, to].double()
    for hook in hooks:
        hook.remove()
    stream, d_head = kept["stream"].double(), attention.head_dim
    v = kept["v"][0].double().unflatten(-1, (-1, d_head))
    value = v[:, writing * v.shape[1] // (attention.o_proj.in_features // d_head)]
    w_o = attention.o_proj.weight.double()[:, writing * d_head : (writing + 1) * d_head]
    q, k = projected(stream, stream)
    mean_k = projected(others, others)[1].mean(0)
    expected = torch.zeros(N_POS, dtype=torch.float64)
    for token in range(to + 1):
        without = stream.clone()
        without[0, to] -= weights[token] * value[token] @ w_o.T
        changed_q, changed_k = projected(without, stream)
        if side == "key":
            expected[token] = q[0, QUERY] @ (k - changed_k)[0, key]
        else:
            expected[token] = (q - changed_q)[0, QUERY] @ mean_k[key]

    def sums(inputs: torch.Tensor, moved_to: int | None = None) -> ReaderSums:
        options = {"layers": [1], "per_head": True, "n_folds": 1, "moved_to": moved_to}
        found = capture_positions(bridge("llama"), inputs, **options)
        return dict(found.readers[1].heads())[head]

    own, moved = sums(TEXT), sums(TEXT, to)
    parts = moved.first_keys if side == "key" else moved.first_queries
    terms = moved_terms(own, sums(INPUTS), QUERY, key, parts[f"L0H{writing}"], side)
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
