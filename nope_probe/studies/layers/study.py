"""The `layers` command's run: from settings to findings on each layer, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pandas as pd
import torch

from nope_probe.data.tokenizing import forces_bos
from nope_probe.errors import UserError, beyond_context, printable
from nope_probe.figures.words import layer_names, listed
from nope_probe.files import JsonObject
from nope_probe.hooks.layers.model import Inputs, hugging_face_config
from nope_probe.models.context import validate_context
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import is_on_hub, validate_reachable
from nope_probe.reports.page import Headline
from nope_probe.run.finished_run import record_sources
from nope_probe.run.identity import threads, versions
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import status
from nope_probe.studies.layers.expect import (
    LENGTHS,
    TOLERANCE,
    Expectation,
    mismatches,
    validate_depth,
)
from nope_probe.studies.layers.probe import N_SHORT, LayerFindings, probe_layers
from nope_probe.studies.layers.settings import Settings
from nope_probe.studies.page import MOST_ROWS, PlainConsole, print_headline, print_table
from nope_probe.studies.tables import TableRow

COLUMNS = ("layer", "RoPE", "pairs", "base", "turned", "mask", "q/k-norm", "cap", "scale")
# Columns that only some models need, and their sentences in the legend.
RARE = {
    "first": "First: the first pair's frequency, radians a token.",
    "slowed": "Slowed: how many times slower the last pair turns than by the base.",
    "learned": "Learned: the same of learned position embeddings.",
    "bias": "Bias: how many nats it gives a key more than another of the same query, at most.",
    "sink": "Sink: whether a learned sink takes part of each row's attention.",
    "MLA": "MLA: heads share their keys' rotary coordinates, but not the other coordinates.",
}
LEGEND = (
    "RoPE: the largest change of a score, nats, when it is removed. Pairs: the rotary "
    "pairs that change a score, of those that turn. Turned: the share of a head's coordinates. "
    "q/k-norm: over a head or over all. Mask: on {n} positions; a longer window would not show."
)
PER_LAYER = ("RoPE", "learned", "bias")  # columns of numbers that differ in layers that are alike
MASKS = 3  # in a sentence
SAYS_BOS = {"forced": ", and its tokenizer puts a BOS token first", "none": ""}
NONE, UNKNOWN, YES = "-", "?", "yes"
N_SEQS = 2
N_MARGIN = 16  # positions beyond a window for it to show
N_LONGEST = 1280  # positions of the longest sequence that `auto` takes for the mask
HINTS = ("sliding_window", "attention_chunk_size", "window_size")


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """The findings on a model.

    Attributes:
        model: its name.
        bos: `forced` if the tokenizer puts a BOS token before any text, else `none`.
        layers: the findings of each layer.
        differences: lines on differences to the configuration.
        unmet: lines on expectations that are not met.
        not_attending: the numbers of layers that do not attend, in a hybrid model.
    """

    model: str
    bos: str
    layers: list[LayerFindings]
    differences: list[str]
    unmet: list[str]
    not_attending: tuple[int, ...] = ()

    def to_dict(self) -> JsonObject:
        """Return the findings as JSON-ready values."""
        return {
            "model": self.model,
            "bos": self.bos,
            "layers": [asdict(layer) for layer in self.layers],
            "not_attending": list(self.not_attending),
            "configuration_differs": self.differences,
            "expectations_not_met": self.unmet,
        }


def run(settings: Settings) -> ModelFindings:
    """Find the positional parts of each layer.

    Raises:
        UserError: for settings that the model cannot satisfy.
    """
    settings.validate()
    validate_reachable(settings.model, settings.revision)
    if settings.seq_len != "auto":
        beyond, revision = settings.beyond_context, settings.revision
        validate_context(settings.model, settings.seq_len, beyond=beyond, revision=revision)
    loaded = load_in_float32(settings)
    expectations = settings.expectations
    validate_depth(expectations, loaded.info.n_layers)
    n_long = n_positions(settings, loaded, expectations, N_SHORT)
    batch = batch_of(loaded, max(n_long, min(N_SHORT, loaded.info.n_ctx)), settings.seed)
    findings = probe_layers(loaded.model, batch[:, :N_SHORT], batch[:1, :n_long])
    bos = "forced" if loaded.tokenizer is not None and forces_bos(loaded.tokenizer) else "none"
    checks = [expectation.check(findings, bos) for expectation in expectations]
    return ModelFindings(
        model=loaded.info.name,
        bos=bos,
        layers=findings,
        differences=mismatches(loaded.model.cfg, hugging_face_config(loaded.model), findings),
        unmet=[line for line in checks if line is not None],
        not_attending=loaded.info.not_attending,
    )


def run_and_show(settings: Settings, verbose: bool = False) -> None:
    """Print the findings; exit with code 1 if an expectation is not met."""
    findings = run(settings)
    if settings.json:
        sys.stdout.write(as_json(findings, settings) + "\n")
    else:
        print_findings(findings, verbose)
    if findings.unmet:
        sys.stderr.write("".join(f"{printable(line)}\n" for line in findings.unmet))
        sys.exit(1)


def load_in_float32(settings: Settings) -> LoadedModel:
    """Load the first layers of the model, in float32.

    Raises:
        UserError: if there is no such model.
    """
    doing = f"loading TransformerLens and {settings.model}"
    with status(doing, has_bars=is_on_hub(settings.model)):
        # It takes seconds to import, and repetitions of other commands do without it.
        from nope_probe.models.load import load

        return load(
            settings.model,
            n_layers=None if settings.layers == "all" else settings.layers,
            device=device_of_process(settings.device),
            dtype=torch.float32,
            revision=settings.revision,
            allow_unused=settings.allow_unused,
            adapter=settings.adapter,
            n_ctx=None if settings.seq_len == "auto" else settings.seq_len,
        )


def n_positions(
    settings: Settings, loaded: LoadedModel, expectations: list[Expectation], shortest: int
) -> int:
    """Return the number of positions on which the mask is read.

    The configuration and the expectations choose this length and have no other effect. A window
    that they name is detected if it exists and fits.

    Raises:
        UserError: for a --seq-len beyond the model's context, or an expected length beyond that.
    """
    n_ctx = loaded.info.n_ctx
    expected = [
        int(expectation.value)
        for expectation in expectations
        if expectation.key in LENGTHS and isinstance(expectation.value, float)
    ]
    if settings.seq_len != "auto":
        if settings.seq_len > n_ctx and not settings.beyond_context:
            raise beyond_context(settings.seq_len, n_ctx)
        length = settings.seq_len
    else:
        config = hugging_face_config(loaded.model) or {}
        hinted = [config[name] for name in HINTS if isinstance(config.get(name), int)]
        fitting = [length for length in hinted if length + N_MARGIN <= N_LONGEST]
        length = min(n_ctx, max([shortest, *(e + N_MARGIN for e in [*fitting, *expected])]))
    if expected and max(expected) >= length:
        raise UserError(
            f"a length of {max(expected)} shows on longer sequences only, and the mask was to be "
            f"read on {length} positions (the model's context is {n_ctx}): raise --seq-len"
        )
    return length


def batch_of(loaded: LoadedModel, length: int, seed: int) -> Inputs:
    """Return random tokens, or random vectors for a parameter-free model."""
    generator = torch.Generator().manual_seed(seed)
    if loaded.info.parameter_free:
        return torch.randn(N_SEQS, length, loaded.info.d_model, generator=generator)
    return torch.randint(loaded.info.d_vocab, (N_SEQS, length), generator=generator)


def as_json(findings: ModelFindings, settings: Settings) -> str:
    """Return the findings as a JSON document, with all settings to repeat it."""
    asked = {name: value for name, value in asdict(settings).items() if name != "json"}
    run = {
        "kind": "layers",
        "settings": asked,
        "versions": versions(),
        "threads": threads(),
        "sources": record_sources(settings.sources()),
    }
    return json.dumps(findings.to_dict() | {"run": run}, indent=1)


def print_findings(findings: ModelFindings, verbose: bool = False) -> None:
    """Print a row for layers that are alike, and the differences to the configuration.

    Args:
        findings: of a model.
        verbose: whether to print a row per layer, and the legend.
    """
    console, table = PlainConsole(), as_text(findings)
    print_headline(console, headline(findings))
    if verbose:
        print_table(console, table, f"{findings.model}: position, layer by layer")
        rare = [about for name, about in RARE.items() if name in table]
        legend = LEGEND.format(n=findings.layers[0].mask.n_positions)
        console.print(" ".join([legend, *rare]), style="dim")
    for title, lines in (
        ("The configuration says otherwise:", findings.differences),
        ("Not as found in a block of the usual kind:", _notes(findings)),
    ):
        if lines:
            console.print(title, *(f"  {line}" for line in lines), sep="\n")


def headline(findings: ModelFindings) -> Headline:
    """Return what a model's layers know of position, a row for layers that are alike."""
    table = as_text(findings)
    shared = [name for name in table if name not in (*PER_LAYER, "layer")]
    rows = []
    for cells, group in table.groupby(shared, sort=False):
        row: TableRow = {"layers": layer_names(group["layer"].str[1:].astype(int))}
        for name in map(str, table.columns[1:]):
            row[name] = _range(group[name]) if name in PER_LAYER else cells[shared.index(name)]
        rows.append(row)
    n_rope, n = sum(layer.rope for layer in findings.layers), len(findings.layers)
    bos = SAYS_BOS[findings.bos]
    return Headline(
        sentence=f"{findings.model} uses RoPE in {n_rope} of {n} attending layers; its mask is "
        f"{listed([*dict.fromkeys(str(layer.mask) for layer in findings.layers)][:MASKS])}{bos}.",
        table=pd.DataFrame(rows[:MOST_ROWS]),
        caption="RoPE: the largest change of a score, nats, when it is removed. Pairs: the rotary "
        "pairs that change a score, of those that turn. --verbose has a row per layer.",
    )


