"""Thumbnails of all heads: their bytes and their size."""

import json
import re
from base64 import b64decode

import numpy as np
from support.explored import HEADS, LAYERS, patterns, table
from support.explored import OF_HEAD as N

from nope_probe.figures.explorer import head_maps


def content(maps: str) -> dict[str, object]:
    [matches] = re.findall(r'<script type="application/json">(.*?)</script>', maps, re.S)
    return dict(json.loads(matches))


def test_the_bytes_hold_every_heads_map_to_half_a_step() -> None:
    given = patterns()
    given[:, :, 5, 0] = np.nan  # a skipped key
    data = content(head_maps(given, table()))
    codes = np.frombuffer(b64decode(str(data["cells"])), np.int8).reshape(LAYERS * HEADS, -1)
    scales = np.frombuffer(b64decode(str(data["scales"])), "<f4")[:, None].astype(float)
    below = given.reshape(-1, N, N)[:, np.tri(N, dtype=bool)]
    np.testing.assert_array_equal(codes == -128, np.isnan(below))
    values = np.where(codes == -128, np.nan, codes * scales)
    assert np.nanmax(np.abs(values - below) / scales) <= 0.501
    np.testing.assert_allclose(127 * scales[:, 0], np.nanmax(np.abs(below), axis=1), rtol=1e-6)
    assert data["noise"] == [False, True, False] * 2
    assert data["amplitudes"] == [0.25, 1.25, 2.25] * 2
    given[0, 0], given[0, 1] = np.nan, 0.0
    limits = np.frombuffer(b64decode(str(content(head_maps(given, table()))["limits"])), "<f4")
    np.testing.assert_allclose(limits[:2], 0.01)


def test_a_thousand_heads_are_pooled_to_stay_under_5_megabytes() -> None:
    one = np.where(np.tri(512, k=-1, dtype=bool), 1.0, np.nan).astype(np.float32)
    maps = head_maps(np.broadcast_to(one, (1, 32, 512, 512)), table(1, 32), 4_000_000 // 32)
    data = content(maps)
    assert (data["block"], data["n"]) == (7, 74)
    assert 32 * len(str(data["cells"])) < 4_100_000
