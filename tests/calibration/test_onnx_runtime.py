"""What ONNX Runtime leaves outside of the models' folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import onnx, {module}
from trt_nvfp4.calibration.cpu_session import cpu_session
from pathlib import Path

text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) {{ y = Neg(x) }}'
model = onnx.parser.parse_model(text)
print(cpu_session(model, Path()).run(None, {{"x": [1, 2]}}))
"""


@pytest.mark.parametrize(
    "module",
    ["trt_nvfp4.builder.sides", "trt_nvfp4.calibration.collection", "trt_nvfp4.graph_passes.moe_probe"],
)
def test_nothing_is_collected(module: str, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 writes what it knows of the models to the user's folder, unless it is told not to."""
    folders = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | folders
    command = [sys.executable, "-c", RUN.format(module=module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "-2" in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
