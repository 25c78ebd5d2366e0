"""A sequence beyond a model's context is refused before the model is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_hub import HubHandler, online, serving
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, OPTConfig, PretrainedConfig

from nope_probe.errors import UserError
from nope_probe.models.hub import configured_context, validate_seq_len

COMMIT = "7" * 40


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_positions=31, n_ctx=47),
        OPTConfig(max_position_embeddings=31),
        LlamaConfig(max_position_embeddings=31),
        Gemma3TextConfig(max_position_embeddings=31),
    ],
    ids=lambda config: config.model_type,
)
def test_a_context_is_known_by_the_name_that_a_family_gives_it(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert configured_context(str(tmp_path)) == 31


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
