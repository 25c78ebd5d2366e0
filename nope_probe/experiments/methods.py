"""The methods paragraph of a finished run, written from its manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nope_probe.components import CIRCUITS, REMOVABLE, WEIGHTS, is_rope
from nope_probe.conditions import Writer
from nope_probe.errors import UserError
from nope_probe.experiments.sections import capitalised, listed
from nope_probe.figures.names import phrase
from nope_probe.figures.words import numbered_layers
from nope_probe.hooks.removing.stand_ins import STAND_INS, Replacement
from nope_probe.reports.notes import run_size
from nope_probe.runtime.settings import GIVEN

Manifest = Mapping[str, Any]
BAND_REMOVED = "to remove a band of RoPE, its pairs of coordinates were rotated as at position 0"
WRITER_REMOVED = "its mean output at each position was replaced by its mean over positions"
SCALED = {
    "output": "scaled so that its output keeps the RMS of the weight's own",
    "norm": "scaled to the weight's Frobenius norm",
    "identity": "not scaled",
}
SCOPES = {
    "both": "in every block",
    "upstream": "in the blocks before the measured layer",
    "own": "in the measured layer alone",
}
MEASURED = {
    "loss": "losses",
    "in-context": "the in-context gain",
    "copy": "copying",
    "order": "sensitivity to the order of the prefix",
    "bos": "dependence on the BOS token",
    "extrapolation": "losses beyond the trained length",
    "position": "how well position can be decoded from the residual stream",
    "pattern": "the positional pattern",
}
SOFTWARE = {
    "nope-probe": "nope_probe",
    "transformer-lens": "TransformerLens",
    "transformers": "transformers",
    "torch": "PyTorch",
    "python": "Python",
}


def methods_paragraph(manifest: Manifest) -> str:
    """Return a paper's paragraph on a run: model, data, noise, removals and versions.

    Args:
        manifest: of a run of one of `PROCEDURES`.

    Raises:
        UserError: for a run of another command.
    """
    kind = manifest.get("kind")
    if kind not in PROCEDURES:
        raise UserError(
            f"--methods describes runs of {', '.join(PROCEDURES)}, and this is a run of {kind}"
        )
    chapters = (_model, _inputs, PROCEDURES[kind], _intervals, _software)
    sentences = [sentence for chapter in chapters for sentence in chapter(manifest)]
    return " ".join(f"{capitalised(sentence)}." for sentence in sentences if sentence)


def _model(manifest: Manifest) -> list[str]:
    """Return the sentences on the model, its layers and its check."""
    model, settings = manifest["model"], manifest["settings"]
    revision = f" at revision {model['revision']}" if model["revision"] else ""
    n_layers, asked, in_memory = model["n_layers"], settings.get("layers"), "given" in settings
    if in_memory and asked != "all" and manifest["kind"] != "behaviour":  # which runs all layers
        n_layers = asked
    layers = numbered_layers(range(n_layers))
    # A model in memory may be the first layers of a larger one.
    layers += " (all layers)" if asked == "all" and not in_memory else ""
    n_rope = sum(model["rope_layers"][:n_layers])
    rope = f"RoPE in {n_rope} of these layers" if n_rope else "no RoPE"
    checked = {"logits": "logits", "pattern": "attention weights"}
    parity = model["parity"]
    errors = [
        f"{error:.1g} for {checked[name]}" for name, error in parity.items() if name in checked
    ]
    against = "the largest error against plain transformers, relative to the largest value, is"
    gguf = model.get("gguf")  # not in manifests from before GGUF files were read
    return [
        f"we ran {layers} of {model['name']}{revision} as a {model['kind']} "
        f"({model['architecture']}, {rope}, {manifest['dtype']} weights, fingerprint "
        f"{model['weights']})",
        f"the weights were dequantised from a GGUF file of type {gguf['file_type']} (SHA-256 "
        f"{gguf['sha256'][:16]})"
        if gguf
        else "",
        f"{against} {listed(errors)}" if errors else "",
    ]


def _inputs(manifest: Manifest) -> list[str]:
    """Return the sentences on the sequences and the keys left out."""
    settings, data = manifest["settings"], manifest["data"]
    size = f"{run_size(manifest)['n_seqs']:,} sequences of {settings['seq_len']:,}"
    if settings["data"] == "gaussian":
        what = f"{size} Gaussian vectors with an expected inner product of {settings['alpha']:g}"
    elif settings["data"] == "random":
        what = f"{size} random tokens"
    elif settings["data"] == GIVEN:
        kind = settings["given"]["kind"]
        what = f"{size} {'vectors' if kind == 'vectors' else 'tokens'} (data: {data['name']})"
    else:
        places = "from the start" if settings["windows"] == "start" else "from random places"
        packed = ", joined end to end" if settings["pack"] else ""
        documents = f"{manifest['documents']:,} documents{packed} (data: {data['name']})"
        what = f"{size} tokens {places} of {documents}"
    details = [
        "each with a BOS token first" if data["bos"] else "",
        "with the tokens of each sequence permuted" if settings["shuffle"] else "",
        "longer than the model's context" if settings.get("beyond_context") else "",
        f"drawn with seed {settings['seed']}" if settings["data"] != GIVEN else "",
        f"SHA-256 of the inputs {data['sha256'][:16]}",
    ]
    return [
        f"the inputs were {', '.join([what, *filter(None, details)])}",
        _chosen(manifest),
        _first_keys(manifest),
    ]


def _first_keys(manifest: Manifest) -> str:
    """Return the sentence on the first keys: apart, left out, or none."""
    n_skipped, kind = manifest["skip_keys"], manifest["kind"]
    keys = "the first key" if n_skipped == 1 else f"the first {n_skipped} keys"
    if kind == "trace":
        parts = "shares are sums of two orthogonal parts, at the first key and among the other keys"
        return f"patterns leave {keys} out" if n_skipped else parts
    if not n_skipped:
        return "no key counted as first"
    if kind == "attention":
        return f"{keys} stood apart from the other keys"
    return (
        f"amplitudes and shares are sums of two orthogonal parts of the pattern, at {keys} and "
        "among the other keys; measures of its shape are of the other keys alone"
    )


def _chosen(manifest: Manifest) -> str:
    """Return the sentence on how the number of sequences was chosen; empty if it was given."""
    pilot = manifest.get("pilot")
    if pilot is None:
        return ""
    if pilot["layer"] is None:
        why = "they showed no positional pattern"
    else:
        why = (
            f"the 95% intervals of the shares of L{pilot['layer']}'s sources were expected to "
            f"extend {100 * pilot['half_width']:.1f} points each way"
        )
    return (
        f"their number was chosen on {pilot['n_pilot']} other sequences, which were not used "
        f"further: {why}"
    )


def _ablate(manifest: Manifest) -> list[str]:
    sets = manifest["player_sets"].values()
    names = [*manifest["positional_sources"], *(name for names in sets for name in names)]
    removed = list(dict.fromkeys(names))
    settings = manifest["settings"]
    control = settings["data"] not in ("random", "gaussian") and not settings["shuffle"]
    if settings["data"] == GIVEN:
        control = settings["given"]["kind"] == "text"
    return [
        "the positional pattern of a layer is its mean attention score before softmax, per query "
        "and key, over sequences and heads, less each row's mean over earlier keys",
        f"the pattern was attributed in {len(manifest['conditions']):,} conditions, in which "
        f"combinations of {_phrases(removed)} were removed, {SCOPES[settings['scope']]}",
        *_removals(removed, manifest["replacements"], settings["gain"]),
        _kept(manifest),
        "as a control, the same sequences were run with their tokens permuted" if control else "",
    ]


def _scores(manifest: Manifest) -> list[str]:
    bands = manifest["settings"]["bands"]
    return [
        "attention scores before softmax were averaged per query and key over sequences"
        + (", for each head and over heads" if manifest["settings"]["per_head"] else " and heads"),
        "the positional pattern is this map less each row's mean over earlier keys",
        f"the map was split exactly into bands of RoPE's pairs ({bands})" if bands else "",
    ]


def _circuit(manifest: Manifest) -> list[str]:
    removed, settings = manifest["removed"], manifest["settings"]
    compared = (
        f"the model without {_phrases(removed)}, removed in every block, was compared with the "
        "intact model on the same sequences"
    )
    return [
        f"the inner products of every stage's vectors at two positions, from the input of block "
        f"L{manifest['layer']} to the scores of the next block, were averaged over sequences",
        compared if removed else "",
        *_removals(removed, [settings["replacement"]], settings["gain"]),
    ]


def _trace(manifest: Manifest) -> list[str]:
    settings = manifest["settings"]
    attention = "each head" if settings["writers"] == "heads" else "the attention of each block"
    pattern = "each head's" if settings["per_head"] else "each layer's"
    confirmed = (
        f"the shares of the strongest pairs of a writer and a reader ({settings['confirm']}) were "
        "confirmed: the writer's mean output at each position was replaced by its mean over "
        "positions, and the reader was measured again"
    )
    return [
        f"{pattern} positional pattern (mean attention scores before softmax, less each row's "
        "mean over earlier keys) was split exactly and without an ablation into RoPE's rotation of "
        "the mean query and key, position written into queries and keys, and a covariance term",
        f"the written terms were split exactly by writer (the embeddings, {attention}, each MLP), "
        "with the scale of the norms as it was for each token",
        confirmed if settings["confirm"] else "",
    ]


def _attention(manifest: Manifest) -> list[str]:
    removed, settings, text = manifest["removed"], manifest["settings"], manifest.get("text")
    measured = (
        "the relative entropy of each head's attention weights to uniform weights, a mean over "
        "sequences and over queries of 8 keys or more, was split exactly by the chain rule"
    )
    without = f"the model was measured without {_phrases(removed)}, removed in every block"
    shown = f"one more text of {len(text['pieces'])} tokens was read beside" if text else ""
    return [
        without if removed else "",
        *_removals(removed, [settings["replacement"]], settings["gain"]),
        measured,
        "its parts are the decision about the first key and that among the other keys; position, "
        "the relative entropy of the mean weights, is the same in every sequence, and content is "
        "the rest",
        "the bias of a mean of finitely many sequences was removed by the jackknife",
        shown,
    ]


def _behaviour(manifest: Manifest) -> list[str]:
    settings = manifest["settings"]
    removed = list(dict.fromkeys(name.partition(":")[0] for name in manifest["conditions"][1:]))
    without_mask = any("mask" in name.split("+") for name in removed)
    prefix = (
        f"where the mask was removed, the first {manifest['prefix']} tokens saw each other and "
        "only the causal suffix was scored"
    )
    without = [f"without {phrase(name)}" for name in removed]
    return [
        f"we measured {listed([MEASURED[name] for name in manifest['measures']])} of the model, "
        f"{listed(['intact', *without])}",
        *_removals(removed, settings["replacement"], settings["gain"]),
        prefix if without_mask else "",
        _kept(manifest),
    ]


def _removals(removed: Iterable[str], replacements: Iterable[Replacement], gain: str) -> list[str]:
    """Return how the removed components, weights and writers were removed."""
    parts = list(dict.fromkeys(part for name in removed for part in name.split("+")))
    weights = {*parts} & {*WEIGHTS, *CIRCUITS}
    written = [phrase(part) for part in parts if Writer.removed_by(part)]
    replaced = [
        f"{record.methods} ({SCALED[gain]})" if record.gain else record.methods
        for record in map(STAND_INS.__getitem__, replacements)
    ]
    return [
        *(f"to remove {phrase(part)}, {how}" for part in parts if (how := _how_removed(part))),
        BAND_REMOVED if any(is_rope(part) and part != "rope" for part in parts) else "",
        *(f"to remove {writer}, {WRITER_REMOVED}" for writer in written),
        f"a removed weight was replaced by {', and again by '.join(replaced)}" if weights else "",
    ]


def _how_removed(name: str) -> str:
    return REMOVABLE[name].removed if name in REMOVABLE else ""


def _kept(manifest: Manifest) -> str:
    """Return which components could not be removed, and stayed; empty without such components."""
    kept = manifest["left_out"]
    return f"{_phrases(kept)} cannot be removed from this model and stayed" if kept else ""


def _phrases(names: Iterable[str]) -> str:
    """Return components in words, as a list in a sentence."""
    return listed([phrase(name) for name in names])


def _intervals(manifest: Manifest) -> list[str]:
    """Return what the intervals are made from."""
    n_folds, n_seqs = manifest["settings"]["folds"], run_size(manifest)["n_seqs"]
    n_documents = manifest["documents"] or n_seqs  # None where each sequence is drawn by itself
    if manifest["kind"] == "behaviour":
        return [
            f"numbers are means over {n_documents:,} documents with 95% intervals of a jackknife "
            "over documents, and differences to the intact model are paired"
        ]
    shared = "; the sequences of a document share a fold" if n_documents < n_seqs else ""
    return [
        f"the sequences were divided into {n_folds} folds, and inner products were taken between "
        f"different folds, so that noise does not count as pattern{shared}",
        "intervals are 95% intervals of a delete-one-fold jackknife",
    ]


def _software(manifest: Manifest) -> list[str]:
    """Return the sentences on the run's software and manifest."""
    used = [f"{name} {manifest['versions'][key]}" for key, name in SOFTWARE.items()]
    return [
        f"the run used {listed(used)} on {manifest['device']} (threads: {manifest['threads']})",
        f"the manifest with all settings has the checksum {manifest['checksum'][:16]}",
    ]


PROCEDURES = {
    "ablate": _ablate,
    "scores": _scores,
    "circuit": _circuit,
    "trace": _trace,
    "attention": _attention,
    "behaviour": _behaviour,
}
