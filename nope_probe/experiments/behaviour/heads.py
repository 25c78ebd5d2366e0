"""Each head's W_Q removed alone, which shows whose positional patterns behaviour needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from nope_probe.analyses.behaviour import mean_interval, second_copy_loss, span_loss
from nope_probe.analyses.jackknife import Interval, cross_products, rms
from nope_probe.analyses.pattern_changes import positional_part
from nope_probe.experiments.behaviour.conditions import INTACT_NAME, Removal
from nope_probe.experiments.behaviour.plan import Plan
from nope_probe.experiments.behaviour.runner import BehaviourRunner, DocumentLosses, Measured
from nope_probe.experiments.resumable import losses_once, scores_once
from nope_probe.experiments.tables import Row, interval_columns, interval_names
from nope_probe.hooks.ablation import Ablation, ablated
from nope_probe.hooks.layers.model import layers_of
from nope_probe.hooks.removing.replacements import Calibration
from nope_probe.maps.maps import ScoreMaps

PROBES = ("text", "copy_text")
COLUMNS = ("layer", "head", *interval_names("pattern", "loss", "copy"))


@dataclass(frozen=True, kw_only=True)
class MeasuredHeads:
    """What was measured of each head.

    Attributes:
        losses: per layer, head and probe, with the head's W_Q removed, nats.
        patterns: per layer, the RMS of each head's positional part p in the intact model, nats.
    """

    losses: dict[tuple[int, int, str], DocumentLosses]
    patterns: dict[int, list[Interval]]


class HeadRunner:
    """Runs a model with each head's W_Q removed alone.

    Args:
        runner: the run of the conditions, which are measured first.
        plan: the sequences.
        skip: how many first keys patterns leave out.
    """

    def __init__(self, runner: BehaviourRunner, plan: Plan, skip: int) -> None:
        self.runner, self.plan, self.skip = runner, plan, skip
        blocks = layers_of(runner.model)[: runner.options.n_layers]
        self.n_heads = [block.n_heads for block in blocks]
        self.probes = [name for name in PROBES if name in plan.probes]

    def streams(self) -> dict[str, int]:
        """Return how many sequences this process runs in each stream, by the stream's key."""
        sizes = {name: self.runner.n_own(self.plan.probes[name]) for name in self.probes}
        found = {
            f"head/L{layer}H{head}/{probe}": sizes[probe]
            for layer, head in self._heads()
            for probe in self.probes
        }
        for layer in range(len(self.n_heads)) if self.plan.measured("pattern") else ():
            found |= {f"head/L{layer}/{name}": sizes["text"] for name in ("all", "no-source")}
        return found

    def run(self, calibration: Calibration | None) -> MeasuredHeads:
        """Return the losses without each head's W_Q, and each head's own positional part."""
        return MeasuredHeads(
            losses={
                (layer, head, probe): self._losses(layer, head, probe, calibration)
                for layer, head in self._heads()
                for probe in self.probes
            },
            patterns={
                layer: self._patterns(layer)
                for layer in range(len(self.n_heads))
                if self.plan.measured("pattern")
            },
        )

    @property
    def n_conditions(self) -> int:
        """In how many heads W_Q is removed, in one after the other."""
        return sum(self.n_heads)

    def _heads(self) -> Iterator[tuple[int, int]]:
        for layer, n_heads in enumerate(self.n_heads):
            yield from ((layer, head) for head in range(n_heads))

    def _losses(
        self, layer: int, head: int, probe: str, calibration: Calibration | None
    ) -> DocumentLosses:
        options, sequences = self.runner.options, self.plan.probes[probe]
        ablation = Ablation(
            remove=["w_q"],
            heads={layer: [head]},
            replacement=options.replacement,
            gain=options.gain,
            seed=options.seed,
        )
        with ablated(self.runner.model, ablation, calibration):
            losses = losses_once(
                self.runner.checkpoint,
                f"head/L{layer}H{head}/{probe}",
                self.runner.model,
                sequences.tokens,
                batch_size=self.runner.seqs_per_batch(sequences),
            )
        return sequences.by_document(losses)

    def _patterns(self, layer: int) -> list[Interval]:
        """Return the RMS of p of each head of a layer, whose maps are held one layer at a time."""
        whole = self._maps(layer, "all", Removal())
        content = self._maps(layer, "no-source", Removal(components=self.plan.sources))
        assert whole.per_head is not None
        assert content.per_head is not None
        found = []
        for head in range(self.n_heads[layer]):
            scores, rest = (each[:, 0, head] for each in (whole.per_head, content.per_head))
            part = positional_part(scores, rest, self.skip, whole.counts)[None]
            found.append(rms(cross_products(part, part, whole.counts)[:, 0, 0], whole.counts))
        return found

    def _maps(self, layer: int, name: str, removal: Removal) -> ScoreMaps:
        with ablated(self.runner.model, Ablation(remove=removal.remove)):
            return scores_once(
                self.runner.checkpoint,
                f"head/L{layer}/{name}",
                self.runner.model,
                self.plan.text.tokens,
                layers=[layer],
                batch_size=self.runner.seqs_per_batch(self.plan.text),
                n_folds=self.runner.options.n_folds,
                documents=self.plan.text.documents,
                per_head=True,
            )


def heads_table(plan: Plan, measured: Measured, heads: MeasuredHeads) -> pd.DataFrame:
    """Return per head its positional part, nats, and what is lost without its W_Q, nats per token.

    `loss` is the rise of the mean loss, `copy` of the loss of a text segment's second copy.
    """
    rows: list[Row] = []
    for layer, head in dict.fromkeys((layer, head) for layer, head, _ in heads.losses):
        rises = {}
        for probe in {name for _, _, name in heads.losses}:
            ours, intact = heads.losses[layer, head, probe], measured.losses[INTACT_NAME, probe]
            if probe == "text":
                rises["loss"] = span_loss(ours, 1) - span_loss(intact, 1)
            else:
                copies = (second_copy_loss(each, plan.segment) for each in (ours, intact))
                rises["copy"] = next(copies) - next(copies)
        row: Row = {"layer": layer, "head": head}
        if heads.patterns:
            row |= interval_columns(heads.patterns[layer][head], "pattern")
        for name, rise in rises.items():
            row |= interval_columns(mean_interval(rise), name)
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))
