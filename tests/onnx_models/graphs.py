"""Hand-made MLP graphs in every spelling that an exporter may choose, and their quantized twins as an oracle."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from trt_nvfp4.common import nvfp4

# Statements that compute `h` from `a`, by activation. Constants take the type of `a`.
ACTIVATION_SPELLINGS: dict[str, list[str]] = {
    "relu": [
        "h = Relu(a)",
        "z = Constant<value = float {{0.0}}>()  h = Max(a, z)",
        "z = Constant<value = float {{0.0}}>()  c = GreaterOrEqual(a, z)  h = Where(c, a, z)",
    ],
    "relu2": ["r = Relu(a)  h = Mul(r, r)", "r = Relu(a)  two = Constant<value = float {{2.0}}>()  h = Pow(r, two)"],
    "silu": [
        "s = Sigmoid(a)  h = Mul(a, s)",
        "s = Sigmoid(a)  h = Mul(s, a)",
        "n = Neg(a)  e = Exp(n)  one = Constant<value = float {{1.0}}>()  d = Add(one, e)  h = Div(a, d)",
        "i = Identity(a)  s = Sigmoid(i)  h = Mul(i, s)",
        "f = Cast<to = 1>(a)  s = Sigmoid(f)  m = Mul(f, s)  h = Cast<to = {code}>(m)",
    ],
    "gelu": [
        "c = Constant<value = float {{1.4142135}}>()  half = Constant<value = float {{0.5}}>()"
        "  one = Constant<value = float {{1.0}}>()  d = Div(a, c)  e = Erf(d)  p = Add(e, one)  m = Mul(a, p)"
        "  h = Mul(m, half)",
        "c = Constant<value = float {{0.70710677}}>()  half = Constant<value = float {{0.5}}>()"
        "  one = Constant<value = float {{1.0}}>()  d = Mul(c, a)  e = Erf(d)  p = Add(one, e)  x5 = Mul(half, a)"
        "  h = Mul(p, x5)",
        "c = Constant<value = float {{0.70710677}}>()  half = Constant<value = float {{0.5}}>()"
        "  d = Mul(c, a)  e = Erf(d)  q = Mul(e, half)  p = Add(q, half)  h = Mul(a, p)",
    ],
    "gelu_tanh": [
        "three = Constant<value = float {{3.0}}>()  k = Constant<value = float {{0.044715}}>()"
        "  s = Constant<value = float {{0.7978846}}>()  one = Constant<value = float {{1.0}}>()"
        "  half = Constant<value = float {{0.5}}>()  c3 = Pow(a, three)  t = Mul(k, c3)  u = Add(a, t)  v = Mul(u, s)"
        "  th = Tanh(v)  w = Add(th, one)  x5 = Mul(a, half)  h = Mul(x5, w)",
        "k = Constant<value = float {{0.044715}}>()  s = Constant<value = float {{0.7978846}}>()"
        "  one = Constant<value = float {{1.0}}>()  half = Constant<value = float {{0.5}}>()  c2 = Mul(a, a)"
        "  t = Mul(c2, k)  u = Add(one, t)  sa = Mul(s, a)  v = Mul(sa, u)  th = Tanh(v)  w = Add(one, th)"
        "  m = Mul(a, w)  h = Mul(half, m)",
    ],
    "gelu_quick": [
        "c = Constant<value = float {{1.702}}>()  b = Mul(a, c)  s = Sigmoid(b)  h = Mul(a, s)",
        "c = Constant<value = float {{1.702}}>()  b = Mul(c, a)  s = Sigmoid(b)  h = Mul(s, a)",
    ],
}
OPSET_20 = {
    "gelu": ["h = Gelu(a)", 'h = Gelu<approximate = "none">(a)'],
    "gelu_tanh": ['h = Gelu<approximate = "tanh">(a)'],
}
OPSET_24 = {"silu": ["h = Swish(a)"], "gelu_quick": ["h = Swish<alpha = 1.702>(a)"]}
LINEARS = ("matmul", "transpose", "gemm", "gemm_transposed", "gemm_scaled", "einsum", "einsum_transposed")
FUSED = (None, "split", "split_sizes", "slice", "interleaved")
_DTYPES = {
    "float32": (TensorProto.FLOAT, np.dtype(np.float32)),
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}


@dataclass(frozen=True)
class Spec:
    """One spelling of one MLP."""

    activation: str = "silu"
    spelling: str = ACTIVATION_SPELLINGS["silu"][0]
    linear: str = "matmul"
    gated: bool = True
    fused: str | None = None
    biases: bool = False
    swapped: bool = False  # the other operand order wherever there is one
    constant_nodes: bool = False  # weights as Constant nodes
    dropout: bool = False
    dtype: str = "float32"
    opset: int = 21
    k: int = 32
    intermediate: int = 48
    out: int = 16
    seed: int = 0


@dataclass
class Graph:
    """A model under construction. `groups`: weights that share a tensor scale, (initializer, is stored [in, out])."""

    spec: Spec
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    groups: list[list[tuple[str, bool]]] = field(default_factory=list)

    def op(self, op_type: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"n{len(self.nodes)}", **attributes))
        return output

    def draw(self, name: str, *shape: int) -> str:
        generator = np.random.default_rng((self.spec.seed, len(self.weights)))
        self.weights[name] = (generator.standard_normal(shape) / np.sqrt(shape[-1])).astype(_DTYPES[self.spec.dtype][1])
        return name

    def linear(self, x: str, name: str, k: int, n: int, y: str) -> str:
        """y = x W^T (+ b) in the spec's spelling."""
        spec = self.spec
        gemm = spec.linear.startswith("gemm")
        stored_in_out = spec.linear in ("matmul", "gemm", "gemm_scaled", "einsum")
        weight = self.draw(name, *((k, n) if stored_in_out else (n, k)))
        self.groups.append([(name, stored_in_out)])
        operand = self.op("Transpose", [weight], f"{name}_t", perm=[1, 0]) if spec.linear == "transpose" else weight
        bias = [self.draw(f"{name}_bias", n)] if spec.biases else []
        if gemm:
            scales = {"alpha": 0.5, "beta": 2.0} if spec.linear == "gemm_scaled" else {}
            return self.op("Gemm", [x, operand, *bias], y, transB=int(spec.linear == "gemm_transposed"), **scales)
        product = f"{y}_product" if bias else y
        if spec.linear.startswith("einsum"):
            term = "kn" if stored_in_out else "nk"
            operands, terms = ([operand, x], [term, "...k"]) if spec.swapped else ([x, operand], ["...k", term])
            self.op("Einsum", operands, product, equation=f"{','.join(terms)}->...n")
        else:
            self.op("MatMul", [x, operand], product)
        if not bias:
            return y
        return self.op("Add", [*bias, product] if spec.swapped else [product, *bias], y)

    def activation(self, a: str, h: str) -> str:
        code, dtype = _DTYPES[self.spec.dtype]
        body = self.spec.spelling.format(code=code)
        text = f'<ir_version: 10, opset_import: ["": {self.spec.opset}]> g (float[n] a) => (float[n] h) {{ {body} }}'
        names = {"a": a, "h": h}
        for node in onnx.parser.parse_model(text).graph.node:
            node.input[:] = [names.setdefault(name, f"{h}_{name}") for name in node.input]
            node.output[:] = [names.setdefault(name, f"{h}_{name}") for name in node.output]
            node.name = f"n{len(self.nodes)}"
            if node.op_type == "Constant":  # the parser knows no float16 literals
                node.attribute[0].t.CopyFrom(
                    numpy_helper.from_array(numpy_helper.to_array(node.attribute[0].t).astype(dtype))
                )
            self.nodes.append(node)
        return h

    def mlp(self, x: str, y: str, prefix: str = "") -> str:
        """The spec's MLP from x to y."""
        spec = self.spec
        first = len(self.groups)
        if not spec.gated:
            h = self.activation(self.linear(x, f"{prefix}up", spec.k, spec.intermediate, f"{prefix}a"), f"{prefix}h")
        else:
            if spec.fused is None:
                gate = self.linear(x, f"{prefix}gate", spec.k, spec.intermediate, f"{prefix}g")
                up = self.linear(x, f"{prefix}up", spec.k, spec.intermediate, f"{prefix}u")
                self.groups[first:] = [[*self.groups[first], *self.groups[first + 1]]]
            else:
                gate, up = self._parts(
                    self.linear(x, f"{prefix}gate_up", spec.k, 2 * spec.intermediate, f"{prefix}gu"), prefix
                )
            operands = [self.activation(gate, f"{prefix}act"), up]
            h = self.op("Mul", operands[::-1] if spec.swapped else operands, f"{prefix}h")
        if spec.dropout:
            h = self.op("Identity", [self.op("Dropout", [h], f"{prefix}dropped")], f"{prefix}same")
        return self.linear(h, f"{prefix}down", spec.intermediate, spec.out, y)

    def _parts(self, gu: str, prefix: str) -> tuple[str, str]:
        spec, size = self.spec, self.spec.intermediate
        gate, up = f"{prefix}g", f"{prefix}u"
        if spec.fused in ("split", "split_sizes"):
            sizes = [self.integers([size, size])] if spec.fused == "split_sizes" else []
            count = {"num_outputs": 2} if not sizes and spec.opset >= 18 else {}
            self.nodes.append(
                helper.make_node("Split", [gu, *sizes], [gate, up], name=f"n{len(self.nodes)}", axis=-1, **count)
            )
        else:
            step = 2 if spec.fused == "interleaved" else 1
            starts = (0, 1) if step == 2 else (0, size)
            stops = (2**62, 2**62) if step == 2 else (size, 2**62)
            for name, start, stop in zip((gate, up), starts, stops, strict=True):
                operands = [self.integers([number]) for number in (start, stop, -1, step)]
                self.op("Slice", [gu, *operands], name)
        return gate, up

    def integers(self, numbers: list[int]) -> str:
        name = f"i{len(self.weights)}"
        self.weights[name] = np.array(numbers, np.int64)
        return name

    def model(self, outputs: list[str], rank: int = 3) -> onnx.ModelProto:
        code = _DTYPES[self.spec.dtype][0]
        shape = [f"d{i}" for i in range(rank - 1)]
        constants = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        nodes = list(self.nodes)
        if self.spec.constant_nodes:
            nodes = [helper.make_node("Constant", [], [t.name], name=f"c_{t.name}", value=t) for t in constants] + nodes
            constants = []
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", code, [*shape, self.spec.k])],
            [helper.make_tensor_value_info(name, code, [None] * rank) for name in outputs],
            constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.spec.opset)], ir_version=10)


