"""What build-engine's help says of its options is so."""

from __future__ import annotations

import re

import typer

from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.calibration import recipes


def test_help_names_every_recipe() -> None:
    (option,) = (entry for entry in typer.main.get_command(app).params if entry.name == "recipe")
    assert set(recipes.NAMES) <= set(re.findall(r"[\w-]+", option.help))
