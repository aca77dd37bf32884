"""bfloat16 models in float32: what ONNX Runtime computes, against Torch."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, parser

from trt_nvfp4.common.widen import widen
from trt_nvfp4.plugins.ops import DOMAIN, OPS
from trt_nvfp4.plugins.ops.number_formats import pack, quantize_blocks, tensor_scale, tile_scales


def bfloat16_tensor(name: str, tensor: torch.Tensor) -> TensorProto:
    raw = tensor.bfloat16().view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, TensorProto.BFLOAT16, tensor.shape, raw, raw=True)


def run(model: onnx.ModelProto, **inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
    )
    outputs: list[np.ndarray] = session.run(None, inputs)
    return outputs


# 16384 are the bits of 2.0 in bfloat16.
TEXT = """<ir_version: 10, opset_import: ["": 21, "local": 1]>
g (bfloat16[N, 8] x, bool flag) => (bfloat16[N, 8] y)
<bfloat16[N, 8] scaled, bfloat16[N, 8] branch>
{
  two = Constant<value = bfloat16[1] {16384}>()
  wide = Cast<to = 1>(x)
  narrow = Cast<to = 16>(wide)
  scaled = Mul(narrow, two)
  branch = If(flag) <
    then_branch = t () => (bfloat16[N, 8] t_y) { t_y = MatMul(scaled, w) },
    else_branch = e () => (bfloat16[N, 8] e_y) { e_c = Cast<to = 16>(x)  e_y = Sqrt(e_c) }
  >
  y = local.square(branch)
}
<domain: "local", opset_import: ["": 21]>
square (a) => (b) { c = Cast<to = 16>(a)  b = Mul(c, c) }
"""


@pytest.mark.parametrize("flag", [True, False])
def test_types_constants_branches_and_functions(flag: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(8, 8, generator=generator).bfloat16()
    x = torch.rand(3, 8, generator=generator)
    model = parser.parse_model(TEXT)
    model.graph.initializer.append(bfloat16_tensor("w", w))
    widened = widen(model)
    assert widened is model
    onnx.checker.check_model(widened, full_check=True)
    assert TensorProto.BFLOAT16 not in {v.type.tensor_type.elem_type for v in [*model.graph.input, *model.graph.output]}
    (y,) = run(widened, x=x.numpy(), flag=np.array(flag))
    expected = (x * 2 @ w.float() if flag else x.sqrt()).square()
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_weights_keep_their_bytes() -> None:
    model = parser.parse_model(TEXT)
    model.graph.initializer.append(bfloat16_tensor("w", torch.arange(64.0).reshape(8, 8)))
    raw = model.graph.initializer[0].raw_data
    weight = widen(model).graph.initializer[0]
    assert (weight.data_type, weight.raw_data) == (TensorProto.BFLOAT16, raw)


def test_a_model_without_bfloat16_is_not_touched() -> None:
    model = parser.parse_model(TEXT.replace("bfloat16", "float").replace("to = 16", "to = 1"))
    before = model.SerializeToString()
    assert widen(model).SerializeToString() == before


def test_a_weight_that_is_also_an_input_becomes_a_constant(seed: int) -> None:
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (bfloat16[N,8] x, bfloat16[8,8] w) => (bfloat16[N,8] y) '
        "{ y = MatMul(x, w) }"
    )
    model.graph.initializer.append(bfloat16_tensor("w", w))
    x = np.ones((2, 8), np.float32)
    (y,) = run(widen(model), x=x)
    np.testing.assert_allclose(y, x @ w.float().numpy(), rtol=1e-5, atol=1e-5)


def test_a_rewritten_model_runs(seed: int) -> None:
    """An op's function body follows the type of its activations."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(24, 32, generator=generator)
    scale = tensor_scale(matrix.abs().max())
    codes, blocks = quantize_blocks(matrix, scale)
    weight, scales = pack(codes).view(torch.int8), tile_scales(blocks).view(torch.int8)
    bias, x = (torch.randn(n, 24 if n == 1 else 32, generator=generator).bfloat16() for n in (1, 5))
    op = OPS["NVFP4Linear"]
    names = [formal.name for formal in op.inputs]
    graph = helper.make_graph(
        [op.node(names, ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["n", 24])],
        [
            onnx.numpy_helper.from_array(weight.numpy(), "weight"),
            onnx.numpy_helper.from_array(scales.numpy(), "weight_scales"),
            onnx.numpy_helper.from_array(scale.numpy(), "weight_tensor_scale"),
            bfloat16_tensor("bias", bias[0]),
            onnx.numpy_helper.from_array(np.zeros((), np.float32), "input_tensor_scale"),
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[op.function(18)], opset_imports=opsets, ir_version=9)
    (y,) = run(widen(model), x=x.float().numpy())
    wide = torch.zeros(())
    expected = op.reference(x.float(), weight, scales, scale, bias[0].float(), wide)
    assert isinstance(expected, torch.Tensor)
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-5)