def _range(cells: pd.Series) -> str:
    """Return the smallest and the largest of some layers' numbers."""
    numbers = pd.to_numeric(cells, errors="coerce").dropna().sort_values()
    if numbers.empty or len({*cells}) == 1:
        return str(cells.iloc[0])
    first, last = cells[numbers.index[0]], cells[numbers.index[-1]]
    return f"{first} to {last}"


def as_text(findings: ModelFindings) -> pd.DataFrame:
    """Return the findings, a row per layer, for a table on the terminal."""
    cells = {layer.layer: _cells(layer) for layer in findings.layers}
    for layer in findings.not_attending:
        cells[layer] = {"layer": f"L{layer}", "mask": "no attention"}
    table = pd.DataFrame([cells[layer] for layer in sorted(cells)], columns=[*COLUMNS, *RARE])
    usual = {name: [NONE, "1"] if name in ("first", "slowed") else [NONE] for name in RARE}
    absent = [name for name in RARE if table[name].dropna().isin(usual[name]).all()]
    return table.drop(columns=absent).fillna(NONE)


def _cells(layer: LayerFindings) -> dict[str, str]:
    """Return a layer's cells by the names of the columns."""
    norms = {(True, False): "q only", (False, True): "k only"}
    over = {"head": "per head", "all heads": "all heads", None: NONE}[layer.norm_over]
    rotary = layer.rope and layer.rope_pairs > 0
    return {
        "layer": f"L{layer.layer}",
        "RoPE": f"{layer.rope_change:.3g}" if layer.rope else "none",
        "pairs": f"{layer.rope_pairs_acting}/{layer.rope_pairs}" if rotary else _unknown(layer),
        "base": _number(layer.rope_base if layer.rope else None, ",.6g"),
        "turned": f"{layer.rotary_fraction:.3g}" if rotary else _unknown(layer),
        "mask": str(layer.mask),
        "q/k-norm": norms.get((layer.q_norm, layer.k_norm), over),
        "cap": _number(layer.soft_cap, ".4g"),
        "scale": f"1/√{layer.scale**-2:.4g}" if layer.scale > 0 else f"{layer.scale:.4g}",
        "first": _number(layer.rope_first if layer.rope else None, ".4g"),
        "slowed": _number(layer.rope_scale if layer.rope else None, ".4g"),
        "learned": _number(layer.learned_positions_change or None, ".3g"),
        "bias": _number(layer.score_bias or None, ".3g"),
        "sink": YES if layer.sinks else NONE,
        "MLA": YES if layer.mla else NONE,
    }


