"""Shape arithmetic that becomes constants, or is read off other tensors, leaves a model's outputs as they were."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_models.graphs import run
from trt_nvfp4.graph_passes.load.source import load

# Statements that compute y from x [2, 3].
ARITHMETIC = {
    "unsqueeze to a matrix": "two = Constant<value = int64 {1}>()  d = Gather(s, two)"
    "  axes = Constant<value = int64[2] {0, 1}>()  y = Unsqueeze(d, axes)",
    "every second": "zero = Constant<value = int64[1] {0}>()  many = Constant<value = int64[1] {9}>()"
    "  two = Constant<value = int64[1] {2}>()  y = Slice(s, zero, many, , two)",
    "beyond int32": "a = Constant<value = int64[1] {8589934597}>()  c = Cast<to = 6>(a)  y = Cast<to = 7>(c)",
    "beyond uint8": "a = Constant<value = uint8[1] {250}>()  y = Add(a, a)",
    "beyond int64": "a = Constant<value = int64[1] {9223372036854775807}>()  b = Mul(a, a)  y = Add(b, s)",
    "negative quotient": "a = Constant<value = int64[1] {-7}>()  b = Constant<value = int64[1] {2}>()  y = Div(a, b)",
    "quotient beyond float64": "a = Constant<value = int64[1] {27021597764222979}>()"
    "  b = Constant<value = int64[1] {3}>()  y = Div(a, b)",
    "one dimension": "one = Constant<value = int64[1] {1}>()  g = Gather(s, one)  y = Mul(g, s)",
}


@pytest.mark.parametrize("body", ARITHMETIC.values(), ids=ARITHMETIC.keys())
@pytest.mark.parametrize("columns", ["3", "n"], ids=["fixed", "dynamic"])
def test_outputs(body: str, columns: str, tmp_path: Path, seed: int) -> None:
    kind = "uint8" if "uint8" in body else "int64"
    rank = "[1, 1]" if "Unsqueeze" in body else "[m]"
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[2, {columns}] x) => ({kind}{rank} z)
    {{ s = Shape(x)  {body}  z = Identity(y) }}"""
    model = onnx.parser.parse_model(text)
    onnx.save(model, tmp_path / "model.onnx")
    loaded = ir.to_proto(load(tmp_path / "model.onnx").ir_model)
    x = np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float32)
    (found,), (expected,) = run(loaded, x), run(model, x)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype
