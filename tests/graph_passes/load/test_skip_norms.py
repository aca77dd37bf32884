"""SkipLayerNormalization of ONNX Runtime becomes operators of ONNX that compute the same."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_models.graphs import parsed, run
from trt_nvfp4.graph_passes.load.source import ModelError, load

HEADER = '<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]> g (float[batch, sequence, 32] x)'
CASES = {
    "all inputs, and the sum": """ => (float[batch, sequence, 32] y, float[batch, sequence, 32] z) {
        n, , , sum = com.microsoft.SkipLayerNormalization<epsilon = 0.01>(x, d, weight, shift, bias)
        y = Relu(n) z = Neg(sum) }""",
    "no shift": """ => (float[batch, sequence, 32] y) {
        y = com.microsoft.SkipLayerNormalization(x, d, weight) }""",
    "a bias without a shift": """ => (float[batch, sequence, 32] y) {
        y = com.microsoft.SkipLayerNormalization<epsilon = 0.00001>(x, d, weight, , bias) }""",
}


def saved(text: str, path: Path, generator: np.random.Generator) -> onnx.ModelProto:
    model = parsed(HEADER + text, {"weight": (32,), "shift": (32,), "bias": (32,), "d": (1, 5, 32)}, generator)
    onnx.save(model, path)
    return model


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_equal_to_onnxruntimes(text: str, tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = saved(text, tmp_path / "model.onnx", generator)
    source = load(tmp_path / "model.onnx")
    assert {node.domain for node in source.graph} == {""}
    x = generator.standard_normal((2, 5, 32)).astype(np.float32)
    for found, expected in zip(run(ir.to_proto(source.ir_model), x), run(model, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_one_whose_mean_is_read_is_refused(tmp_path: Path, seed: int) -> None:
    text = """ => (float[batch, sequence, 32] y, float[batch, sequence, 1] mean) {
        y, mean = com.microsoft.SkipLayerNormalization(x, d, weight) }"""
    saved(text, tmp_path / "model.onnx", np.random.default_rng(seed))
    with pytest.raises(ModelError, match="SkipLayerNormalization"):
        load(tmp_path / "model.onnx")
