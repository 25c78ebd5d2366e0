"""What `behaviour` runs: losses of every condition on every probe, and decoded positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import log, nan
from typing import TYPE_CHECKING, Any, Unpack

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nope_probe.analyses.behaviour import (
    Losses,
    PerDocument,
    binned_means,
    by_document,
    chance_distance,
    cost_of,
    mean_interval,
    parts_of,
    ridge,
    span_loss,
)
from nope_probe.data.sequences import random_twice
from nope_probe.data.tokenizing import permuted
from nope_probe.errors import UserError
from nope_probe.hooks.layers.model import Given, positions_of
from nope_probe.hooks.reading.capture import capture_distances, capture_moments
from nope_probe.hooks.reading.streaming import Stream
from nope_probe.hooks.removing.components import components
from nope_probe.hooks.removing.settings import Ablation
from nope_probe.hooks.removing.weights import untrained
from nope_probe.maps.folds import State, halves_of
from nope_probe.removal import INTACT
from nope_probe.run.flags import refuse
from nope_probe.run.folder import Run
from nope_probe.run.session import Session
from nope_probe.studies.behaviour import (
    QUANTITIES,
    SAID,
    Quantity,
    Settings,
    make_conditions,
    report,
)
from nope_probe.studies.engine import Engine, irreplaceable, validate_removable
from nope_probe.studies.from_python import ModelOrName, Out, run_of, takes_options
from nope_probe.studies.page import with_page
from nope_probe.studies.readings import Probe, captured_losses, copies, costs
from nope_probe.studies.study import Pass, Results, Study, calibration, captured
from nope_probe.studies.tables import (
    Row,
    TableRow,
    interval_columns,
    interval_names,
    mean_columns,
    table_of,
)

if TYPE_CHECKING:
    from nope_probe.studies.options import BehaviourOptions as Options

LONG = "positions/long"  # the pass that measures mean attention of long windows
MIN_DOCUMENTS = 8  # four to fit on and four to evaluate
BINS = 64  # of positions beyond the trained context
PLACE = ["removed", "replacement"]


class Behaviour(Study[Settings]):
    """What a model does with context, order, BOS, copies and length, in every condition."""

    def __init__(self, session: Session[Settings]) -> None:
        super().__init__(session)
        settings, loaded, text = self.settings, session.loaded, session.sequences()
        if text.kind in ("random", "vectors"):
            raise UserError(SAID["on_text"])
        kept = irreplaceable(loaded.model)
        self.left_out = kept if "weights" in settings.groups else {}
        self.conditions = make_conditions(components(loaded.model), settings, kept)
        refuse(settings.wrong_ablations(self.conditions))
        validate_removable(loaded.model, [*self.conditions.values()])
        self.layers = settings.layers_with_maps(loaded.info)  # refused before anything is run
        if text.n_documents < MIN_DOCUMENTS:
            raise UserError(
                f"{len(text)} sequences from {text.n_documents} documents: {MIN_DOCUMENTS} "
                "documents are needed; raise --n-seqs, or take other --data"
            )
        self.text, self.skip = text, settings.n_first(text.kind != "vectors")
        self.trained, self.longest = settings.lengths(loaded.info.n_ctx)
        self.probes, self.uniform = self._probes(), nan  # the loss of a uniform guess, nats
        if loaded.tokenizer is not None:  # among the tokens that are not special
            n_special = len({*loaded.tokenizer.all_special_ids})
            self.uniform = log(len(loaded.tokenizer) - n_special)
        if not self.taken:
            reasons = "; ".join(f"{name}: {self.skipped[name]}" for name in settings.measures)
            raise UserError(f"nothing to measure ({reasons})")

    def _probes(self) -> dict[str, Probe]:
        """Return the sequences that the measures need; `skipped` says which cannot be taken."""
        settings, data, tokenizer = self.settings, self.text, self.session.loaded.tokenizer
        text = replace(Probe.of(data, settings.prefix_len), texts=data)
        probes = {"text": text}
        no_tokens = SAID["no_tokens"] if tokenizer is None else ""
        reasons = {"copy": no_tokens, "bos": no_tokens if data.bos else SAID["no_bos"]}
        is_held_out = halves_of(text.engine(self.session).fold_of) == 1
        n_held_out = len(text.documents[is_held_out].unique())
        if n_held_out < MIN_DOCUMENTS // 2:
            reasons["position"] = SAID["few_held_out"].format(
                n=n_held_out, least=MIN_DOCUMENTS // 2
            )
        if "extrapolation" in settings.measures:
            try:
                probes["long"] = self._long_windows()
            except UserError as error:
                reasons["extrapolation"] = str(error)
        self.skipped = {name: reasons[name] for name in settings.measures if reasons.get(name)}
        self.taken = taken = {*settings.measures} - {*self.skipped}
        if "order" in taken:
            generator = torch.Generator().manual_seed(settings.seed)
            shuffled = permuted(text.tokens, generator, int(data.bos), text.prefix)
            probes["order"] = replace(text, tokens=shuffled)
        if "copy" in taken:
            probes |= copies(data, tokenizer, settings.seed)
        if "bos" in taken:
            rest, prefix = text.tokens[:, 1:], settings.prefix_len - 1
            drawn = random_twice(data, data.segment, tokenizer, settings.seed)[:, -1:]
            probes["without_bos"] = replace(text, tokens=rest, texts=None, prefix=prefix)
            probes["other_first"] = replace(text, tokens=torch.cat([drawn, rest], 1))
        return probes

    def _long_windows(self) -> Probe:
        """Return windows beyond the trained context, of about as many tokens as the text's.

        Raises:
            UserError: saying why there are none.
        """
        settings, model = self.settings, self.session.loaded.model
        trained, length, prefix = self.trained, self.longest, settings.prefix_len
        n_positions = positions_of(model) or length
        why_not = {
            "learned": "pos_embed" in components(model),
            "no_longer": length <= trained,
            "given": self.session.inputs is not None,
            "few_positions": length > n_positions,
            "late_prefix": prefix > trained - trained // 4,
        }
        numbers = {"trained": trained, "length": length, "prefix": prefix, "n": n_positions}
        refuse((is_so, SAID[name].format(**numbers)) for name, is_so in why_not.items())
        n_seqs = max(settings.folds, settings.n_seqs * settings.seq_len // length)
        longer = replace(settings, n_seqs=n_seqs, seq_len=length, beyond_context=True)
        return Probe.of(self.session.sequences("long", settings=longer), settings.prefix_len)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes of the losses, and of decoded positions."""
        session, conditions = self.session, self.conditions
        text = self.probes["text"].engine(session)
        yield from calibration(text, [*conditions.values()])
        if "long" in self.probes:  # mean attention belongs to its length and to all shorter ones
            of_content = [of for of in conditions.values() if "content" in of.condition]
            yield from calibration(self.probes["long"].engine(session), of_content, key=LONG)
        yield from costs(session, conditions, self.probes, self._losses)
        if "position" in self.taken:
            for weights in ("distances", "untrained"):
                for name, ablation in conditions.items():
                    if weights == "distances" or ablation.condition.are_sources:
                        yield Pass(
                            key=f"{weights}/{name}",
                            engine=text,
                            read=self._distances,
                            ablation=ablation,
                            kind="decoding",
                        )

    def _losses(
        self, name: str, probe: str, engine: Engine, key: str, ablation: Ablation
    ) -> Losses:
        """Return the losses of every document in a condition on a probe.

        Raises:
            UserError: for a loss that is not finite.
        """
        calibration, of_long = engine.calibration, engine.results.get(LONG)
        if probe == "long" and calibration and of_long:
            patterns = replace(calibration, patterns=of_long.patterns)
            engine = replace(engine, calibration=patterns)
        losses = captured_losses(engine, key, ablation)["losses"]
        if not losses.isfinite().all():
            raise UserError(f"non-finite losses in condition {name} ({probe})")
        return by_document(losses, self.probes[probe].documents)

    def _distances(
        self, engine: Engine, key: str, ablation: Ablation
    ) -> Float[Tensor, "held_out layer fit"]:
        """Return the distances of true and fitted index, of the documents that are not fitted.

        The even folds are fitted, and the distances are those of the odd folds: means of written
        position are of one half, and their error knows positions.
        """
        text, generator = self.probes["text"], torch.Generator().manual_seed(self.settings.seed)
        half_of = halves_of(text.engine(self.session).fold_of)
        fit, held_out = (text.engine(self.session, half_of == half) for half in (0, 1))
        index = torch.arange(fit.inputs.shape[1]).double().expand(fit.inputs.shape)
        control = permuted(index, generator, self.skip)
        targets = torch.stack([index, control], -1)

        def capture(engine: Engine, stream: Stream | None) -> State:
            options: dict[str, Any] = {"skip": self.skip, "checkpoint": stream}
            places = [*map(self.session.loaded.info.attending.index, self.layers)]
            size, n_layers = fit.batch_size, places[-1] + 1
            moments = capture_moments(
                engine.model, fit.inputs, targets, n_layers=n_layers, batch_size=size, **options
            )
            weights, size = ridge(*moments), held_out.batch_size
            distances = capture_distances(
                engine.model, held_out.inputs, weights, batch_size=size, **options
            )
            return {"distances": distances[:, places]}

        assert held_out.documents is not None
        is_drawn = key.startswith("untrained/")
        with untrained(engine.model, self.settings.seed) if is_drawn else nullcontext():
            distances = captured(capture, engine, key, ablation)["distances"]
        return by_document(distances, held_out.documents)

    def analyse(self, results: Results) -> Run:
        """Estimate every measure in every condition, and return the run."""
        session, conditions = self.session, self.conditions.values()
        quantities = [row for name in QUANTITIES for row in self._quantity(name, results)]
        columns = ["measure", *PLACE, *interval_names("value", "difference", "beyond_null"), "note"]
        tables = {
            "loss_by_position": self._by_position("text", results),
            "extrapolation": self._by_position("long", results),
            "behaviour": table_of(quantities, columns),
            "decodability": self._decoded(results),
        }
        manifest = replace(
            session.manifest_of(self.text),
            results={
                "conditions": [*dict.fromkeys(of.named.name for of in conditions)],
                "left_out": self.left_out,
                "massive_outputs": self.massive_outputs(),
                "skipped": self.skipped,
                "prefix": self.settings.prefix_len,
                "trained_len": self.trained,
            },
        )
        tokens = {name: probe.tokens for name, probe in self.probes.items()}
        tokens |= {"tokens": tokens.pop("text"), "documents": self.probes["text"].documents}
        if "long" in self.probes:
            tokens["long_documents"] = self.probes["long"].documents
        arrays = {"tokens": {name: array.numpy() for name, array in tokens.items()}}
        return with_page(session, Run(manifest=manifest, arrays=arrays, tables=tables), report)

    def _quantity(self, name: str, results: Results) -> Iterator[TableRow]:
        """Yield the rows of a quantity, one for each condition.

        `difference` is to the intact model on the same documents and targets, `beyond_null` of
        written position to its null. An empty value has a note that says why.
        """
        about = QUANTITIES[name]
        if about.measure not in self.settings.measures:
            return
        read, reason = partial(self._read, about, results), self.skipped.get(about.measure, "")
        if not reason and name in ("copy_text", "copy_random"):
            reason = "" if mean_interval(read(INTACT.name)).high < 0 else SAID["no_copy"]
        for condition, ablation in self.conditions.items():
            suffix_only, null = "mask" in ablation.condition, ablation.condition.null
            note, of = reason or (about.unmasked if suffix_only else ""), dict[str, PerDocument]()
            if not note:
                of["value"] = values = read(condition, suffix_only)
                has_null = null != ablation.condition
                losses = [read(x, suffix_only) for x in (INTACT.name, *[null.name] * has_null)]
                cost = cost_of(values, *losses)
                if has_null:
                    of["beyond_null"] = cost["cost"]
                if condition != INTACT.name:
                    of["difference"] = cost["cost_with_noise" if has_null else "cost"]
                if name == "copy_random_second" and values.mean() > self.uniform:
                    note = SAID["above_uniform"]
                    del of["value"]
            means = interval_columns(**{column: mean_interval(x) for column, x in of.items()})
            yield {"measure": name, **Row.of(ablation).columns, **means, "note": note}

    def _read(
        self, about: Quantity, results: Results, condition: str, suffix_only: bool = False
    ) -> PerDocument:
        """Return a quantity in a condition, a number per document.

        Args:
            about: the quantity.
            results: of all passes.
            condition: the condition.
            suffix_only: whether only targets after the prefix are scored.
        """
        if about.measure == "position":
            return results[f"distances/{condition}"][..., 0].mean(1)
        means = list[PerDocument]()
        for name, part in filter(None, (about.of, about.less)):
            probe, segment = self.probes[name], self.text.segment
            n_pos, prefix = probe.tokens.shape[1], probe.prefix or 1
            spans = parts_of(n_pos, prefix=prefix, segment=segment, trained=self.trained)
            is_cut = suffix_only and part in ("all", "after_bos")
            span = spans["suffix" if is_cut else part]
            means.append(span_loss(results[f"loss/{condition}/{name}"], *span))
        return means[0] - means[1] if means[1:] else means[0]

    def _by_position(self, probe: str, results: Results) -> pd.DataFrame:
        """Return the mean loss at each position, nats; without the mask, of the suffix alone.

        Positions of long windows are binned.
        """
        width = max(1, self.longest // BINS) if probe == "long" else 1
        tables = [pd.DataFrame()]
        for condition, ablation in self.conditions.items() if probe in self.probes else ():
            first = self.settings.prefix_len if "mask" in ablation.condition else 1
            starts, means = binned_means(results[f"loss/{condition}/{probe}"], first, width)
            numbers = {"position": starts, **mean_columns("loss", means)}
            tables.append(pd.DataFrame(Row.of(ablation).columns | numbers))
        columns = [*PLACE, "position", *interval_names("loss")]
        return table_of(pd.concat(tables, ignore_index=True), columns)

    def _decoded(self, results: Results) -> pd.DataFrame:
        """Return the distance of decoded and true index, per layer, in positions.

        `distance` is of the regression on the residual stream after the layer, `null` of one on
        shuffled targets, `untrained` of the model with random weights; `difference` is to the
        intact model, paired over documents; `chance` is what the middle position achieves.
        """
        chance = chance_distance(self.text.inputs.shape[1], self.skip)
        rows, names = list[TableRow](), ("distance", "null", "untrained", "difference")
        for condition, ablation in self.conditions.items() if "position" in self.taken else ():
            distances = results[f"distances/{condition}"]
            of = {"distance": distances[..., 0], "null": distances[..., 1]}
            if f"untrained/{condition}" in results:
                of["untrained"] = results[f"untrained/{condition}"][..., 0]
            if condition != INTACT.name:
                of["difference"] = (distances - results[f"distances/{INTACT.name}"])[..., 0]
            for place, layer in enumerate(self.layers):
                means = {name: mean_interval(values[:, place]) for name, values in of.items()}
                named = {"layer": layer, **Row.of(ablation).columns, "chance": chance}
                rows.append(named | interval_columns(**means))
        return table_of(rows, ["layer", *PLACE, *interval_names(*names), "chance"])


@partial(takes_options, Settings)
def run_behaviour(
    model: ModelOrName, inputs: Given | None = None, *, out: Out = None, **options: Unpack[Options]
) -> Run:
    """Measure a model's behaviour as the `behaviour` command does, and return its tables.

    Inputs are text, and the sequences of one text are one document only where `sequences` cut them.
    Extrapolation needs longer sequences, so a call with inputs leaves it out.

    Args:
        model: a name, as the command takes it, or a model that `load` takes or returns, of which
            all layers are studied by default.
        inputs: what `capture_scores` takes; by default the sequences that the options describe.
        out: a new folder for the run, or that of the same run; by default nothing is kept.
        options: the flags of `python -m nope_probe.behaviour --help`, as in `seq_len=32`.

    Raises:
        UserError: for what cannot be done.

    Example:
        >>> from nope_probe import run_behaviour
        >>> small = dict(n_seqs=16, seq_len=24, measures=["loss"], remove=["mlp"])
        >>> run = run_behaviour("nope-tiny", **small)
        >>> table = run.tables["behaviour"].set_index(["measure", "removed"])
        >>> bool(table.loc[("loss", "mlp"), "difference_low"] > 1)
        True
    """
    return run_of(Behaviour, Settings, model, inputs, out, options)
