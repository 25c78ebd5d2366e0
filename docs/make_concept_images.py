"""Draw the small maps of docs/guide/concepts.md: python docs/make_concept_images.py.

Each is made by the functions that it illustrates, on a score map written by hand.
"""

from pathlib import Path

import torch
from plotly.colors import sample_colorscale
from torch import Tensor

from nope_probe.analyses.attention import information_parts
from nope_probe.analyses.pattern import MIN_KEYS, measure
from nope_probe.analyses.pattern_rows import not_by_distance
from nope_probe.maps.layers import LayerMaps
from nope_probe.maps.rows import diagonal_normalised, row_centred

OUT = Path(__file__).parent / "images" / "concepts"
N, CELL, LEFT, TOP, GAP = 16, 11, 34, 30, 56
SCORES = ("key position", "query position")
TEXT = 'font-family="system-ui, sans-serif" fill="#222"'


def main() -> None:
    i, j = torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij")
    near = 2 * torch.exp(-(i - j) / 5.0)
    rows = 1.5 * torch.sin(i / 1.7)
    edge = near + 1.2 * (j < 2)
    bent = row_centred(edge)
    rest = not_by_distance(LayerMaps.of(bent[None]).pattern)[0].where(bent.isfinite(), torch.nan)
    pictures = {
        "pattern": {
            "score map": lower(near + rows),
            "pattern among the other keys": row_centred(near + rows, 1),
        },
        "amplitude": amplitudes(near),
        "locality": orders(i, j),
        "relative": {
            "relative": row_centred(near),
            "with an edge": bent,
            "its part not by distance": rest,
        },
        "edge": {
            "score map": lower(edge + rows / 2),
            "diagonal-normalised": diagonal_normalised(lower(edge + rows / 2)),
            "part not by distance": rest,
        },
        "sources": sources(i, j),
        "removed": removals(near),
        "attention": attention(i, j),
        "mean_term": mean_and_covariance(i, j),
    }
    for name, maps in pictures.items():
        draw(name, maps)
    draw("gram", grams(), ("position", "position"))


def amplitudes(near: Tensor) -> dict[str, Tensor]:
    """Return a pattern, a tenth of it, and what a single map of noise alone looks like."""
    noise = torch.randn(8, 1, N, N, generator=torch.Generator().manual_seed(3)) * 1.1
    alone = measure(noise)[0].amplitude.value
    pattern = row_centred(near)
    rms = pattern.square().nanmean().sqrt()
    return {
        f"amplitude {rms:.2f} nats": pattern,
        f"amplitude {rms / 10:.2f} nats": pattern / 10,
        f"noise: amplitude {alone:.2f} nats": row_centred(noise.mean(0)[0]),
    }


def orders(i: Tensor, j: Tensor) -> dict[str, Tensor]:
    """Return patterns that prefer near keys, far keys and both, with their measures."""
    shapes = {
        "near keys": j / 8,
        "far keys": -j / 8,
        "both ends": ((j - (i - 1) / 2) / 8).square() * 1.5,
    }
    found = {}
    for name, scores in shapes.items():
        one = measure(scores.float().expand(8, 1, N, N))[0]
        numbers = f"{one.locality.value:+.1f}, {one.monotonicity.value:.1f}"
        found[f"{name}: {numbers}"] = row_centred(scores.float())
    return found


def sources(i: Tensor, j: Tensor) -> dict[str, Tensor]:
    """Return terms and the pattern that they add up to."""
    terms = {
        "mask": row_centred(j / 12),
        "RoPE": row_centred(torch.cos((i - j) / 1.5)),
        "mask x RoPE": row_centred(-j / 30 * torch.cos((i - j) / 1.5)),
    }
    return {**terms, "sum: the pattern": sum(terms.values())}


