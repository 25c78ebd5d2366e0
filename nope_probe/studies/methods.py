"""The methods paragraph of a finished run: the sentences of `reports/methods.txt`, filled in.

A line there is a sentence; a word and "?" before it name the fact that must be true of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from nope_probe.errors import as_tuple
from nope_probe.figures.names import phrase
from nope_probe.figures.words import capitalised, layer_names, listed
from nope_probe.hooks.removing.stand_ins import REPLACEMENTS, STAND_INS
from nope_probe.removal import Condition, replaced_by
from nope_probe.reports.notes import chapters
from nope_probe.run.manifest import Manifest
from nope_probe.run.settings import FIRST_LAYERS, GIVEN
from nope_probe.studies.attention.settings import ALONE

Facts = dict[str, Any]  # what sentences name, by name
GAINS = {
    "output": "scaled so that its output keeps the RMS of the weight's output",
    "norm": "scaled to the weight's Frobenius norm",
    "identity": "not scaled",
}
MEASURED = {
    "loss": "losses",
    "in-context": "the in-context gain",
    "copy": "copying",
    "order": "sensitivity to the order of the prefix",
    "bos": "dependence on the BOS token",
    "extrapolation": "losses beyond the trained length",
    "position": "how well position can be decoded from the residual stream",
}
SOFTWARE = {
    "nope-probe": "nope_probe",
    "transformer-lens": "TransformerLens",
    "transformers": "transformers",
    "torch": "PyTorch",
    "python": "Python",
}
INPUTS = {  # by --data
    "gaussian": "Gaussian vectors with an expected inner product of {alpha:g}",
    "random": "random tokens",
    GIVEN: "{kind} (data: {data[name]})",
    ALONE: "one text",
    "text": "tokens {places} of {documents:,} documents{packed} (data: {data[name]})",
}
DETAILS = {  # of the inputs, by setting
    "bos": "each with the token {bos_token} first",
    "shuffle": "with the tokens of each sequence permuted",
    "beyond_context": "longer than the model's context",
}
FIRST_KEYS = {  # by command; without first keys, and with them
    "attention": ("no key counted as first", "{keys} counted separately from the other keys"),
    "others": (
        "no key counted as first",
        "the lead of {keys} over the other keys and the pattern among these were measured "
        "separately",
    ),
}
PLACES = {"start": "from the start", "random": "from random places"}
KEYS = {1: "the first key"}
SHARED = "; the sequences of a document share a fold"
HEADS = (" and heads", ", for each head and over heads")  # of a map, by --per-head
READERS = ("each layer's", "each head's")
WRITERS = {"heads": "each head", "layers": "the attention of each block"}
PARITY = {"logits": "logits", "pattern": "attention weights"}


def methods_paragraph(manifest: Manifest) -> str:
    """Return a paper's paragraph on a run: model, data, noise, removals and versions.

    Args:
        manifest: of a run of one of the commands in `reports/methods.txt`.
    """
    texts, kind = chapters("methods.txt"), manifest.kind
    intervals = "Jackknife" if kind in ("behaviour", "heads") else "Folds"
    facts, names = _facts(manifest), ("Before", kind, intervals, "After")
    sentences = []
    for line in chain.from_iterable(texts[name] for name in names):
        fact, _, sentence = line.rpartition("? ")
        if facts.get(fact, not fact):
            sentences.append(capitalised(sentence.format_map(facts)))
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def _facts(manifest: Manifest) -> Facts:
    """Return what sentences can name: the manifest, its settings, and words for their choices."""
    facts = manifest.settings | manifest.to_json() | _of_model(manifest) | _of_inputs(manifest)
    return facts | _of_removals(manifest) | _of_command(manifest)


def _of_model(manifest: Manifest) -> Facts:
    model, asked = manifest.model, manifest.settings.get("layers")
    assert model is not None
    n_layers, in_memory = model.n_layers, bool(manifest.given)
    if in_memory and manifest.kind != "behaviour":  # which runs all layers
        n_layers = asked if isinstance(asked, int) else n_layers
        n_layers = min(FIRST_LAYERS, n_layers) if asked == "auto" else n_layers
    # A model in memory may be the first layers of a larger one.
    every = " (all layers)" if asked == "all" and not in_memory else ""
    n_rope, parity = sum(model.rope_layers[:n_layers]), model.parity
    errors = [f"{parity[key]:.1g} for {name}" for key, name in PARITY.items() if key in parity]
    software = [f"{name} {manifest.versions[key]}" for key, name in SOFTWARE.items()]
    return {
        "layers": layer_names(range(n_layers)) + every,
        "revision": f" at revision {model.revision}" if model.revision else "",
        "rope": f"RoPE in {n_rope} of these layers" if n_rope else "no RoPE",
        "errors": listed(errors) if errors else "",
        "gguf": model.gguf and vars(model.gguf),
        "software": listed(software),
    }


def _of_inputs(manifest: Manifest) -> Facts:
    settings, data, n_keys = manifest.settings, manifest.data, manifest.skip_keys
    names = {
        **settings,
        "data": vars(data),
        "documents": manifest.documents,
        "kind": "vectors" if manifest.given.get("kind") == "vectors" else "tokens",
        "places": PLACES.get(settings.get("windows", "")),
        "packed": ", joined end to end" if settings.get("pack") else "",
    }
    what = INPUTS.get(settings["data"], INPUTS["text"]).format_map(names)
    seed = f"drawn with seed {settings.get('seed')}" if settings["data"] != GIVEN else ""
    chosen = settings | {"bos": data.bos, "bos_token": data.bos_token or "BOS"}
    details = [text.format_map(chosen) for name, text in DETAILS.items() if chosen.get(name)]
    checksum = f"SHA-256 of the inputs {data.sha256[:16]}"
    first = FIRST_KEYS.get(manifest.kind, FIRST_KEYS["others"])[n_keys > 0]
    n_documents = manifest.documents or settings["n_seqs"]  # each sequence drawn by itself
    n_text = 0 if manifest.text is None else len(manifest.text.pieces)
    is_alone = settings["data"] == ALONE
    return {
        "corpus": not is_alone,
        "alone": is_alone,
        "compared_text": n_text > 0 and not is_alone,
        "n_text": n_text,
        "inputs": ", ".join(filter(None, [what, *details, seed, checksum])),
        "first_keys": first.format(keys=KEYS.get(n_keys, f"the first {n_keys} keys")),
        "n_documents": n_documents,
        "shared": SHARED if n_documents < settings["n_seqs"] else "",
    }


def _of_removals(manifest: Manifest) -> Facts:
    """Return the removed components, and how they, the weights and the writers were removed."""
    sources, names = manifest.positional_sources or (), list(manifest.removed or ())
    if manifest.kind == "ablate":
        names = list(dict.fromkeys([*sources, *names]))
    elif manifest.kind == "behaviour":
        names = list(dict.fromkeys(replaced_by(name)[0] for name in manifest.conditions[1:]))
    parts = [part for name in names for part in Condition.parse(name).ordered]
    heads: list[str] = manifest.settings.get("in_heads", [])
    how = {"a band of RoPE" if part.is_band else phrase(part): part.removed for part in parts}
    sentences = [f"to remove {name}, {done}" for name, done in how.items() if done]
    if Condition(parts).weights:
        chosen, gain = manifest.replacements, GAINS[manifest.settings["gain"]]
        kinds = {*as_tuple(manifest.settings["replacement"] if chosen is None else chosen)}
        records = [STAND_INS[kind] for kind in REPLACEMENTS if kind in kinds]
        replaced = [record.methods + f" ({gain})" * record.gain for record in records]
        sentences.append(f"a removed weight was replaced by {', and again by '.join(replaced)}")
    return {
        "removals": ". ".join(map(capitalised, sentences)),
        "without": _phrases(names),
        "where": f"in {listed([*heads])} alone" if heads else "in every block",
        "sources": _phrases(sources),
        "models": listed(["intact", *(f"without {phrase(name)}" for name in names)]),
        "suffix": "mask" in parts,
        "kept": _phrases(manifest.left_out or ()),
    }


def _of_command(manifest: Manifest) -> Facts:
    settings = manifest.settings
    given = manifest.given.get("kind", "text") == "text"
    per_head, writers = settings.get("per_head", False), settings.get("writers", "heads")
    measures = manifest.results.get("measures", ())
    return {
        "control": given
        and settings["data"] not in ("random", "gaussian")
        and not settings["shuffle"],
        "heads": HEADS[per_head],
        "readers": READERS[per_head],
        "writing": WRITERS[writers],
        "n_conditions": len(manifest.conditions),
        "orders": listed([*settings.get("by", [])] or [""]),
        "counts": listed([f"{k:,}" for k in settings.get("k", [])] or [""]),
        "measured": listed([MEASURED[name] for name in measures] or [""]),
    }


def _phrases(names: Iterable[str]) -> str:
    """Return components in words, as a list in a sentence; empty without components."""
    return listed([phrase(name) for name in names] or [""])
