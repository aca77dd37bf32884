"""Consecutive MLP blocks become one persistent op, whatever the spelling of their RMSNorm and residual."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_models.graphs import Graph, assert_same, parsed, quantized_twin, run, spec
from onnx_models.passes import found_mlps, plan_all, rewritten
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.rewrite import calibration_tensors

Load = Callable[[onnx.ModelProto], SourceModel]
K = 32

# Statements that compute `n` from `x` with weight `w` [K]; all agree with x / sqrt(mean(x^2) + 1e-5) * w.
_MEAN = "m = ReduceMean<keepdims = 1>(p, axes)  e = Add(m, eps)"
NORMS = {
    "div": f"p = Mul(x, x)  {_MEAN}  r = Sqrt(e)  d = Div(x, r)  n = Mul(d, w)",
    "rsqrt": f"p = Pow(x, two)  {_MEAN}  r = Sqrt(e)  i = Reciprocal(r)  d = Mul(x, i)  n = Mul(w, d)",
    "one over": f"p = Pow(x, two)  {_MEAN}  r = Sqrt(e)  i = Div(one, r)  d = Mul(i, x)  n = Mul(d, w)",
    "power": f"p = Mul(x, x)  {_MEAN}  i = Pow(e, half)  d = Mul(x, i)  n = Mul(d, w)",
    "casts": f"f = Cast<to = 1>(x)  p = Pow(f, two)  {_MEAN}  r = Sqrt(e)  i = Reciprocal(r)"
    "  d = Mul(f, i)  c = Cast<to = 1>(d)  n = Mul(w, c)",
    "gemma": f"p = Pow(x, two)  {_MEAN}  r = Sqrt(e)  i = Reciprocal(r)  d = Mul(x, i)"
    "  w1 = Add(wm, one)  n = Mul(d, w1)",
    "operator": "n = RMSNormalization<axis = -1, epsilon = 1e-5>(x, w)",
}


def stack(
    layers: int, norm: str | None, residual: bool, seed: int, gated: bool = True, taps: int | None = None
) -> tuple[onnx.ModelProto, Graph]:
    """`layers` blocks from x to y; `taps` is a block whose output is a graph output too."""
    graph = Graph(spec(k=K, intermediate=48, out=K, seed=seed, gated=gated, opset=23))
    numbers = {"axes": np.array([-1]), "eps": 1e-5, "two": 2.0, "one": 1.0, "half": -0.5}
    for name, number in numbers.items():
        graph.weights[name] = number if name == "axes" else np.float32(number).reshape(())
    current, outputs = "x", ["y"]
    for layer in range(layers):
        inner = current
        if norm is not None:
            inner = f"l{layer}_n"
            graph.weights[f"l{layer}_w"] = np.random.default_rng((seed, layer)).uniform(0.5, 2, K).astype(np.float32)
            graph.weights[f"l{layer}_wm"] = graph.weights[f"l{layer}_w"] - 1
            shape = f"float[b, s, {K}]"
            text = f'<ir_version: 11, opset_import: ["": 23]> g ({shape} x, float[{K}] w, float[{K}] wm) => ({shape} n)'
            names = {"x": current, "n": inner, "w": f"l{layer}_w", "wm": f"l{layer}_wm"} | {
                name: name for name in numbers
            }
            for node in onnx.parser.parse_model(f"{text} {{ {NORMS[norm]} }}").graph.node:
                node.input[:] = [names.setdefault(name, f"l{layer}_{name}") for name in node.input]
                node.output[:] = [names.setdefault(name, f"l{layer}_{name}") for name in node.output]
                node.name = f"n{len(graph.nodes)}"
                graph.nodes.append(node)
        end = "y" if layer == layers - 1 else f"l{layer}_y"
        graph.mlp(inner, f"l{layer}_mlp" if residual else end, prefix=f"l{layer}_")
        if residual:
            graph.op("Add", [current, f"l{layer}_mlp"] if layer % 2 else [f"l{layer}_mlp", current], end)
        if layer == taps:
            outputs.append(end)
        current = end
    model = graph.model(outputs)
    model.ir_version = 11
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model, graph


def agree(source: SourceModel, twin: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The rewritten model computes what its quantized twin does; returns the former."""
    path = rewritten(source).path
    x = np.random.default_rng(seed).standard_normal((2, 3, K)).astype(np.float32)
    assert_same(path, twin, x, 2e-5)
    return onnx.load(path)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_blocks_merge(norm: str | None, residual: bool, gated: bool, loaded: Load, seed: int) -> None:
    model, graph = stack(3, norm, residual, seed, gated)
    source = loaded(model)
    (found,) = found_mlps(source)
    assert found.shapes["layers"] == 3
    written = agree(source, quantized_twin(graph, model), seed)
    (node,) = written.graph.node
    assert node.op_type == "NVFP4PersistentMLP"
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (attributes["norm"], attributes["residual"], attributes["gated"]) == (norm is not None, residual, gated)
    weights = {t.name.split("/")[-1]: numpy_helper.to_array(t) for t in written.graph.initializer}["norm_weight"]
    expected = np.stack([graph.weights[f"l{i}_w"] for i in range(3)]) if norm else np.ones((3, K), np.float32)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("norm", "constant", "shape"),
    [
        *(("div", constant, shape) for constant, shape in (("w", (1, 1, 1, K)), ("eps", (1, 1, 1, 1)))),
        *(("operator", "w", shape) for shape in ((), (1,))),
    ],
)
def test_constants_that_make_another_norm(
    norm: str, constant: str, shape: tuple[int, ...], loaded: Load, seed: int
) -> None:
    """They add a dimension, or the op has no number for each feature."""
    model, graph = stack(2, norm, True, seed)
    for tensor in model.graph.initializer:
        if tensor.name.split("_")[-1] == constant:
            array = numpy_helper.to_array(tensor).reshape(-1)[: np.prod(shape, dtype=int)].reshape(shape)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [None] * max(3, len(shape))))
    source = loaded(model)
    assert [m.shapes["layers"] for m in found_mlps(source)] == [1, 1]
    agree(source, quantized_twin(graph, model), seed)


