"""Weights as an NVFP4 checkpoint publishes them, taken over bit by bit."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch
from torch.nn.functional import pad

from trt_nvfp4.calibration.checkpoint import NVFP4Checkpoint, NVFP4Weight
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.subgraphs.parts import Weight
from trt_nvfp4.graph_passes.subgraphs.values import MadeWeights, Matrix
from trt_nvfp4.plugins.ops.number_formats import BLOCK, tile_scales, tiled_shape

# Enough to tell another matrix, few enough to read for every expert.
_COMPARED_ROWS = 8
# The distance of a rounded matrix from the original, by norms: 0.09 to 0.13 for NVFP4, more for other weights or
# scaled channels.
_LARGEST_DIFFERENCE = 0.25


class NVFP4Source:
    """One matrix of a checkpoint, read on demand: `rows` of a module's, in place of the model's `weight`."""

    def __init__(self, checkpoint: NVFP4Checkpoint, module: str, weight: Weight, rows: slice = slice(None)) -> None:
        self._checkpoint, self.module, self._weight, self._rows = checkpoint, module, weight, rows
        self.shape = weight.shape

    @property
    def identity(self) -> tuple[object, ...]:
        """Hashable; sources of equal identity are the same matrix."""
        return self.module, self._rows.start, self._rows.stop, self._rows.step, *self._weight.identity

    def tensor_scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Those of the weight and of its input."""
        of_weight, of_input = self._checkpoint.tensor_scales(self.module)
        return of_weight * self._weight.scale, of_input

    def read(self) -> NVFP4Weight:
        """The weight."""
        whole = self._checkpoint[self.module]
        return replace(whole, packed=whole.packed[self._rows], block_scales=whole.block_scales[self._rows])

    def block_scales_under(self, tensor_scale: torch.Tensor) -> torch.Tensor | None:
        """Its block scales where that is the tensor scale, float8_e4m3fn [N, K/16]; None where they cannot give the
        same values."""
        own, block_scales = self.tensor_scales()[0], self.read().block_scales
        if own == tensor_scale:
            return block_scales
        exact = block_scales.double() * own.double()
        found = (exact / tensor_scale.double()).float().to(torch.float8_e4m3fn)
        return found if torch.equal(found.double() * tensor_scale.double(), exact) else None

    @property
    def of_model(self) -> bool:
        """Whether the checkpoint is the model's own."""
        return self._checkpoint.of_model

    def check_shape(self) -> range:
        """Compares the shape with the model's; returns which rows of the module's it has.

        Raises:
            CalibrationError: of another shape than the model's.
        """
        rows, k = self._checkpoint.shape(self.module)
        own_rows = range(rows)[self._rows]
        if (len(own_rows), k) != self.shape:
            raise CalibrationError(
                f"{self.module} is {(len(own_rows), k)} in the checkpoint and {self.shape} in the model"
            )
        return own_rows

    def check_values(self) -> None:
        """Compares the first rows with the model's.

        Raises:
            CalibrationError: of another shape than the model's, or not the model's rows, rounded.
        """
        first = self.check_shape()[:_COMPARED_ROWS]
        found = self._checkpoint.rows(self.module, slice(first[0], first[-1] + 1))
        packed, block_scales = found.packed[:: first.step], found.block_scales[:: first.step]
        rounded = nvfp4.dequantize(packed, block_scales, self.tensor_scales()[0])
        model = next(Matrix([self._weight]).chunks(_COMPARED_ROWS))
        # Negated, so that NaN is a difference.
        if not (difference := (rounded - model).norm()) <= _LARGEST_DIFFERENCE * model.norm():
            raise CalibrationError(
                f"{self.module} of the checkpoint is not the model's '{self._weight.stored.name}' in NVFP4: their "
                f"first {len(first)} rows differ by {difference / model.norm():.0%}, rounding makes about 10%; give "
                "the checkpoint of this very model, without channel scales folded into other layers (AWQ), or leave "
                "--set packed-weights out to quantize from the model's own weights"
            )


