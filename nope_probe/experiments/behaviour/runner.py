"""Runs of a model in every condition: losses of all probes, decodability, score maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import halves, index_targets, ridge
from nope_probe.analyses.jackknife import Interval, cross_products, rms
from nope_probe.analyses.pattern_changes import positional_part
from nope_probe.components import Ablation
from nope_probe.experiments.behaviour.conditions import Removal
from nope_probe.experiments.behaviour.plan import Plan, Probe
from nope_probe.experiments.behaviour.settings import Settings
from nope_probe.experiments.engine import calibration_once, losses_once, scores_once
from nope_probe.hooks.ablation import ablated
from nope_probe.hooks.layers.protocols import HookedModel
from nope_probe.hooks.reading.residuals import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import StreamCheckpoint, batches_of
from nope_probe.hooks.removing.edited_weights import untrained
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.folds import State
from nope_probe.maps.maps import ScoreMaps
from nope_probe.runtime.session import Session

HEAD_PROBES = ("text", "copy_text")  # on which single heads are removed
DocumentLosses = Float[Tensor, "_ _"]  # documents and targets, which differ among probes
Distances = Float[Tensor, "held_out layer fit"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in every condition.

    Attributes:
        losses: per condition and probe, nats.
        distances: per condition, of predicted and true index on held-out documents, in positions;
            the last axis is the fit on true and on shuffled targets.
        untrained: the same of the model with random weights, where only sources are removed.
        maps: per removal, score maps.
        head_patterns: per layer, the RMS of each head's positional part p in the intact model,
            nats; empty if single heads are not wanted.
    """

    losses: dict[tuple[str, str], DocumentLosses]
    distances: dict[str, Distances] = field(default_factory=dict)
    untrained: dict[str, Distances] = field(default_factory=dict)
    maps: dict[Removal, ScoreMaps] = field(default_factory=dict)
    head_patterns: dict[int, list[Interval]] = field(default_factory=dict)


