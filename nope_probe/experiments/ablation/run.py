"""The `ablate` command's run: from settings to a folder, and from Python."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

import tyro

from nope_probe.components import (
    ROPE_HALVES,
    SOURCES,
    WEIGHTS,
    Gain,
    equal_bands,
    with_bands,
    writer_of,
)
from nope_probe.errors import UserError
from nope_probe.experiments.given import RunOptions, run_of
from nope_probe.hooks.removing.removals import Substitute, validate_replacements, without_weights
from nope_probe.hooks.removing.stand_ins import DEFAULT_REPLACEMENTS, Replacement
from nope_probe.runtime.folder import Run, has_first_page
from nope_probe.runtime.processes import status
from nope_probe.runtime.session import Call, Session
from nope_probe.runtime.settings import OFFSET_BINS, Bounds, GainFlag, RunSettings, validate_effects

if TYPE_CHECKING:
    import pandas as pd

    from nope_probe.experiments.ablation.plan import Measured, Plan
    from nope_probe.experiments.given import Model
    from nope_probe.hooks.layers.model import Given

_arg = tyro.conf.arg
MOST_BANDS = 128  # rotary pairs of the widest heads
SHORT = 1.0  # seconds for the sources: such a run ends before its first page is opened
FLAGS_OF_WEIGHTS = ("reparametrise", "replacement", "gain")


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Find where a model's positional attention pattern comes from.

    Runs the model with and without its causal mask, RoPE and weights, and reports per layer how
    much of the positional pattern each source brings and which weights it needs, with intervals.
    The page of the sources comes first, with the default settings after about 10 seconds on two
    cores; the weights are on it after about 40.
    """

    players: Annotated[
        tuple[str, ...] | None,
        _arg(
            help="What is kept or removed as a whole: of mask rope w_q w_k w_o w_v mlp pos_embed "
            "window alibi sink, the circuits qk ov, rope_high and rope_low (pairs whose wavelength "
            "is below the sequence's length, and the rest), the position that a head, MLP or "
            "embedding writes (position[L1H0], position[MLP0]), unions such as w_q+mlp; or "
            "`sources` alone. By default mask rope w_q w_k w_o, and in a second set mask rope qk "
            "ov."
        ),
    ] = None
    bands: Annotated[
        int,
        Bounds(0, MOST_BANDS),
        _arg(
            help="Into how many bands of rotary pairs to divide RoPE, each a player in its place; "
            "0 leaves it whole. Without --players, mask and bands play alone."
        ),
    ] = 0
    replacement: Annotated[
        tuple[Replacement, ...] | None,
        _arg(
            help="What a removed weight is replaced by; several are shown side by side, and maps "
            "and figures are of the first. By default identity, and beside it, for what is lost "
            "without each weight, mean."
        ),
    ] = None
    gain: GainFlag = "output"
    scope: Annotated[
        Literal["both", "upstream", "own"],
        _arg(help="For a layer's scores, remove in the layers before it, in itself, or in both."),
    ] = "both"
    reparametrise: Annotated[
        int,
        Bounds(0, 1000),
        _arg(help="In how many random reparametrisations to repeat the first player set."),
    ] = 0
    offset_bins: Annotated[Literal["auto", "all"], OFFSET_BINS] = "auto"
    residuals_gb: Annotated[
        float,
        Bounds(0, 1_000_000),
        _arg(
            help="With --scope own or upstream: up to how many GB of residual streams to keep for "
            "conditions that have them in common, in the memory of the model's device."
        ),
    ] = 1.0

    unrecorded = (*RunSettings.unrecorded, "residuals_gb")

    def validate(self) -> None:
        """Check what can be checked without the model."""
        super().validate()
        if self.bands and self.players is not None and "rope" not in self.players:
            raise UserError("--bands divides the player rope, and it is not among --players")
        validate_replacements(
            DEFAULT_REPLACEMENTS if self.replacement is None else self.replacement, self.gain
        )
        removed = self._named_components()
        if removed is not None and not removed & {*WEIGHTS}:
            validate_effects(self, without_weights(FLAGS_OF_WEIGHTS))
        written = sorted(name for name in removed or () if writer_of(name))
        if written and self.scope != "both":
            raise UserError(f"{written[0]} is of one place: it takes no --scope {self.scope}")

    def without_effect(self) -> dict[str, str]:
        """Return by name why settings have no effect beside the others."""
        whole = {"residuals_gb": "with --scope both: no two conditions share residual streams"}
        return super().without_effect() | (whole if self.scope == "both" else {})

    def _named_components(self) -> frozenset[str] | None:
        """Return the components of the players, as far as their names tell; None by default.

        Raises:
            UserError: for players that do not exist or share a component, or too many.
        """
        from nope_probe.analyses.shapley import player_set

        names = self.player_names
        if names is None:
            return None
        if names == ("sources",):
            return frozenset(SOURCES)
        try:
            if self.bands:
                player_set(names)  # as they were named: bands of other players are no fault
                pairs = equal_bands(self.bands, self.bands)  # in place of the model's
                names = tuple(with_bands(names, pairs))
            players = player_set(names).players
        except ValueError as error:
            flag = "--bands" if self.players is None else "--players"
            raise UserError(f"{flag}: {error}") from error
        return frozenset().union(*(player.components for player in players))

    @property
    def substitutes(self) -> tuple[Substitute, ...]:
        """The replacements of removed weights, in turn."""
        return self._substitutes(self.replacement or DEFAULT_REPLACEMENTS[:1])

    @property
    def checks(self) -> tuple[Substitute, ...]:
        """The replacements that only measure what is lost without each weight."""
        return () if self.replacement else self._substitutes(DEFAULT_REPLACEMENTS[1:])

    def _substitutes(self, names: Sequence[Replacement]) -> tuple[Substitute, ...]:
        return tuple(Substitute(replacement=name, gain=self.gain, seed=self.seed) for name in names)

    @property
    def player_names(self) -> tuple[str, ...] | None:
        """The players as they were named; None where the model decides on them."""
        if self.players is None and self.bands:
            return ("mask", "rope")
        return self.players


