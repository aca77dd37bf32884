"""What cannot be replaced is refused with a reason that names the culprit; what is no MLP is not taken for one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_models.graphs import Graph, Spec, mlp_model, parsed, spec
from onnx_models.passes import EVERYTHING, found_mlps, plan_all
from trt_nvfp4.graph_passes.load.source import ModelError, SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.decide import make_plan

Load = Callable[[onnx.ModelProto], SourceModel]


def refusal(model: onnx.ModelProto, load: Load) -> str:
    """The reason of the only MLP; it must reach the plan, which then keeps the subgraph."""
    source = load(model)
    (mlp,) = found_mlps(source)
    assert mlp.unsupported is not None
    (entry,) = [entry for entry in plan_all(source).subgraphs if entry.kind != "linear"]
    assert entry.decision == "keep"
    assert mlp.unsupported.text in entry.reason
    return mlp.unsupported.text


def test_intermediate_is_an_output(loaded: Load) -> None:
    model, _ = mlp_model(spec())
    model.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None] * 3))
    assert "'h' is also an output of the graph" in refusal(model, loaded)


def test_intermediate_is_read_elsewhere(loaded: Load) -> None:
    model, _ = mlp_model(spec(gated=False))
    model.graph.node.append(helper.make_node("Neg", ["a"], ["z"], name="reader"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 3))
    reason = refusal(model, loaded)
    assert "'a'" in reason
    assert "'reader' (Neg)" in reason


@pytest.mark.parametrize("weight", ["gate", "up", "down"])
def test_shared_weight(weight: str, loaded: Load) -> None:
    model, _ = mlp_model(spec())
    model.graph.node.append(helper.make_node("ReduceMax", [weight], ["z"], name="reader", keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, []))
    reason = refusal(model, loaded)
    assert f"'{weight}'" in reason
    assert "reader" in reason


def test_some_weights_in_common(loaded: Load) -> None:
    """Two MLPs over the same `up` but another `down` each cannot share what is made of their weights."""
    text = """g (float[rows, 32] x) => (float[rows, 32] y) {
        a = MatMul(x, up) b = Relu(a) m = MatMul(b, down0) c = MatMul(m, up) d = Relu(c) y = MatMul(d, down1) }"""
    model = parsed(text, dict.fromkeys(("up", "down0", "down1"), (32, 32)))
    mlps = found_mlps(loaded(model))
    assert len(mlps) == 2
    assert all(m.unsupported is not None and "its weight 'up' is shared" in m.unsupported.text for m in mlps)


@pytest.mark.parametrize(
    ("spelling", "operator"),
    [
        ("h = HardSwish(a)", "HardSwish"),
        ("h = Tanh(a)", "Tanh"),
        ("h = Elu(a)", "Elu"),
        ("h = LeakyRelu(a)", "LeakyRelu"),
        ("k = Constant<value = float {{0.25}}>()  h = PRelu(a, k)", "PRelu"),
        # Apertus' xIELU.
        (
            "k = Constant<value = float {{0.8}}>()  zero = Constant<value = float {{0.0}}>()  sign = Greater(a, zero)"
            "  s = Mul(a, a)  p = Mul(s, k)  low = Min(a, zero)  e = Exp(low)  one = Constant<value = float {{1.0}}>()"
            "  m = Sub(e, one)  d = Sub(m, a)  n = Mul(d, k)  w = Where(sign, p, n)  b = Mul(a, k)  h = Add(w, b)",
            "Greater",
        ),
        ("k = Constant<value = float {{0.005}}>()  c = Less(k, a)  z = Sub(k, k)  h = Where(c, a, z)", "Less"),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_activation_not_served(spelling: str, operator: str, gated: bool, loaded: Load) -> None:
    model, _ = mlp_model(spec(spelling=spelling, gated=gated, activation=operator))
    assert f"activation ({operator}" in refusal(model, loaded)


def test_constants_that_are_almost_right(loaded: Load) -> None:
    """x * sigmoid(1.5 x) is neither SiLU nor quick GELU."""
    spelling = "c = Constant<value = float {{1.5}}>()  b = Mul(a, c)  s = Sigmoid(b)  h = Mul(a, s)"
    model, _ = mlp_model(spec(spelling=spelling, gated=False))
    assert "activation" in refusal(model, loaded)


@pytest.mark.parametrize("changes", [{"k": 24}, {"intermediate": 40}])
def test_k_is_no_multiple_of_16(changes: dict[str, int], loaded: Load) -> None:
    """NVFP4 cannot serve, FP8 can; without FP8 the subgraph falls to BF16. Each reason names weight and node."""
    model, _ = mlp_model(spec(**changes))
    source = loaded(model)
    (k,) = changes.values()
    (entry,) = plan_all(source).subgraphs
    assert entry.decision == "fp8"
    assert f"has K = {k}" in entry.reason
    assert "'gate'" in entry.reason or "'down'" in entry.reason
    without = make_plan(source, find_subgraphs(source), replace(EVERYTHING, fp8=False))
    assert [entry.decision for entry in without.subgraphs] == ["bf16"]
    nothing = make_plan(source, find_subgraphs(source), Capabilities("nothing", bf16=False))
    assert [entry.decision for entry in nothing.subgraphs] == ["keep"]


NO_MLP = {
    "linear twice": "a = MatMul(x, w1)  y = MatMul(a, w2)",
    "scaled": "a = MatMul(x, w1)  c = Constant<value = float {2.0}>()  b = Mul(a, c)  y = MatMul(b, w2)",
    "sum of two": "a = MatMul(x, w1)  b = MatMul(x, w3)  c = Add(a, b)  y = MatMul(c, w2)",
    "gate of another tensor": "v = Relu(x)  a = MatMul(x, w1)  b = MatMul(v, w3)  s = Sigmoid(a)  t = Mul(a, s)"
    "  c = Mul(t, b)  y = MatMul(c, w2)",
    "norm between": "a = MatMul(x, w1)  n = LayerNormalization(a, one)  y = MatMul(n, w2)",
    "softmax between": "a = MatMul(x, w1)  n = Softmax(a)  y = MatMul(n, w2)",
    "vector scale between": "a = MatMul(x, w1)  r = Relu(a)  n = Mul(r, one)  y = MatMul(n, w2)",
    "weights computed": "a = MatMul(x, w1)  r = Relu(a)  e = Exp(w2)  y = MatMul(r, e)",
    "weights rounded": "a = MatMul(x, w1)  r = Relu(a)  i = Cast<to = 6>(w2)  f = Cast<to = 1>(i)  y = MatMul(r, f)",
    "transposed input": "a = Gemm<transA = 1>(x, w1)  r = Relu(a)  y = Gemm(r, w2)",
    "rows backwards": "s = Constant<value = int64[1] {31}>()  e = Constant<value = int64[1] {15}>()"
    "  d = Constant<value = int64[1] {1}>()  m = Constant<value = int64[1] {-1}>()"
    "  a = MatMul(x, wide)  b = Slice(a, s, e, d, m)  r = Relu(b)  y = MatMul(r, w2)",
    "transposed between": "a = MatMul(x, w1)  r = Relu(a)  t = Transpose<perm = [1, 0]>(r)  y = MatMul(t, w2)",
    "gate of every row for all rows": "a = MatMul(x, w1)  b = MatMul(x, w3)  s = Sigmoid(a)  t = Mul(a, s)"
    "  ax = Constant<value = int64[1] {1}>()  u = Unsqueeze(t, ax)  p = Mul(u, b)"
    "  sh = Constant<value = int64[2] {-1, 16}>()  c = Reshape(p, sh)  y = MatMul(c, w2)",
    "activation of every row for all rows": "a = MatMul(x, w1)  ax = Constant<value = int64[1] {1}>()"
    "  u = Unsqueeze(a, ax)  s = Sigmoid(u)  p = Mul(a, s)  sh = Constant<value = int64[2] {-1, 16}>()"
    "  c = Reshape(p, sh)  y = MatMul(c, w2)",
    "gather that adds a dimension": "a = MatMul(x, wide)  i = Constant<value = int64[1, 16]"
    " {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}>()  g = Gather<axis = 1>(a, i)  r = Relu(g)"
    "  y = MatMul(r, w2)",
    "constant that adds a dimension": "a = MatMul(x, w1)  b = Max(a, zero)  y = MatMul(b, w2)",
    "computed constant that adds a dimension": "a = MatMul(x, w1)  z = Abs(zero)  b = Max(a, z)  y = MatMul(b, w2)",
}


@pytest.mark.parametrize("body", NO_MLP.values(), ids=NO_MLP.keys())
def test_no_mlp(body: str, loaded: Load) -> None:
    rows = "m, n" if "zero" in body or "int64[1, 16]" in body else "rows"
    shapes = {"w1": (16, 16), "w2": (16, 16), "w3": (16, 16), "one": (16,), "wide": (16, 32), "zero": (1, 1, 1)}
    text = f"g (float[16, 16] x) => (float[{rows}, 16] y) {{ {body} }}"
    model = parsed(text, {name: shape for name, shape in shapes.items() if name in body})
    onnx.checker.check_model(model)
    assert found_mlps(loaded(model)) == []


@pytest.mark.parametrize(
    ("outputs", "bias"), [("float[n, 16] y, float[n, 16] a", (16,)), ("float[m, n, 16] y", (1, 1, 16))]
)
def test_what_is_added_is_no_bias(outputs: str, bias: tuple[int, ...], loaded: Load) -> None:
    """The product is an output by itself; the sum has more dimensions than it."""
    body = "a = MatMul(x, w)  y = Add(a, b)"
    model = parsed(f"g (float[n, 16] x) => ({outputs}) {{ {body} }}", {"w": (16, 16), "b": bias})
    (linear,) = find_subgraphs(loaded(model))
    assert (linear.kind, linear.unsupported, linear.output, len(linear.nodes)) == ("linear", None, "a", 1)


QUANTIZED = {
    "Q/DQ": "f = DequantizeLinear(w, scale)  y = MatMul(x, f)",
    "Q/DQ, transposed": "f = DequantizeLinear(w, scale)  t = Transpose<perm = [1, 0]>(f)  y = MatMul(x, t)",
    "float weights before Q/DQ": "q = QuantizeLinear(v, scale)  f = DequantizeLinear(q, scale)  y = Gemm(x, f)",
    "a Cast, scaled": "f = Cast<to = 1>(w)  s = Mul(f, scale)  y = MatMul(x, s)",
    "a Cast, shifted and scaled": "f = Cast<to = 1>(w)  d = Sub(f, scale)  s = Mul(scale, d)  t = Transpose(s)"
    "  y = Gemm(x, t)",
    "integers": "q, s, z = DynamicQuantizeLinear(x)  i = MatMulInteger(q, w, z)  y = Cast<to = 1>(i)",
}


@pytest.mark.parametrize("body", QUANTIZED.values(), ids=QUANTIZED.keys())
def test_weights_that_are_quantized_already(body: str, loaded: Load) -> None:
    """No candidates, and an empty list would not say why."""
    text = f"g (float[16, 16] x) => (float[16, 16] y) <float scale = {{0.1}}> {{ {body} }}"
    source = loaded(parsed(text, {"w": np.ones((16, 16), np.int8), "v": (16, 16)}))
    with pytest.raises(ModelError, match=r"its weights are quantized already, as node '.*' \(\w+\) reads them"):
        find_subgraphs(source)


def test_integers_among_what_is_computed_are_no_weights(loaded: Load) -> None:
    text = """g (float[16, 16] x) => (float[16, 16] y) {
        f = Cast<to = 1>(positions)  h = Add(x, f)  y = MatMul(x, h) }"""
    assert find_subgraphs(loaded(parsed(text, {"positions": np.ones((16, 16), np.int64)}))) == []


def test_weights_in_float64(loaded: Load) -> None:
    text = "g (double[n, 16] x) => (double[n, 16] y) { [up] h = MatMul(x, w)  r = Relu(h)  y = Gemm(r, w) }"
    source = loaded(parsed(text, {"w": np.ones((16, 16))}))
    with pytest.raises(
        ModelError, match=r"weights are float64, as node 'up' \(MatMul\) reads them; export the model in"
    ):
        find_subgraphs(source)


def test_linears_in_bodies(loaded: Load) -> None:
    """As in decoders that optimum merged: all of the model is in the branches of one If."""
    text = """g (float[2, 16] x, bool cached) => (float[2, 16] y) {
        y = If (cached) <then_branch = t () => (float[2, 16] a) { a = MatMul(x, w) },
                         else_branch = e () => (float[2, 16] b) { h = MatMul(x, w)  b = Relu(h) }> }"""
    model = parsed(text, {"w": (16, 16)})
    model.graph.node[0].name = "optimum::if"
    source = loaded(model)
    with pytest.raises(
        ModelError, match=r"linears lie in the bodies of node 'optimum::if' \(If\).*decoder_model\.onnx"
    ):
        find_subgraphs(source)


def test_bilinear_and_clamped_gates(loaded: Load) -> None:
    """Gates without an activation, and gpt-oss's clamped SwiGLU with its constants."""
    bilinear, _ = mlp_model(Spec(activation="identity", spelling="h = Identity(a)"))
    assert [m.activation for m in found_mlps(loaded(bilinear))] == ["identity"]
    text = """g (float[2, 16] x) => (float[2, 16] y)
    <float limit = {5.0}, float low = {-5.0}, float alpha = {1.5}, float one = {1.0}> {
        a = MatMul(x, w1)  b = MatMul(x, w3)  g = Min(a, limit)  u = Clip(b, low, limit)  v = Mul(g, alpha)
        s = Sigmoid(v)  t = Mul(g, s)  p = Add(u, one)  c = Mul(p, t)  y = MatMul(c, w2)
    }"""
    (mlp,) = found_mlps(loaded(parsed(text, dict.fromkeys(("w1", "w2", "w3"), (16, 16)))))
    block = mlp.blocks[0].mlp
    assert (mlp.activation, block.alpha, block.limit) == ("swiglu_clamped", 1.5, 5.0)
    assert block.gate is not None
    assert block.gate.weight.stored.name == "w1"