def packed_initializers(
    prefix: str,
    groups: Sequence[tuple[NVFP4Source, ...]],
    stacked: bool,
    made: MadeWeights,
    interleaved: bool = True,
    size: tuple[int, int] | None = None,
) -> tuple[ir.Value, ...]:
    """As `nvfp4_initializers`; a group's matrices make one, as in `Matrix`. One group in memory at a time.

    `made` collects them: blocks may share them. `size`: rows and K, where they are more than the matrices have: zeros
    fill them.

    Raises:
        CalibrationError: a matrix is not the model's; those of a group have tensor scales of their own, where the op
            has one.
    """
    key = ("packed", stacked, interleaved, size, *(source.identity for group in groups for source in group))
    if key in made:
        return made[key]
    scales = torch.stack([_tensor_scale(group) for group in groups])
    for source in itertools.chain(*groups):
        source.check_shape()
    # The model's own are computed from these very files: the first and the last show that all are in their places.
    is_own = all(source.of_model for source in groups[0])
    for source in itertools.chain(*([groups[0], groups[-1]] if is_own else groups)):
        source.check_values()
    own_rows, k = sum(source.shape[0] for source in groups[0]), groups[0][0].shape[1]
    rows, k = size or (own_rows, k)
    lead = (len(groups),) if stacked else ()

    def joined(parts: list[torch.Tensor], columns: int) -> torch.Tensor:
        whole = torch.stack(parts, 1).reshape(own_rows, -1) if interleaved else torch.cat(parts)
        return pad(whole, (0, columns - whole.shape[1], 0, rows - own_rows))

    def packed() -> Iterator[torch.Tensor]:
        for group in groups:
            yield joined([source.read().packed for source in group], k // 2)

    def tiled() -> Iterator[torch.Tensor]:
        for group, scale in zip(groups, scales, strict=True):
            found = [source.block_scales_under(scale) for source in group]
            parts = [part.view(torch.uint8) for part in found if part is not None]
            yield tile_scales(joined(parts, k // BLOCK).view(torch.float8_e4m3fn))

    tensors = (
        StreamedTensor(prefix, ir.DataType.INT8, (*lead, rows, k // 2), packed),
        StreamedTensor(f"{prefix}.block_scales", ir.DataType.INT8, (*lead, *tiled_shape(rows, k // BLOCK)), tiled),
        ir.Tensor(scales.reshape(lead).numpy(), name=f"{prefix}.tensor_scale"),
    )
    made[key] = tuple(ir.val(t.name, const_value=t) for t in tensors)
    return made[key]


def input_scale(groups: Sequence[tuple[NVFP4Source, ...]]) -> torch.Tensor:
    """The largest tensor scale of what the matrices are multiplied with; 0 where one is not given."""
    scales = [source.tensor_scales()[1] for group in groups for source in group]
    known = [scale for scale in scales if scale is not None]
    return torch.stack(known).max() if known and len(known) == len(scales) else torch.tensor(0.0)


def common_scale(group: Sequence[NVFP4Source]) -> torch.Tensor | None:
    """The one tensor scale of a group's matrices: theirs, or one of them under which the others' block scales give the
    same values; None without such a scale."""
    scales = {scale.item(): scale for scale in (source.tensor_scales()[0] for source in group)}
    if len(scales) == 1:
        return next(iter(scales.values()))
    fitting = (scale for scale in scales.values() if all(s.block_scales_under(scale) is not None for s in group))
    return next(fitting, None)


def _tensor_scale(group: tuple[NVFP4Source, ...]) -> torch.Tensor:
    if (scale := common_scale(group)) is not None:
        return scale
    listed = ", ".join(f"{source.module} {source.tensor_scales()[0].item():g}" for source in group)
    raise CalibrationError(
        f"gate and up must have one tensor scale in common, found {listed}; quantize the checkpoint with fused "
        "scales, or leave --set packed-weights out to quantize from the model's own weights"
    )
