"""Every spelling of an MLP is found, named rightly and rewritten to what its quantized twin computes."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_models.graphs import (
    ACTIVATION_SPELLINGS,
    FUSED,
    LINEARS,
    OPSET_20,
    OPSET_24,
    Graph,
    Spec,
    mlp_model,
    quantized_twin,
    run,
    spec,
)
from onnx_models.passes import found_mlps, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel

Load = Callable[[onnx.ModelProto], SourceModel]


def check(case: Spec, load: Load, seed: int) -> None:
    """Found as one MLP of the right kind and shape; rewritten, it computes what the quantized original computes."""
    model, graph = mlp_model(case)
    source = load(model)
    (mlp,) = found_mlps(source)
    assert mlp.unsupported is None
    assert (mlp.kind, mlp.activation, mlp.dtype) == ("gated_mlp" if case.gated else "mlp", case.activation, case.dtype)
    assert mlp.shapes == {
        "in_features": case.k,
        "intermediate_features": case.intermediate,
        "out_features": case.out,
        "layers": 1,
    }
    result = rewritten(source)
    written = onnx.load(result.path)
    assert [node.op_type for node in written.graph.node] == ["NVFP4GatedMLP" if case.gated else "NVFP4PersistentMLP"]
    assert result.realized == {mlp.name: [written.graph.node[0].name]} == {mlp.name: [mlp.name]}
    if case.dtype != "float32" or case.opset > 23:
        return  # ONNX Runtime has no bfloat16 and no opset 24; test_rewrite checks 16-bit weights
    rows = (5,) if case.linear.startswith("gemm") else (2, 3)
    x = np.random.default_rng(seed).standard_normal((*rows, case.k)).astype(np.float32)
    (expected,) = run(quantized_twin(graph, model), x)
    (found,) = run(result.path, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


SPELLINGS = [
    *((name, text, 17) for name, texts in ACTIVATION_SPELLINGS.items() for text in texts),
    *((name, text, 20) for name, texts in OPSET_20.items() for text in texts),
    *((name, text, 24) for name, texts in OPSET_24.items() for text in texts),
]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("activation", "spelling", "opset"), SPELLINGS)
def test_activation_spellings(activation: str, spelling: str, opset: int, gated: bool, loaded: Load, seed: int) -> None:
    check(spec(activation=activation, spelling=spelling, opset=opset, gated=gated, seed=seed), loaded, seed)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
def test_linear_spellings(linear: str, fused: str | None, biases: bool, loaded: Load, seed: int) -> None:
    check(spec(linear=linear, fused=fused, biases=biases, seed=seed), loaded, seed)


@pytest.mark.parametrize("opset", range(17, 25))
def test_opsets(opset: int, loaded: Load, seed: int) -> None:
    check(spec(opset=opset, fused="split", biases=True, seed=seed), loaded, seed)


def test_a_cast_for_each_projection(loaded: Load, seed: int) -> None:
    """Mixed precision may cast the input once for the gate and once for up: it is one input all the same."""
    graph = Graph(spec(dtype="float16", seed=seed))
    gate, up = (
        graph.linear(graph.op("Cast", ["wide"], f"{name}_x", to=TensorProto.FLOAT16), name, 32, 48, f"{name}_y")
        for name in ("gate", "up")
    )
    graph.linear(graph.op("Mul", [graph.activation(gate, "a"), up], "h"), "down", 48, 16, "y")
    graph.nodes.insert(0, helper.make_node("Cast", ["x"], ["wide"], name="widen", to=TensorProto.FLOAT))
    source = loaded(graph.model(["y"]))
    (mlp,) = found_mlps(source)
    assert (mlp.kind, mlp.unsupported) == ("gated_mlp", None)
    written = onnx.load(rewritten(source).path)
    assert [node.op_type for node in written.graph.node] == ["Cast", "Cast", "NVFP4GatedMLP"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_combination(data: st.DataObject, loaded: Load) -> None:
    activation = data.draw(st.sampled_from(sorted(ACTIVATION_SPELLINGS)))
    gated = data.draw(st.booleans())
    case = Spec(
        activation=activation,
        spelling=data.draw(st.sampled_from(ACTIVATION_SPELLINGS[activation])),
        linear=data.draw(st.sampled_from(LINEARS)),
        gated=gated,
        fused=data.draw(st.sampled_from(FUSED)) if gated else None,
        biases=data.draw(st.booleans()),
        swapped=data.draw(st.booleans()),
        constant_nodes=data.draw(st.booleans()),
        dropout=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        opset=data.draw(st.sampled_from([17, 18, 19, 21, 22, 23])),
        k=data.draw(st.sampled_from([16, 48, 144])),
        intermediate=data.draw(st.sampled_from([16, 80])),
        out=data.draw(st.sampled_from([1, 7, 16])),
        seed=data.draw(st.integers(0, 2**31)),
    )
    check(case, loaded, case.seed)
