"""Small models for the builder's tests."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser


def _save_gated_mlps(
    path: Path,
    rng: np.random.Generator,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int = 128,
    elem_type: int = TensorProto.FLOAT16,
    external: bool = True,
) -> Path:
    """Residual SiLU-gated MLPs on x [tokens, hidden], a non-linear step after each so that blocks stay apart."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    nodes, weights, x = [], [], "x"
    for layer in range(layers):
        shapes = {"gate": (hidden, intermediate), "up": (hidden, intermediate), "down": (intermediate, hidden)}
        for name, shape in shapes.items():
            values = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype)
            weights.append(
                onnx.TensorProto(name=f"{name}{layer}", data_type=elem_type, dims=shape, raw_data=values.tobytes())
            )
        y = f"y{layer}"
        nodes += [
            helper.make_node("MatMul", [x, f"gate{layer}"], [f"g{layer}"], name=f"gate_proj{layer}"),
            helper.make_node("Sigmoid", [f"g{layer}"], [f"s{layer}"], name=f"sigmoid{layer}"),
            helper.make_node("Mul", [f"g{layer}", f"s{layer}"], [f"a{layer}"], name=f"silu{layer}"),
            helper.make_node("MatMul", [x, f"up{layer}"], [f"u{layer}"], name=f"up_proj{layer}"),
            helper.make_node("Mul", [f"a{layer}", f"u{layer}"], [f"h{layer}"], name=f"product{layer}"),
            helper.make_node("MatMul", [f"h{layer}", f"down{layer}"], [f"d{layer}"], name=f"down_proj{layer}"),
            helper.make_node("Add", [x, f"d{layer}"], [f"r{layer}"], name=f"residual{layer}"),
            helper.make_node("Tanh", [f"r{layer}"], [y], name=f"tanh{layer}"),
        ]
        x = y
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("x", elem_type, ["tokens", hidden])],
        [helper.make_tensor_value_info(x, elem_type, ["tokens", hidden])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location=path.name + ".data", size_threshold=0)
    return path


@pytest.fixture
def save_gated_mlps(rng: np.random.Generator) -> Callable[..., Path]:
    """Writes such a model: (path, layers=, hidden=, intermediate=, elem_type=, external=) -> path."""
    return partial(_save_gated_mlps, rng=rng)


@pytest.fixture
def gated_mlps(tmp_path: Path, save_gated_mlps: Callable[..., Path]) -> Path:
    return save_gated_mlps(tmp_path / "model.onnx")


@pytest.fixture
def fp8_and_bf16(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A product of FP8 operands (node mm8), then one of bfloat16 operands (node mm16)."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        mixed (float16[tokens, 64] x) => (float16[tokens, 64] y) {
            [q] xq = QuantizeLinear(x, s, z)
            [dq] xd = DequantizeLinear(xq, s, z)
            [wdq] wd = DequantizeLinear(w8, s, z)
            [mm8] a = MatMul(xd, wd)
            [narrow] b = Cast<to = 16>(a)
            [mm16] c = MatMul(b, w16)
            [wide] y = Cast<to = 10>(c)
        }""")
    w8 = np.clip(rng.standard_normal((64, 64)), -4, 4).astype(ml_dtypes.float8_e4m3fn)
    w16 = rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    scale = np.float16(0.01)
    model.graph.initializer.extend(
        [
            helper.make_tensor("w8", TensorProto.FLOAT8E4M3FN, w8.shape, w8.tobytes(), raw=True),
            helper.make_tensor("w16", TensorProto.BFLOAT16, w16.shape, w16.tobytes(), raw=True),
            helper.make_tensor("s", TensorProto.FLOAT16, [], scale.tobytes(), raw=True),
            helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True),
        ]
    )
    path = tmp_path / "mixed.onnx"
    onnx.save(model, path)
    return path
