"""Ifs on constants become their branch; branches that TensorRT does not take are refused."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.graph_passes.load.source import ModelError, load

_SIZES = "sizes = Shape(x)  d = Gather(sizes, {axis})  c = Equal(d, eight)"
_BRANCHES = """<then_branch = then () => (float[n, m] t) { a = Relu(first)  t = Mul(a, weight) },
                else_branch = other () => (float[n, m] t) { t = Neg(first) }>"""
_RANKS = """<then_branch = then () => (float[n, m] t) { t = Relu(first) },
             else_branch = other () => (float[n, m, k] u) { u = Unsqueeze(first, zero) }>"""
_INNER = f"""<then_branch = then () => (float[n, m] v) {{ v = If (yes) {_BRANCHES} }},
              else_branch = other () => (float[n, m] u) {{ u = Abs(first) }}>"""


def _saved(path: Path, body: str) -> Path:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[batch, 8] x, bool asked) => (float[n, m] y) '
        f"{{ first = Abs(x)  {body} }}"
    )
    constants = {"zero": np.array([0]), "one": np.array(1), "nil": np.array(0), "eight": np.array(8)}
    constants |= {"yes": np.array(True), "no": np.array([False]), "weight": np.arange(8, dtype=np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"b = If (yes) {_BRANCHES}  y = Sqrt(b)", ["Abs", "Relu", "Mul", "Sqrt"]),
        (f"c = Not(no)  y = If (c) {_BRANCHES}", ["Abs", "Relu", "Mul", "Identity"]),
        (f"b = If (no) {_BRANCHES}  d = If (yes) {_BRANCHES}  y = Add(b, d)", ["Abs", "Neg", "Relu", "Mul", "Add"]),
        (f"{_SIZES.format(axis='one')}  y = If (c) {_RANKS}", ["Abs", "Relu", "Identity"]),
        (f"b = If (yes) {_INNER}  y = Sqrt(b)", ["Abs", "Relu", "Mul", "Sqrt"]),
        (f"b = If (asked) {_BRANCHES}  y = Sqrt(b)", ["Abs", "If", "Sqrt"]),
    ],
    ids=["a constant", "an output", "two of the same names", "a fixed size", "one in another", "an input"],
)
def test_conditions(body: str, expected: list[str], seed: int, tmp_path: Path) -> None:
    path = _saved(tmp_path / "m.onnx", body)
    source = load(path)
    assert [node.op_type for node in source.graph] == expected
    loaded = ir.to_proto(source.ir_model)
    onnx.checker.check_model(loaded)
    feeds = {"x": np.random.default_rng(seed).standard_normal((3, 8), np.float32), "asked": np.array(True)}
    results = [
        onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for content in (path.read_bytes(), loaded.SerializeToString())
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("condition", ["asked", "c"])
def test_branches_of_different_ranks(condition: str, tmp_path: Path) -> None:
    path = _saved(tmp_path / "m.onnx", f"{_SIZES.format(axis='nil')}  b = If ({condition}) {_RANKS}  y = Abs(b)")
    with pytest.raises(ModelError, match=r"m\.onnx: node '.*' \(If\): 'b' has 2 dimensions in one branch and 3 in"):
        load(path)
