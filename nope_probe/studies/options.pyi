"""The options of the `run_*` functions. Written by docs/make_options.py."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypedDict

class RunOptions(TypedDict, total=False):
    adapter: str | Collection[str]
    """Folders of adapters (LoRA or others that peft merges), merged in turn; without --model, into
    the base model of the first. [()]"""
    revision: str | None
    """A branch, tag or commit of a model on the Hub. [None]"""
    allow_unused: bool
    """Load a model whose files hold tensors that it does not use. [False]"""
    tokens: Path | str | None
    """A .npy or .safetensors file of token ids [seq, pos] to run instead of --data; `documents` in
    the latter says which sequences belong together. [None]"""
    windows: Literal["random", "start"]
    """Where sequences begin in documents; start: at the first token (the paper's). ['random']"""
    pack: bool
    """Join documents, an EOS token after each, and cut sequences across them. [False]"""
    bos: str
    """Begin sequences with the BOS token: always, never, or auto, if the tokenizer adds one; or
    with another token, given as its text. ['auto']"""
    alpha: float
    """With --data gaussian: expected inner product. [0.0]"""
    shuffle: bool
    """Permute the tokens in each sequence. [False]"""
    beyond_context: bool
    """Allow a --seq-len beyond the context (not of learned positions). [False]"""
    batch_size: int | Literal["auto"]
    """Sequences per forward pass; auto: 8,192 tokens, at most 32 sequences. ['auto']"""
    folds: int
    """Parts of the data that intervals are made from. [8]"""
    skip_keys: int | Literal["auto"]
    """How many keys count as first; auto: 1 for tokens (trace: for BOS), else 0. ['auto']"""
    seed: int
    """Seed of every random choice. [0]"""
    device: str
    """A torch device, or auto; under torchrun each process takes a GPU. ['auto']"""
    device_map: Literal["auto", "balanced", "sequential"] | None
    """Spread a model that is larger than one GPU over all of them. [None]"""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"]
    """The type of the weights; auto: bfloat16 on a GPU, else float32. ['auto']"""

class RemovingOptions(RunOptions, total=False):
    in_heads: str | Collection[str]
    """The heads that lose what --remove names (L16H0 L18H6), in place of all heads; `ablate`
    removes the sources in all heads as well. [()]"""
    gain: Literal["output", "norm", "identity"]
    """The size of the replacements identity and random. ['output']"""
    kept_positions: int
    """How many first tokens keep what blocks write, where `written` is removed; 0 takes the first
    token's mark too. [1]"""

class AblateOptions(RemovingOptions, total=False):
    data: str
    """auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose (Python's
    language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, a
    Hub data set (owner/name or owner/name:config) or a local folder of one. ['auto']"""
    n_seqs: int
    """How many sequences. [64]"""
    seq_len: int
    """Tokens in a sequence. [64]"""
    layers: int | str
    """4: the first four, L0 to L3; 7:9: L7 and L8, after blocks that are run and not reported; all;
    auto: 4, or all of fewer. ['auto']"""
    query_rows: int | None
    """Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above. [None]"""
    remove: str | Collection[str] | None
    """What to remove besides the sources, one at a time: mask rope w_q w_k w_o w_v mlp pos_embed
    alibi window sink norms, the circuits qk ov, rope_high and rope_low (pairs whose wavelength is
    below the sequence's length, and the rest), the position that a head, MLP or embedding writes
    (position[L1H0], position[MLP0]), that of all blocks in a model that stays causal (written),
    content (attention becomes its mean over texts), unions such as w_k+w_o; `sources` for the
    sources alone; `none` to map the intact model alone. By default written w_q w_k w_q+w_k w_o.
    [None]"""
    replacement: (
        Literal["identity", "random", "mean", "zero"]
        | Collection[Literal["identity", "random", "mean", "zero"]]
    )
    """What a removed weight is replaced by; several are shown side by side. [('mean',)]"""
    per_head: bool
    """Also measure each head without each source; with --remove none keep each head's map, and
    measure its attention. [False]"""

class AttentionOptions(RemovingOptions, total=False):
    data: str | None
    """Other texts, named as in `ablate` [shipped; with --text none, unless --n-seqs]. [None]"""
    n_seqs: int | None
    """How many sequences of other texts [512; with --text none, unless --data]. [None]"""
    seq_len: int
    """Tokens in a sequence. [64]"""
    layers: int | str
    """4: the first four, L0 to L3; 7:9: L7 and L8, after blocks that are run and not reported; all;
    auto: 4, or all of fewer. ['all']"""
    query_rows: int | None
    """Queries of the maps: evenly spread; all up to 256 tokens, 128 above. [None]"""
    remove: str | Collection[str] | None
    """What to remove from every block: mask rope w_q w_k w_o w_v mlp pos_embed alibi window sink
    norms, the circuits qk ov, rope_high and rope_low (pairs whose wavelength is below the
    sequence's length, and the rest), the position that a head, MLP or embedding writes
    (position[L1H0], position[MLP0]), that of all blocks in a model that stays causal (written),
    content (attention becomes its mean over texts), unions such as w_k+w_o. [()]"""
    replacement: Literal["identity", "random", "mean", "zero"]
    """What a removed weight is replaced by. ['mean']"""
    text: str | None
    """A text of up to 512 tokens: the page shows where each head looks in it. With --n-seqs or
    --data it is compared with other texts, and has up to --seq-len tokens. [None]"""
    why: str | None
    """A head (L1H3) of the text: why it looks where it looks from --query, exactly, by position and
    by what each earlier component wrote. [None]"""
    query: int | str
    """The token of the text that --why asks about: its number (-1 is the last), or a word. [-1]"""
    steps: int
    """Steps back from --why: 2 also says from which tokens the heads that wrote the most attended
    key, or the query, moved it, and why they looked there; what each moved is taken out of the
    model too, to measure what the score loses. [1]"""

class BehaviourOptions(RemovingOptions, total=False):
    data: str
    """auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose (Python's
    language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, a
    Hub data set (owner/name or owner/name:config) or a local folder of one. ['auto']"""
    n_seqs: int
    """How many sequences. [128]"""
    seq_len: int
    """Tokens in a sequence. [128]"""
    layers: int | str
    """In which layers to read position, as in `ablate`; all layers are run. ['all']"""
    query_rows: int | None
    """Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above. [None]"""
    remove: str | Collection[str]
    """The conditions: mask rope w_q w_k w_o w_v mlp pos_embed alibi window sink norms, the circuits
    qk ov, rope_high and rope_low (pairs whose wavelength is below the sequence's length, and the
    rest), the position that a head, MLP or embedding writes (position[L1H0], position[MLP0]), that
    of all blocks in a model that stays causal (written), content (attention becomes its mean over
    texts), unions such as w_k+w_o; or a group, if the model has it: `position` (rope written
    rope+written mask), the default; `sources` (rope mask mask+rope); `weights` (w_q w_k qk w_o ov
    mlp). [('position',)]"""
    replacement: (
        Literal["identity", "random", "mean", "zero"]
        | Collection[Literal["identity", "random", "mean", "zero"]]
    )
    """What a removed weight becomes; several are measured side by side. [('mean',)]"""
    measures: (
        Literal["loss", "in-context", "copy", "order", "bos", "extrapolation", "position"]
        | Collection[
            Literal["loss", "in-context", "copy", "order", "bos", "extrapolation", "position"]
        ]
    )
    """What to measure. [('loss', 'in-context', 'copy', 'order', 'bos', 'extrapolation',
    'position')]"""
    prefix: int | None
    """Without the mask, this many first tokens see each other, and only those after them are scored
    [half of --seq-len]. [None]"""
    trained_len: int | None
    """Tokens that the model was trained at [as recorded, else its context]; it is extrapolated to 4
    times as many. [None]"""
    max_len: int
    """Most tokens in a window of the extrapolation. [4096]"""

class CircuitOptions(RemovingOptions, total=False):
    data: str
    """auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose (Python's
    language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, a
    Hub data set (owner/name or owner/name:config) or a local folder of one. ['auto']"""
    n_seqs: int
    """How many sequences. [1000]"""
    seq_len: int
    """Tokens in a sequence. [50]"""
    query_rows: int | None
    """Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above. [None]"""
    remove: str | Collection[str] | None
    """What to remove from every block: mask rope w_q w_k w_o w_v mlp pos_embed alibi window sink
    norms, the circuits qk ov, rope_high and rope_low (pairs whose wavelength is below the
    sequence's length, and the rest), the position that a head, MLP or embedding writes
    (position[L1H0], position[MLP0]), that of all blocks in a model that stays causal (written),
    content (attention becomes its mean over texts), unions such as w_k+w_o. [()]"""
    replacement: Literal["identity", "random", "mean", "zero"]
    """What a removed weight is replaced by. ['mean']"""
    layer: int
    """Which block, from 0; the last one has (a) to (g). [0]"""

class HeadsOptions(RunOptions, total=False):
    data: str
    """auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose (Python's
    language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, a
    Hub data set (owner/name or owner/name:config) or a local folder of one. ['auto']"""
    n_seqs: int
    """Sequences that costs are measured on. [8]"""
    seq_len: int
    """Tokens in a sequence. [64]"""
    layers: int | str
    """Which layers' heads to order, as in `ablate`; all layers are run. ['all']"""
    query_rows: int | None
    """Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above. [None]"""
    by: str | Collection[str]
    """Orders, highest first: need (how much a head's attention changes without what is removed),
    others and positional (the share of position among the other keys, and of all keys), induction;
    or a CSV file with the columns layer and head, in the order of the file. [('need',)]"""
    least: bool
    """Remove from the last heads of an order, and draw among all heads: the heads of more draws
    include those of fewer. [False]"""
    remove: (
        Literal["rope", "content", "mask"] | Collection[Literal["rope", "content", "mask"]] | None
    )
    """What to remove from the first heads, one at a time [rope, or of a model without it the mask].
    [None]"""
    k: int | Collection[int]
    """In how many of the first heads, one number at a time. [(1, 5, 20)]"""
    draws: int
    """How often as many other heads are drawn, for comparison; for k = 1, one more single heads of
    any layer. [19]"""
    singles: bool
    """For k = 1, compare with every other head alone, and map all heads: as many passes as heads.
    [False]"""
    mean_seqs: int
    """Other sequences, on which heads are ordered (by need, on as many as n_seqs), and whose mean
    attention removed content leaves. [384]"""

class TraceOptions(RunOptions, total=False):
    data: str
    """auto (shipped; gaussian for a parameter-free model), shipped (Python source), prose (Python's
    language reference), stdlib, random, gaussian, a .txt, .jsonl or .parquet file, fineweb-edu, a
    Hub data set (owner/name or owner/name:config) or a local folder of one. ['auto']"""
    n_seqs: int
    """How many sequences. [64]"""
    seq_len: int
    """Tokens in a sequence. [64]"""
    layers: int | str
    """4: the first four, L0 to L3; 7:9: L7 and L8, after blocks that are run and not reported; all;
    auto: 4, or all of fewer. ['auto']"""
    query_rows: int | None
    """Rows of the maps: evenly spread queries; all up to 2,048 tokens, 512 above. [None]"""
    reader: str | None
    """The layer (L2) or head (L2H1) that the headline, the maps and --confirm are about [the one
    with the largest lead]; a head turns --per-head on. [None]"""
    writers: Literal["heads", "layers"]
    """Whether heads write one by one, or each block's attention as a whole. ['heads']"""
    per_head: bool
    """Trace what each head reads, instead of each layer. [False]"""
    confirm: int
    """How many heads lose their position, one at a time and after each earlier attention and MLP,
    to measure what is lost. [6]"""
