"""An activation is taken for a served one only where the two agree over the whole range of their inputs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch.nn import functional as F  # noqa: N812 (its customary name)

from onnx_models import moe_spellings, zoo
from onnx_models.graphs import Graph, assert_same, quantized_twin, run, spec
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, quantize_together
from onnx_models.passes import found_mlps, plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.planning.kinds.registry import DEFAULT_KINDS

Load = Callable[[onnx.ModelProto], SourceModel]
DTYPES = ("float32", "float16", "bfloat16")

# How `h` is computed from `g` (and `u`), (op, inputs, output) each; `silu` is silu(g), `low` is -limit.
SILU = (("Sigmoid", "g", "s"), ("Mul", "g s", "silu"))
SILU_CLAMPED = [
    *(("Min", "g limit", "c"), ("Sigmoid", "c", "s"), ("Mul", "c s", "silu")),
    *(("Clip", "u low limit", "d"), ("Mul", "silu d", "h")),
]
CLAMPED_PLAIN = {
    "relu": [("Clip", "g zero limit", "h")],
    "relu2": [("Relu", "g", "r"), ("Mul", "r r", "q"), ("Min", "q limit", "h")],
    "silu": [*SILU, ("Clip", "silu  limit", "h")],
    "before silu": [("Min", "g limit", "c"), ("Sigmoid", "c", "s"), ("Mul", "c s", "h")],
}
CLAMPED_GATES = {
    "silu": [*SILU, ("Min", "silu limit", "c"), ("Mul", "c u", "h")],
    "up": [*SILU, ("Clip", "u low limit", "c"), ("Mul", "silu c", "h")],
    "gate and half of up": [*SILU_CLAMPED[:-2], ("Min", "u limit", "d"), ("Mul", "silu d", "h")],
    "product": [*SILU, ("Mul", "silu u", "p"), ("Clip", "p low limit", "h")],
    "bilinear": [("Mul", "g u", "p"), ("Max", "p low", "h")],
    "swiglu_clamped by two limits": [
        *(("Min", "g twice", "c"), ("Mul", "c alpha", "b"), ("Sigmoid", "b", "s"), ("Mul", "c s", "a")),
        *(("Clip", "u low limit", "d"), ("Add", "d one", "p"), ("Mul", "a p", "h")),
    ],
}
SWIGLU_CLAMPED = [
    *(("Min", "g limit", "c"), ("Mul", "c alpha", "b"), ("Sigmoid", "b", "s"), ("Mul", "c s", "a")),
    *(("Clip", "u low limit", "d"), ("Add", "d one", "p"), ("Mul", "a p", "h")),
]


def mlp(
    body: list[tuple[str, str, str]], gated: bool, limit: float, alpha: float, dtype: str, seed: int
) -> tuple[onnx.ModelProto, Graph]:
    """x -> linears g (and u) -> body -> linear -> y."""
    graph = Graph(spec(dtype=dtype, seed=seed))
    graph.linear("x", "gate", 32, 48, "g")
    if gated:
        graph.linear("x", "up", 32, 48, "u")
        graph.groups = [[*graph.groups[0], *graph.groups[1]]]
    numbers = {"zero": 0.0, "one": 1.0, "alpha": alpha, "limit": limit, "twice": 2 * limit, "low": -limit}
    weight_type = graph.weights["gate"].dtype
    for op_type, inputs, output in body:
        names = inputs.split(" ")
        graph.op(op_type, names, output)
        graph.weights |= {name: np.array(numbers[name], weight_type) for name in names if name in numbers}
    graph.linear("h", "down", 48, 16, "y")
    model = graph.model(["y"])
    onnx.checker.check_model(model)
    return model, graph


def limits(seed: int) -> list[float]:
    """Two limits, from 0.5 to 10 and on to 1000."""
    generator = np.random.default_rng(seed)
    return [float(np.exp(generator.uniform(*np.log(bounds)))) for bounds in ((0.5, 10), (10, 1000))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("body", "gated"),
    [(body, False) for body in CLAMPED_PLAIN.values()] + [(body, True) for body in CLAMPED_GATES.values()],
    ids=[f"plain {name}" for name in CLAMPED_PLAIN] + [f"gated {name}" for name in CLAMPED_GATES],
)
def test_a_clamp_that_no_op_has(
    body: list[tuple[str, str, str]], gated: bool, dtype: str, loaded: Load, seed: int
) -> None:
    """Kept with the reason; the rewritten model computes the clamp."""
    for limit in limits(seed):
        model, _ = mlp(body, gated, limit, 1.702, dtype, seed)
        source = loaded(model)
        plan = plan_all(source, kinds=DEFAULT_KINDS)
        (entry,) = [entry for entry in plan.subgraphs if entry.kind != "linear"]
        assert (entry.kind, entry.decision) == ("gated_mlp" if gated else "mlp", "keep")
        assert "its activation (" in entry.reason
        if dtype != "float32":
            continue  # ONNX Runtime has no bfloat16, and float16 overflows here
        x = (np.random.default_rng(seed).standard_normal((2, 3, 32)) * 4 * limit).astype(np.float32)
        (expected,) = run(model, x)
        (unclamped,) = run(mlp(body, gated, 1e30, 1.702, dtype, seed)[0], x)
        assert not np.allclose(expected, unclamped, rtol=0.1)
        (found,) = run(rewritten(source, plan).path, x)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["swiglu_clamped", "silu_clamped"])
def test_clamped_gate_of_any_limit(name: str, dtype: str, loaded: Load, seed: int) -> None:
    """The ops that have a clamp take its constants from the model."""
    for limit in (*limits(seed), 10.0, 16.0, 20.0):
        body = SWIGLU_CLAMPED if name == "swiglu_clamped" else SILU_CLAMPED
        model, graph = mlp(body, True, limit, 1.702, dtype, seed)
        source = loaded(model)
        (subgraph,) = found_mlps(source)
        assert (subgraph.activation, subgraph.unsupported) == (name, None)
        block = subgraph.blocks[0].mlp
        assert name != "swiglu_clamped" or block.alpha == float(graph.weights["alpha"])
        assert block.limit == float(graph.weights["limit"])
        if dtype != "float32":
            continue
        x = (np.random.default_rng(seed).standard_normal((2, 3, 32)) * 4 * limit).astype(np.float32)
        assert_same(rewritten(source).path, quantized_twin(graph, model), x)


def test_silu_clamped_behind_it(loaded: Load, seed: int) -> None:
    """As Step-3.7 has it: from a limit of 10 on the same within 1e-4, below another function."""
    body = [*SILU, ("Min", "silu limit", "c"), ("Clip", "u low limit", "d"), ("Mul", "c d", "h")]
    for limit in (0.5, 4.0, 8.0, 10.0, 16.0, 200.0):
        source = loaded(mlp(body, True, limit, 1.702, "float32", seed)[0])
        (subgraph,) = found_mlps(source)
        assert (subgraph.activation == "silu_clamped") == (subgraph.unsupported is None) == (limit >= 10)


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [("deepseek_v4", "DeepseekV4MLP", ()), ("glm5_next", "Glm5NextTextMLP", ()), ("step3p7", "Step3p7MLP", (0,))],
)
def test_clamped_mlps_of_transformers(
    module: str, name: str, arguments: tuple[int, ...], tmp_path: Path, seed: int
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    limits = {"swiglu_limit": 10.0, "swiglu_limits_shared": [16.0]}
    config = SimpleNamespace(**sizes, **limits, hidden_act="silu", mlp_bias=False)
    torch.manual_seed(seed)
    mlp = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)(config, *arguments)
    quantize_together(mlp.gate_proj.weight, mlp.up_proj.weight)
    quantize_together(mlp.down_proj.weight)
    x = 100 * torch.randn(2, 3, 32)
    zoo.export(mlp, x, tmp_path / "mlp.onnx", "torchscript")
    source = load(tmp_path / "mlp.onnx")
    (subgraph,) = found_mlps(source)
    assert (subgraph.activation, subgraph.unsupported) == ("silu_clamped", None)
    (found,) = run(rewritten(source).path, x.numpy())
    expected = mlp(x).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bound_at_the_end_of_the_type_is_none(dtype: str, loaded: Load, seed: int) -> None:
    largest = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}[dtype]
    for name in ("relu", "relu2"):
        model, _ = mlp(CLAMPED_PLAIN[name], False, largest, 1.702, dtype, seed)
        assert [(m.activation, m.unsupported) for m in found_mlps(loaded(model))] == [(name, None)]


@pytest.mark.parametrize("to", [TensorProto.INT32, TensorProto.FLOAT8E4M3FN])
def test_a_cast_that_rounds(to: int, loaded: Load, seed: int) -> None:
    graph = Graph(spec(seed=seed))
    graph.op("Relu", [graph.linear("x", "up", 32, 48, "u")], "r")
    graph.op("Cast", [graph.op("Cast", ["r"], "rounded", to=to)], "h", to=TensorProto.FLOAT)
    graph.linear("h", "down", 48, 16, "y")
    assert found_mlps(loaded(graph.model(["y"]))) == []


@pytest.mark.parametrize("constant", [False, True], ids=["input", "constant"])
def test_a_dropout_that_drops(constant: bool, loaded: Load, seed: int) -> None:
    graph = Graph(spec(seed=seed))
    graph.weights |= {"ratio": np.float32(0.5).reshape(())} | ({"training": np.array(True)} if constant else {})
    graph.op("Relu", [graph.linear("x", "up", 32, 48, "u")], "r")
    graph.linear(graph.op("Dropout", ["r", "ratio", "training"], "h"), "down", 48, 16, "y")
    model = graph.model(["y"])
    if not constant:
        model.graph.input.append(onnx.helper.make_tensor_value_info("training", TensorProto.BOOL, []))
    assert found_mlps(loaded(model)) == []


def test_the_mask_of_a_dropout(loaded: Load, seed: int) -> None:
    """It is no value that an activation has."""
    graph = Graph(spec(seed=seed))
    graph.weights["zero"] = np.float32(0).reshape(())
    graph.linear("x", "up", 32, 48, "u")
    graph.nodes.append(onnx.helper.make_node("Dropout", ["u"], ["dropped", "mask"], "dropout"))
    graph.op("Relu", [graph.op("Where", ["mask", "u", "zero"], "masked")], "h")
    graph.linear("h", "down", 48, 16, "y")
    assert found_mlps(loaded(graph.model(["y"]))) == []


def test_selu_of_other_constants(loaded: Load, seed: int) -> None:
    """Only with the constants of its paper would this be ReLU."""
    graph = Graph(spec(seed=seed))
    graph.weights["inverse"] = np.float32(1 / 1.0507010).reshape(())
    graph.op("Relu", [graph.linear("x", "up", 32, 48, "u")], "r")
    graph.op("Mul", [graph.op("Selu", ["r"], "s", gamma=2.0), "inverse"], "h")
    graph.linear("h", "down", 48, 16, "y")
    (refused,) = found_mlps(loaded(graph.model(["y"])))
    assert "its activation (Relu, Selu, Mul)" in refused.unsupported.text


@pytest.mark.parametrize("dispatch", ["loop", "mask"])
def test_clamped_experts(dispatch: str, tmp_path: Path, seed: int) -> None:
    """One expert with a clamp keeps the block, and the rewritten model computes the clamp."""
    for limit in limits(seed):
        model = Moe(MoeSpec(dispatch), seed)
        clamped = model.experts[seed % len(model.experts)]
        clamped.activation = lambda g, limit=limit: F.silu(g).clamp(max=limit)
        path = tmp_path / "model.onnx"
        moe_spellings.export(model, path, seed)
        source = load(path)
        moe, *_ = plan_all(source, kinds=("moe", "gated_mlp", "mlp")).subgraphs
        assert (moe.kind, moe.decision) == ("moe", "keep")
        assert "its activation (" in moe.reason
        plan = plan_all(source, kinds=("moe",))
        x = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 8 * limit
        (found,) = run(rewritten(source, plan).path, x.numpy())
        with torch.no_grad():
            expected = model(x)
            clamped.activation = F.silu
            assert not torch.allclose(model(x), expected, rtol=0.1)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4 * expected.abs().max().item())
