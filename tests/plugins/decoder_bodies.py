"""Random inputs of NVFP4Decoder, and models of one node of it or of a like op."""

from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from op_bodies import TYPES, Inputs
from torch import Tensor

from trt_nvfp4.plugins.ops import DOMAIN, OpDefinition

LAYERS, K, INTERMEDIATE, HEADS, KV_HEADS, SIZE, CAPACITY = 2, 48, 32, 4, 2, 16, 9


def inputs(
    seed: int, lengths: list[int], new: int, dtype: torch.dtype = torch.float32, fp8: bool = False
) -> list[Tensor]:
    """Of small weights, so that sums stay near one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = Inputs(seed, dtype)

    def projection(rows: int, k: int) -> list[Tensor]:
        return [*made.weight(rows, k, LAYERS), made.normal(LAYERS, rows)]

    batch = len(lengths)
    scales = [torch.rand(LAYERS, KV_HEADS, generator=generator) / 50 + 0.02 for _ in range(2)]
    past = normal(LAYERS, 2, batch, KV_HEADS, CAPACITY, SIZE)
    if fp8:
        over = torch.stack(scales, 1)[:, :, None, :, None, None]
        past = (past / over).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
    else:
        past = past.to(dtype)
    for b, length in enumerate(lengths):  # nothing reads what is not cached
        past[:, :, b, :, length:] = 127 if fp8 else torch.nan
    angles = normal(12, SIZE // 2)
    norms = [(1 + normal(LAYERS, size) / 10).to(dtype) for size in (K, SIZE, SIZE, K)]
    attended = HEADS * SIZE
    return [
        normal(batch, new, K).to(dtype),
        past,
        torch.tensor(lengths, dtype=(torch.int32, torch.int64)[seed % 2]),
        angles.cos(),
        angles.sin(),
        *norms[:3],
        *scales,
        *projection(attended + 2 * KV_HEADS * SIZE, K),
        *projection(K, attended),
        norms[3],
        *projection(2 * INTERMEDIATE, K),
        *projection(K, INTERMEDIATE),
    ]


def model_of(op: OpDefinition, tensors: list[Tensor], opset: int = 21, **attributes: Any) -> onnx.ModelProto:
    names = [formal.name for formal in op.inputs]
    types = {**TYPES, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64}

    def values(of: list[str], like: list[Tensor]) -> list[onnx.ValueInfoProto]:
        every = zip(of, like, strict=True)
        return [helper.make_tensor_value_info(name, types[x.dtype], list(x.shape)) for name, x in every]

    graph = helper.make_graph(
        [op.node(names, ["y", "present"], "node", **attributes)],
        "decoder",
        values(names, tensors),
        values(["y", "present"], tensors[:2]),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[op.function(opset)], opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model)
    return model