class BehaviourRunner:
    """Runs a model in all conditions that the run's checkpoint does not have yet.

    Args:
        session: the run.
        plan: the conditions, and the sequences.
    """

    def __init__(self, session: Session[Settings], plan: Plan) -> None:
        self.model, self.checkpoint = session.loaded.model, session.checkpoint
        self.settings, self.plan = session.settings, plan
        self.n_layers = self.settings.n_layers_of(session.loaded)
        self.skip = self.settings.n_skipped(session.sequences())
        self.conditions = plan.conditions | plan.heads
        ablations = [self._ablation(each, None) for each in self.conditions.values()]
        self.needs_calibration = any(each.needs_calibration for each in ablations)
        self.is_random = any(each.replacement == "random" for each in ablations)
        self.fit, self.held_out = (plan.text.subset(each) for each in halves(plan.text.documents))

    def streams(self) -> dict[str, int]:
        """Return how many sequences this process runs in each stream, by the stream's key."""
        text = self.plan.text
        found = {"calibration": text} if self.needs_calibration else {}
        for name, probe in self._scored():
            found[f"loss/{name}/{probe}"] = self.plan.probes[probe]
        for prefix, names in self._decoded().items():
            for name in names:
                found[f"{prefix}/{name}/fit"] = self.fit
                found[f"{prefix}/{name}/distance"] = self.held_out
        found |= {f"score/{removal.key}": text for removal in self.map_removals()}
        for layer in self._head_counts():
            found |= {f"head/L{layer}/{removal.key}": text for removal in self._with_and_without()}
        return {key: self.n_own(probe) for key, probe in found.items()}

    def seqs_per_batch(self, probe: Probe) -> int:
        """Return how many sequences make about as many tokens as a batch of text windows.

        Every process that shares the run gets a batch.
        """
        n_seqs, length = probe.tokens.shape
        same_tokens = self.settings.seqs_per_batch * self.plan.text.tokens.shape[1] // length
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
        return Measured(
            losses={
                (name, probe): self._losses(name, probe, calibration)
                for name, probe in self._scored()
            },
            maps={each: self._maps(each, calibration) for each in self.map_removals()},
            head_patterns={layer: self._head_patterns(layer) for layer in self._head_counts()},
            **{prefix: self._decode(prefix, calibration) for prefix in self._decoded()},
        )

    def _scored(self) -> Iterator[tuple[str, str]]:
        """Yield each condition with each of the probes whose losses it is scored by."""
        for name, removal in self.conditions.items():
            for probe in self.plan.probes:
                if removal.head is None or probe in HEAD_PROBES:
                    yield name, probe

    def map_removals(self) -> list[Removal]:
        """Return the removals that score maps are needed of.

        What a condition leaves of the positional part needs the condition without the sources too.
        """
        if not self.plan.measured("pattern"):
            return []
        ours = list(self.plan.conditions.values())
        return list(dict.fromkeys([*ours, *(each.without(self.plan.sources) for each in ours)]))

    def _head_counts(self) -> dict[int, int]:
        """Return how many heads have a pattern to measure, by layer."""
        if not self.plan.measured("pattern"):
            return {}
        return Counter(each.head[0] for each in self.plan.heads.values() if each.head is not None)

    def _with_and_without(self) -> tuple[Removal, Removal]:
        """Return the removals of nothing and of all sources."""
        return Removal(), Removal(components=self.plan.sources)

    def _decoded(self) -> dict[str, list[str]]:
        """Return the conditions in which decodability is measured, per kind of model."""
        if not self.plan.measured("position"):
            return {}
        conditions, sources = self.plan.conditions, self.plan.sources
        only_sources = [name for name, each in conditions.items() if each.is_source(sources)]
        return {"distances": list(conditions), "untrained": only_sources}

    def calibrate(self) -> Calibration | None:
        """Return the gains and means of the replacements; None if they need none."""
        if not self.needs_calibration:
            return None
        text = self.plan.text
        return calibration_once(
            self.checkpoint,
            "calibration",
            self.model,
            text.tokens,
            batch_size=self.seqs_per_batch(text),
            seed=self.settings.seed if self.is_random else None,
        )

    def _ablation(self, removal: Removal, prefix: int | None) -> Ablation:
        return Ablation(
            remove=removal.remove,
            replacement=removal.replacement,
            gain=self.settings.gain,
            seed=self.settings.seed,
            prefix=prefix if removal.mask else None,
            heads=None if removal.head is None else {removal.head[0]: [removal.head[1]]},
        )

    def _ablated(
        self, removal: Removal, calibration: Calibration | None, prefix: int | None = None
    ) -> AbstractContextManager[HookedModel]:
        return ablated(self.model, self._ablation(removal, prefix), calibration)

    def _losses(
        self, name: str, probe_name: str, calibration: Calibration | None
    ) -> DocumentLosses:
        probe = self.plan.probes[probe_name]
        with self._ablated(self.conditions[name], calibration, probe.prefix):
            losses = losses_once(
                self.checkpoint,
                f"loss/{name}/{probe_name}",
                self.model,
                probe.tokens,
                batch_size=self.seqs_per_batch(probe),
            )
        return probe.by_document(losses)

    def _maps(
        self, removal: Removal, calibration: Calibration | None, layer: int | None = None
    ) -> ScoreMaps:
        """Return the score maps of all layers, or those of the heads of one."""
        text, of_head = self.plan.text, layer is not None
        with self._ablated(removal, calibration):
            return scores_once(
                self.checkpoint,
                f"head/L{layer}/{removal.key}" if of_head else f"score/{removal.key}",
                self.model,
                text.tokens,
                layers=[layer] if of_head else range(self.n_layers),
                batch_size=self.seqs_per_batch(text),
                n_folds=self.settings.folds,
                documents=text.documents,
                per_head=of_head,
            )

    def _head_patterns(self, layer: int) -> list[Interval]:
        """Return the RMS of p of each head of a layer, whose maps are held one layer at a time."""
        whole, content = (self._maps(each, None, layer) for each in self._with_and_without())
        assert whole.per_head is not None
        assert content.per_head is not None
        found = []
        for head in range(self._head_counts()[layer]):
            scores, rest = (each[:, 0, head] for each in (whole.per_head, content.per_head))
            part = positional_part(scores, rest, self.skip, whole.counts)[None]
            found.append(rms(cross_products(part, part, whole.counts)[:, 0, 0], whole.counts))
        return found

    def _decode(self, prefix: str, calibration: Calibration | None) -> dict[str, Distances]:
        names = self._decoded()[prefix]
        with self._weights(prefix):
            return {name: self._distances(prefix, name, calibration) for name in names}

    @contextmanager
    def _weights(self, prefix: str) -> Iterator[None]:
        if prefix == "untrained":
            with untrained(self.model, self.settings.seed):
                yield
        else:
            yield

    def _distances(self, prefix: str, name: str, calibration: Calibration | None) -> Distances:
        key = f"{prefix}/{name}"
        with self._ablated(self.conditions[name], calibration):
            weights = self._ridge(f"{key}/fit")
            measured = self.checkpoint.once(
                f"{key}/distance",
                lambda stream: {
                    "distances": capture_distances(
                        self.model,
                        self.held_out.tokens,
                        weights,
                        skip=self.skip,
                        batch_size=self.seqs_per_batch(self.held_out),
                        checkpoint=stream,
                    )
                },
            )
        return self.held_out.by_document(measured["distances"])

    def _ridge(self, key: str) -> Float[Tensor, "layer row fit"]:
        """Return the fits on true and on shuffled targets, which the checkpoint keeps."""
        tokens = self.fit.tokens
        generator = torch.Generator().manual_seed(self.settings.seed)
        targets = index_targets(len(tokens), tokens.shape[1], self.skip, generator)

        def fit(stream: StreamCheckpoint) -> State:
            xx, xy = capture_moments(
                self.model,
                tokens,
                targets,
                n_layers=self.n_layers,
                skip=self.skip,
                batch_size=self.seqs_per_batch(self.fit),
                checkpoint=stream,
            )
            return {"weights": ridge(xx, xy)}

        return self.checkpoint.once(key, fit)["weights"]
