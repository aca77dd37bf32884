"""A share of the sweep over ONNX Runtime's optimizers: the sessions that are used compute what those without any do."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from common.optimizer_sweep import combinations, ours

from onnx_models import zoo
from onnx_models.position_table import position_table


@pytest.mark.parametrize("name", ["vit", "bert", "t5"])
def test_networks(name: str, tmp_path: Path) -> None:
    model, draw = zoo.build(name)
    zoo.export(model, draw(0), tmp_path / "m.onnx", "torchscript")
    assert ours(tmp_path / "m.onnx") < 1e-5


def test_the_sweep_finds_what_is_wrong(tmp_path: Path) -> None:
    """A cubic Resize between Transposes fails where the optimizer of these runs, and constants are not folded."""
    onnx.save(position_table("cubic", True, 17), tmp_path / "m.onnx")
    found = {disabled for _, disabled, _ in combinations(tmp_path / "m.onnx")}
    assert ("ConstantFolding",) in found
    assert not any("TransposeOptimizer_CPUExecutionProvider" in disabled for disabled in found)
    assert ours(tmp_path / "m.onnx") < 1e-5
