"""Every command on a tiny decoder, with its default readers and removals, and heads' maps."""

from pathlib import Path
from typing import Any

from support.plain_attention import plain_attention
from support.tiny_models import Tiny

from nope_probe.studies import commands

TEXT = {"n_seqs": 10, "seq_len": 24, "folds": 5}
RANDOM = {**TEXT, "seq_len": 12, "data": "random"}
# Of each run: its command, and its sizes.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "intact": ("ablate", {**RANDOM, "layers": "all", "per_head": True, "remove": ("none",)}),
    "attention": ("attention", {**RANDOM, "layers": "all"}),
    "circuit": ("circuit", RANDOM),
    "ablate": ("ablate", {**RANDOM, "layers": "all"}),
    "trace": ("trace", {**RANDOM, "layers": "all", "confirm": 1}),
    "behaviour": (
        "behaviour",
        {
            **TEXT,
            "measures": ("loss", "position"),
            "layers": "all",
            "remove": ("sources", "weights"),
        },
    ),
}


def run_command(name: str, tiny: Tiny, out: Path) -> None:
    """Run a command on a decoder into a folder; `circuit` on the first layer that attends."""
    named, sizes = COMMANDS[name]
    command = commands.COMMANDS[named]
    first = (
        {"layer": min(plain_attention(tiny.hf, tiny.tokens), default=0)}
        if name == "circuit"
        else {}
    )
    settings: Any = command.settings
    command.study()(settings(model=str(tiny.folder), **sizes, **first, out=out))