def test_a_norm_of_fewer_features(loaded: Load, seed: int) -> None:
    """Its weight makes K features of one; an op would read K."""
    model, _ = stack(2, "div", False, seed)
    model.graph.input[0].type.tensor_type.shape.dim[-1].dim_value = 1
    assert [m.shapes["layers"] for m in found_mlps(loaded(model))] == [1, 1]


def test_a_norm_of_reciprocal_roots(loaded: Load, seed: int) -> None:
    """What computes the norm's input looks like a part of the norm, and is not replaced with it."""
    model, graph = stack(2, "rsqrt", False, seed)
    for node in model.graph.node:
        node.input[:] = ["rooted" if name == "x" else name for name in node.input]
    roots = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Sqrt", ["e"], ["r"])]
    roots.append(helper.make_node("Reciprocal", ["r"], ["rooted"]))
    for index, node in enumerate(roots):
        model.graph.node.insert(index, node)
    for weight in ("l0_w", "l1_w"):  # without weights nothing but the norm reads its parts
        product = next(node for node in model.graph.node if weight in node.input)
        product.op_type = "Identity"
        product.input.remove(weight)
        model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == weight))
    source = loaded(model)
    assert [m.shapes["layers"] for m in found_mlps(source)] == [2]
    written = agree(source, quantized_twin(graph, model), seed)
    assert [node.op_type for node in written.graph.node] == ["Exp", "Sqrt", "Reciprocal", "NVFP4PersistentMLP"]


def test_one_scaled_feature(loaded: Load, seed: int) -> None:
    """A scale before an MLP is no norm's weight, though it has a number for every feature."""
    graph = Graph(spec(k=1, gated=False, seed=seed))
    graph.weights["half"] = np.float32(0.5).reshape(())
    graph.mlp(graph.op("Mul", ["x", "half"], "scaled"), "y")
    assert [m.unsupported for m in found_mlps(loaded(graph.model(["y"])))] == [None]


