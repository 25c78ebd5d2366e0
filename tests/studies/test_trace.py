"""The trace command as a user types it: its tables and maps, its first table, its refusals."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support import traced
from support.command_line import refused, run_command
from support.finished_runs import assert_numbers_are_cells
from support.rounding import assert_same, assert_same_table
from support.tiny_models import ByName, tokens

from nope_probe import Ablation, Run, ablated, load, read_run, run_trace, trace
from nope_probe.analyses.positions import readers, term_maps
from nope_probe.hooks.reading.readers import capture_positions
from nope_probe.studies import trace as page
from nope_probe.studies.tables import term_table, writer_table
from nope_probe.studies.trace_run import strongest_reader
from tests.support.manifests import manifest_of

N = 23
ORDER = ["order", "order,\nagainst", "order,\nlost"]
SMALL = ["--n-seqs", 43, "--seq-len", N, "--folds", 5, "--batch-size", 7]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "nope"
    run_command(trace, *SMALL, "--layers", 3, "--out", out, "--confirm", 0)
    return read_run(out)


def test_tables_and_maps_are_those_of_the_captured_sums(done: Run) -> None:
    saved = done.arrays["tokens"]
    tokens, documents = (torch.from_numpy(saved[name]) for name in ("tokens", "documents"))
    options = {"layers": [0, 1, 2], "batch_size": 7, "n_folds": 5, "documents": documents}
    sums = capture_positions(load("nope-tiny").model, tokens, **options)
    assert done.manifest.layers == (0, 1, 2)
    names = {"terms": ["layer", "of", "term"], "writers": ["layer", "of", "side", "writer"]}
    for name, truth in (("terms", term_table(sums)), ("writers", writer_table(sums))):
        found = done.tables[name].set_index(names[name])
        expected = truth.set_index(found.index.names).loc[found.index]
        assert_same_table(found, expected[list(found)])
    for names, reader in readers(sums):
        for term, values in term_maps(reader).items():
            seen = done.maps[f"L{names['layer']}/{term}"]
            assert_same(seen, values)


def test_inside_ablated_the_ablated_model_is_traced() -> None:
    model, text = load("nope-tiny", n_layers=2).model, tokens(17, 13)
    with ablated(model, Ablation(remove="mlp")):
        run = run_trace(model, text, confirm=0)
        expected = term_table(capture_positions(model, text))
    places, terms = ["layer", "of", "term"], run.tables["terms"]
    expected = expected.set_index(places)[[*terms][3:]]
    assert_same_table(terms.set_index(places), expected)
    assert run.tables["effects"].empty


def test_writers_stand_in_the_order_in_which_they_write(done: Run) -> None:
    writers = done.tables["writers"]
    heads = [[f"L{layer}H{head}" for head in range(4)] for layer in range(2)]
    order = ["embed", *heads[0], "MLP0", *heads[1], "MLP1", "bias"]
    of_readers = writers.groupby(["layer", "of", "side"], sort=False)["writer"].agg(list)
    assert list(of_readers.index) == [
        (n, of, side) for n in range(3) for of in ("lead", "pattern") for side in ("key", "query")
    ]
    assert all(of_readers[2, of, side] == order for _, of, side in of_readers.index)
    assert list(writers.index) == list(range(len(writers)))


def test_heads_read_and_whole_attentions_write(
    tiny: ByName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert "L1H3" in page.headline(run).sentence
    figure = page.report(run).sections[0].drawn()
    assert figure is not None
    assert figure.layout.title.text == "The terms of L1H3"
    np.testing.assert_allclose(figure.data[0].z[1:, 1:], run.maps["L1H3/all"][1:, 1:], rtol=1e-6)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["reader"] == "L1H3"
    assert "error" not in capsys.readouterr().err


def run_of(
    terms: pd.DataFrame,
    writers: pd.DataFrame | None = None,
    effects: pd.DataFrame | None = None,
    reader: str | None = None,
) -> Run:
    """Return a finished run with some tables."""
    tables = {
        "terms": terms,
        "writers": traced.writers_table() if writers is None else writers,
        "effects": traced.effects_table().iloc[:0] if effects is None else effects,
    }
    settings = {"data": "shipped", "n_seqs": 64, "seq_len": 48, "folds": 8, "reader": reader}
    manifest = {
        "model": {"name": "mine", "depth": 4, "rope_layers": [False] * 4},
        "settings": settings,
        "layers": [1, 2, 3],
        "reader": reader or strongest_reader(terms, ()),
        "kept_positions": 0,
        "skip_keys": 1,
    }
    return Run(manifest=manifest_of(**manifest), arrays={"maps": traced.maps()}, tables=tables)


def test_the_first_line_is_the_largest_part_of_the_larger_of_lead_and_order() -> None:
    terms, writers = traced.terms_table(), traced.writers_table()
    learned = writers.replace({"writer": {"MLP0": "pos_embed"}})
    for written, reader, said in (
        (writers, "L2", "the largest part of the order comes from ATTN1: 12.08 of 7.60"),
        (writers, "L1", "the largest part of the order comes from MLP0: 0.29 of 0.30"),
        (learned, "L1", "the largest part of the order comes from pos_embed: 0.29 of 0.30"),
    ):
        lead = page.headline(run_of(terms, written, reader=reader))
        assert lead.sentence == f"In {reader}, {said} nats."
        assert_numbers_are_cells(lead)
        assert len(lead.table) == {"L1": 4, "L2": 8}[reader], "L0H0 and L0H1 write too little"


def test_lead_and_order_have_their_parts_and_what_pushes_back_next_to_each_other() -> None:
    rotation = traced.terms_table("rope")
    lead = traced.terms_table().assign(of="lead")
    lead.loc[lead["term"] == "all", ["size", "size_low", "size_high"]] *= -1
    against = traced.writers_table().assign(of="lead")
    for table in (lead, against):
        ends = table[["part", "part_high", "part_low"]]
        table[["part", "part_low", "part_high"]] = -ends.to_numpy()
    written = pd.concat([traced.writers_table(), against])
    found = page.headline(run_of(pd.concat([lead, rotation]), written, traced.effects_table()))
    assert found.sentence.startswith(
        "In L2, the largest part of the lead comes from ATTN1: -12.08 of -7.60 nats."
    )
    assert_numbers_are_cells(found)
    name = "L2 at 48 tokens, nats"
    assert [*found.table] == [name, "lead", "lead,\nagainst", *ORDER]
    table = found.table.set_index(name)
    assert [*table.index] == [
        *("whole", "RoPE's rotation", "ATTN1", "· L1H0", "· L1H1", "MLP1"),
        *("other writers", "covariance"),
    ]
    assert table.loc["whole"].to_list() == ["-7.60", "5.47", "1.90", "-5.49", ""]
    assert table.loc["RoPE's rotation"].to_list() == ["0.00", "0.00", "1.95", "0.00", ""]
    assert table.loc["MLP1"].to_list() == ["5.47", "5.47", "-5.47", "-5.47", "-4.79"]
    assert table.loc["· L1H1", ORDER[2]] == "", "it was not measured"
    for column in ("lead", "lead,\nagainst", *ORDER[:2]):
        whole, *parts = (
            float(text) for name, text in table[column].items() if not name.startswith("·")
        )
        assert sum(parts) == pytest.approx(whole, abs=0.03), "heads are in their attention"


def test_a_writer_that_acts_through_others_alone_is_in_the_first_table() -> None:
    """An attention counts with its heads, of which the table names some."""
    effects = traced.effects_table().query("layer == 2")
    indirect = effects.iloc[:1].assign(writer="ATTN0", **traced.interval("total", 6.84))
    whole = effects.iloc[:1].assign(writer="ATTN1", **traced.interval("total", 6.08))
    faint = effects.iloc[:1].assign(writer="MLP9", **traced.interval("total", 0.2))
    writers = traced.writers_table()
    little = (
        writers.query("layer == 2").iloc[:1].assign(writer="L0H0", **traced.interval("part", 0))
    )
    tables = traced.terms_table(), pd.concat([writers, little])
    found = page.headline(run_of(*tables, pd.concat([effects, indirect, whole, faint])))
    table = found.table.set_index("L2 at 48 tokens, nats")
    assert table.loc["ATTN0"].to_list() == ["0.00", "0.00", "6.84"]
    assert table.loc["ATTN1"].to_list() == ["12.08", "0.00", "6.08"]
    assert [*table.index] == [
        *("whole", "ATTN0", "ATTN1", "· L1H0", "· L1H1", "MLP1", "other writers", "covariance")
    ]
    assert table.loc["other writers", "order"] == "0.98", "MLP0's 0.99, less the rounding"


def test_without_a_lead_or_pattern_above_the_noise_the_answer_is_that_there_is_none() -> None:
    noise = traced.terms_table("rope").assign(size_low=-1.0)
    none = page.headline(run_of(noise))
    assert (none.sentence, none.table) == (page.SAID["no_pattern"], None)
    of_reader = page.headline(run_of(noise.assign(part=np.nan), reader="L1"))
    assert (of_reader.sentence[:3], of_reader.table) == ("L1 ", None)


def test_the_writers_that_count_are_shown_with_both_sides() -> None:
    of_layer = traced.writers_table().query("layer == 2")
    faint = of_layer.iloc[:1].assign(writer="MLP9", part=0.049 * of_layer["part"].max())
    writers = pd.concat([of_layer, faint])
    writers = pd.concat([writers, writers.assign(side="query")])
    weak = writers.assign(head=3, part=writers["part"] / 50)
    written = page.written_parts(pd.concat([writers.assign(head=9), weak]))
    assert [*written["writer"]] == ["MLP0", "MLP0", "L1H0", "L1H0", "L1H1", "L1H1", "MLP1", "MLP1"]
    assert [*written["reader"]] == ["L2H9", "L2H3"] * 4, "a writer counts by its largest part"
    one = of_layer.query("writer == 'L1H1'").iloc[0]
    both = written.query("reader == 'L2H9'").set_index("writer").loc["L1H1"]
    for name in ("part", "part_low", "part_high", "from_first_key"):
        assert both[name] == pytest.approx(2 * one[name])


def test_a_report_draws_the_terms_that_count_the_writers_and_what_was_lost() -> None:
    terms, effects = traced.terms_table(), traced.effects_table()
    noise = terms["term"] == "covariance"
    terms.loc[noise, "size"] *= 0.05
    whole = page.report(run_of(terms, effects=effects, reader="L2"))
    without = page.report(run_of(terms, reader="L2"))
    assert (len(whole.sections), len(without.sections)) == (3, 2)
    assert (len([*whole.headline.table]), len([*without.headline.table])) == (4, 3)
    of_terms, written, lost = (section.drawn() for section in whole.sections)
    titles = [note.text for note in of_terms.layout.annotations]
    assert titles == ["whole pattern", "written into keys", "written into both"]
    [cells] = written.data
    assert [*cells.x] == ["L1", "L2", "L3"]
    place = [*cells.y].index("MLP1"), 1
    assert cells.z[place] == pytest.approx(-0.72 * 7.6)
    for dots, name in zip(lost.data, ("direct", "total"), strict=True):
        assert [*dots.x] == [*effects[name]]
    shown = traced.terms_table().filter(regex="^(?!relative_r2)")
    assert [*whole.sections[0].table] == [*shown], "shares are in the file alone"
    assert "Who writes position in mine" in whole.title
    assert any(note.startswith("A reader is") for note in whole.how_to_read)


def test_writers_that_do_not_fit_into_memory_are_refused_with_what_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nope_probe.run.processes.free_memory", lambda: 10**6)
    line = refused(capfd, tmp_path, trace, "--layers", "all", "--n-seqs", 8, "--seq-len", 40)
    assert line.startswith("this needs at least ")
    assert line.endswith("; lower --layers or --seq-len, or take --writers layers")