def _unknown(layer: LayerFindings) -> str:
    """Return the sign in RoPE's columns for a layer without RoPE, or for an unknown rotation."""
    return UNKNOWN if layer.rope else NONE


def _number(value: float | None, style: str) -> str:
    return NONE if value is None else f"{value:{style}}"


def _notes(findings: ModelFindings) -> list[str]:
    """Return lines on findings that are unusual, or without a column in the table."""
    lines = []
    for layer in findings.layers:
        name = f"L{layer.layer}"
        if not layer.mask_same_in_all_heads:
            lines.append(f"{name}: heads have different masks; the table shows H0's")
        if layer.product_error > 1e-3:
            lines.append(f"{name}: scores are not q.k alone: off by {layer.product_error:.2g}")
        if layer.rope:
            lines += [f"{name}: {line}" for line in _rope_notes(layer)]
        if layer.queries_grow_from is not None:
            lines.append(
                f"{name}: queries are scaled from position {layer.queries_grow_from:,} on "
                f"({layer.queries_grow_by:.4g} times at the last)"
            )
    return lines


def _rope_notes(layer: LayerFindings) -> Iterator[str]:
    """Yield what is unusual of the RoPE of a layer."""
    if not layer.rope_pairs:
        yield "RoPE's pairs of coordinates were not recognised"
    if abs(layer.rope_factor - 1) > TOLERANCE:
        yield f"RoPE multiplies queries and keys by {layer.rope_factor:.4g}"
    if layer.rope_first is not None and abs(layer.rope_first - 1) > TOLERANCE:
        yield f"RoPE's first pair turns by {layer.rope_first:.4g}, not by 1"
    if layer.rope_pairs_following < layer.rope_pairs:
        slowed = "" if layer.rope_scale is None else f", up to {layer.rope_scale:.4g} times slower"
        yield (
            f"pairs from {layer.rope_pairs_following} on do not follow the power law of the first "
            f"ones (RoPE is scaled{slowed})"
        )
    if layer.rope_rescaled_from is not None:
        yield (
            f"RoPE changes from sequences of {layer.rope_rescaled_from:,} tokens on (the pair that "
            f"changes most turns {layer.rope_rescaled_by:.3g} times as fast)"
        )
