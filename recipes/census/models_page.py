"""Write docs/models.md: what is measured and removed of every decoder, from runs of tiny models.

make models                                                    # both environments, then the page

.venv/bin/python recipes/census/models_page.py measure build/models-tl3.json     # the same by hand
.venv-tl4/bin/python recipes/census/models_page.py measure build/models-tl4.json
.venv/bin/python recipes/census/models_page.py write build/models-tl3.json build/models-tl4.json
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections import Counter
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
OUT = ROOT / "docs" / "models.md"
BOUND = 1e-5
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "mlp")


def measure(out: Path, /) -> None:
    """Measure every decoder with the TransformerLens of this environment."""
    from support.decoders import DECODERS
    from transformer_lens.tools.model_registry.api import get_supported_models
    from transformers.utils import logging

    logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        decoders = [_measured(name, Path(folder)) for name in tqdm(DECODERS, unit=" decoders")]
    counts = Counter(model.architecture_id for model in get_supported_models())
    found = {"version": version("transformer-lens"), "counts": counts, "decoders": decoders}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _measured(name: str, folder: Path) -> dict[str, Any]:
    """Return a decoder's scheme, its errors by removal, and what is refused and why."""
    from ci.decoder_commands import COMMANDS
    from support.decoder_errors import map_error, removals_of
    from support.decoders import write_decoder

    from nope_probe import load

    tiny = write_decoder(name, folder)
    found: dict[str, Any] = {
        "name": name,
        "architecture": json.loads((tiny.folder / "config.json").read_text())["architectures"][0],
        "scheme": _scheme(tiny),
        "errors": {},
        "refused": None,
        "not_removable": {},
        "not_run": {},
    }
    try:
        model = load(str(tiny.folder)).model
        for removal in removals_of(tiny):
            found["errors"][removal] = map_error(model, tiny, removal)
    except Exception as error:  # noqa: BLE001  (the page shows it, and goes on)
        found["refused"] = _reason(error).replace(str(tiny.folder), "the folder")
        return found
    for weight in WEIGHTS:
        if reason := _refusal(model, tiny, weight):
            found["not_removable"][weight] = reason
    for command in COMMANDS:
        if reason := _failure(command, tiny):
            found["not_run"][command] = reason
    return found


def _refusal(model: Any, tiny: Any, weight: str) -> str | None:
    """Return why a weight cannot be removed; None if it can."""
    from nope_probe import Ablation, ablated, capture_scores

    try:
        with ablated(model, Ablation(remove=[weight]), tokens=tiny.tokens):
            capture_scores(model, tiny.tokens)
    except Exception as error:  # noqa: BLE001
        return _reason(error)
    return None


def _failure(command: str, tiny: Any) -> str | None:
    """Return why a command with its default players, readers and removals ends; None if it runs."""
    from ci.decoder_commands import run_command

    try:
        with redirect_stderr(io.StringIO()):
            run_command(command, tiny, tiny.folder.with_name(f"{tiny.name}-{command}"))
    except Exception as error:  # noqa: BLE001
        return _reason(error).replace(str(tiny.folder), "the folder")
    return None


def _reason(error: Exception) -> str:
    """Return what a user reads; of what is no refusal, where it came from too."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def _scheme(tiny: Any) -> str:
    """Return how plain transformers' model attends, in a few words."""
    from support.plain_attention import blocks_of, components_of, plain_attention

    attention = plain_attention(tiny.hf, tiny.tokens)
    if not attention:
        return "no attention"
    has = components_of(tiny.hf, tiny.tokens)
    words = {"rope": "RoPE", "pos_embed": "position embeddings", "alibi": "ALiBi"}
    scheme = [word for name, word in words.items() if name in has] or ["no position encoding"]
    scheme += [name for name in ("window", "sink") if name in has]
    if any(layer.softcap for layer in attention.values()):
        scheme.append("soft cap")
    if len(attention) < len(blocks_of(tiny.hf)):
        scheme.append("layers without attention")
    return ", ".join(scheme)


def write(older: Path, newer: Path, /) -> None:
    """Write the page from what was measured with two versions of TransformerLens."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in (older, newer)]
    OUT.write_text(page(runs), encoding="utf-8")


def page(runs: list[dict[str, Any]]) -> str:
    """Return the page of what was measured with each TransformerLens, the newest last."""
    counts = _without_case(runs[-1]["counts"])
    by_name = [{decoder["name"]: decoder for decoder in run["decoders"]} for run in runs]
    names = sorted(by_name[-1], key=lambda name: -counts[_kind(by_name[-1][name])])
    rows = [_row(name, [decoders[name] for decoders in by_name]) for name in names]
    versions = " and ".join(run["version"] for run in runs)
    lines = [*_introduction(runs, counts), "", *_table(rows, versions), ""]
    return "\n".join([*lines, *_reasons(list(by_name[-1].values())), ""])


def _row(name: str, decoders: list[dict[str, Any]]) -> tuple[str, str, str, str]:
    """Return a decoder's name, scheme, largest error and what of it is refused."""
    newest = decoders[-1]
    variant = f" ({name.partition('-with-')[2]})" if "-with-" in name else ""
    not_run = {f"`{command}`" for decoder in decoders for command in decoder["not_run"]}
    refused = ", ".join([*newest["not_removable"], *sorted(not_run)])
    error = max(map(_error, decoders))
    result = f"{error:.0e}".replace("e-0", "e-") if error < math.inf else "refused"
    return newest["architecture"] + variant, newest["scheme"], result, refused


