"""The settings that commands share."""

import pytest

from nope_probe.errors import UserError
from nope_probe.runtime.settings import RunSettings


@pytest.mark.parametrize(
    ("seq_len", "n_seqs"), [(64, 32), (256, 32), (257, 31), (1024, 8), (8192, 1), (30_000, 1)]
)
def test_an_automatic_batch_holds_at_most_32_sequences_and_8192_tokens(seq_len, n_seqs):
    assert RunSettings(seq_len=seq_len).seqs_per_batch == n_seqs


def test_a_batch_size_that_is_given_is_taken():
    assert RunSettings(seq_len=1024, batch_size=13).seqs_per_batch == 13


def test_naming_the_automatic_batch_size_is_the_same_run():
    assert RunSettings(batch_size=32).recorded() == RunSettings().recorded()


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_of_no_sequences_is_an_error(batch_size):
    with pytest.raises(UserError, match=f"--batch-size {batch_size}: expected 1 <= batch-size"):
        RunSettings(batch_size=batch_size).validate()