def test_a_single_block_leaves_norm_and_residual(loaded: Load, seed: int) -> None:
    model, graph = stack(1, "div", True, seed)
    written = agree(loaded(model), quantized_twin(graph, model), seed)
    ops = [node.op_type for node in written.graph.node]
    assert "NVFP4GatedMLP" in ops
    assert ops[-1] == "Add"


def test_a_tapped_block_ends_the_chain(loaded: Load, seed: int) -> None:
    """The output of block 1 is a graph output: blocks 0 and 1 merge, and so do 2 and 3."""
    model, graph = stack(4, "rsqrt", True, seed, taps=1)
    source = loaded(model)
    assert [m.shapes["layers"] for m in found_mlps(source)] == [2, 2]
    agree(source, quantized_twin(graph, model), seed)


def test_different_activations_do_not_merge(loaded: Load, seed: int) -> None:
    first, graph = stack(2, None, False, seed, gated=False)
    node = next(node for node in first.graph.node if node.op_type == "Sigmoid" and "l1_" in node.output[0])
    node.op_type = "Relu"  # relu(x) * x is squared ReLU
    source = loaded(first)
    assert [(m.activation, m.shapes["layers"]) for m in found_mlps(source)] == [("silu", 1), ("relu2", 1)]
    agree(source, quantized_twin(graph, first), seed)


def test_merged_blocks_in_fp8_and_16_bits(loaded: Load, seed: int) -> None:
    """The other decisions reach every layer of a merged stack, and leave norms and residuals in float32."""
    model, _ = stack(2, "div", True, seed)
    source = loaded(model)
    x = np.random.default_rng(seed).standard_normal((2, 3, K)).astype(np.float32)
    (expected,) = run(model, x)
    for decision, tolerance in (("fp8", 0.15), ("fp16", 0.01)):
        plan = plan_all(source)
        plan.subgraphs[0].decision = decision
        result = rewritten(source, plan)
        assert len(result.realized[plan.subgraphs[0].name]) == 6
        (found,) = run(result.path, x)
        assert not np.array_equal(found, expected)
        np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


def test_merged_blocks_in_mixed_precision_with_residual_channels(loaded: Load, seed: int) -> None:
    """Gate and up of every layer are linears, and look at the heavy channels of their own input twice."""
    model, _ = stack(2, "div", True, seed)
    source = loaded(model)
    x = np.random.default_rng(seed).standard_normal((4, 16, K)).astype(np.float32)
    (expected,) = run(model, x)
    errors = []
    for recipe in ("max", f"max+residual:{K}"):
        plan = plan_all(source, calibrated=True, recipe=recipe)
        plan.subgraphs[0].decision, plan.subgraphs[0].op = Decision.NVFP4_MIXED, "NVFP4Linear"
        statistics = collect(source.path, calibration_tensors(plan), [{"x": x}])
        result = rewritten(source, plan, statistics)
        nodes = [node for node in onnx.load(result.path).graph.node if node.domain == "trt_nvfp4"]
        counts = {node.name: a.i for node in nodes for a in node.attribute if a.name == "residual_channels"}
        wide = {name for name, count in counts.items() if count == K}
        assert wide == ({name for name in counts if "/up" in name} if "residual" in recipe else set())
        (found,) = run(result.path, x)
        errors.append(np.linalg.norm(found - expected))
    assert errors[1] < errors[0] < 0.4 * np.linalg.norm(expected)


def test_deep_graph(loaded: Load, seed: int) -> None:
    """Thousands of nodes, all connected through residuals, exhaust no stack."""
    model, _ = stack(300, "div", True, seed)
    (found,) = found_mlps(loaded(model))
    assert found.shapes["layers"] == 300


