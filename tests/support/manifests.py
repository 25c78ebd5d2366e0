"""Manifests of runs that were never made."""

from typing import Any

from nope_probe.run.manifest import Manifest

A_MODEL = {
    "name": "tiny",
    "source": "tiny",
    "architecture": "LlamaForCausalLM",
    "kind": "TransformerBridge",
    **dict.fromkeys(("n_layers", "depth", "n_heads", "n_kv_heads", "d_head"), 2),
    **dict.fromkeys(("d_model", "n_ctx", "d_vocab"), 32),
    "rope_layers": [True, True],
    "weights": "ee324450f065aa10",
}


def manifest_of(**entries: Any) -> Manifest:
    """Return the manifest with some entries of manifest.json; a model gets all of its entries."""
    model = {"model": A_MODEL | entries["model"]} if "model" in entries else {}
    return Manifest.of_json(entries | model)
