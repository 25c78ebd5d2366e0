"""The settings that the commands on models share, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from annotated_types import Interval

from nope_probe.data.documents import (
    file_of,
    is_data_set,
    validate_packing,
    validate_readable,
    validate_token_file,
)
from nope_probe.errors import TooFewLayersError, UserError, beyond_context
from nope_probe.files import JsonObject
from nope_probe.maps import MIN_FOLDS, MIN_KEYS, default_rows
from nope_probe.models.info import ModelInfo, stated_info
from nope_probe.models.names import (
    CHECKPOINTS,
    PARAMETER_FREE,
    base_of,
    path_of,
    validate_adapter,
    validate_hub_answers,
    validate_reachable,
    validate_revision,
)
from nope_probe.removal import Condition, validate_components
from nope_probe.run.flags import (
    ALPHA,
    COUNT,
    LARGEST,
    LAYERS,
    SEED,
    SEQ_LEN,
    CommandSettings,
    LocalPath,
    Mistakes,
    refuse,
    without_effect,
)
from nope_probe.run.processes import process_count

Layers = Annotated[Annotated[int, LAYERS] | str, tyro.conf.arg(metavar="N|FROM:TO|all|auto")]
# Raised when a column, an array or a setting begins to mean something else: runs of another format
# are neither read nor taken up.
FORMAT = 9
FIRST_LAYERS = 4  # that are studied by default
# Vectors of d_model numbers that a block holds for each token: residual stream, q, k, v, z and MLP.
VECTORS_OF_BLOCK = 16
OF_SHIPPED = ("mask", "rope", "w_q", "w_k", "w_o", "w_v", "mlp")  # components; of nope-tiny no RoPE
# A batch of long sequences must not take minutes: a run stops between batches.
AUTO_BATCH_TOKENS, AUTO_BATCH_SEQS = 8192, 32
# The `data` of a run on sequences that a call from Python gives, and what these take the place of.
GIVEN = "given in Python"
OF_INPUTS = (
    *("data", "windows", "pack", "bos", "alpha", "shuffle"),
    *("n_seqs", "seq_len", "beyond_context"),
)
# The settings without effect on a source of data; another value than the default is refused.
NO_EFFECT_ON = {
    "gaussian": ("windows", "pack", "bos", "shuffle"),
    "random": ("windows", "pack", "alpha", "shuffle"),
}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(CommandSettings):
    """Which model is read.

    Attributes:
        model: A shipped or friendly name, a Hub id, a local Hugging Face folder, or a GGUF file
            here or on the Hub (owner/name/FILE.gguf).
        adapter: Folders of adapters (LoRA or others that peft merges), merged in turn; without
            --model, into the base model of the first.
        revision: A branch, tag or commit of a model on the Hub.
        allow_unused: Load a model whose files hold tensors that it does not use.
    """

    model: str = "rope-tiny"
    adapter: tuple[str, ...] = ()
    revision: str | None = None
    allow_unused: bool = False

    boxes: ClassVar = {"model": "model"}

    def __post_init__(self) -> None:
        super().__post_init__()
        default = type(self).model  # a dataclass keeps its defaults on the class
        if self.adapter and self.model == default:
            object.__setattr__(self, "model", base_of(self.adapter[0]))


@dataclass(frozen=True, kw_only=True)
class RunSettings(ModelSettings):
    """Which model is run, on which sequences, and how.

    Attributes:
        data: auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose
            (Python's language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet
            file, fineweb-edu, a Hub data set (owner/name or owner/name:config) or a local folder
            of one.
        tokens: A .npy or .safetensors file of token ids [seq, pos] to run instead of --data;
            `documents` in the latter says which sequences belong together.
        windows: Where sequences begin in documents; start: at the first token (the paper's).
        pack: Join documents, an EOS token after each, and cut sequences across them.
        bos: Begin sequences with the BOS token: always, never, or auto, if the tokenizer adds one;
            or with another token, given as its text.
        alpha: With --data gaussian: expected inner product.
        shuffle: Permute the tokens in each sequence.
        n_seqs: How many sequences.
        seq_len: Tokens in a sequence.
        beyond_context: Allow a --seq-len beyond the context (not of learned positions).
        layers: 4: the first four, L0 to L3; 7:9: L7 and L8, after blocks that are run and not
            reported; all; auto: 4, or all of fewer.
        batch_size: Sequences per forward pass; auto: 8,192 tokens, at most 32 sequences.
        folds: Parts of the data that intervals are made from.
        query_rows: Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above.
        skip_keys: How many keys count as first; auto: 1 for tokens (trace: for BOS), else 0.
        seed: Seed of every random choice.
        device: A torch device, or auto; under torchrun each process takes a GPU.
        device_map: Spread a model that is larger than one GPU over all of them.
        dtype: The type of the weights; auto: bfloat16 on a GPU, else float32.
        out: Folder of the run [runs/COMMAND-MODEL-HASH].
    """

    data: str = "auto"
    tokens: LocalPath | None = None
    windows: Literal["random", "start"] = "random"
    pack: bool = False
    bos: str = "auto"
    alpha: Annotated[float, ALPHA] = 0.0
    shuffle: bool = False
    n_seqs: Annotated[int, COUNT] = 64
    seq_len: Annotated[int, SEQ_LEN] = 64
    beyond_context: bool = False
    layers: Layers = "auto"
    batch_size: Annotated[int, COUNT] | Literal["auto"] = "auto"
    folds: Annotated[int, Interval(ge=MIN_FOLDS, le=LARGEST)] = 8
    query_rows: Annotated[int | None, COUNT] = None
    skip_keys: Annotated[int, Interval(ge=0, le=LARGEST)] | Literal["auto"] = "auto"
    seed: Annotated[int, SEED] = 0
    device: str = "auto"
    device_map: Literal["auto", "balanced", "sequential"] | None = None
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    out: LocalPath | None = None

    in_one_process = False
    boxes: ClassVar = {"data": "data", "layers": "measuring", "out": "output"}
    runs_all_layers: ClassVar[bool] = False  # whichever of them are studied
    shortest: ClassVar[int] = MIN_KEYS + 2  # tokens of a sequence that has a query to measure

    def __post_init__(self) -> None:
        if self.data == "auto":
            parameter_free = self.model.lower() in PARAMETER_FREE
            object.__setattr__(self, "data", "gaussian" if parameter_free else "shipped")
        super().__post_init__()
        if isinstance(self.layers, str) and self.layers not in ("auto", "all"):
            first, colon, end = self.layers.partition(":")
            is_range = colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)
            if not is_range:
                raise UserError(
                    f"--layers {self.layers}: expected how many first layers (4), a range (7:9 is "
                    "L7 and L8), all or auto"
                )

    def chosen(self) -> JsonObject:
        """Return the settings that are not the default, by name; data, if it was asked for."""
        chosen = super().chosen()
        for by_default in (("data", "n_seqs"), ("data",), ("n_seqs",)):
            asked = {name: value for name, value in chosen.items() if name not in by_default}
            if type(self)(**asked) == self:
                return asked
        return chosen

    def length_of(self, n: int) -> str:
        """Return how to ask for sequences of n tokens: the flag, or a call's inputs."""
        return f"sequences of {n} tokens" if self.data == GIVEN else f"--seq-len {n}"

    @property
    def seqs_per_batch(self) -> int:
        """Sequences per forward pass."""
        if self.batch_size == "auto":
            return max(1, min(AUTO_BATCH_SEQS, AUTO_BATCH_TOKENS // self.seq_len))
        return self.batch_size

    def recorded(self) -> JsonObject:
        """Return the settings that identify the run, as its manifest holds them."""
        return {"format": FORMAT, **super().recorded(), "batch_size": self.seqs_per_batch}

    def mistakes(self) -> Mistakes:
        """Yield what can be wrong before the model is loaded, each with its message."""
        reads, n, n_seqs = self.reads_corpus, self.seq_len, self.n_seqs
        yield (
            reads and n < self.shortest,
            f"{self.length_of(n)}: measures use queries that see {MIN_KEYS} keys or more besides "
            f"the first; take {self.length_of(self.shortest)} or more",
        )
        yield (
            reads and n_seqs < self.folds,
            f"--n-seqs {n_seqs}: {self.folds} folds take {self.folds} sequences or more, and "
            f"--folds {MIN_FOLDS} (the fewest) {MIN_FOLDS}",
        )
        yield (self.query_rows or 0) > n, f"--query-rows {self.query_rows} is more than {n} tokens"
        yield self.n_first(False) > n - 3, f"--skip-keys {self.skip_keys} leaves no keys of {n}"
        yield from self._wrong_devices()
        if self.pack:
            validate_packing(self.data, self.windows)
        if self.reads_corpus:
            unused = NO_EFFECT_ON.get(self.data, ("alpha",))
            yield from without_effect(self, unused, f"on --data {self.data}")
        if self.revision is not None:
            validate_revision(self.model)

    def validate_reach(self) -> None:
        """Check what names and files say of the model and the data, before torch is imported.

        Raises:
            UserError: naming what is not there, or what works offline; for layers, components or
                positions that the model's config.json does not have.
        """
        validate_reachable(self.model, self.revision)
        for adapter in self.adapter:
            validate_adapter(adapter)
        self._validate_stated()
        if self.tokens is not None and self.data != GIVEN:
            self.validate_tokens(self.tokens)
        elif self.data == GIVEN or not self.reads_corpus:
            return
        elif not is_data_set(self.data):
            validate_readable(self.data)
        elif file_of(self.data) is None:
            validate_hub_answers(f"the data set {self.data}")

    def validate_tokens(self, file: Path) -> None:
        """Check that there is a file of tokens, and no flag that describes other sequences.

        Raises:
            UserError: naming the file or the flag.
        """
        refuse(without_effect(self, OF_INPUTS, "next to --tokens"))
        validate_token_file(file)

    def _validate_stated(self) -> None:
        """Check the settings on what the model's config.json states."""
        info = stated_info(self.model)
        if info is None:
            return
        refuse(self.mistakes_of(info))
        if self.model.lower() in CHECKPOINTS:
            if info.n_ctx < self.seq_len and not self.beyond_context and self.data != GIVEN:
                raise beyond_context(self.seq_len, info.n_ctx)
            has = [name for name in OF_SHIPPED if name != "rope" or any(info.rope_layers)]
            for condition in self.named:
                validate_components(condition, has)

    @property
    def named(self) -> Sequence[Condition]:
        """What is removed by name, one condition at a time."""
        return ()

    @property
    def reads_text(self) -> bool:
        """Whether a language model reads text."""
        is_parameter_free = self.model.lower().startswith("parameter-free")
        return not is_parameter_free and self.data not in ("random", "gaussian")

    @property
    def reads_corpus(self) -> bool:
        """Whether the run reads the sequences that `data` names."""
        return True

    def memory(self, n_maps: int = 1, d_model: int = 0, n_heads: int = 0, d_vocab: int = 0) -> int:
        """Return the bytes that the run needs above its model: sequences, fold maps and a batch.

        Files of finished passes are mapped; their pages are no memory that the run needs.

        Args:
            n_maps: how many maps (of float64, in every fold) are in memory at a time; their lower
                triangles and means are there too while a finished pass is saved.
            d_model: the width of the model, for the activations of a batch; 0 leaves these out.
            n_heads: how many heads have scores and weights in a batch; 0 leaves these out.
            d_vocab: how many logits a position has, if a pass reads them; 0 leaves these out.

        Example:
            >>> from nope_probe.ablate import Settings
            >>> Settings(n_seqs=8, seq_len=100, folds=4).memory(n_maps=2)
            1126400
        """
        means = n_maps * self.n_rows * self.seq_len
        cells = self.folds * means
        tokens = min(self.seqs_per_batch, self.n_seqs) * self.seq_len
        numbers = VECTORS_OF_BLOCK * d_model + 2 * n_heads * self.seq_len + d_vocab
        inputs = self.n_seqs * self.seq_len
        return 8 * (inputs + cells + cells // 2 + means) + 4 * tokens * numbers

    @property
    def n_rows(self) -> int:
        """How many rows the maps of the run have."""
        return self.query_rows or default_rows(self.seq_len)

    def _wrong_devices(self) -> Mistakes:
        n_processes, n_batches = process_count(), -(-self.n_seqs // self.seqs_per_batch)
        batches = f"{self.n_seqs} sequences in batches of {self.seqs_per_batch} are {n_batches}"
        too_few = f"{batches} batches, too few for {n_processes} processes; lower --batch-size"
        yield n_batches < n_processes, too_few
        is_spread = self.device_map is not None
        one = "--device is for one device and --device-map for several: take one"
        yield is_spread and self.device != "auto", one
        all_or_one = "--device-map gives one process all GPUs, and torchrun one each: take one"
        yield is_spread and n_processes > 1, all_or_one

    def sources(self) -> dict[str, Path | None]:
        """Return the paths of the model's and the data's files.

        A path is None for the Hub, and for the standard library, which comes with Python.
        """
        made_here = self.model.lower().startswith("parameter-free")
        files = {} if made_here else {"model": path_of(self.model)}
        files |= {f"adapter {n}": path_of(folder) for n, folder in enumerate(self.adapter, 1)}
        has_no_file = self.data in ("random", "gaussian", GIVEN) or not self.reads_corpus
        return files if has_no_file else files | {"data": file_of(self.data)}

    @property
    def depth(self) -> int | None:
        """How many first layers of the model to load, if it has as many; None for all."""
        if self.runs_all_layers or self.layers == "all":
            return None
        return FIRST_LAYERS if self.layers == "auto" else self._end

    @property
    def _end(self) -> int:
        """The number after that of the last layer of a number or a range."""
        return int(str(self.layers).rpartition(":")[2])

    def depth_in(self, info: ModelInfo) -> int:
        """Return how many first layers of a model to study, or to run before those."""
        if self.layers == "auto":
            return min(FIRST_LAYERS, info.n_layers)
        return info.n_layers if self.layers == "all" else self._end

    @property
    def positions(self) -> int | None:
        """How many positions the model is to take beyond its context; None for no more."""
        return self.seq_len if self.beyond_context else None

    def mistakes_of(self, info: ModelInfo) -> Mistakes:
        """Yield what can be wrong with the settings of a run of some model, each with its message.

        Raises:
            TooFewLayersError: for a missing layer.
        """
        depth, first = self.depth_in(info), info.attending[0]
        if depth > info.n_layers:
            raise TooFewLayersError(info.name, depth=info.n_layers, requested=depth)
        yield (
            not self.layers_with_maps(info),
            f"--layers {depth if self.layers == 'auto' else self.layers} of {info.name} do not "
            f"attend: L{first} is the first that does, try --layers {first + 1}",
        )

    @property
    def removes(self) -> bool:
        """Whether the run removes components, which a model inside `ablated` does not allow."""
        return True

    def n_first(self, by_default: bool) -> int:
        """Return how many positions count as first: `skip_keys`, or by default 1 or none."""
        return int(by_default) if self.skip_keys == "auto" else self.skip_keys

    def layers_with_maps(self, info: ModelInfo) -> tuple[int, ...]:
        """Return the numbers of the layers that have maps: those to study that attend."""
        first, colon, _ = str(self.layers).partition(":")
        studied = range(int(first) if colon else 0, self.depth_in(info))
        return tuple(layer for layer in info.attending if layer in studied)
