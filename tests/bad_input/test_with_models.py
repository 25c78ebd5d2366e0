"""What a command finds out from its model, tokens or text: one line, and nothing is written.

A row is a command line, with tiny models in braces, and a fragment of the line that it ends with.
"""

import shlex
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from support.command_line import module_of, refused
from support.tiny_models import ByName

SMALL = "--n-seqs 8 --seq-len 13 --folds 4"
RANDOM = f"{SMALL} --layers 2 --data random"
WIDE = "--n-seqs 16 --seq-len 29 --folds 4"
TEXT = "attention --layers 1 --text"
LLAMA = f"ablate {RANDOM} --model {{llama}}"
NOPE = f"ablate {RANDOM} --model {{smollm3-nope}}"
COMPONENTS = [
    (
        f"behaviour {WIDE} --model nope-tiny --remove position[L9H0]",
        "L9H0 writes nothing in this model; the components that do are embed, L0H0 to L3H3",
    ),
    (f"{NOPE} --remove rope_high", "has no rope_high; it has mask"),
    (f"{LLAMA} --remove rope[4:6]", "no band rope[4:6]: the model rotates 5"),
]
PLACES = [
    (f"{LLAMA} --layers 3", "has 2 layers, 3 were asked for; try --layers"),
    ("trace --reader L2 --per-head", "--reader L2: with --per-head, readers are heads"),
    ("trace --reader L4", "--reader L4 is not among the first 4 layers: take --layers 5"),
    ("trace --reader L5 --layers all", "L5: there are L0, L1, L2, L3, with the heads H0 to H3"),
    ("ablate --device-map auto", "rope-tiny is small and stays on one device"),
    (
        "ablate --device-map auto --model parameter-free --data gaussian",
        "parameter-free is small and stays on one device",
    ),
    ("attention --n-seqs 16 --in-heads L1H0", "--in-heads has no effect where nothing is removed"),
    ("attention --n-seqs 16 --remove content --in-heads MLP1", "--in-heads MLP1: expected heads"),
]
TEXTS = [
    ("ablate --data gaussian", "rope-tiny takes text or random tokens, not --data gaussian"),
    ("ablate --model parameter-free --data prose", "takes gaussian vectors, not --data prose"),
    ("ablate --n-seqs 99999", "documents of 63 tokens or more give "),
    ("ablate --model .", "has no config.json"),
    (f"behaviour {WIDE} --model {{bare}}", "tokenizer"),
    (
        f"behaviour {WIDE} --measures extrapolation --trained-len 64 --max-len 64",
        "nothing to measure (extrapolation: the trained context of 64 tokens is not shorter",
    ),
    (f"{TEXT} '{'word ' * 30}' --n-seqs 8 --folds 4 --seq-len 16", "have 16: take --seq-len "),
    (f"{TEXT} a --remove mask --n-seqs 8 --folds 4 --seq-len 16", "seen without the mask: take --"),
    (f"{TEXT} '{'word ' * 300}'", "has 601 tokens, and a text alone up to 256: show a part"),
    (f"{TEXT} a --why L0H4", "--why L0H4: there are L0 to L0, with the heads H0"),
    (f"{TEXT} a --why L0H1 --query 9", "the text has 2 tokens, 0 to 1"),
    (f"{TEXT} a --model parameter-free", "the model has no tokenizer, so it takes "),
    (f"{TEXT} '\ufeff<bos>'", "the text has no tokens: the model's tokenizer leaves noth"),
]


@pytest.mark.parametrize(("typed", "fragment"), [*COMPONENTS, *PLACES, *TEXTS])
def test_a_mistake_that_a_model_shows_is_one_line_and_exit_code_2(
    typed: str, fragment: str, tiny: ByName, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = copytree(tiny("llama").folder, tmp_path / "bare", ignore=ignore_patterns("*tok*"))
    folders = {"bare": bare, **{name: tiny(name).folder for name in ("llama", "smollm3-nope")}}
    command, *arguments = shlex.split(typed.format_map(folders))
    assert fragment in refused(capfd, tmp_path / "here", module_of(command), *arguments)
