"""Small maps to draw, and the words of a figure."""

import numpy as np
import plotly.graph_objects as go

N_LAYERS, N = 3, 7


def triangle(n_layers: int = N_LAYERS, n: int = N, seed: int = 0) -> np.ndarray:
    """Return random causal maps."""
    maps = np.random.default_rng(seed).standard_normal((n_layers, n, n)).astype(np.float32)
    return np.where(np.tri(n, dtype=bool), maps, np.nan).astype(np.float32)


def text_of(figure: go.Figure) -> list[str]:
    """Return the text of a figure's annotations."""
    return [annotation.text for annotation in figure.layout.annotations if annotation.text]