def run(settings: Settings, call: Call | None = None) -> Path:
    """Run the attribution unless it is finished, and return its folder.

    Args:
        settings: the command's.
        call: the model and sequences of a Python call.

    Raises:
        UserError: for what cannot be done.
    """
    with Session("ablate", settings, call) as session:
        if not session.finished:
            plan = plan_of(session)
            measured = measure(session, plan)
            if session.is_first:
                with status("analysing and writing", in_logs=True):
                    from nope_probe.experiments.ablation.analyse import analyse

                    session.write(analyse(session, plan, measured))
    return session.folder


def plan_of(session: Session[Settings]) -> Plan:
    """Return the conditions to run.

    Raises:
        UserError: for players that the model does not have, or flags that need others.
    """
    from nope_probe.experiments.ablation.plan import make_plan
    from nope_probe.experiments.engine import (
        bands_of,
        irreplaceable,
        validate_removable,
        without_effect,
    )
    from nope_probe.hooks.removing.targets import components

    settings, loaded = session.settings, session.loaded
    layers = settings.layers_of(loaded.info)
    players = settings.player_names
    bands: tuple[str, ...] = ROPE_HALVES
    if settings.bands:
        bands = bands_of(loaded.model, settings.bands)
        players = tuple(with_bands(players or (), bands))
    plan = make_plan(
        components(loaded.model),
        players,
        loaded.info.parameter_free,
        bands,
        left_out=irreplaceable(loaded.model)
        | without_effect(loaded.model, session.sequences().inputs, len(layers)),
    )
    validate_removable(loaded.model, plan.removable)
    if not plan.removes_weights:
        validate_effects(settings, without_weights(FLAGS_OF_WEIGHTS))
    return replace(
        plan,
        layers=layers,
        substitutes=settings.substitutes,
        checks=settings.checks if plan.removes_weights else (),
        scope=settings.scope,
        reparametrise=settings.reparametrise,
        offset_bins=settings.offset_bins,
    )


def measure(session: Session[Settings], plan: Plan) -> Measured:
    """Return the score maps of all conditions, from the checkpoint or captured and saved.

    Raises:
        UserError: for a non-finite score.
    """
    from nope_probe.experiments.ablation.plan import measure_conditions
    from nope_probe.experiments.engine import Engine, validate_first_sequence
    from nope_probe.hooks.reading.streaming import GIGABYTE

    settings, engine, shuffled = session.settings, Engine.of(session), None
    if session.sequences().kind == "text":  # with an order that shuffling removes
        shuffled = session.sequences("shuffled-inputs", shuffle=True)
    keys = plan.keys(shuffled is not None)
    is_resumed = f"score/{plan.name(plan.conditions[0])}" in session.checkpoint
    if not is_resumed:
        validate_first_sequence(engine.model, engine.inputs, plan.layers)
    session.announce(len(plan.conditions), keys, n_seqs=len(engine.inputs))
    soonest = time.monotonic() + (0 if is_resumed else SHORT)
    with session.checkpoint.progress(keys, session.n_own_seqs):
        return measure_conditions(
            engine,
            plan,
            shuffled,
            max_residual_bytes=int(settings.residuals_gb * GIGABYTE),
            show_sources=partial(show_sources, session, plan, soonest),
        )


