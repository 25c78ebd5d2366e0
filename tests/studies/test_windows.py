"""Commands on sequences that are longer than a layer's sliding window of 5 positions."""

from pathlib import Path

import pytest
import torch
from support.decoders import write_decoder
from support.edited_model import subsets
from support.plain_attention import plain_attention
from support.rounding import NETWORK
from support.tiny_models import ByName

from nope_probe import Run, run_ablations
from nope_probe.reports.page import run_notes

TERMS = (
    *("without_sources", "mask", "rope", "window"),
    *("mask_x_rope", "mask_x_window", "rope_x_window", "mask_x_rope_x_window"),
)


@pytest.fixture(scope="module")
def runs(tiny: ByName) -> dict[str, Run]:
    """Runs of Mistral, and of Gemma 2 whose L1 has no window."""
    sizes = {"n_seqs": 16, "seq_len": 23, "folds": 4, "layers": "all"}
    options = {"data": "random", "bos": "never", "skip_keys": 0, **sizes}
    return {
        name: run_ablations(str(tiny(name).folder), remove=removed, **options)
        for name, removed in (("mistral", "sources"), ("gemma2", "none"))
    }


def test_offsets_and_maps_end_with_the_window(runs: dict[str, Run]) -> None:
    offsets = runs["mistral"].tables["offsets"]
    assert sorted({*offsets["offset"]}) == [1, 2, 3, 4]
    assert offsets["mean"].notna().all()
    gemma2 = runs["gemma2"].tables["offsets"].groupby("layer")["offset"].max()
    assert gemma2.tolist() == [4, 22]


def test_the_window_is_a_source_and_its_terms_are_differences_of_plain_models(
    tiny: ByName, bridge: ByName
) -> None:
    tokens = torch.randint(200, (16, 23), generator=torch.Generator().manual_seed(0))
    study = run_ablations(bridge("mistral"), tokens, remove=["sources"], folds=4, skip_keys=0)
    assert sorted(study.tables["terms"].query("layer == 1")["term"]) == sorted(TERMS)
    row, key = torch.arange(23)[:, None], torch.arange(23)
    kept = (key < row) & (row - key < 5)
    patterns = {}
    for removed in subsets(["mask", "rope", "window"]):
        without = " and ".join(name for name in ("mask", "window", "rope") if name in removed)
        layers = plain_attention(tiny("mistral").hf, tokens, without=without or None)
        seen = torch.stack([layer.map for layer in layers.values()]).where(kept, torch.nan)
        patterns[removed] = seen - seen.nanmean(-1, keepdim=True)
    scale, added = patterns[()].nan_to_num().abs().max(), 0
    for term in TERMS:
        parts = [] if term == "without_sources" else term.split("_x_")
        expected = sum(
            (-1) ** (len(parts) - len(present)) * patterns[_without(present)]
            for present in subsets(parts)
        )
        result = torch.from_numpy(study.maps[f"term/{term}"]).double()
        assert (result - expected).nan_to_num().abs().max() <= NETWORK * scale, term
        assert result.isfinite().equal(kept.expand(2, -1, -1))
        added += expected
    assert (added - patterns[()]).nan_to_num().abs().max() <= 1e-9 * scale
    window = torch.from_numpy(study.maps["term/window"]).nan_to_num().abs()
    assert window[0].max() < NETWORK * scale, "nothing before L0 attends"
    assert window[1].max() > 0.1 * scale


def _without(present: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in ("mask", "rope", "window") if name not in present)


def test_a_window_that_hides_nothing_is_no_source_and_the_manifest_says_so(tmp_path: Path) -> None:
    short = {"n_seqs": 8, "seq_len": 11, "folds": 4, "layers": 2, "data": "random"}
    folder = write_decoder("mistral", tmp_path, sliding_window=11).folder
    run = run_ablations(str(folder), remove="sources", bos="never", **short)
    assert {*run.tables["pattern"]["removed"]} == {"intact", "mask", "rope", "mask+rope"}
    note = "sliding window (it hides no key in sequences of 11 tokens)"
    assert note in " ".join(run_notes(run.manifest))


def test_tables_have_measures_and_the_page_says_what_is_measured(runs: dict[str, Run]) -> None:
    measures = runs["mistral"].tables["pattern"].query("removed == 'intact'")
    assert measures["amplitude"].notna().all()
    assert measures["monotonicity"].isna().all()
    assert measures["locality"].isna().all()  # no query has 8 keys
    manifest = runs["mistral"].manifest
    assert manifest.results["windows"] == {"L0": 5, "L1": 5}
    assert "at most 5 keys in L0, 5 keys in L1" in " ".join(run_notes(manifest))
