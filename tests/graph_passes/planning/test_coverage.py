"""What a plan has no entry for is counted."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.lowerings.decision import Capabilities
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.coverage import UnplannedProducts, unplanned_products
from trt_nvfp4.graph_passes.planning.decide import make_plan
from trt_nvfp4.graph_passes.planning.kinds.kind import PlanOptions
from trt_nvfp4.graph_passes.planning.plan import Plan

Load = Callable[[onnx.ModelProto], SourceModel]

# Beside a linear that is planned: the nodes, the operator, how many, and which constants they multiply by.
UNPLANNED = {
    "weight on the left": ("z = MatMul(w, x)", "MatMul", 1, ["w"]),
    "weights [1, K, N], x [M, K]": ("z = MatMul(x, batched)", "MatMul", 1, ["batched"]),
    "shared by two": ("a = MatMul(w, x)  b = MatMul(w, a)  z = Relu(b)", "MatMul", 2, ["w"]),
    "float64": ("d = Cast<to = 11>(x)  z = MatMul(d, double)", "MatMul", 1, ["double"]),
    "Conv": ("i = Reshape(x, image)  z = Conv(i, kernel, bias)", "Conv", 1, ["kernel"]),
    "Einsum": ('z = Einsum<equation = "ij,jk->ki">(x, w)', "Einsum", 1, ["w"]),
    "Q/DQ": ("f = DequantizeLinear(w8, scale)  t = Transpose(f)  z = MatMul(x, t)", "MatMul", 1, ["w8"]),
    "QOperator": ("q, s, o = DynamicQuantizeLinear(x)  z = MatMulInteger(q, w8, o)", "MatMulInteger", 1, ["w8"]),
    "ONNX Runtime's": ("z = com.microsoft.MoE<k = 1>(x, x, stack, bias, stack)", "MoE", 1, ["stack"]),
    "chosen from a stack": (
        "r = ReduceMax(x)  n = Cast<to = 7>(r)  a = Gather(stack, n)  b = GatherND(stack, n)  t = Transpose(b)"
        "  u = MatMul(x, a)  z = MatMul(u, t)",
        *("MatMul", 2, ["stack"]),
    ),
    "made anew": ("h = Mul(w, bias)  r = Round(h)  t = Transpose(r)  z = MatMul(x, t)", "MatMul", 1, ["w"]),
    "made of two": ("m = Round(w)  s = Softmax(v)  a = Add(m, s)  z = MatMul(x, a)", "MatMul", 1, ["w", "v"]),
    "made in a body": (
        "z = If (flag) <then_branch = t () => (float[16, 16] a) { m = Mul(w, bias)  a = MatMul(x, m) },"
        " else_branch = e () => (float[16, 16] b) { b = Relu(x) }>",
        *("MatMul", 1, ["w"]),
    ),
    "body": (
        "z = If (flag) <then_branch = t () => (float[16, 16] a) { a = MatMul(x, w) },"
        " else_branch = e () => (float[16, 16] b) { b = Relu(x) }>",
        *("MatMul", 1, ["w"]),
    ),
}


def load_and_plan(body: str, loaded: Load, rng: np.random.Generator) -> tuple[SourceModel, Plan, dict[str, int]]:
    """`body` beside a linear with `planned`; with the bytes of each constant that is left in the model."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[16, 16] x, bool flag) => (float[16, 16] y, z)
        <float scale = {{0.1}}, int64[4] image = {{1, 16, 4, 4}}> {{ y = MatMul(x, planned)  {body} }}"""
    )
    arrays = {
        "planned": rng.standard_normal((16, 16)).astype(np.float32),
        "w": rng.standard_normal((16, 16)).astype(np.float32),
        "v": rng.standard_normal((16, 16)).astype(np.float32),
        "batched": rng.standard_normal((1, 16, 16)).astype(np.float32),
        "stack": rng.standard_normal((4, 16, 16)).astype(np.float32),
        "double": rng.standard_normal((16, 16)),
        "kernel": rng.standard_normal((8, 16, 1, 1)).astype(np.float32),
        "bias": rng.standard_normal(8 if "kernel" in body else 16).astype(np.float32),
        "w8": rng.integers(-9, 9, (16, 16), np.int8),
    }
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    source = loaded(model)
    plan = make_plan(
        source, find_subgraphs(source), Capabilities("ada", nvfp4_w4a16=True), PlanOptions(kinds=("linear",))
    )
    return source, plan, {name: array.nbytes for name, array in arrays.items()}


@pytest.mark.parametrize(("body", "op_type", "count", "weights"), UNPLANNED.values(), ids=UNPLANNED.keys())
def test_products_without_an_entry(
    body: str, op_type: str, count: int, weights: list[str], loaded: Load, seed: int
) -> None:
    source, plan, sizes = load_and_plan(body, loaded, np.random.default_rng(seed))
    (found,) = unplanned_products(source, plan).items()
    assert len(plan.subgraphs) == 1
    size = sum(sizes[name] for name in weights)
    total = sum(value.const_value.nbytes for value in source.graph.initializers.values() if value.const_value)
    assert found == (op_type, UnplannedProducts(count, size, pytest.approx(size / total)))


@pytest.mark.parametrize(
    "body",
    [
        "z = Relu(x)",
        "z = MatMul(x, x)",
        "z = MatMul(x, column)",
        "z = Gather(w, rows)",
        "i = Gather(w, rows)  z = MatMul(x, i)",
    ],
)
def test_nothing_is_left(body: str, loaded: Load, seed: int) -> None:
    """Activations, vectors and rows that the input chooses are no matrices of weights."""
    body = "c = Constant<value_floats = [" + "0.5, " * 15 + "0.5]>()  column = Unsqueeze(c, last)  " + body
    body = "last = Constant<value_ints = [1]>()  r = ReduceMax(x)  n = Cast<to = 7>(r)  rows = Expand(n, last)  " + body
    source, plan, _ = load_and_plan(body, loaded, np.random.default_rng(seed))
    assert unplanned_products(source, plan) == {}


def test_entries_that_were_deleted_are_counted(loaded: Load, seed: int) -> None:
    source, plan, sizes = load_and_plan(UNPLANNED["Conv"][0], loaded, np.random.default_rng(seed))
    plan.subgraphs.clear()
    found = unplanned_products(source, plan)
    assert list(found) == ["MatMul", "Conv"]  # most bytes first
    assert found["MatMul"].weight_bytes == sizes["planned"]
    assert found["MatMul"].share + found["Conv"].share < 1
