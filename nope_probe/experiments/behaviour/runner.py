"""Runs of a model in every condition: losses of all probes, decodability, score maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import halves, index_targets, ridge
from nope_probe.components import Gain, Replacement
from nope_probe.experiments.behaviour.conditions import Removal
from nope_probe.experiments.behaviour.plan import Plan
from nope_probe.experiments.behaviour.probes import Probe
from nope_probe.experiments.resumable import calibration_once, losses_once, scores_once
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import batches_of
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.checkpoint import RunCheckpoint

DocumentLosses = Float[Tensor, "_ _"]  # documents and targets, which differ among probes
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How conditions are run, the same for all of them.

    Attributes:
        n_layers: how many first layers decodability and score maps are measured in.
        batch_size: sequences per forward pass.
        n_folds: parts of the data that the score maps' intervals are made from.
        skip: how many first positions decodability and patterns leave out.
        gain: the size of a removed weight's replacement.
        seed: of the shuffled targets and the untrained model.
        position: whether to measure decodability.
        pattern: whether to measure score maps.
        replacement: of the W_Q of single heads.
        heads: whether W_Q is removed from single heads.
    """

    n_layers: int
    batch_size: int = 32
    n_folds: int = 8
    skip: int = 0
    gain: Gain = "output"
    seed: int = 0
    position: bool = True
    pattern: bool = True
    replacement: Replacement = "identity"
    heads: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in every condition.

    Attributes:
        losses: per condition and probe, nats.
        distances: per condition, of predicted and true index on held-out documents, in positions;
            the last axis is the fit on true and on shuffled targets.
        untrained: the same of the model with random weights, where only sources are removed.
        maps: per removal, score maps.
    """

    losses: dict[tuple[str, str], DocumentLosses]
    distances: dict[str, Distances] = field(default_factory=dict)
    untrained: dict[str, Distances] = field(default_factory=dict)
    maps: dict[Removal, ScoreMaps] = field(default_factory=dict)


class BehaviourRunner:
    """Runs a model in all conditions that the checkpoint does not have yet.

    Args:
        model: a HookedTransformer or TransformerBridge.
        plan: the conditions, and the sequences.
        options: how they are run.
        checkpoint: what is finished; the rest is saved there.
    """

    def __init__(
        self,
        model: HookedModel,
        plan: Plan,
        options: RunOptions,
        checkpoint: RunCheckpoint,
    ) -> None:
        self.model, self.options, self.checkpoint = model, options, checkpoint
        self.conditions, self.sources, self.probes = plan.conditions, plan.sources, plan.probes
        ablations = [self._ablation(each, None) for each in plan.conditions.values()]
        if options.heads:
            head = Removal(components=frozenset({"w_q"}), replacement=options.replacement)
            ablations.append(self._ablation(head, None))
        self.needs_calibration = any(each.needs_calibration for each in ablations)
        self.is_random = any(each.replacement == "random" for each in ablations)
        self.fit, self.held_out = (plan.text.subset(each) for each in halves(plan.text.documents))

    def streams(self) -> dict[str, int]:
        """Return how many sequences this process runs in each stream, by the stream's key."""
        text = self.probes["text"]
        found = {"calibration": text} if self.needs_calibration else {}
        for name in self.conditions:
            found |= {f"loss/{name}/{probe}": each for probe, each in self.probes.items()}
        for prefix, names in self._decoded().items():
            for name in names:
                found[f"{prefix}/{name}/fit"] = self.fit
                found[f"{prefix}/{name}/distance"] = self.held_out
        found |= {f"score/{removal.key}": text for removal in self.map_removals()}
        return {key: self.n_own(probe) for key, probe in found.items()}

    def seqs_per_batch(self, probe: Probe) -> int:
        """Return how many sequences make about as many tokens as a batch of text windows.

        Every process that shares the run gets a batch.
        """
        n_seqs, length = probe.tokens.shape
        same_tokens = self.options.batch_size * self.probes["text"].tokens.shape[1] // length
        return max(1, min(same_tokens, n_seqs // self.checkpoint.processes.count))

    def n_own(self, probe: Probe) -> int:
        """Return how many of the sequences this process runs."""
        processes = self.checkpoint.processes
        size = self.seqs_per_batch(probe)
        ours = batches_of(len(probe.tokens), size, processes.rank, processes.count)
        return sum(stop - start for start, stop in ours)

    def run(self) -> Measured:
        """Return the losses, decodability and score maps of all conditions."""
        calibration = self.calibrate()
        losses = {
            (name, probe): self._losses(name, probe, calibration)
            for name in self.conditions
            for probe in self.probes
        }
        return Measured(
            losses=losses,
            maps={each: self._maps(each, calibration) for each in self.map_removals()},
            **{prefix: self._decode(prefix, calibration) for prefix in self._decoded()},
        )

    def map_removals(self) -> list[Removal]:
        """Return the removals that score maps are needed of.

        What a condition leaves of the positional part needs the condition without the sources too.
        """
        if not self.options.pattern:
            return []
        ours = list(self.conditions.values())
        return list(dict.fromkeys([*ours, *(each.without(self.sources) for each in ours)]))

    def _decoded(self) -> dict[str, list[str]]:
        """Return the conditions in which decodability is measured, per kind of model."""
        if not self.options.position:
            return {}
        only_sources = [n for n, r in self.conditions.items() if r.is_source(self.sources)]
        return {"distances": list(self.conditions), "untrained": only_sources}

    def calibrate(self) -> Calibration | None:
        """Return the gains and means of the replacements; None if they need none."""
        if not self.needs_calibration:
            return None
        text = self.probes["text"]
        return calibration_once(
            self.checkpoint,
            "calibration",
            self.model,
            text.tokens,
            batch_size=self.seqs_per_batch(text),
            seed=self.options.seed if self.is_random else None,
        )

    def _ablation(self, removal: Removal, prefix: int | None) -> Ablation:
        return Ablation(
            remove=removal.remove,
            replacement=removal.replacement,
            gain=self.options.gain,
            seed=self.options.seed,
            prefix=prefix if removal.mask else None,
        )

    def _ablated(
        self, removal: Removal, calibration: Calibration | None, prefix: int | None = None
    ) -> AbstractContextManager[HookedModel]:
        return ablated(self.model, self._ablation(removal, prefix), calibration)

    def _losses(
        self, name: str, probe_name: str, calibration: Calibration | None
    ) -> DocumentLosses:
        probe = self.probes[probe_name]
        with self._ablated(self.conditions[name], calibration, probe.prefix):
            losses = losses_once(
                self.checkpoint,
                f"loss/{name}/{probe_name}",
                self.model,
                probe.tokens,
                batch_size=self.seqs_per_batch(probe),
            )
        return probe.by_document(losses)

    def _maps(self, removal: Removal, calibration: Calibration | None) -> ScoreMaps:
        with self._ablated(removal, calibration):
            return scores_once(
                self.checkpoint,
                f"score/{removal.key}",
                self.model,
                self.probes["text"].tokens,
                layers=range(self.options.n_layers),
                batch_size=self.seqs_per_batch(self.probes["text"]),
                n_folds=self.options.n_folds,
                documents=self.probes["text"].documents,
            )

    def _decode(self, prefix: str, calibration: Calibration | None) -> dict[str, Distances]:
        names = self._decoded()[prefix]
        with self._weights(prefix):
            return {name: self._distances(prefix, name, calibration) for name in names}

    @contextmanager
    def _weights(self, prefix: str) -> Iterator[None]:
        if prefix == "untrained":
            with untrained(self.model, self.options.seed):
                yield
        else:
            yield

    def _distances(self, prefix: str, name: str, calibration: Calibration | None) -> Distances:
        key, options = f"{prefix}/{name}", self.options
        with self._ablated(self.conditions[name], calibration):
            weights = self._ridge(f"{key}/fit")
            if f"{key}/distance" not in self.checkpoint:
                with self.checkpoint.stream(f"{key}/distance") as stream:
                    distances = capture_distances(
                        self.model,
                        self.held_out.tokens,
                        weights,
                        skip=options.skip,
                        batch_size=self.seqs_per_batch(self.held_out),
                        checkpoint=stream,
                    )
                self.checkpoint.save(f"{key}/distance", {"distances": distances})
        found = self.checkpoint.load(f"{key}/distance")["distances"]
        return self.held_out.by_document(found)

    def _ridge(self, key: str) -> Float[Tensor, "layer row fit"]:
        """Return the fits on true and on shuffled targets, which the checkpoint keeps."""
        options, tokens = self.options, self.fit.tokens
        if key not in self.checkpoint:
            generator = torch.Generator().manual_seed(options.seed)
            with self.checkpoint.stream(key) as stream:
                xx, xy = capture_moments(
                    self.model,
                    tokens,
                    index_targets(len(tokens), tokens.shape[1], options.skip, generator),
                    n_layers=options.n_layers,
                    skip=options.skip,
                    batch_size=self.seqs_per_batch(self.fit),
                    checkpoint=stream,
                )
            self.checkpoint.save(key, {"weights": ridge(xx, xy)})
        return self.checkpoint.load(key)["weights"]
