"""The sentences that report pages share: how to read figures and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from nope_probe.errors import printable
from nope_probe.figures import names, words
from nope_probe.files import packaged, template
from nope_probe.run.manifest import Manifest


def captions(command: str) -> Mapping[str, str]:
    """Return the captions of a command's page, by name, from its table in `texts.toml`."""
    captions: Mapping[str, str] = packaged("reports/texts.toml")[command]
    return captions


def how_to_read(page: str | Sequence[str], **numbers: object) -> list[str]:
    """Return how to read a page's figures, a sentence or two each.

    Args:
        page: a name in `how_to_read` of `texts.toml`, or lines as there; a line of one word means
            the sentence of that name.
        numbers: of the run, which its sentences name.
    """
    sentences = captions("words")
    lines = captions("how_to_read")[page].splitlines() if isinstance(page, str) else page
    limits = {"clipped": 100 / words.CLIPPED, **numbers}
    return [sentences.get(line, line).format_map(limits) for line in lines]


def run_notes(manifest: Manifest) -> list[str]:
    """Return notes on weak intervals, measures of some queries, windows and components left out.

    Example:
        >>> from nope_probe.run.manifest import Manifest
        >>> run_notes(Manifest(documents=40, fold_sizes=(64,) * 8, query_stride=1))
        []
        >>> run_notes(Manifest(documents=6))[0].split(". ")[0]
        'The intervals come from only 6 documents, so they are rough'
        >>> run_notes(Manifest(distinct_sequences=1, fold_sizes=(8,) * 8))[0].split(". ")[0]
        'All 64 sequences are the same, so the intervals have no width'
        >>> run_notes(Manifest(query_stride=4))[0].split(". ")[0]
        'Locality and monotonicity use 1 query in 4, from query 0'
        >>> run_notes(Manifest(results={"windows": {"L0": 512, "L2": 512}}))[0].split(". ")[0]
        'A sliding window or chunk leaves a query at most 512 keys in L0, 512 keys in L2'
        >>> left_out = {"window": "it hides no key in sequences of 64 tokens"}
        >>> run_notes(Manifest(results={"left_out": left_out}))
        ['Not removed by default: sliding window (it hides no key in sequences of 64 tokens).']
    """
    keys_from = () if manifest.model is None else manifest.model.keys_from
    reasons = manifest.results.get("left_out") or {}
    lines = template("reports", "notes.txt").render(
        manifest=manifest,
        layers=words.layer_names,
        sharing={layer: source for layer, source in enumerate(keys_from) if layer != source},
        left_out=[
            (why, ", ".join(map(names.words, alike)))
            for why, alike in groupby(reasons, reasons.get)
        ],
    )
    of_text = () if manifest.text is None else manifest.text.notes
    padding = [manifest.data.padding] if manifest.data.padding else []
    return [*lines.splitlines(), *padding, *manifest.data.notes, *of_text]


def about(manifest: Manifest) -> dict[str, str]:
    """Return words for the model, with its weights and layers, and for the texts.

    Example:
        >>> from nope_probe.run.manifest import Manifest
        >>> settings = {"data": "shipped", "n_seqs": 64, "seq_len": 128}
        >>> about(Manifest(settings=settings))
        {'Data': '64 sequences of 128 tokens of shipped Python source'}
    """
    model, name = manifest.model, str(manifest.settings.get("data", ""))
    name = printable(Path(name).name if Path(name).is_absolute() else name)
    layers = {*manifest.layers, *(() if model is None else model.not_attending)}
    lines = template("reports", "about.txt").render(
        manifest=manifest,
        name=printable(manifest.model_name),
        layers=words.layer_names,
        source=captions("data").get(name, name),
        is_all=model is None or {*range(model.depth)} <= layers,
    )
    return dict(line.split(": ", 1) for line in lines.splitlines())
