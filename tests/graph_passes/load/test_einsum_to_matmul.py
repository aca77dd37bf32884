"""Einsums that are linears are found as such; others stay."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onnx_models.graphs import parsed, run
from onnx_models.passes import plan_all, rewritten
from trt_nvfp4.common import nvfp4
from trt_nvfp4.graph_passes.load.source import SourceModel
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs

Load = Callable[[onnx.ModelProto], SourceModel]

LINEARS = ("bsk,kn->bsn", "bsk,nk->bsn", "kn,bsk->bsn", "nk , bsk -> bsn", "...k,kn->...n", "nk,B...k->B...n")
OTHERS = {
    "transposed product": "bsk,kn->bns",
    "sum over a leading axis": "ksb,kn->sbn",
    "sum over the rows, too": "bsk,kn->bn",
    "no sum": "bsk,kn->bskn",
    "one factor for each value": "bsk,sk->bsk",
    "a matrix for each row": "bsk,sk->bs",
    "diagonal": "bsk,kk->bsk",
    "implicit result": "bsk,kn",
}


def einsum(equation: str, constant: int, seed: int) -> onnx.ModelProto:
    """x, [16, 16, 16], and a random matrix, the operand of index `constant`."""
    operands = "w, x" if constant == 0 else "x, w"
    text = f'g (float[16, 16, 16] x) => (y) {{ [product] y = Einsum<equation = "{equation}">({operands}) }}'
    return parsed(text, {"w": (16, 16)}, seed)


@pytest.mark.parametrize("equation", LINEARS)
def test_linear(equation: str, loaded: Load, seed: int) -> None:
    """In the plan under its name, and rewritten to what the Einsum makes of the quantized weight."""
    constant = 1 if equation[2] in "k." else 0
    model = einsum(equation, constant, seed)
    source = loaded(model)
    (found,) = find_subgraphs(source)
    assert (found.kind, found.nodes, found.input, found.output) == ("linear", ("product",), "x", "y")
    x = np.random.default_rng(seed + 1).standard_normal((16, 16, 16)).astype(np.float32)
    (actual,) = run(rewritten(source, plan_all(source)).path, x)

    weight = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy())
    stored_in_out = "kn" in equation
    rows = weight.T.contiguous() if stored_in_out else weight
    quantized = nvfp4.dequantize(*nvfp4.quantize(rows), torch.float32)
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array((quantized.T if stored_in_out else quantized).contiguous().numpy(), "w")
    )
    np.testing.assert_allclose(actual, run(model, x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", OTHERS.values(), ids=OTHERS.keys())
def test_other_products_stay(equation: str, loaded: Load, seed: int) -> None:
    source = loaded(einsum(equation, 1, seed))
    assert [node.op_type for node in source.graph] == ["Einsum"]


def test_two_inputs_stay(loaded: Load) -> None:
    text = 'g (float[8, 16] x, float[16, 4] v) => (float[8, 4] y) { y = Einsum<equation = "mk,kn->mn">(x, v) }'
    source = loaded(parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'))
    assert [node.op_type for node in source.graph] == ["Einsum"]
