"""NVFP4 initializers of a matrix: values, block scales, tensor scale."""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import onnx_ir as ir
import torch
from torch.nn.functional import pad

from trt_nvfp4.calibration.device import device
from trt_nvfp4.calibration.recipes import InputStatistics, Recipe, WeightQuantizer
from trt_nvfp4.calibration.recipes.residual_channels import repeat_last
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.subgraphs.values import Matrix
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tile_scales, tiled_shape


class Layout(Enum):
    """Who reads the initializers. PLUGINS: INT8 [N, K/2] and tiled block scales, INT8 as well; TENSORRT: FLOAT4E2M1
    [N, K] and FLOAT8E4M3FN [N, K/16], row by row."""

    PLUGINS = 0
    TENSORRT = 1


def nvfp4_initializers(
    prefix: str,
    matrices: Sequence[Matrix],
    stacked: bool,
    recipe: Recipe,
    inputs: Iterable[InputStatistics],
    layout: Layout = Layout.PLUGINS,
    size: tuple[int, int] | None = None,
    residual: int = 0,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Initializers for values, block scales and tensor scale; quantized while they are written.

    Args:
        stacked: each gets a leading dimension, one entry per matrix; otherwise there is one matrix.
        recipe: how to quantize.
        inputs: statistics of what each matrix is multiplied with; read anew each time that it is quantized.
        size: rows and K, where they are more than the matrices have: zeros fill them.
        residual: so many of the last columns stand there twice, beyond `size`.

    Raises:
        ModelError: a weight holds NaN or Inf.
    """
    own, (rows, k) = matrices[0].shape, size or matrices[0].shape
    filled, k = k - own[1], k + residual
    assert not (filled and residual)  # the repeated columns would stand in front of the zeros that fill K up to `size`
    lead = (len(matrices),) if stacked else ()
    tensor_scales = [recipe.tensor_scale(matrix.amax) for matrix in matrices]
    block_scales: list[torch.Tensor] = []  # kept from writing the values until they are written themselves
    where = device()

    def packed() -> Iterator[torch.Tensor]:
        block_scales.clear()
        for matrix, scale, statistics in zip(matrices, tensor_scales, inputs, strict=True):
            known = statistics if matrix.columns is None else statistics.in_order(matrix.columns)
            quantize = WeightQuantizer(recipe, known, where)
            scales = []
            for chunk in matrix.chunks():
                values, chunk_scales = repeat_last(*quantize(chunk.to(where), scale.to(where)), residual)
                scales.append(pad(chunk_scales.view(torch.uint8).cpu(), (0, filled // BLOCK)))
                yield pad(values.cpu(), (0, filled // 2))
            if rows > own[0]:
                scales.append(torch.zeros(rows - own[0], k // BLOCK, dtype=torch.uint8))
                yield torch.zeros(rows - own[0], k // 2, dtype=torch.uint8)
            rows_of_scales = torch.cat(scales).view(torch.float8_e4m3fn)
            block_scales.append(tile_scales(rows_of_scales) if layout is Layout.PLUGINS else rows_of_scales)

    def scales_of_blocks() -> Iterator[torch.Tensor]:
        if len(block_scales) != len(matrices):
            for _ in packed():
                pass
        yield from block_scales
        block_scales.clear()

    if layout is Layout.PLUGINS:
        types, shapes = (ir.DataType.INT8, ir.DataType.INT8), ((rows, k // 2), tiled_shape(rows, k // BLOCK))
    else:
        types, shapes = (ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN), ((rows, k), (rows, k // BLOCK))
    tensors = (
        StreamedTensor(prefix, types[0], (*lead, *shapes[0]), packed),
        StreamedTensor(f"{prefix}.block_scales", types[1], (*lead, *shapes[1]), scales_of_blocks),
        ir.Tensor(torch.stack(tensor_scales).reshape(lead).numpy(), name=f"{prefix}.tensor_scale"),
    )
    weight, scales, scale = (ir.val(t.name, const_value=t) for t in tensors)
    return weight, scales, scale
