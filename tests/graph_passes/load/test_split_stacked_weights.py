"""What constant numbers pick from a stack, or of a matrix's rows, are weights of their own."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from torch import Tensor
from torch.nn import functional

from onnx_models import moe_spellings, zoo
from onnx_models.graphs import run
from onnx_models.moe_spellings import HIDDEN, Moe, MoeSpec, assert_computes, quantized_spelling
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.graph_passes.load.source import SourceModel, load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs

K, N = 32, 16
HEAD = '<ir_version: 10, opset_import: ["": 21]> g'
PICKS = {
    "of matrices": """(float[T, 32] x) => (float[T, 16] y)
        <int64 i = {1}, int64 j = {-1}> { a = Gather(w, i)  b = Gather(w, j)
        u = MatMul(x, a)  v = MatMul(x, b)  y = Sub(u, v) }""",
    "of rows": """(float[T, 32] x) => (float[T, 16] y)
        <int64 i = {1}, int64 j = {-1}, int64[3] shape = {-1, 32, 16}> { s = Reshape(w, shape)  a = Gather(s, i)
        b = Gather(s, j)  u = MatMul(x, a)  v = MatMul(x, b)  y = Sub(u, v) }""",
}
SLICES = "q = Slice(w, zero, n)  r = Slice(w, n, last)"
ROWS = {
    "slices": SLICES,
    "slices of axes": "q = Slice(w, zero, n, zero, one)  r = Slice(w, n, last, zero)",
    "split": "q, r = Split(w, sizes)",
    "one slice twice": f"{SLICES}  u = Identity(q)",
}
ROWS_LEFT = {
    "columns": "q = Slice(w, zero, n, one)  r = Slice(w, n, last, one)",
    "every second": "q = Slice(w, zero, last, zero, two)  r = Slice(w, one, last, zero, two)",
    "unknown": "m = Shape<start = 0, end = 1>(x)  q = Slice(w, zero, m)  r = Slice(w, m, last)",
    "read as a whole, too": f"{SLICES}  u = Identity(w)",
}
LEFT = {
    "unknown number": "(float[T, 32] x, int64 i) => (float[T, 16] y) { a = Gather(w, i)  y = MatMul(x, a) }",
    "several at once": "(float[T, 32] x) => (y) <int64[2] i = {0, 2}> { a = Gather(w, i)  y = MatMul(x, a) }",
    "another axis": "(float[T, 3] x) => (y) <int64 i = {1}> { a = Gather<axis = 1>(w, i)  y = MatMul(x, a) }",
    "read as a whole, too": """(float[T, 32] x) => (y)
        <int64 i = {1}> { a = Gather(w, i)  u = MatMul(x, a)  v = MatMul(x, w)  y = Add(u, v) }""",
    "seen outside": "(float[T, 32] x) => (float[T, 16] y, a) <int64 i = {1}> { a = Gather(w, i)  y = MatMul(x, a) }",
}


def saved(body: str, shape: tuple[int, ...], path: Path, seed: int, external: bool = False) -> np.ndarray:
    """The values of the stack `w` [3, K, N] of the model that is written to `path`."""
    model = parser.parse_model(f"{HEAD} {body}")
    values = np.random.default_rng(seed).standard_normal((3, K, N)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values.reshape(shape), "w"))
    onnx.save(model, path, save_as_external_data=external, location="weights", size_threshold=0)
    return values


def unquantized(source: SourceModel) -> Path:
    return rewritten(source, plan_all(source, kinds=("moe",))).path


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("stack", PICKS)
def test_parts(stack: str, external: bool, tmp_path: Path, seed: int) -> None:
    """Neither copied from external data nor changed."""
    shape = (3 * K, N) if stack == "of rows" else (3, K, N)
    values = saved(PICKS[stack], shape, tmp_path / "model.onnx", seed, external)
    source = load(tmp_path / "model.onnx")
    linears = [linear for subgraph in find_subgraphs(source) for linear in subgraph.linears]
    for linear, number in zip(linears, (1, 2), strict=True):
        np.testing.assert_array_equal(source.tensor(linear.weight.stored.name or ""), values[number])
    x = np.random.default_rng(seed).standard_normal((5, K)).astype(np.float32)
    (y,) = run(unquantized(source), x)
    np.testing.assert_allclose(y, x @ values[1] - x @ values[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT.keys())
def test_stacks_that_stay(body: str, tmp_path: Path, seed: int) -> None:
    saved(body, (3, K, N), tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    assert source.tensor("w").shape == (3, K, N)
    assert next(node.op_type for node in source.graph) == "Gather"


def rows_model(body: str, path: Path, seed: int, external: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Writes a model of two products by rows of `w` [48, 16], 32 and 16 of them unless `body` says otherwise, and adds
    the same of `b` [48]; returns these."""
    text = f"""{HEAD} (float[T, 16] x) => (float[T, E] y, float[T, F] z)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] n = {{32}},
         int64[1] last = {{9223372036854775807}}, int64[2] sizes = {{32, 16}}>
        {{ {body}  qt = Transpose(q)  rt = Transpose(r)  c = Slice(b, zero, n)  d = Slice(b, n, last)
        qx = MatMul(x, qt)  rx = MatMul(x, rt)  y = Add(qx, c)  z = Add(rx, d) }}"""
    model = parser.parse_model(text)
    rng = np.random.default_rng(seed)
    w, b = rng.standard_normal((48, 16)).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")])
    onnx.save(model, path, save_as_external_data=external, location="weights", size_threshold=0)
    return w, b


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("body", ROWS.values(), ids=ROWS.keys())
def test_rows(body: str, external: bool, tmp_path: Path, seed: int) -> None:
    w, b = rows_model(body, tmp_path / "model.onnx", seed, external)
    source = load(tmp_path / "model.onnx")
    linears = [linear for found in find_subgraphs(source) for linear in found.linears]
    for linear, rows in zip(linears, (slice(0, 32), slice(32, 48)), strict=True):
        assert linear.bias is not None
        np.testing.assert_array_equal(source.tensor(linear.weight.stored.name or ""), w[rows])
    x = np.random.default_rng(seed).standard_normal((5, 16)).astype(np.float32)
    for found, rows in zip(run(unquantized(source), x), (slice(0, 32), slice(32, 48)), strict=True):
        np.testing.assert_allclose(found, x @ w[rows].T + b[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("body", ROWS_LEFT.values(), ids=ROWS_LEFT.keys())
def test_rows_that_stay(body: str, tmp_path: Path, seed: int) -> None:
    rows_model(body, tmp_path / "model.onnx", seed)
    source = load(tmp_path / "model.onnx")
    assert source.tensor("w").shape == (48, 16)
    assert not any(linear.bias for subgraph in find_subgraphs(source) for linear in subgraph.linears)


@pytest.mark.parametrize("dynamo", [False, True])
def test_attention_whose_queries_are_not_its_values(dynamo: bool, tmp_path: Path, seed: int) -> None:
    """As in DETR and ACT, whose queries and keys have positions added: torch slices their common weight."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)
            self.register_buffer("position", torch.randn(5, 32))

        def forward(self, x: Tensor) -> Tensor:
            placed = x + self.position
            return self.attention(placed, placed, x, need_weights=False)[0]

    torch.manual_seed(seed)
    module, x = Attention().eval(), torch.randn(2, 5, 32)
    path = tmp_path / "model.onnx"
    torch.onnx.export(module, (x,), path, dynamo=dynamo, input_names=["x"])
    source = load(path)
    assert [len(found.linears) for found in find_subgraphs(source)] == [2, 1, 1]  # Q and K; V; the output
    (found,) = run(unquantized(source), x.numpy())
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Loop(Moe):
    """A loop over all matrices of a stack, as of DBRX's and Step-3.7's experts once all take part."""

    def _gathered(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        masks = functional.one_hot(chosen, self.spec.experts).permute(2, 1, 0)
        for index in range(self.spec.experts):
            rank, token = torch.where(masks[index])
            rows = x[token]
            hidden = functional.silu(rows @ self.stacked_gate[index]) * (rows @ self.stacked_up[index])
            y.index_add_(0, token, hidden @ self.stacked_down[index] * weights[token, rank, None])
        return y


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_loop_over_a_stack(exporter: str, tmp_path: Path, seed: int) -> None:
    """One plugin node; torch's newer exporter picks each expert's matrices at run time."""
    model, path = Loop(MoeSpec("gathered", shared=True), seed), tmp_path / "model.onnx"
    if exporter == "dynamo":
        zoo.export(model, torch.randn(2, 5, HIDDEN), path, exporter)
    else:
        moe_spellings.export(model, path, seed)
    source = load(path)
    (moe,) = [subgraph for subgraph in find_subgraphs(source) if subgraph.kind == "moe"]
    assert moe.unsupported is None
    assert (moe.shapes["experts"], moe.shapes["shared_features"]) == (4, 80)
    x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(seed))
    assert_computes(rewritten(source, plan_all(source, kinds=("moe",))).path, quantized_spelling(model), x)
