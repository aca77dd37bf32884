"""A minute of fuzzing: no changed model or other file ends with exit code 1, ends the process or hangs.

The drivers run for hours."""

from pathlib import Path

import pytest
from fuzz import decoders
from fuzz.driver import fuzz
from fuzz.file_driver import attack


@pytest.mark.slow
def test_changed_models(tmp_path: Path) -> None:
    outcome = fuzz(seed=51, seconds=60, count=1000, folder=tmp_path)
    assert not outcome.failures
    assert {"exit code 0", "exit code 3"} < outcome.counts.keys(), "most are valid no longer, and some still are"


def test_changed_files(tmp_path: Path) -> None:
    """Plans, reports, manifests, statistics, samples, adapters, tokenizers."""
    outcome = attack(seed=51, seconds=60, count=600, folder=tmp_path)
    assert not outcome.failures
    assert {"exit code 0", "exit code 2", "exit code 3"} <= outcome.counts.keys()


def test_changed_decoders(seed: int) -> None:
    """Converted rightly, or refused."""
    counts = decoders.run(seed, 24)
    assert not counts[decoders.WRONG]
    assert counts[decoders.RIGHT] + counts[decoders.REFUSED]
