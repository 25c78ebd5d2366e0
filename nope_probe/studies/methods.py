"""The methods paragraph of a finished run: the sentences of `reports/methods.txt`, filled in.

A line there is a sentence; a word and "?" before it name the fact that must be true of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from nope_probe.figures.names import phrase
from nope_probe.figures.words import capitalised, listed, numbered_layers
from nope_probe.hooks.removing.stand_ins import REPLACEMENTS, STAND_INS
from nope_probe.removal import Condition, replaced_by
from nope_probe.reports.notes import chapters, run_size
from nope_probe.run.settings import FIRST_LAYERS, GIVEN
from nope_probe.studies.attention.settings import ALONE

Manifest = Mapping[str, Any]
GAINS = {
    "output": "scaled so that its output keeps the RMS of the weight's own",
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
    "attention": ("no key counted as first", "{keys} stood apart from the other keys"),
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
    texts, kind = chapters("methods.txt"), str(manifest["kind"])
    intervals = "Jackknife" if kind == "behaviour" else "Folds"
    facts, names = _facts(manifest), ("Before", kind, intervals, "After")
    sentences = []
    for line in chain.from_iterable(texts[name] for name in names):
        fact, _, sentence = line.rpartition("? ")
        if facts.get(fact, not fact):
            sentences.append(capitalised(sentence.format_map(facts)))
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Return what sentences can name: the manifest, its settings, and words for their choices."""
    facts = {**manifest["settings"], **manifest, **run_size(manifest)}
    return facts | _of_model(facts) | _of_inputs(facts) | _of_removals(facts) | _of_command(facts)


def _of_model(facts: Manifest) -> dict[str, Any]:
    model, settings = facts["model"], facts["settings"]
    asked, in_memory = settings.get("layers"), "given" in settings
    n_layers = model["n_layers"]
    if in_memory and facts["kind"] != "behaviour":  # which runs all layers
        first = {None: n_layers, "all": n_layers, "auto": min(FIRST_LAYERS, n_layers)}
        n_layers = first.get(asked, asked)  # `circuit` records none: it runs what it loads
    # A model in memory may be the first layers of a larger one.
    every = " (all layers)" if asked == "all" and not in_memory else ""
    n_rope = sum(model["rope_layers"][:n_layers])
    parity = model["parity"]
    errors = [f"{parity[key]:.1g} for {name}" for key, name in PARITY.items() if key in parity]
    return {
        "layers": numbered_layers(range(n_layers)) + every,
        "revision": f" at revision {model['revision']}" if model["revision"] else "",
        "rope": f"RoPE in {n_rope} of these layers" if n_rope else "no RoPE",
        "errors": listed(errors) if errors else "",
        "gguf": model.get("gguf"),  # not in manifests from before GGUF files were read
        "software": listed([f"{name} {facts['versions'][key]}" for key, name in SOFTWARE.items()]),
    }


def _of_inputs(facts: Manifest) -> dict[str, Any]:
    settings, data, n_keys = facts["settings"], facts["data"], facts["skip_keys"]
    names = {
        **facts,
        "kind": "vectors" if settings.get("given", {}).get("kind") == "vectors" else "tokens",
        "places": PLACES.get(settings.get("windows", "")),
        "packed": ", joined end to end" if settings.get("pack") else "",
    }
    what = INPUTS.get(settings["data"], INPUTS["text"]).format_map(names)
    seed = f"drawn with seed {settings.get('seed')}" if settings["data"] != GIVEN else ""
    given = {"bos_token": "BOS"} | settings | data
    details = [text.format_map(given) for name, text in DETAILS.items() if given.get(name)]
    checksum = f"SHA-256 of the inputs {data['sha256'][:16]}"
    first = FIRST_KEYS.get(facts["kind"], FIRST_KEYS["others"])[n_keys > 0]
    n_documents = facts["documents"] or facts["n_seqs"]  # None: each sequence drawn by itself
    n_text = len((facts.get("text") or {"pieces": ()})["pieces"])
    is_alone = settings["data"] == ALONE
    return {
        "corpus": not is_alone,
        "alone": is_alone,
        "beside": n_text > 0 and not is_alone,
        "n_text": n_text,
        "inputs": ", ".join(filter(None, [what, *details, seed, checksum])),
        "first_keys": first.format(keys=KEYS.get(n_keys, f"the first {n_keys} keys")),
        "n_documents": n_documents,
        "shared": SHARED if n_documents < facts["n_seqs"] else "",
    }


def _of_removals(facts: Manifest) -> dict[str, Any]:
    """Return the removed components, and how they, the weights and the writers were removed."""
    alone = [replaced_by(name)[0] for name in facts.get("conditions", ())[1:]]
    names = list(facts.get("removed", ()))
    if facts["kind"] == "ablate":
        names = list(dict.fromkeys([*facts["positional_sources"], *facts["removed"]]))
    elif facts["kind"] == "behaviour":
        names = list(dict.fromkeys(alone))
    parts = [part for name in names for part in Condition.parse(name).ordered]
    how = {"a band of RoPE" if part.is_band else phrase(part): part.removed for part in parts}
    sentences = [f"to remove {name}, {done}" for name, done in how.items() if done]
    if Condition(parts).weights:
        chosen: Any = facts.get("replacements", facts["replacement"])
        kinds = {chosen} if isinstance(chosen, str) else {*chosen}
        records = [STAND_INS[kind] for kind in REPLACEMENTS if kind in kinds]
        scaled = f" ({GAINS[facts['gain']]})"
        replaced = [record.methods + scaled * record.gain for record in records]
        sentences.append(f"a removed weight was replaced by {', and again by '.join(replaced)}")
    return {
        "removals": ". ".join(map(capitalised, sentences)),
        "without": _phrases(names),
        "sources": _phrases(facts.get("positional_sources", ())),
        "models": listed(["intact", *(f"without {phrase(name)}" for name in names)]),
        "suffix": "mask" in parts,
        "kept": _phrases(facts.get("left_out", ())),
    }


def _of_command(facts: Manifest) -> dict[str, Any]:
    settings = facts["settings"]
    given = settings.get("given", {}).get("kind", "text") == "text"
    per_head, writers = settings.get("per_head", False), settings.get("writers", "heads")
    return {
        "control": given
        and settings["data"] not in ("random", "gaussian")
        and not settings["shuffle"],
        "heads": HEADS[per_head],
        "readers": READERS[per_head],
        "writing": WRITERS[writers],
        "n_conditions": len(facts.get("conditions", ())),
        "measured": listed([MEASURED[name] for name in facts.get("measures", ())] or [""]),
    }


def _phrases(names: Iterable[str]) -> str:
    """Return components in words, as a list in a sentence; empty without components."""
    return listed([phrase(name) for name in names] or [""])
