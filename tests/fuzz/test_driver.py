"""A minute of fuzzing: no changed model ends with exit code 1, ends the process or hangs; the driver runs for hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.driver import fuzz


@pytest.mark.slow
def test_changed_models(tmp_path: Path) -> None:
    outcome = fuzz(seed=51, seconds=60, count=1000, folder=tmp_path)
    assert not outcome.failures
    assert {"exit code 0", "exit code 3"} < outcome.counts.keys(), "most are valid no longer, and some still are"
