"""Find what each layer of a model does about position, by intervening on one short batch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from findings_table import print_findings
from nope_probe.cli import one_line_errors, parse
from nope_probe.data.tokenizing import forces_bos
from nope_probe.errors import UserError, beyond_context
from nope_probe.hooks.layers.model import Inputs, hugging_face_config
from nope_probe.models.context import validate_context
from nope_probe.models.info import LoadedModel
from nope_probe.models.names import is_on_hub, path_of, validate_reachable, validate_revision
from nope_probe.run.flags import LAYERS, SEED, SEQ_LEN, Mistakes, without_effect
from nope_probe.run.folder import record_sources
from nope_probe.run.manifest import versions
from nope_probe.run.process_group import device_of_process
from nope_probe.run.processes import status
from nope_probe.run.settings import ModelSettings
from probe import N_SHORT, ModelFindings, probe_layers

N_SEQS = 2
N_MARGIN = 16  # positions beyond a window for it to show
N_LONGEST = 1280  # positions of the longest sequence that `auto` takes for the mask
HINTS = ("sliding_window", "attention_chunk_size", "window_size")


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    """Find what each layer of a model does about position.

    The findings are RoPE's action, pairs and base, the mask's shape, norms, soft cap, scale and
    BOS. They come from interventions on one short batch. Prints one table.

    Attributes:
        layers: How many first layers to read.
        seq_len: Length of the sequence from which masks, and changes with length, are read; only
            shorter windows show.
        beyond_context: Allow a --seq-len beyond the context (not of learned positions).
        json: Print JSON instead of the table.
        seed: Seed of the batch.
        device: A torch device, or auto.
    """

    examples = ("--model rope-tiny", "--model smollm3-3b --layers 12")
    in_one_process = False

    layers: Annotated[int, LAYERS] | Literal["all"] = "all"
    seq_len: Annotated[int, SEQ_LEN] | Literal["auto"] = "auto"
    beyond_context: bool = False
    json: bool = False
    seed: Annotated[int, SEED] = 0
    device: str = "auto"

    def sources(self) -> dict[str, Path | None]:
        """Return the paths of the model's files; None for a model on the Hub."""
        made_here = self.model.lower().startswith("parameter-free")
        return {} if made_here else {"model": path_of(self.model)}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        if self.seq_len == "auto":
            yield from without_effect(self, ["beyond_context"], "without a --seq-len")
        if self.revision is not None:
            validate_revision(self.model)


def main() -> None:
    """Run the command line: print a table of the findings, or JSON."""
    with one_line_errors():
        settings, shown = parse(Settings, ("verbose",))
        settings.validate()
        if settings.json and shown["verbose"]:
            raise UserError("--verbose has no effect with --json, which holds all findings")
        findings = run(settings)
        if settings.json:
            sys.stdout.write(as_json(findings, settings) + "\n")
        else:
            print_findings(findings, **shown)


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
    n_long = n_positions(settings, loaded)
    batch = batch_of(loaded, max(n_long, min(N_SHORT, loaded.info.n_ctx)), settings.seed)
    return ModelFindings(
        model=loaded.info.name,
        bos="forced" if loaded.tokenizer is not None and forces_bos(loaded.tokenizer) else "none",
        layers=probe_layers(loaded.model, batch[:, :N_SHORT], batch[:1, :n_long]),
        not_attending=loaded.info.not_attending,
    )


def load_in_float32(settings: Settings) -> LoadedModel:
    """Load the first layers of the model, in float32.

    Raises:
        UserError: if there is no such model.
    """
    doing = f"loading TransformerLens and {settings.model}"
    with status(doing, has_bars=is_on_hub(settings.model)):
        from nope_probe.models.load import load  # takes seconds to import

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


def n_positions(settings: Settings, loaded: LoadedModel) -> int:
    """Return the number of positions on which the mask is read.

    The configuration has a part in this length alone: a window that it names shows, if the window
    exists and fits.

    Raises:
        UserError: for a --seq-len beyond the model's context.
    """
    n_ctx = loaded.info.n_ctx
    if settings.seq_len != "auto":
        if settings.seq_len > n_ctx and not settings.beyond_context:
            raise beyond_context(settings.seq_len, n_ctx)
        return settings.seq_len
    config = hugging_face_config(loaded.model) or {}
    hinted = [config[name] for name in HINTS if isinstance(config.get(name), int)]
    fitting = [length + N_MARGIN for length in hinted if length + N_MARGIN <= N_LONGEST]
    return min(n_ctx, max([N_SHORT, *fitting]))


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
        "threads": torch.get_num_threads(),
        "sources": record_sources(settings.sources()),
    }
    return json.dumps(asdict(findings) | {"run": run}, indent=1)


if __name__ == "__main__":
    main()
