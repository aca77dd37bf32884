"""What build-engine's help says of its options is so."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import typer

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.builder.cli.console import failures
from trt_nvfp4.calibration import recipes


def test_help_names_every_recipe() -> None:
    (option,) = (entry for entry in typer.main.get_command(app).params if entry.name == "recipe")
    assert set(recipes.NAMES) <= set(re.findall(r"[a-z][a-z-]*(?::\d+)?", option.help))


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(typer.Exit) as ended, failures(debug=False):
            terminated()
        assert ended.value.exit_code == errors.INTERRUPTED
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