def removals(near: Tensor) -> dict[str, Tensor]:
    """Return a pattern, and it without a part, with how many nats of it are kept."""
    whole = row_centred(near)
    left = {"the mask": 0 * whole, "W_Q": 0 * whole, "the MLPs": 0.9 * whole}
    size = whole.square().nanmean().sqrt()
    kept = {name: (p * whole).nanmean() / size for name, p in left.items()}
    return {
        f"the pattern: {size:.2f} nats": whole,
        **{f"without {name}: {kept[name]:.2f} nats": p for name, p in left.items()},
    }


def mean_and_covariance(i: Tensor, j: Tensor) -> dict[str, Tensor]:
    """Return a score map and its exact split."""
    mean, covariance = 0.12 * i * j / N, torch.exp(-(i - j) / 2.0)
    return {
        "score map": lower(mean + covariance),
        "mean term": lower(mean),
        "covariance term": lower(covariance),
    }


def attention(i: Tensor, j: Tensor) -> dict[str, Tensor]:
    """Return a head's weights in two texts and their mean, with the positional share."""
    content = torch.randn(400, 1, N, generator=torch.Generator().manual_seed(1))
    scores = (3 * torch.exp(-(i - j) / 3.0) + 1.4 * content).double()
    visible = j <= i
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    rows = visible.sum(-1) >= MIN_KEYS
    in_texts, of_mean = (
        information_parts(x, visible).others[..., rows].mean() for x in (weights, weights.mean(0))
    )
    drawn = (*weights[:2], weights.mean(0))
    names = ("one text", "another text", f"the mean: {of_mean / in_texts:.0%} position")
    return {
        name: values.where(visible, torch.nan) for name, values in zip(names, drawn, strict=True)
    }


def grams() -> dict[str, Tensor]:
    """Return Gram maps of independent unit inputs, before and after even causal attention."""
    even = torch.ones(N, N).tril()
    even = even / even.sum(-1, keepdim=True)
    return {"inputs": torch.eye(N), "after causal attention": even @ even.T}


def lower(scores: Tensor) -> Tensor:
    """Return scores with NaN where j >= i."""
    return scores.where(torch.ones(N, N).tril(-1).bool(), torch.nan)


def draw(name: str, maps: dict[str, Tensor], axes: tuple[str, str] = SCORES) -> None:
    """Write maps side by side as an SVG; colours are centred on zero and share one scale."""
    side = N * CELL
    width, height = LEFT + len(maps) * (side + GAP), TOP + side + 26
    limit = max(values[values.isfinite()].abs().max().item() for values in maps.values())
    panels = "\n".join(
        panel(title, values / limit, LEFT + at * (side + GAP), axes)
        for at, (title, values) in enumerate(maps.items())
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{panels}\n</svg>\n',
        encoding="utf-8",
    )


def panel(title: str, values: Tensor, x: int, axes: tuple[str, str]) -> str:
    """Return one map with its title and axes; values are -1 to 1, NaN cells stay empty."""
    side = N * CELL
    cells = "\n".join(
        f'<rect x="{x + key * CELL}" y="{TOP + query * CELL}" width="{CELL}" height="{CELL}" '
        f'fill="{colour(values[query, key].item())}"/>'
        for query in range(N)
        for key in range(N)
        if values[query, key].isfinite()
    )
    return (
        f'<text x="{x}" y="{TOP - 10}" {TEXT} font-size="13" font-weight="600">{title}</text>\n'
        f'{cells}\n<rect x="{x}" y="{TOP}" width="{side}" height="{side}" fill="none" '
        f'stroke="#bbb"/>\n<text x="{x + side / 2}" y="{TOP + side + 17}" text-anchor="middle" '
        f'{TEXT} font-size="11">{axes[0]}</text>\n<text transform="translate({x - 10} '
        f'{TOP + side / 2}) rotate(-90)" text-anchor="middle" {TEXT} font-size="11">'
        f"{axes[1]}</text>"
    )


def colour(value: float) -> str:
    red, green, blue = sample_colorscale("RdBu_r", (value + 1) / 2, colortype="tuple")[0]
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


if __name__ == "__main__":
    main()
