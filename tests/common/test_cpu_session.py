"""Sessions compute what ONNX Runtime computes without any optimizer."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from onnx_models.position_table import position_table
from trt_nvfp4.common.cpu_session import TooOldError, cpu_session


@pytest.mark.parametrize("opset", [13, 17, 19])
@pytest.mark.parametrize("dynamic_sizes", [True, False])
@pytest.mark.parametrize("mode", ["cubic", "linear", "nearest"])
def test_resized_position_tables(mode: str, dynamic_sizes: bool, opset: int, tmp_path: Path) -> None:
    """Without constant folding, an optimizer of ONNX Runtime's moves the Transposes, and its Resize takes none such."""
    model = position_table(mode, dynamic_sizes, opset)
    x = np.random.default_rng(1).normal(size=(2, 49, 8)).astype(np.float32)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), plain).run(None, {"x": x})
    (found,) = cpu_session(model, tmp_path).run(None, {"x": x})
    np.testing.assert_array_equal(found, expected)


def test_nodes_of_one_name(tmp_path: Path) -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x, bool c) => (float[2] y) {
            [same] a = Relu(x)
            [same] b = Neg(a)
            [same_2] d = Abs(b)
            [same] e = If (c) <then_branch = yes () => (float[2] f) { [n] g = Exp(d)  [n] f = Neg(g) },
                               else_branch = no () => (float[2] h) { [n] h = Neg(d) }>
            y = Neg(e)
        }""")
    x = np.array([1, -2], np.float32)
    (y,) = cpu_session(model, tmp_path).run(None, {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(y, np.exp([1, 0]), rtol=1e-6)
    assert len({node.name for node in model.graph.node}) == 5


@pytest.mark.parametrize(("scatter", "is_refused"), [("TensorScatter", True), ("a.TensorScatter", False)])
def test_a_version_without_caches(
    scatter: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bodies, too; an operator of the same name in another domain is not ONNX's."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 24, "a": 1]>
        g (float[1, 1, 4, 2] past, float[1, 1, 1, 2] new, int64[1] at, bool c) => (float[1, 1, 4, 2] y) {{
            y = If (c) <then_branch = yes () => (float[1, 1, 4, 2] f) {{ f = {scatter} (past, new, at) }},
                        else_branch = no () => (float[1, 1, 4, 2] h) {{ h = Neg(past) }}>
        }}
        <domain: "a", opset_import: ["": 24]> TensorScatter (past, new, at) => (out) {{ out = Add(past, new) }}""")
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    if is_refused:
        with pytest.raises(TooOldError, match=r"ONNX Runtime 1\.23\.2 is too old"):
            cpu_session(model, tmp_path)
    else:
        cpu_session(model, tmp_path)