def _table(rows: list[tuple[str, str, str, str]], versions: str) -> list[str]:
    """Return a table of what is measured, a row for each scheme and what is refused in it."""
    groups: dict[tuple[str, str, bool], list[tuple[str, str]]] = {}
    for name, scheme, result, refused in rows:
        groups.setdefault((scheme, refused, result == "refused"), []).append((name, result))
    head = ["scheme", "architectures", f"TransformerLens {versions}", "refused"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (scheme, refused, is_refused), found in groups.items():
        names = ", ".join(name for name, _ in found)
        worst = "refused" if is_refused else max((result for _, result in found), key=float)
        lines.append(f"| {scheme} | {names} | {worst} | {refused} |")
    return lines


def _kind(decoder: dict[str, Any]) -> str:
    return decoder["architecture"].lower()


def _without_case(counts: dict[str, int]) -> Counter[str]:
    """Return numbers of models by architectures in lower case: some spell MptForCausalLM MPT."""
    total: Counter[str] = Counter()
    for architecture, count in counts.items():
        total[architecture.lower()] += count
    return total


def _error(decoder: dict[str, Any]) -> float:
    """Return the largest error of a decoder's maps; infinity if it is refused."""
    return math.inf if decoder["refused"] else max(decoder["errors"].values())


def _introduction(runs: list[dict[str, Any]], counts: Counter[str]) -> list[str]:
    from transformer_lens.tools.model_registry import HF_SUPPORTED_ARCHITECTURES

    newest = [each for each in runs[-1]["decoders"] if "-with-" not in each["name"]]
    attending = [each for each in newest if each["scheme"] != "no attention"]
    exact = [each for each in attending if _error(each) <= BOUND]
    n_models = sum(counts[_kind(each)] for each in attending)
    share = sum(counts[_kind(each)] for each in exact) / n_models
    known = {_kind(each) for each in newest}
    remote = sorted(
        name
        for name in HF_SUPPORTED_ARCHITECTURES
        if name.endswith("ForCausalLM") and name.lower() not in known
    )
    return [
        "# Models",
        "",
        "<!-- Written by recipes/census/models_page.py from what was run: `make models`. -->",
        "",
        f"TransformerLens {runs[-1]['version']} lists {len(newest)} architectures of text decoders "
        f"whose code is in transformers. {len(attending)} of them attend, and the maps of "
        f"{len(exact)} of these are exact, those of {share:.1%} of the {n_models:,} models that "
        "its registry lists.",
        "",
        "Of each architecture a tiny random model, with layers of every kind that the family has, "
        "was compared with plain transformers' (`tests/support/plain_attention.py`): "
        "intact, without each source of position, without MLPs, and with an identity in the place "
        "of each of W_Q, W_K, W_V and W_O that is a separate matrix. The table shows the largest "
        "difference of any map, relative to the map's largest score; a map counts as exact up to "
        "1e-5. *Refused*: weights that cannot be removed, and commands that do not run with their "
        "defaults ([why](#what-is-refused)). In a hybrid model commands measure the blocks that "
        "attend, and MLPs are removed from every block.",
        "",
        f"Decoders whose code is in no release of transformers need remote code, which is refused "
        f"({', '.join(remote)}). Encoders and models that read images or sound are refused too.",
    ]


def _reasons(decoders: list[dict[str, Any]]) -> list[str]:
    """Return why models, removals of weights and commands are refused: a row for each reason."""
    weights: dict[tuple[str, str], list[str]] = {}  # by reason and architecture
    for decoder in decoders:
        if decoder["refused"]:
            weights[decoder["refused"], decoder["architecture"]] = []
        for weight, reason in decoder["not_removable"].items():
            why = reason.partition("cannot be removed: ")[2].partition("; name")[0] or reason
            removed = weights.setdefault((why, decoder["architecture"]), [])
            if weight not in removed:
                removed.append(weight)
        for command, reason in decoder["not_run"].items():
            weights[reason, f"`{command}` of {decoder['architecture']}"] = []
    names: dict[tuple[str, str], list[str]] = {}  # by reason and weights
    for (reason, architecture), removed in weights.items():
        names.setdefault((reason, ", ".join(removed)), []).append(architecture)
    rows = [
        f"| {f'{removed} of ' if removed else ''}{', '.join(refused)} | {reason} |"
        for (reason, removed), refused in names.items()
    ]
    return ["## What is refused", "", "| architecture | reason |", "|---|---|", *rows]


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "write": write})
