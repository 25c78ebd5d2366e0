"""How much the last position of a text takes from each position, by several measures.

Influence is the norm of the gradient of a random read-out of the last position's final residual
stream by each input embedding. Rollout is the product over layers of the heads' mean attention,
without a residual or with one of some weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import exp
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from claims import Row, add_line, jackknife, panels

ROLLOUTS = {"rollout": 0.0, "rollout, residual 1/2": 0.5, "rollout, residual 9/10": 0.9}
HALF = 0.5  # the share of a rollout from which it has collapsed onto the first position
PARTS = ("first", "early", "late", "last")


def profiles(
    model: Any, tokens: Int[Tensor, "seq pos"], seed: int = 0
) -> dict[str, Float[Tensor, "seq pos"]]:
    """Return the profile of each measure in each text.

    Args:
        model: a HookedTransformer or TransformerBridge.
        tokens: the texts.
        seed: of the first text's read-out; that of each further text is one more.
    """
    kept: dict[str, Tensor] = {}
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"

    def keep(name: str, tensor: Tensor, hook: object) -> Tensor:
        kept[name] = tensor if kept else tensor.detach().requires_grad_()
        return kept[name]

    draws = [torch.Generator().manual_seed(seed + text) for text in range(len(tokens))]
    readouts = torch.stack([torch.randn(model.cfg.d_model, generator=draw) for draw in draws])
    points = ("hook_embed", *patterns, last)
    with torch.enable_grad(), model.hooks([(name, partial(keep, name)) for name in points]):
        model(tokens)
        (gradient,) = torch.autograd.grad((kept[last][:, -1] * readouts).sum(), kept["hook_embed"])
    attention = torch.stack([kept[name].detach().double().mean(1) for name in patterns])
    return {
        "influence": gradient.norm(dim=-1).double(),
        "attention": attention[:, :, -1].mean(0),
        **{name: rollout(attention, residual) for name, residual in ROLLOUTS.items()},
    }


def rollout(
    attention: Float[Tensor, "layer *seq pos pos"], residual: float = 0.0
) -> Float[Tensor, "*seq pos"]:
    """Return the last row of the product over layers of (1 - residual) attention + residual.

    Example:
        >>> rollout(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]] * 2).double()).tolist()
        [0.75, 0.25]
    """
    row = torch.eye(attention.shape[-1], dtype=attention.dtype)[-1:]
    for weights in reversed(attention):
        row = (1 - residual) * row @ weights + residual * row
    return row[..., 0, :]


def part_of(name: str) -> Callable[[Float[Tensor, "seq pos"]], Tensor]:
    """Return a statistic: the log of the mean profile in a part over that in the middle half.

    The parts are the first position, the early ones (up to n/8), the late ones (the last eighth
    without the last), and the last position.
    """

    def statistic(profiles: Float[Tensor, "seq pos"]) -> Tensor:
        n, profile = profiles.shape[-1], profiles.mean(0)
        spans = ((0, 1), (1, n // 8), (n - n // 8, n - 1), (n - 1, n))
        begin, end = spans[PARTS.index(name)]
        return (profile[begin:end].mean() / profile[n // 4 : 3 * n // 4].mean()).log()

    return statistic


def share_of_first(profiles: Float[Tensor, "seq pos"]) -> Tensor:
    """Return the first position's share of the mean profile, 0 to 1."""
    profile = profiles.mean(0)
    return profile[0] / profile.sum()


def largest_change(pairs: Float[Tensor, "seq two pos"]) -> Tensor:
    """Return the largest difference, in any part of the text, of the logs of two mean profiles."""
    one, other = (torch.stack([part_of(name)(side) for name in PARTS]) for side in pairs.unbind(1))
    return (one - other).abs().max()


def part_rows(
    model: str, measure: str, where: str, profiles: Float[Tensor, "seq pos"]
) -> Iterator[Row]:
    """Yield the parts of a mean profile over its middle half, and of a rollout the first's share.

    Claims: influence is a U, rollout collapses onto the first position, and a residual prevents it.
    """
    of_influence, residual = measure == "influence", ROLLOUTS.get(measure, 0.0)
    claim = f"u_{where.split(',')[0]}" if of_influence else "residual" if residual else "collapse"
    for part in PARTS:
        bound = {"above": 1.0} if of_influence and part in ("first", "last") else {}
        ends = map(exp, jackknife(profiles, part_of(part)))
        yield Row.of(claim, model, f"{measure}: {where}: {part}", ends, **bound)
    if measure in ROLLOUTS:
        ends = jackknife(profiles, share_of_first)
        bound = {"below": HALF} if residual else {"above": HALF}
        yield Row.of(claim, model, f"{measure}: {where}: share of the first key", ends, **bound)


def draw(rows: pd.DataFrame) -> go.Figure:
    """Draw each measure's parts of the text, over its middle half, a panel for each condition."""
    names = rows["quantity"].str.split(": ", expand=True)
    rows = rows.assign(measure=names[0], where=names[1], part=names[2])
    rows = rows[rows["part"].isin(PARTS)]
    figure = panels([*rows["where"].unique()], x="part of the text", y="over the middle half")
    for panel, (_, of_panel) in enumerate(rows.groupby("where", sort=False)):
        for name, of_measure in of_panel.groupby("measure", sort=False):
            add_line(figure, panel, str(name), of_measure["part"], of_measure)
    figure.update_yaxes(type="log", exponentformat="power", range=[-4, 8])
    return figure
