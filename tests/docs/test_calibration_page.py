"""docs/how_to/calibration.md lists every part of a recipe, and its example in Python runs."""

import re
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.calibration import recipes

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "calibration.md").read_text()


def test_parts_of_recipes() -> None:
    table = PAGE.split("| part | does |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `([\w:-]+)` \|", table, re.MULTILINE)) == sorted(recipes.NAMES)
    assert f"default recipe is `{recipes.DEFAULT}`" in " ".join(PAGE.split())


def test_example(seed: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 64, generator=generator)
    names: dict[str, Any] = {"x": torch.randn(256, 64, generator=generator), "weight": weight}
    exec(code, names)
    error = (names["restored"] - weight).norm() / weight.norm()
    assert 0 < error < 0.15
