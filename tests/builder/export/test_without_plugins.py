"""Rewritten models for tools without the plugin library, and through tools that simplify models."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

surgeon = pytest.importorskip("trt_nvfp4.surgeon", exc_type=ImportError)

import onnx_graphsurgeon as gs  # noqa: E402

import trt_nvfp4  # noqa: E402

K, N = 64, 96


@pytest.fixture
def model(tmp_path: Path, seed: int) -> Path:
    """Two plugin nodes of one op, as MiniLM's MLPs become them, and their functions."""
    rng = np.random.default_rng(seed)
    x = gs.Variable("x", np.float16, ["tokens", K])
    graph, y = gs.Graph(inputs=[x], opset=21, ir_version=10), x
    for name in ("first", "second"):
        up, down = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((N, K), (K, N)))
        y = graph.nvfp4_persistent_mlp(y, name=name, up=up, down=down, activation="gelu", norm=0, residual=0)
    graph.outputs = [y]
    surgeon.save(graph, tmp_path / "plugins.onnx")
    return tmp_path / "plugins.onnx"


@pytest.fixture
def x(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).standard_normal((5, K)).astype(np.float16)


def run(model: Path, x: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])


def test_standard_operators_compute_the_same(model: Path, x: np.ndarray, tmp_path: Path) -> None:
    inlined = trt_nvfp4.inline_plugins(model, tmp_path / "standard.onnx")
    proto = onnx.load(inlined)
    assert {node.domain for node in proto.graph.node} == {""}
    assert not proto.functions
    names = [node.name for node in proto.graph.node]
    assert len(set(names)) == len(names)
    np.testing.assert_array_equal(run(inlined, x), run(model, x))


@pytest.mark.slow
def test_polygraphy_builds_it_without_the_library(model: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")
    inlined = trt_nvfp4.inline_plugins(model, tmp_path / "standard.onnx")
    program = "import sys; from polygraphy.tools import main; sys.exit(main())"
    options = ["--convert-to", "trt", "-o", tmp_path / "engine", "--strongly-typed", "--compute-capabilities", "12.0"]
    command = [sys.executable, "-c", program, "convert", inlined, *options]
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (tmp_path / "engine").stat().st_size > 0


@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_tools_that_simplify_models(tool: str, model: Path, x: np.ndarray, tmp_path: Path) -> None:
    """Plugin nodes stay, and so do outputs; surgeon mends the functions that onnxslim breaks."""
    module, simpler = pytest.importorskip(tool), tmp_path / "simpler.onnx"
    if tool == "onnxslim":
        module.slim(str(model), str(simpler))
    else:
        simplified, valid = module.simplify(onnx.load(model))
        assert valid
        onnx.save(simplified, simpler)
    if tool == "onnxslim":
        surgeon.save(surgeon.to_gs(simpler), simpler)
    nodes = onnx.load(simpler).graph.node
    assert [(node.op_type, node.name) for node in nodes] == [
        ("NVFP4PersistentMLP", "first"),
        ("NVFP4PersistentMLP", "second"),
    ]
    np.testing.assert_array_equal(run(simpler, x), run(model, x))
