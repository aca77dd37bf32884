"""The library in tools that merely open it: it registers itself, and the parser takes its plugins."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest

from trt_nvfp4.plugins.ops import OPS

_OPEN = """
import ctypes, importlib, json, sys
trt = importlib.import_module(sys.argv[1])
registry = trt.get_plugin_registry()
found = []
for step in sys.argv[3:]:
    if step == "open":
        ctypes.CDLL(sys.argv[2])
    else:
        registry.load_library(sys.argv[2])
    names = [creator.name for creator in registry.all_creators]
    found.append(sorted(name for name in names if name.startswith(("NVFP4", "FP8", "CachedAttention"))))
print(json.dumps(found))
"""
_POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"


def run(program: str, *arguments: str | Path, **environment: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_lean_bindings"])
@pytest.mark.parametrize("steps", [("open",), ("open", "open"), ("load", "open"), ("open", "load")])
def test_each_creator_is_registered_once(library: Path, module: str, steps: tuple[str, ...]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    assert json.loads(run(_OPEN, module, library, *steps)) == [sorted(OPS)] * len(steps)


def test_an_open_library_without_tensorrt_imports_none(library: Path) -> None:
    loaded = run("import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('tensorrt_rtx' in sys.modules)", library)
    assert loaded.strip() == "False"


@pytest.fixture
def two_linears(tmp_path: Path) -> Path:
    """Two nodes of one op, with the op's function."""
    scales = ", ".join(["56"] * 128 * 4)  # 1, as E4M3
    weight = ", ".join(str(value % 120) for value in range(32 * 16))
    calls = "\n".join(
        f"[linear{i}] y{i} = trt_nvfp4.NVFP4Linear"
        "<activation = 0, quantize_activations = 0, scale_search = 0, residual_channels = 0, static_scales = 0>"
        f"(y{i - 1}, w, s, t, b, t)"
        for i in (1, 2)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "trt_nvfp4": 1]> two (float16[3, 32] y0) => (float16[3, 32] y2)
        <int8[32, 16] w = {{{weight}}}, int8[128, 4] s = {{{scales}}}, float t = {{0.01}},
         float16[32] b = {{{", ".join(["0"] * 32)}}}> {{ {calls} }}"""
    )
    model.functions.append(OPS["NVFP4Linear"].function())
    onnx.save(model, tmp_path / "two.onnx")
    return tmp_path / "two.onnx"


def test_polygraphy_builds_with_the_plugins(library: Path, two_linears: Path, tmp_path: Path) -> None:
    """Polygraphy imports TensorRT after it has opened the library, and nothing else is set up."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")
    arguments = ["convert", two_linears, "--convert-to", "trt", "-o", tmp_path / "engine", "--strongly-typed"]
    arguments += ["--compute-capabilities", "12.0", "--onnx-flags", "ENABLE_PLUGIN_OVERRIDE", "--plugins", library]
    arguments += ["--profiling-verbosity", "detailed", "-vvv"]
    said = run(_POLYGRAPHY, *arguments, POLYGRAPHY_USE_TENSORRT_RTX="1", LD_LIBRARY_PATH="")
    layers = [line for line in said.splitlines() if "LayerType: custom_layer" in line]
    assert [name for name in ("linear1", "linear2") for line in layers if name in line] == ["linear1", "linear2"]
