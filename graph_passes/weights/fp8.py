"""E4M3 initializers of the FP8 ops: a matrix's bytes with a scale per row, and the scales of activations."""

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from trt_nvfp4.common import fp8
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.subgraphs.parts import Mlp
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights, Matrix, initializer
from trt_nvfp4.graph_passes.weights.mlp_inputs import linears_of
from trt_nvfp4.graph_passes.weights.published_fp8 import published_scales
from trt_nvfp4.plugins.ops.number_formats import e4m3_scale


def fp8_initializers(prefix: str, matrices: Sequence[Matrix], stacked: bool, made: MadeWeights) -> dict[str, ir.Value]:
    """`weight` and `scale`, their names being `<prefix>_weight` and `<prefix>_scale`; quantized while they are written.

    Args:
        stacked: each gets a leading dimension, one entry per matrix; otherwise there is one matrix.
        made: collects them; of matrices that are in there it gives the same.

    Raises:
        ModelError: a weight holds NaN or Inf.
    """
    key = ("fp8", stacked, *(matrix.identity for matrix in matrices))
    if key not in made:
        made[key] = _quantized(prefix, matrices, stacked)
    return dict(zip(("weight", "scale"), made[key], strict=True))


def _quantized(prefix: str, matrices: Sequence[Matrix], stacked: bool) -> tuple[ir.Value, ir.Value]:
    scales = [_row_scales(matrix) for matrix in matrices]
    lead = (len(matrices),) if stacked else ()

    def quantized() -> Iterator[torch.Tensor]:
        for matrix, scale in zip(matrices, scales, strict=True):
            start = 0
            for chunk in matrix.chunks():
                yield fp8.quantize(chunk, scale[start : start + len(chunk)], axis=0).view(torch.int8)
                start += len(chunk)

    values = StreamedTensor(f"{prefix}_weight", ir.DataType.INT8, (*lead, *matrices[0].shape), quantized)
    scale = initializer(f"{prefix}_scale", torch.stack(scales).reshape(*lead, -1), ir.DataType.FLOAT)
    return ir.val(values.name, const_value=values), scale


def mlp_weights(
    made: MadeWeights, mlps: Sequence[Mlp], is_down: bool, stacked: bool, prefix: str
) -> dict[str, ir.Value]:
    """`fp8_initializers` of gate and up, whose rows interleave, or of down; `mlp_inputs.MakeWeights` but for `made`."""
    matrices = [Matrix([linear.weight for linear in linears_of(mlp, is_down)]) for mlp in mlps]
    return fp8_initializers(prefix, matrices, stacked, made)


def activation_scales(prefix: str, largest: Sequence[float | None]) -> dict[str, ir.Value]:
    """`input_scale` and `hidden_scale`, named `<prefix>/...`, of the largest magnitudes; None: 0, found at run time."""
    scales = [torch.tensor(0.0) if amax is None else e4m3_scale(torch.tensor(amax)) for amax in largest]
    return {
        name: initializer(f"{prefix}/{name}", scale, ir.DataType.FLOAT)
        for name, scale in zip(("input_scale", "hidden_scale"), scales, strict=True)
    }


def _row_scales(matrix: Matrix) -> torch.Tensor:
    published = [scales for part in matrix.parts if (scales := published_scales(part)) is not None]
    if len(published) == len(matrix.parts):
        return torch.stack(published, 1).reshape(-1)
    amax = torch.cat([chunk.abs().amax(1) for chunk in matrix.chunks()])
    if not torch.isfinite(amax).all():
        stored = " or ".join(dict.fromkeys(f"'{part.stored.name}'" for part in matrix.parts))
        raise ModelError(f"weight {stored} holds NaN or Inf and cannot be quantized; repair the checkpoint")
    return e4m3_scale(amax)