@pytest.mark.parametrize("bare", [False, True])
def test_reference_stack(bare: bool, tmp_path: Path) -> None:
    """The example that makes the reference stack, small: one persistent op, BF16 in external data throughout."""
    script = Path(__file__).parents[3] / "examples" / "make_mlp_stack.py"
    module_spec = importlib.util.spec_from_file_location("make_mlp_stack", script)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    path = tmp_path / "stack.onnx"
    module.make_mlp_stack(path, layers=4, hidden=64, intermediate=256, bare=bare)
    onnx.checker.check_model(path)
    source = load(path)
    (found,) = found_mlps(source)
    assert (found.activation, found.dtype, found.shapes["layers"]) == ("gelu_tanh", "bfloat16", 4)
    result = rewritten(source)
    onnx.checker.check_model(result.path)
    # 4.5 bits a weight instead of 16, and some for biases and padding of small matrices.
    assert 3 < result.weights_bytes_before / result.weights_bytes_after < 3.56


@pytest.mark.parametrize(("decision", "most"), [("bf16", 0.03), ("fp16", 0.003), ("fp8", 0.3)])
def test_layers_without_anything_between(decision: str, most: float, loaded: Load, seed: int) -> None:
    """The output of an MLP is the input of the next: other decisions take the layers one by one."""
    model, _ = stack(3, None, False, seed)
    source = loaded(model)
    plan = plan_all(source)
    (entry,) = plan.subgraphs
    assert entry.shapes["layers"] == 3
    entry.decision = decision
    x = np.random.default_rng(seed).standard_normal((2, 3, K)).astype(np.float32)
    (found,), (expected,) = run(widen(onnx.load(rewritten(source, plan).path)), x), run(model, x)
    # About a third of the most; exact agreement would mean that nothing was rounded.
    assert most / 50 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < most


RMS_NORM = "p{0} = Pow({1}, power)  m{0} = ReduceMean<keepdims = 1>(p{0}, axes)  e{0} = Add(m{0}, eps)"
RMS_NORM += "  r{0} = Sqrt(e{0})  q{0} = Div({1}, r{0})  n{0} = Mul(q{0}, w)"


@pytest.mark.parametrize(
    ("change", "power", "axis", "shape", "layers"),
    [
        (("", ""), 2.0, -1, (K,), [2]),
        (("", ""), 3.0, -1, (K,), [1, 1]),
        (("", ""), 2.0, 0, (K,), [1, 1]),
        (("", ""), 2.0, -1, (K, 1), [1, 1]),
        (("keepdims = 1", "keepdims = 0"), 2.0, -1, (K,), [1, 1]),
    ],
    ids=["norm", "mean cube", "other axis", "weight of rows", "mean of columns"],
)
def test_what_is_almost_a_norm(
    change: tuple[str, str], power: float, axis: int, shape: tuple[int, ...], layers: list[int], loaded: Load, seed: int
) -> None:
    """It stands between two MLPs, which merge over a norm alone. As many rows as channels, so that all shapes fit."""
    mlp = "a{0} = MatMul(n{0}, u{0})  b{0} = Relu(a{0})  y{0} = MatMul(b{0}, d{0})"
    body = (RMS_NORM + "  " + mlp).replace(*change) if change[0] else RMS_NORM + "  " + mlp
    text = f"""g (float[{K}, {K}] x) => (float[{K}, {K}] y1)
    <int64[1] axes = {{{axis}}}, float eps = {{1e-5}}, float power = {{{power}}}>
    {{ {body.format(0, "x")}  {body.format(1, "y0")} }}"""
    model = parsed(text, {"u0": (K, 48), "d0": (48, K), "u1": (K, 48), "d1": (48, K), "w": shape}, seed)
    assert [found.shapes["layers"] for found in found_mlps(loaded(model))] == layers


FLATTENING = {
    "the second": "a = MatMul(x, u0)  b = Relu(a)  c = MatMul(b, d0)"
    "  d = MatMul(c, u1)  e = Relu(d)  f = Reshape(e, rows)  y = Gemm(f, d1)",
    "both": "a = MatMul(x, u0)  b = Relu(a)  r = Reshape(b, rows)  c = Gemm(r, d0)"
    "  d = MatMul(c, u1)  e = Relu(d)  f = Reshape(e, rows)  y = Gemm(f, d1)",
    "a residual": "a = MatMul(x, u0)  b = Relu(a)  r = Reshape(b, rows)  c = Gemm(r, d0)  s = Add(x, c)"
    "  d = MatMul(s, u1)  e = Relu(d)  f = Reshape(e, rows)  g = Gemm(f, d1)  y = Add(s, g)",
}


