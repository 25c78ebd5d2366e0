"""The sentences that report pages share: how to read figures and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from nope_probe.figures import names, words
from nope_probe.files import packaged
from nope_probe.run.manifest import Manifest

MANY_DOCUMENTS = 20  # from this number on, intervals come without a note
UNBALANCED = 1.5  # times the mean fold
LEAST_TEXTS = 48  # of a half; with fewer, errors of the means of written position break a model
REPEATED = 1.25  # times the number of different sequences


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
    documents, sizes, stride = manifest.documents, manifest.fold_sizes, manifest.query_stride
    n, largest = sum(sizes), max(sizes, default=0)
    distinct = manifest.distinct_sequences or n
    silent = () if manifest.model is None else manifest.model.not_attending
    keys_from = () if manifest.model is None else manifest.model.keys_from
    sharing = [layer for layer, source in enumerate(keys_from) if layer != source]
    sources = words.layer_names({keys_from[layer] for layer in sharing})
    windows, left_out = (manifest.results.get(name) or {} for name in ("windows", "left_out"))
    kept = "; ".join(
        f"{', '.join(map(names.words, alike))} ({why})"
        for why, alike in groupby(left_out, left_out.get)
    )
    keys = ", ".join(f"{size} keys in {layer}" for layer, size in windows.items())
    half = min(sum(sizes[::2]), sum(sizes[1::2]))
    is_short = "written" in manifest.results.get("conditions", ()) and half < LEAST_TEXTS
    uneven, n_folds = largest * len(sizes) > UNBALANCED * n, len(sizes)
    rows = (  # by the name of the note
        ("silent", silent, {"layers": words.layer_names(silent)}),
        ("sharing", sharing, {"layers": words.layer_names(sharing), "sources": sources}),
        ("few_documents", documents is not None and documents < MANY_DOCUMENTS, {"n": documents}),
        ("few_texts", is_short, {"n": half, "least": LEAST_TEXTS}),
        ("same_sequences", distinct == 1 < n, {"n": n}),
        ("repeated", distinct > 1 and distinct * REPEATED < n, {"n": n, "distinct": distinct}),
        ("uneven_folds", uneven, {"n": n_folds, "largest": largest / max(n, 1)}),
        ("stride", stride > 1, {"n": stride}),
        ("windows", windows, {"keys": keys}),
        ("left_out", left_out, {"kept": kept}),
    )
    said = [line for name, is_so, of in rows if is_so for line in how_to_read([name], **of)]
    of_text = () if manifest.text is None else manifest.text.notes
    padding = [manifest.data.padding] if manifest.data.padding else []
    return [*said, *padding, *manifest.data.notes, *of_text]


def about(manifest: Manifest) -> dict[str, str]:
    """Return words for the model, with its weights and layers, and for the texts.

    Example:
        >>> from nope_probe.run.manifest import Manifest
        >>> settings = {"data": "shipped", "n_seqs": 64, "seq_len": 128}
        >>> about(Manifest(settings=settings))
        {'Data': '64 sequences of 128 tokens of shipped Python source'}
    """
    facts, model, settings, data = {}, manifest.model, manifest.settings, manifest.data
    if model is not None:
        weights = f" ({model.gguf.file})" if model.gguf else ""
        is_all = {*range(model.depth)} <= {*manifest.layers, *model.not_attending}
        of = "" if is_all else f" of {model.depth}"
        layers = f", {words.layer_names(manifest.layers)}{of}" if manifest.layers else ""
        facts["Model"] = f"{manifest.model_name}{weights}{layers}"
    if "data" in settings:
        name = str(settings["data"])
        name = Path(name).name if Path(name).is_absolute() else name
        facts["Data"] = captions("data").get(name, name)
        if manifest.seq_len:
            unit = "positions" if name == "gaussian" else "tokens"
            of = "" if name.startswith("given") else "of "
            shuffled = ", shuffled" * bool(settings.get("shuffle"))
            begin = f", each after {data.bos_token or 'BOS'}" if data.bos else ""
            sequences = f"{settings['n_seqs']:,} sequences of {manifest.seq_len:,} {unit}"
            facts["Data"] = f"{sequences} {of}{facts['Data']}{shuffled}{begin}"
    return facts
