"""Tables of `trace` for figures and sentences."""

import numpy as np
import pandas as pd

N = 48
TERMS = {  # size of the whole pattern, nats; shares of rotation and of the three written terms
    "nope": {
        "L1": (0.30, 0.0, 0.986, 0.0, 0.007),
        "L2": (7.6, 0.0, 0.845, 0.0, 0.154),
        "L3": (2.6, 0.0, 0.806, 0.0, 0.147),
    },
    "rope": {
        "L1": (0.60, 0.997, 0.005, -0.002, 0.0),
        "L2": (1.9, 1.026, -0.024, 0.009, 0.0),
        "L3": (2.1, 0.990, -0.055, 0.004, 0.002),
    },
}
WRITERS = {
    "L1": {"MLP0": 0.97, "L0H0": 0.011, "L0H1": 0.006},
    "L2": {"L1H0": 0.92, "L1H1": 0.67, "MLP0": 0.13, "MLP1": -0.72},
    "L3": {"L1H0": 0.92, "L1H1": 0.67, "MLP0": 0.16, "MLP1": -0.74},
}
EFFECTS = [  # reader, writer, predicted, direct, total
    ("L1", "MLP0", 0.97, 0.97, 0.95),
    ("L1", "L0H0", 0.011, 0.011, 0.39),
    ("L1", "L0H1", 0.006, 0.006, 0.35),
    ("L2", "L1H0", 0.92, 0.92, 0.60),
    ("L2", "MLP1", -0.72, -0.72, -0.63),
]
FIRST_KEY = {"L0H0": 0.79, "L0H1": 0.75, "L1H0": 0.2, "L1H1": 0.3}
NAMES = ("rotation", "written_key", "written_query", "written_both")


def interval(name: str, value: float, width: float = 0.004) -> dict[str, float]:
    return {name: value, f"{name}_low": value - width, f"{name}_high": value + width}


def layer_of(reader: str) -> dict[str, int]:
    layer, _, head = reader[1:].partition("H")
    return {"layer": int(layer), **({"head": int(head)} if head else {})}


def terms_table(model: str = "nope") -> pd.DataFrame:
    rows = []
    for reader, (size, *shares) in TERMS[model].items():
        left = 1 - sum(shares)
        parts = {"all": 1.0, **dict(zip(NAMES, shares, strict=True)), "covariance": left}
        parts["mean"] = 1 - left
        for term, share in parts.items():
            width = 0.0 if share == 0 else 0.004
            numbers = {
                **interval("size", size * abs(share) ** 0.5),
                **interval("part", share * size, width * size),
            }
            relative = interval("relative_r2", 1.0 if term == "rotation" else 0.4)
            other = interval("not_by_distance", 0.0 if term == "rotation" else 0.1)
            labels = {**layer_of(reader), "of": "pattern", "term": term}
            rows.append({**labels, **numbers, **relative, **other})
    return pd.DataFrame(rows)


def writers_table() -> pd.DataFrame:
    rows = [
        {
            **layer_of(reader),
            "of": "pattern",
            "side": "key",
            "writer": writer,
            **interval("part", share * TERMS["nope"][reader][0]),
            **interval("size", abs(share)),
            **interval("from_first_key", share * FIRST_KEY.get(writer, np.nan), abs(share) / 20),
        }
        for reader, shares in WRITERS.items()
        for writer, share in shares.items()
    ]
    return pd.DataFrame(rows)


def effects_table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            **layer_of(reader),
            "of": "pattern",
            "writer": writer,
            **interval("predicted", size * predicted),
            **interval("held", size * predicted),
            **interval("direct", size * direct),
            **interval("norm", size * (direct - predicted)),
            **interval("total", size * total, size * 0.02),
        }
        for reader, writer, predicted, direct, total in EFFECTS
        for size in [TERMS["nope"][reader][0]]
    )


def maps(model: str = "nope") -> dict[str, np.ndarray]:
    """Return patterns of each reader: slopes, as large as the term is."""
    result = {}
    positions = np.arange(N)
    below = np.tri(N, k=-1, dtype=bool)
    slope = np.where(below, np.cos((positions[:, None] - positions[None]) / 9), np.nan)
    for reader, (rms, *shares) in TERMS[model].items():
        named = dict(zip(NAMES, shares, strict=True))
        for term, share in {"all": 1.0, **named, "covariance": 1 - sum(shares)}.items():
            if model == "rope" or term not in ("rotation", "written_query"):
                result[f"{reader}/{term}"] = (rms * share * slope).astype(np.float32)
    return result
