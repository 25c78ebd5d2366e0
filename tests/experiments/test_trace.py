"""The trace command as a user types it: its tables and maps, its sentences, its refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support import traced
from support.command_line import refused, run_command
from support.decoders import write_decoder
from support.rounding import NETWORK, assert_same, assert_same_table
from support.tiny_models import plain

from nope_probe import load, read_run, run_trace, trace
from nope_probe.analyses.positions import readers, term_maps
from nope_probe.conditions import Writer
from nope_probe.data.sequences import Sequences
from nope_probe.experiments.tables import term_table, writer_table
from nope_probe.experiments.trace import sections
from nope_probe.experiments.trace.analyse import that_could_matter
from nope_probe.experiments.trace.settings import Settings
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.maps.rows import choose_rows
from nope_probe.models.names import CHECKPOINTS
from nope_probe.runtime.folder import Run

N = 23
SMALL = ["--n-seqs", 43, "--seq-len", N, "--folds", 5, "--batch-size", 7]
TEXT = {"effects": pd.DataFrame()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "nope"
    run_command(trace, *SMALL, "--layers", 3, "--out", out, "--confirm", 0)
    return out


def test_tables_and_maps_are_those_of_the_captured_sums(done: Path) -> None:
    saved = load_file(done / "tokens.safetensors")
    tokens, documents = (torch.from_numpy(saved[name]) for name in ("tokens", "documents"))
    sums = capture_positions(
        load("nope-tiny").model,
        tokens,
        layers=[0, 1, 2],
        batch_size=7,
        n_folds=5,
        documents=documents,
    )
    run = read_run(done)
    names = {"terms": ["layer", "term"], "writers": ["layer", "side", "writer"]}
    for name, truth in (("terms", term_table(sums)), ("writers", writer_table(sums))):
        found = run.tables[name].set_index(names[name])
        expected = truth.set_index(found.index.names).loc[found.index]
        assert_same_table(found, expected)
    for names, reader in readers(sums):
        for term, values in term_maps(reader).items():
            seen = run.maps[f"L{names['layer']}/{term}"]
            assert_same(seen, values)


def test_writers_stand_in_the_order_in_which_they_write(done: Path) -> None:
    writers = read_run(done).tables["writers"]
    heads = [[f"L{layer}H{head}" for head in range(4)] for layer in range(2)]
    order = ["embed", *heads[0], "MLP0", *heads[1], "MLP1", "bias"]
    of_readers = writers.groupby(["layer", "side"], sort=False)["writer"].agg(list)
    assert list(of_readers.index) == [(n, side) for n in range(3) for side in ("key", "query")]
    assert of_readers[2, "key"] == of_readers[2, "query"] == order
    assert list(writers.index) == list(range(len(writers)))
    names = ["bias", "MLP0", "L1H0", "ATTN1", "L0H10", "L0H2", "MLP10", "pos_embed", "BLOCK2"]
    assert sorted(names, key=lambda name: Writer(name).order) == [
        *("pos_embed", "L0H2", "L0H10", "MLP0", "L1H0", "ATTN1", "BLOCK2", "MLP10", "bias")
    ]


def test_clocks_are_coordinates_of_mean_keys_and_queries_along_their_axes(done: Path) -> None:
    """Six writers at most beside their sum; distances between positions are those of the keys."""
    run, saved = read_run(done), load_file(done / "tokens.safetensors")
    sums = capture_positions(
        load("nope-tiny").model,
        torch.from_numpy(saved["tokens"]),
        layers=[2],
        n_folds=5,
        documents=torch.from_numpy(saved["documents"]),
    )
    weights = sums.counts.double() / sums.counts.sum()
    clocks, writers = run.tables["clocks"].query("layer == 2"), run.tables["writers"]
    assert set(run.tables["clocks"]["layer"]) == {0, 1, 2}
    for side, whole, parts in (
        ("key", sums.readers[2].k, sums.readers[2].keys),
        ("query", sums.readers[2].q, sums.readers[2].queries),
    ):
        own = clocks[clocks["side"] == side]
        ranked = writers.query("layer == 2 and side == @side").set_index("writer")["share"]
        ranked = ranked.abs().sort_values(ascending=False)
        n_writers = own["writer"].nunique()
        assert list(own["writer"].unique()) == ["all", *ranked.index[: n_writers - 1]]
        assert 2 <= n_writers - 1 < len(ranked)
        about_mean = {}
        for name, x in {"all": whole, **parts}.items():
            mean = torch.einsum("f,fphd->phd", weights, x)[1:].flatten(1)
            about_mean[name] = mean - mean.mean(0)
        variances, axes = torch.linalg.eigh(about_mean["all"].T @ about_mean["all"])
        axes = axes[:, [-1, -2]]
        axes = axes * axes.sum(0).sign()
        explained = variances[-2:].sum() / variances.sum()
        assert own["explained"].to_numpy() == pytest.approx(float(explained), rel=1e-4)
        for name, points in own.groupby("writer"):
            expected = about_mean[name] @ axes
            found = points[["axis_1", "axis_2"]].to_numpy()
            assert list(points["position"]) == list(range(1, N))
            np.testing.assert_allclose(found, expected, atol=1e-4 * float(axes.abs().max()) + 1e-4)


def test_the_norms_scale_by_position_is_that_of_plain_transformers(done: Path) -> None:
    """Documents make folds of unequal size; the mean is over all sequences."""
    tokens = torch.from_numpy(load_file(done / "tokens.safetensors")["tokens"])
    hf = plain(CHECKPOINTS["nope-tiny"])
    with torch.inference_mode():
        x = hf(tokens, output_hidden_states=True).hidden_states[2]
    epsilon = hf.model.layers[2].input_layernorm.variance_epsilon
    scale = (x.square().mean(-1) + epsilon).rsqrt().mean(0)[1:]
    clocks = read_run(done).tables["clocks"].query("layer == 2")
    for (_, _), rows in clocks.groupby(["side", "writer"]):
        assert_same(rows["norm_scale"], scale / scale.mean())
    assert clocks["norm_scale"].max() > 1.1 * clocks["norm_scale"].min()


def test_maps_of_chosen_rows_name_their_queries() -> None:
    loaded = load("nope-tiny", n_layers=2)
    text = torch.randint(2048, (15, N), generator=torch.Generator().manual_seed(3))
    options = {"confirm": 0, "folds": 5, "skip_keys": 1}
    whole, chosen = (run_trace(loaded, text, **options, query_rows=rows) for rows in (None, 11))
    queries = choose_rows(N, 11)
    assert "query_positions" not in whole.maps
    assert chosen.maps.keys() == {"query_positions", *whole.maps}
    np.testing.assert_array_equal(chosen.maps["query_positions"], queries)
    for name, values in whole.maps.items():
        np.testing.assert_allclose(chosen.maps[name], values[queries], atol=1e-5)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["heads", "layers"])
def test_the_bytes_of_a_run_are_those_of_what_heads_and_mlps_write(
    kind: Any, per_head: bool, tiny: Callable[[str], Any]
) -> None:
    loaded = load(str(tiny("smollm3").folder))
    text = torch.randint(263, (10, N), generator=torch.Generator().manual_seed(3))
    sums = capture_positions(loaded.model, text, n_folds=5, writers=kind, per_head=per_head)
    kept = sum(
        values.nbytes
        for reader in sums.readers.values()
        for parts in (reader.keys, reader.queries)
        for name, values in parts.items()
        if name not in ("embed", "bias")
    )
    settings = Settings(
        model="x", layers="all", writers=kind, per_head=per_head, folds=5, seq_len=N, n_seqs=10
    )
    assert settings.bytes_of_sums(loaded.info) == kept
    assert settings.n_maps(loaded.info) == 3 + kept // (8 * 5 * N**2)
    assert replace(settings, layers=1).bytes_of_sums(loaded.info) == 0
    assert replace(settings, reader="L2H1").traces_heads
    assert replace(settings, reader="L2").traces_heads == per_head


def test_by_default_six_pairs_of_readers_and_writers_are_confirmed_in_eight_folds() -> None:
    settings = Settings()
    assert (settings.confirm, settings.folds, settings.traces_heads) == (6, 8, False)


def test_clocks_lie_along_axes_of_which_the_first_explains_most(done: Path) -> None:
    clocks = read_run(done).tables["clocks"].query("layer == 2 and side == 'key'")
    assert list(clocks["writer"].unique())[:3] == ["all", "L1H1", "L1H0"]
    whole = clocks[clocks["writer"] == "all"]
    assert list(whole["position"]) == list(range(1, N))
    assert whole["axis_1"].var() > whole["axis_2"].var()
    assert abs(np.corrcoef(whole["axis_1"], whole["axis_2"])[0, 1]) < NETWORK
    assert whole["explained"].between(0, 1).all()


def test_a_finished_run_is_shown_again_with_its_answer(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (done / "manifest.json").read_bytes()
    run_command(trace, *SMALL, "--layers", 3, "--out", done, "--confirm", 0, "--verbose")
    shown = " ".join(capsys.readouterr().out.split())
    assert "L2's position is written by L1H1 and L1H0: " in shown
    assert "first_key" in shown
    assert "The exact terms of each pattern" in shown
    assert (done / "manifest.json").read_bytes() == before
    page = (done / "report.html").read_text()
    assert page.count("L2&#x27;s position is written by L1H1 and L1H0") >= 1
    assert '"Reader"' in page


def test_heads_read_and_whole_attentions_write(
    tiny: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", tiny("llama").folder, "--data", "random", "--layers", 2, "--confirm", 0]
    flags += ["--reader", "L1H3", "--writers", "layers"]
    run_command(trace, *SMALL, *flags, "--out", tmp_path / "run")
    run = read_run(tmp_path / "run")
    terms, writers = run.tables["terms"], run.tables["writers"]
    assert sorted(set(zip(terms["layer"], terms["head"], strict=True))) == [
        (layer, head) for layer in (0, 1) for head in range(6)
    ]
    names = {"embed", "bias", "ATTN0", "MLP0"}
    assert set(writers[writers["layer"] == 1]["writer"]) == names
    assert "L1H3/rotation" in run.maps
    assert "L1H3" in " ".join(run.manifest["headline"])
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["reader"] == "L1H3"
    assert "error" not in capsys.readouterr().err


def test_a_hybrid_is_read_where_it_attends_and_its_other_blocks_write_as_a_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_decoder("jamba", tmp_path)
    flags = ["--model", model.folder, "--data", "random", "--layers", "all", "--confirm", 1]
    run_command(trace, *SMALL, *flags, "--out", tmp_path / "run")
    run = read_run(tmp_path / "run")
    readers = sorted(run.tables["terms"]["layer"].unique())
    others = run.manifest["model"]["not_attending"]
    assert not {*readers} & {*others}
    last = run.tables["writers"].query("layer == @readers[-1]")
    assert {f"BLOCK{layer}" for layer in others if layer < readers[-1]} <= {*last["writer"]}
    elsewhere = tmp_path / "elsewhere"
    line = refused(capfd, elsewhere, trace, *flags, "--reader", f"L{others[0]}")
    assert line.startswith(f"--reader L{others[0]}: there are L{readers[0]}")


def test_in_memory_it_gives_what_the_command_writes(done: Path) -> None:
    saved, run = load_file(done / "tokens.safetensors"), read_run(done)
    tokens, documents = (torch.from_numpy(saved[name]) for name in ("tokens", "documents"))
    data = Sequences(inputs=tokens, documents=documents, name="x", bos=True, kind="text")
    found = run_trace(load("nope-tiny").model, data, layers=3, folds=5, batch_size=7)
    for name, table in found.tables.items():
        if name != "effects":
            assert_same_table(run.tables[name], table)
    assert set(found.maps) == set(run.maps)
    assert repr(found).startswith("Trace of L0, L1, L2: L2's position is written by L1H1 and L1H0")
    with pytest.raises(ValueError, match="--folds 4: expected 5 <= folds"):
        run_trace(load("nope-tiny").model, data, folds=4)


def test_the_answer_names_the_main_writers_and_nothing_of_another_reader() -> None:
    tables = {"terms": traced.terms_table(), "writers": traced.writers_table(), **TEXT}
    assert sections.lead(tables).sentence == (
        "L2's position is written by L1H0 and L1H1: 92% and 67% of its pattern."
    )
    assert (
        sections.lead(tables, "L1").sentence
        == "L1's position is written by MLP0: 97% of its pattern."
    )
    learned = tables["writers"].replace({"writer": {"MLP0": "pos_embed"}})
    assert sections.lead(tables | {"writers": learned}, "L1").sentence == (
        "L1's position is written by pos_embed: 97% of its pattern."
    )


def test_a_writer_whose_interval_holds_zero_is_no_main_writer() -> None:
    writers = traced.writers_table()
    strongest = (writers["layer"] == 2) & (writers["writer"] == "L1H0")
    writers.loc[strongest, ["share", "share_low", "share_high"]] = (1.9, -0.1, 3.9)
    tables = {"terms": traced.terms_table(), "writers": writers, **TEXT}
    main, _, _ = sections.lead(tables, "L2").sentence.partition(":")
    assert main == "L2's position is written by L1H1"


def test_the_answer_with_rope_is_rotation_and_without_a_pattern_that_there_is_none() -> None:
    tables = {"terms": traced.terms_table("rope"), "writers": traced.writers_table(), **TEXT}
    assert sections.lead(tables, "L1").sentence == (
        "RoPE's rotation of constant vectors makes L1's pattern: 100% [99, 100] of it."
    )
    noise = tables["terms"].assign(rms_low=-1.0)
    tables |= {"terms": noise}
    assert sections.lead(tables).sentence == sections.NO_PATTERN
    of_l1 = "L1 shows no positional pattern that exceeds the noise."
    assert sections.lead(tables, "L1").sentence == of_l1
    assert sections.lead(tables).table.empty
    undefined = noise.assign(share=np.nan)
    lead = sections.lead(tables | {"terms": undefined}, "L1")
    assert lead.sentence == of_l1
    assert lead.table.empty


def with_shares(terms: pd.DataFrame, reader: int, half: float, **shares: float) -> pd.DataFrame:
    """Return terms with other shares in a layer, with intervals of one width."""
    rows = terms.copy()
    for term, share in shares.items():
        of_term = (rows["layer"] == reader) & (rows["term"] == term)
        rows.loc[of_term, ["share", "share_low", "share_high"]] = share, share - half, share + half
    return rows


def test_a_term_is_the_answer_only_where_the_intervals_say_so_of_all_terms() -> None:
    writers = {"writers": traced.writers_table(), **TEXT}
    shares = {"rotation": 0.55, "written_key": 0.95, "written_both": 0.0, "covariance": -0.5}
    tables = {"terms": with_shares(traced.terms_table(), 1, 0.01, **shares), **writers}
    assert sections.lead(tables, "L1").sentence.startswith("L1's position is written by MLP0")
    shares |= {"rotation": 0.6, "written_key": 0.4, "written_query": 0.0, "covariance": 0.0}
    tables["terms"] = with_shares(traced.terms_table(), 1, 2.6, **shares)
    tables["terms"] = with_shares(tables["terms"], 1, 0.0, written_both=0.0, written_query=0.0)
    lead = sections.lead(tables, "L1")
    assert lead.sentence == "No single term is surely most of L1's pattern."
    assert lead.table.to_numpy().tolist() == [
        ["rotation", "60% [-200, 320]"],
        ["written", "40% [-220, 300]"],
        ["covariance", "0% [-260, 260]"],
    ]


def test_a_writer_that_takes_from_queries_what_it_gives_to_keys_is_no_main_writer() -> None:
    writers = traced.writers_table()
    both = [
        {"layer": 2, "side": side, "writer": "L0H1", **traced.interval("share", share)}
        for side, share in (("key", 0.90), ("query", -0.95))
    ]
    tables = {"terms": traced.terms_table(), "writers": pd.concat([writers, pd.DataFrame(both)])}
    assert sections.lead(tables).sentence.startswith("L2's position is written by L1H0 and L1H1")
    halves = writers.assign(share=writers["share"] / 2, share_low=writers["share_low"] / 2)
    halves = pd.concat([halves.assign(side=side) for side in ("key", "query")])
    assert sections.lead(tables | {"writers": halves}).sentence == sections.lead(tables).sentence
    wide = writers.assign(share_low=writers["share"] - 1.0)
    assert sections.lead(tables | {"writers": wide}).sentence.startswith(
        "Position written by no single writer makes L2's pattern: "
    )


def test_the_strongest_of_many_readers_clears_the_noise_of_all_of_them() -> None:
    faint = {"rms": 0.01, "rms_low": 0.002, "rms_high": 0.0142}
    one = traced.terms_table().query("layer == 2").assign(**faint)
    writers = {"writers": traced.writers_table()}
    assert sections.lead({"terms": one, **writers}).sentence.startswith(
        "L2's position is written by"
    )
    others = [one.assign(layer=layer, rms=0.0, rms_low=-0.01) for layer in range(3, 26)]
    terms = pd.concat([one, *others])
    assert sections.lead({"terms": terms, **writers}).sentence == sections.NO_PATTERN


def test_the_first_table_has_each_writers_share_and_what_is_lost_without_it() -> None:
    tables = {"terms": traced.terms_table(), "writers": traced.writers_table()}
    tables["effects"] = traced.effects_table()
    rows = {row[0]: row[1:] for row in sections.lead(tables, "L2").table.to_numpy().tolist()}
    assert next(iter(rows)) == "L1H0"
    assert rows["L1H0"][1] == "60% [58, 62]"
    assert rows["MLP1"][1] == "-63% [-65, -61]"
    shares = [abs(float(share.partition("%")[0])) for share, _ in rows.values()]
    assert shares == sorted(shares, reverse=True)


def test_removals_are_tested_of_writers_whose_share_could_be_5_percent() -> None:
    rows = [
        (1, "key", "MLP0", 0.03, 0.04),
        (1, "query", "MLP0", 0.0, 0.011),
        (1, "key", "L0H0", 0.02, 0.049),
        (2, "key", "L0H0", -0.051, 0.02),
        (2, "key", "embed", float("nan"), float("nan")),
    ]
    writers = pd.DataFrame(rows, columns=["layer", "side", "writer", "share_low", "share_high"])
    kept = that_could_matter(writers)
    assert kept.index.to_list() == [0, 1, 3]


def test_of_many_heads_the_strongest_are_shown() -> None:
    whole = traced.terms_table().query("layer == 2")
    terms = [whole.assign(head=head, rms=whole["rms"] * (head + 1)) for head in range(40)]
    tables = {"terms": pd.concat(terms), "writers": traced.writers_table().assign(head=39)}
    shown = sections.shown_readers(tables["terms"], "L2H0")
    assert shown == ["L2H0", *(f"L2H{head}" for head in range(9, 40))]
    writers = sections.strongest_writers(tables, 2).query("layer == 2")
    assert list(writers["writer"]) == ["L1H0", "MLP1"]


def test_a_report_has_the_effects_that_were_measured_and_four_writers_of_each_reader() -> None:
    writers = traced.writers_table()
    weakest = writers.query("layer == 2 and writer == 'MLP0'").assign(
        writer="embed", share=0.05, share_low=0.04, share_high=0.06
    )
    tables = {
        "terms": traced.terms_table(),
        "writers": pd.concat([weakest, writers], ignore_index=True),
        "effects": traced.effects_table(),
        "clocks": traced.clocks_table(),
    }
    model = {"name": "mine", "rope_layers": [False] * 4}
    manifest = {"model": model, "reader": None, "settings": {"folds": 8}, "skip_keys": 1}
    run = Run(manifest=manifest, arrays={"maps": traced.maps()}, tables=tables)
    whole = sections.report(run)
    without = sections.report(replace(run, tables=tables | {"effects": tables["effects"].iloc[:0]}))
    assert (len(whole.sections), len(without.sections)) == (3, 2)
    assert (len([*whole.lead.table]), len([*without.lead.table])) == (3, 2)
    shown = tables["effects"].drop(columns=["predicted", "predicted_low", "predicted_high"])
    pd.testing.assert_frame_equal(whole.sections[2].table, shown)
    pd.testing.assert_frame_equal(whole.sections[1].table, tables["terms"])
    assert "embed" in set(whole.sections[0].table["writer"])
    assert "Who writes position in mine" in whole.title


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--reader", "2"], "--reader 2: expected a layer or head, such as L2 or L2H1"),
        (["--reader", "L2", "--per-head"], "--reader L2: with --per-head, readers are heads"),
        (["--reader", "L4"], "--reader L4 is not among the first 4 layers: take --layers 5"),
        (
            ["--reader", "L5", "--layers", "all"],
            "--reader L5: there are L0, L1, L2, L3, with the heads H0 to H3",
        ),
        (["--reader", "L1H4"], "--reader L1H4: there are L0, L1, L2, L3, with the heads H0 to H3"),
        (["--folds", 4], "--folds 4: expected 5 <= folds <= 2147483647"),
        (["--writers", "head"], "invalid choice 'head'"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(
    flags: list[Any], line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert line in refused(capfd, tmp_path, trace, *flags)


def test_writers_that_do_not_fit_into_memory_are_refused_with_what_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.runtime.places.free_memory", lambda: 10**6)
    line = refused(capfd, tmp_path, trace, "--layers", "all", "--n-seqs", 8, "--seq-len", 40)
    assert line.startswith("this needs at least ")
    assert line.endswith("; lower --layers or --seq-len, or take --writers layers")