def show_sources(
    session: Session[Settings], plan: Plan, soonest: float, measured: Measured
) -> None:
    """Write the page of the sources, which the finished run replaces, unless it is too early.

    Args:
        session: the run's.
        plan: the conditions.
        soonest: the time on the clock `time.monotonic` from which a page is worth its drawing.
        measured: the maps of the sources' conditions.
    """
    is_wanted = session.is_first and session.call.is_kept and time.monotonic() > soonest
    if is_wanted and not has_first_page(session.folder):
        from nope_probe.experiments.ablation.analyse import first_page

        session.write_first_page(first_page(session, plan, measured))


class AblationOptions(RunOptions, total=False):
    """The options of `run_ablations`, which are the flags of `ablate`."""

    players: Sequence[str] | None
    bands: int
    replacement: Replacement | Sequence[Replacement] | None
    gain: Gain
    scope: Literal["both", "upstream", "own"]
    reparametrise: int
    offset_bins: Literal["auto", "all"]
    residuals_gb: float


@dataclass(frozen=True, kw_only=True, repr=False)
class AblationStudy(Run):
    """Where a model's positional pattern comes from, and which weights it needs.

    Its `tables` are those of the run's CSV files: `sources`, `players`, `interactions`, `pattern`,
    `non_relative`, `controls`, `mean_covariance`, `offsets`, `queries`. Its `maps` are those of
    maps.safetensors, [layer, row, key_pos] in nats: `score/<kept>`, `pattern/all`, `source/<term>`,
    `shapley/<player>`, ...
    """

    def __repr__(self) -> str:
        """Return the shares of the sources per layer, and what else there is."""
        lines = ["AblationStudy: shares of the positional pattern"]
        terms = self.sources.query("term != 'position'")  # all but content
        for layer, rows in terms.groupby("layer"):
            shares = zip(rows["term"], rows["share"], strict=True)
            parts = [f"{term} {share:.2f}" for term, share in shares]
            lines.append(f"  L{layer}  {', '.join(parts)}")
        tables = [name for name, table in self.tables.items() if len(table)]
        shape = " × ".join(map(str, self.maps["pattern/all"].shape))
        maps = f"maps ({shape}): {', '.join(self.maps)}"
        wrapped = fill(maps, width=100, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*lines, f"tables: {', '.join(tables)}", wrapped])

    @property
    def sources(self) -> pd.DataFrame:
        """Per layer and term (content, mask, rope, ...), its RMS in nats and its share."""
        return self.tables["sources"]

    @property
    def players(self) -> pd.DataFrame:
        """Per layer and player, its Shapley share, what is lost without it, and alone."""
        return self.tables["players"]

    @property
    def skip_keys(self) -> int:
        """How many first keys the patterns leave out."""
        return int(self.manifest["skip_keys"])


def run_ablations(
    model: Model,
    inputs: Given | None = None,
    *,
    out: Path | str | None = None,
    **options: Unpack[AblationOptions],
) -> AblationStudy:
    """Find where a model's positional pattern comes from, and which weights it needs.

    Runs the model with and without its mask, position encoding and weights, as the `ablate` command
    does. A progress bar goes to stderr.

    Args:
        model: a name, as the command takes it; what `load` returns; a HookedTransformer or a
            TransformerBridge. A model that is no name is studied in all its layers by default.
        inputs: what `capture_scores` takes; vectors for a parameter-free model. By default the
            sequences that the options describe (`data`, `n_seqs`, `seq_len`, ...).
        out: a folder for the run, as the command writes it; the same call reads it again. By
            default nothing is kept.
        options: the command's flags, with underscores: `players=["mask", "qk"]`, `layers=2`,
            `folds=4`, `replacement="mean"`, ...

    Raises:
        UserError: for what cannot be done, such as players that the model lacks, too few sequences,
            or a folder that holds another run.

    Example:
        >>> from nope_probe import load, run_ablations, sequences
        >>> loaded = load("nope-tiny", n_layers=3)
        >>> data = sequences("random", tokenizer=loaded.tokenizer, n_seqs=64, seq_len=16)
        >>> study = run_ablations(loaded, data, players=["mask", "qk"])
        >>> study.sources.query("layer == 2 and term == 'mask'")["share"].item() > 0.9
        True
        >>> study.maps["source/mask"].shape
        (3, 16, 16)
    """
    return AblationStudy(**vars(run_of(run, Settings, model, inputs, out, options)))
