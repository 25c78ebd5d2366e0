"""Every command on a tiny decoder, with its default readers and removals, and heads' maps."""

from importlib import import_module
from pathlib import Path
from typing import Any

from support.plain_attention import plain_attention
from support.tiny_models import Tiny

TEXT = {"n_seqs": 8, "seq_len": 24, "folds": 5}
RANDOM = {**TEXT, "seq_len": 12, "data": "random"}
# Of each command: its folder in `studies`, and the sizes of its run.
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "intact": ("ablation", {**RANDOM, "layers": "all", "per_head": True, "remove": ("none",)}),
    "attention": ("attention", {**RANDOM, "layers": "all"}),
    "circuit": ("circuit", RANDOM),
    "ablate": ("ablation", {**RANDOM, "layers": "all"}),
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
    folder, sizes = COMMANDS[name]
    module: Any = import_module(f"nope_probe.studies.{folder}.study")
    first = (
        {"layer": min(plain_attention(tiny.hf, tiny.tokens), default=0)}
        if name == "circuit"
        else {}
    )
    module.run(module.Settings(model=str(tiny.folder), **sizes, **first, out=out))
