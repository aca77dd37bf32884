"""Weights [1, K, N] are those [K, N]."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_models.graphs import draw, mlp_model, parsed, quantized_twin, run, spec
from onnx_models.passes import found_mlps, plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs

Load = Callable[[onnx.ModelProto], SourceModel]


@pytest.mark.parametrize("precision", ["nvfp4", "fp8"])
def test_mlp(precision: str, loaded: Load, seed: int) -> None:
    """Found, and rewritten to what is computed with weights [K, N]; the original's values are ONNX Runtime's."""
    model, graph = mlp_model(spec(gated=True, seed=seed))
    x = np.random.default_rng(seed).standard_normal((2, 3, graph.spec.k)).astype(np.float32)
    source = loaded(model)
    (expected,) = run(rewritten(source, plan_all(source, precision)).path, x)
    (exact,) = run(model, x)
    twin = quantized_twin(graph, model)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[None], tensor.name))
    np.testing.assert_allclose(run(model, x)[0], exact, rtol=1e-5, atol=1e-5)
    source = loaded(model)
    (mlp,) = found_mlps(source)
    assert mlp.unsupported is None
    (found,) = run(rewritten(source, plan_all(source, precision)).path, x)
    np.testing.assert_array_equal(found, expected)
    if precision == "nvfp4":
        np.testing.assert_allclose(found, run(twin, x)[0], rtol=2e-5, atol=2e-5)


LEFT = {
    "input of fewer dimensions": "float[8, 16] x) => (float[1, 8, 16] y) { y = MatMul(x, w) }",
    "input of unknown rank": "float[1, 8, 16] x, int64[?] s) => (y) { r = Reshape(x, s)  y = MatMul(r, w) }",
    "weight on the left": "float[1, 16, 8] x) => (float[1, 16, 8] y) { y = MatMul(w, x) }",
    "read by another operator": "float[1, 16, 16] x) => (float[1, 16, 16] y) { a = MatMul(x, w)  y = Add(a, w) }",
}


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT.keys())
def test_products_that_need_the_dimension(body: str, loaded: Load, seed: int) -> None:
    source = loaded(parsed(f"g ({body}", {"w": (1, 16, 16)}, seed))
    assert source.tensor("w").shape == (1, 16, 16)
    assert find_subgraphs(source) == []


def test_external_data(tmp_path: Path, seed: int) -> None:
    """Its values are those in the file."""
    weight = draw(seed, 1, 16, 16)
    model = parsed("g (float[1, 8, 16] x) => (float[1, 8, 16] y) { y = MatMul(x, w) }", {"w": weight})
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    source = load(path)
    np.testing.assert_array_equal(source.tensor("w"), weight[0])
    assert [subgraph.kind for subgraph in find_subgraphs(source)] == ["linear"]