def mlp_model(spec: Spec) -> tuple[onnx.ModelProto, Graph]:
    """x -> MLP -> y; a Gemm takes two dimensions, everything else three."""
    graph = Graph(spec)
    graph.mlp("x", "y")
    model = graph.model(["y"], rank=2 if spec.linear.startswith("gemm") else 3)
    onnx.checker.check_model(model)
    return model, graph


def quantized_twin(graph: Graph, model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with every weight replaced by what NVFP4 makes of it: the oracle of a rewrite with 16-bit activations."""
    twin = replace_weights(graph)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensors = {tensor.name: tensor for tensor in result.graph.initializer}
    tensors |= {node.output[0]: node.attribute[0].t for node in result.graph.node if node.op_type == "Constant"}
    for name, array in twin.items():
        tensors[name].CopyFrom(numpy_helper.from_array(array, name))
    return result


def replace_weights(graph: Graph) -> dict[str, np.ndarray]:
    """Dequantized values of the graph's weights by name; those of a group share a tensor scale."""
    scale_of = {"gemm_scaled": 0.5}.get(graph.spec.linear, 1.0)
    result = {}
    for group in graph.groups:
        rows = {}
        for name, stored_in_out in group:
            array = torch.from_numpy(graph.weights[name].astype(np.float32)) * scale_of
            rows[name] = array.T.contiguous() if stored_in_out else array
        _, _, scale = nvfp4.quantize(torch.cat(list(rows.values())))
        for name, stored_in_out in group:
            values = nvfp4.dequantize(*nvfp4.quantize(rows[name], scale), torch.float32) / scale_of
            values = values.T if stored_in_out else values
            result[name] = np.ascontiguousarray(values.numpy()).astype(graph.weights[name].dtype)
    return result


def draw(seed: int | tuple[int, ...], *shape: int) -> np.ndarray:
    """Normal values in float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def parsed(
    text: str, weights: Mapping[str, np.ndarray | tuple[int, ...]], seed: int | np.random.Generator = 0
) -> onnx.ModelProto:
    """A model as text, at opset 21 unless it names another, with weights: arrays, or shapes of normal values."""
    model = parser.parse_model(text if text.startswith("<") else f'<ir_version: 10, opset_import: ["": 21]> {text}')
    generator = np.random.default_rng(seed)
    for name, weight in weights.items():
        array = generator.standard_normal(weight, np.float32) if isinstance(weight, tuple) else weight
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def run(model: onnx.ModelProto | Path, x: np.ndarray) -> list[np.ndarray]:
    """Outputs in ONNX Runtime, graph optimisations off so that nothing is fused."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})


def spec(**changes: object) -> Spec:
    """A spec that differs from the default by `changes`."""
    return replace(Spec(), **changes)  # type: ignore[arg-type]


def assert_same(
    found: onnx.ModelProto | Path, expected: onnx.ModelProto | Path, x: np.ndarray, tolerance: float = 1e-5
) -> None:
    """Two models compute the same of `x`."""
    for actual, right in zip(run(found, x), run(expected, x), strict=True):
        assert actual.shape == right.shape
        np.testing.assert_allclose(actual, right, rtol=10 * tolerance, atol=tolerance * np.abs(right).max())


def save_model(path: Path, output: str, body: str, x: str = "float[n, 8]") -> Path:
    """A model of x and y, which has the type `output` and is what `body` makes of x."""
    onnx.save(
        parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({x} x) => ({output} y) {{ {body} }}'), path
    )
    return path
