"""A model's context is known by its config.json, and sequences beyond it are refused by that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_hub import HubHandler, online, serving

from nope_probe.errors import UserError
from nope_probe.models.context import configured_context, validate_seq_len

COMMIT = "7" * 40


@pytest.mark.parametrize(
    ("text", "n_ctx"),
    [
        ('{"max_position_embeddings": 31}', 31),
        ('{"n_positions": 19}', 19),
        ('{"max_position_embeddings": 31, "n_positions": 19}', 19),
        ("{}", None),
        ('{"max_position_embeddings": null}', None),
        ('{"max_position_embeddings": "31"}', None),
        ('{"max_position_embeddings": 0}', None),
        ("[]", None),
        ("7", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"a":' * 100_000, None),
    ],
)
def test_a_context_is_that_of_the_file_or_unknown(
    text: str, n_ctx: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert configured_context(str(tmp_path)) == n_ctx


def test_a_sequence_as_long_as_the_context_fits() -> None:
    validate_seq_len(31, 31)
    validate_seq_len(10**9, None)
    with pytest.raises(UserError, match="--seq-len 32 is beyond the model's context 31"):
        validate_seq_len(32, 31)


class OneFile(HubHandler):
    """A hub whose models have a config.json of a context of 31 positions, and nothing else."""

    requests: list[str]
    content = json.dumps({"model_type": "llama", "max_position_embeddings": 31}).encode()

    def do_HEAD(self) -> None:
        if self.path.endswith("/config.json"):
            self.answer(200, self.content, ETag='"5"', X_Repo_Commit=COMMIT)
        else:
            self.answer(200)

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.do_HEAD()
        self.wfile.write(self.content)


def test_of_a_model_on_the_hub_only_its_configuration_is_downloaded(tmp_path: Path) -> None:
    OneFile.requests = []
    command = [sys.executable, "-m", "nope_probe.scores", "--model", "owner/model"]
    with serving(OneFile) as hub:
        ended = subprocess.run(
            command, env=online(hub, tmp_path), cwd=tmp_path, capture_output=True, text=True
        )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: --seq-len 64 is beyond the model's context 31\n"
    of_the_model = [path for path in OneFile.requests if path.startswith("/owner/model")]
    assert of_the_model == ["/owner/model/resolve/main/config.json"]