@pytest.mark.parametrize("between", ["Tanh", "Relu", "Sigmoid"])
def test_a_linear_in_front_of_an_mlp(between: str, loaded: Load, seed: int) -> None:
    """A state's projection, say: with the gate behind it, it would be an MLP that cannot be replaced."""
    graph = Graph(spec(intermediate=32, seed=seed))
    graph.mlp(graph.op(between, [graph.linear("x", "projection", 32, 32, "p")], "t"), "y")
    found = find_subgraphs(loaded(graph.model(["y"])))
    assert [(subgraph.kind, subgraph.unsupported) for subgraph in found] == [("linear", None), ("gated_mlp", None)]


def test_overlapping_mlps_share_no_linear(loaded: Load) -> None:
    """Of Linear-ReLU-Linear-ReLU-Linear one pair is an MLP; no linear is in two subgraphs."""
    text = """g (float[2, 16] x) => (float[2, 16] y) {
        a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  d = Relu(c)  y = MatMul(d, w3) }"""
    subgraphs = find_subgraphs(loaded(parsed(text, dict.fromkeys(("w1", "w2", "w3"), (16, 16)))))
    assert sorted(subgraph.kind for subgraph in subgraphs) == ["linear", "mlp"]
    stored = [linear.weight.stored.name for subgraph in subgraphs for linear in subgraph.linears]
    assert sorted(stored) == ["w1", "w2", "w3"]  # type: ignore[type-var]