@pytest.mark.parametrize("body", FLATTENING.values(), ids=FLATTENING.keys())
def test_layers_that_flatten_their_rows(body: str, loaded: Load, seed: int) -> None:
    """A Reshape to two dimensions on the way: shapes and values stay."""
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[1, s, {K}] x) => (float[] y)
    <int64[2] rows = {{-1, 48}}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    graph = Graph(spec(seed=seed))
    for layer in "01":
        for name, shape in ((f"u{layer}", (K, 48)), (f"d{layer}", (48, K))):
            graph.groups.append([(graph.draw(name, *shape), True)])
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in graph.weights.items())
    x = np.random.default_rng(seed).standard_normal((1, 3, K)).astype(np.float32)
    (found,), (expected,) = run(rewritten(loaded(model)).path, x), run(quantized_twin(graph, model), x)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


def test_casts_to_the_same_type_are_no_obstacle(loaded: Load, seed: int) -> None:
    """TorchScript leaves one of float32 to float32 for norms that compute in float32; the residual reads it, too."""
    norm = "f{0} = Cast<to = 1>({1})  " + RMS_NORM.replace("{1}", "f{0}")
    mlp = "a{0} = MatMul(n{0}, u{0})  b{0} = Relu(a{0})  d{0} = MatMul(b{0}, v{0})  y{0} = Add(f{0}, d{0})"
    text = f"""g (float[b, s, {K}] x) => (float[b, s, {K}] y1)
    <int64[1] axes = {{-1}}, float eps = {{1e-5}}, float power = {{2.0}}>
    {{ {norm.format(0, "x")}  {mlp.format(0)}  {norm.format(1, "y0")}  {mlp.format(1)} }}"""
    model = parsed(text, {"u0": (K, 48), "v0": (48, K), "u1": (K, 48), "v1": (48, K), "w": (K,)}, seed)
    assert [found.shapes["layers"] for found in found_mlps(loaded(model))] == [2]


def test_a_norm_that_changes_the_type_is_no_part_of_a_block(loaded: Load, seed: int) -> None:
    """float32 -> norm -> float16 -> MLP -> norm -> MLP: the op has one type of activations."""
    norm = "p{0} = Mul({1}, {1})  m{0} = ReduceMean(p{0}, axes)  e{0} = Add(m{0}, eps)  r{0} = Sqrt(e{0})"
    norm += "  q{0} = Div({1}, r{0})  n{0} = Mul(q{0}, w)  h{0} = Cast<to = 10>(n{0})"
    mlp = "a{0} = MatMul(h{0}, u{0})  b{0} = Relu(a{0})  y{0} = MatMul(b{0}, d{0})"
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[b, s, {K}] x) => (float16[b, s, {K}] y1)
    <int64[1] axes = {{-1}}, float eps = {{1e-5}}>
    {{ {norm.format(0, "x")}  {mlp.format(0)}  f = Cast<to = 1>(y0)  {norm.format(1, "f")}  {mlp.format(1)} }}"""
    model = onnx.parser.parse_model(text)
    graph = Graph(spec(dtype="float16", seed=seed))
    for layer in "01":
        for name, shape in ((f"u{layer}", (K, 48)), (f"d{layer}", (48, K))):
            graph.groups.append([(graph.draw(name, *shape), True)])
    graph.weights["w"] = np.random.default_rng(seed).uniform(0.5, 2, K).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in graph.weights.items())
    x = np.random.default_rng(seed).standard_normal((2, 3, K)).astype(np.float32)
    (found,), (expected,) = run(rewritten(loaded(model)).path, x), run(quantized_twin(graph, model), x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
