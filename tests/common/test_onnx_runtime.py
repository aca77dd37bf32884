"""What ONNX Runtime leaves outside of the models' folders."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import onnx
from trt_nvfp4.common.cpu_session import cpu_session
from pathlib import Path

text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
model = onnx.parser.parse_model(text)
print(cpu_session(model, Path()).run(None, {"x": [1, 2]}))
"""


def test_nothing_is_collected(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 writes what it knows of the models to the user's folder, unless it is told not to."""
    folders = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"} | folders
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
    assert "-2" in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_one_module_imports_it() -> None:
    sources = [
        path
        for folder in ("builder", "calibration", "graph_passes", "plugins", "trt_nvfp4")
        for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    direct = re.compile(r"^\s*(import onnxruntime|from onnxruntime)", re.MULTILINE)
    assert len(sources) > 100
    assert [path.name for path in sources if direct.search(path.read_text())] == ["onnx_runtime.py"]
