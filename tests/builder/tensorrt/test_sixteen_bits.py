"""Operators that TensorRT takes in float32 and not in 16 bits stay float32: engines of such networks are built."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from command_lines import invoked
from onnx import numpy_helper, parser

from trt_nvfp4.builder.cli.build_engine import app
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")

NO_SIXTEEN_BITS = ("Celu",)
NO_BFLOAT16 = ("ConvTranspose", "GRU", "HardSwish", "LpNormalization", "LpPool", "Mish", "Shrink")
MODEL = """<ir_version: 10, opset_import: ["": 22]>
    g (float[1, 4, 8, 8] x, float[3, 1, 8] steps) => (float[16, 1, 64] y, float[3, 1, 1, 16] z)
    <int64[3] rows = {16, 1, 16}> {
        a = Conv(x, kernel)
        b = HardSwish(a)
        c = Mish(b)
        d = Shrink(c)
        e = Celu(d)
        f = LpNormalization(e)
        i = LpPool<kernel_shape=[2, 2], strides=[2, 2]>(f)
        j = ConvTranspose<strides=[2, 2]>(i, transposed, bias)
        k = LpPool<kernel_shape=[2, 2], strides=[2, 2]>(j)
        l = Reshape(k, rows)
        q = MatMul(l, up)
        s = Relu(q)
        y = MatMul(s, down)
        z = GRU<hidden_size=16>(steps, w, r)
    }"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, and an MLP."""
    model, rng = parser.parse_model(MODEL), np.random.default_rng(0)
    shapes = {
        "kernel": (8, 4, 1, 1),
        "transposed": (8, 16, 2, 2),
        "bias": (16,),
        "w": (1, 48, 8),
        "r": (1, 48, 16),
        "up": (16, 64),
        "down": (64, 64),
    }
    weights = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.checker.check_model(model, full_check=True)
    path = tmp_path_factory.mktemp("network") / "m.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("kind", "expected"), [("bf16", {*NO_SIXTEEN_BITS, *NO_BFLOAT16}), ("fp16", {*NO_SIXTEEN_BITS})]
)
def test_they_stay_float32(network: Path, kind: str, expected: set[str]) -> None:
    model = load(network)
    ops = {node.name: node.op_type for node in model.graph}
    reasons = choose(model, kind).float32
    found = {ops[name]: reason for reason, names in reasons.items() for name in names if reason.startswith("TensorRT")}
    assert found == {op: f"TensorRT has no {op} in {'bfloat16' if kind == 'bf16' else 'float16'}" for op in expected}


@pytest.mark.parametrize("activations", ["bf16", "fp16"])
def test_engines_are_built(network: Path, tmp_path: Path, activations: str) -> None:
    options = ["-o", str(tmp_path / "o.engine"), "--target", "rtx-blackwell", "--precision", "fp8"]
    invoked(app, [network, *options, "--activations", activations])
