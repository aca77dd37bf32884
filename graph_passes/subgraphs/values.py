"""Weights of subgraphs row by row in float32, biases, and initializers made of them."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor
from trt_nvfp4.graph_passes.ir.tensors import read_part, read_tensor
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.subgraphs.parts import WHOLE_AMAX, Bias, RMSNorm, Weight

# Initializers by what they were made of, and how: subgraphs with the same weights read the same ones.
MadeWeights: TypeAlias = dict[tuple[object, ...], tuple[ir.Value, ...]]
# Values held in float32 at a time.
_CHUNK_VALUES = 1 << 23


def as_torch(array: np.ndarray) -> torch.Tensor:
    """`array` in Torch, without a copy where it is writable; bfloat16 goes by its bits, which Torch does not take."""
    array = np.require(array, requirements=["W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_dtype(dtype: ir.DataType) -> torch.dtype:
    """float32, float16 or bfloat16 in Torch."""
    return {
        ir.DataType.FLOAT: torch.float32,
        ir.DataType.FLOAT16: torch.float16,
        ir.DataType.BFLOAT16: torch.bfloat16,
    }[dtype]


def constant(value: ir.Value) -> np.ndarray:
    """The array behind an initializer or Constant; of one that was converted, as it was before."""
    return constant_part(value, None)


def constant_part(value: ir.Value, index: int | None) -> np.ndarray:
    """`constant(value)`, or what it holds at `index` of its first axis, without computing more."""
    tensor = get_const_tensor(value)
    assert tensor is not None
    tensor = tensor.original if isinstance(tensor, ConvertedTensor) else tensor
    return read_tensor(tensor) if index is None else read_part(tensor, index)


def check_not_empty(weight: Weight) -> None:
    """Raises ModelError for a weight without values, which has no scale."""
    if 0 in weight.shape:
        raise ModelError(
            f"weight '{weight.stored.name}' is empty, {list(weight.shape)}, and cannot be quantized; leave its "
            "subgraph out with --exclude, or export the model without it"
        )


class Matrix:
    """W [rows, in_features] in float32, of the given weights: their rows `interleaved` (gate 0, up 0, gate 1, ...), or
    one weight behind the other (all of Q, all of K, ...).

    `columns`, `row_order`: the order (int64) of its columns, and of the rows of each interleaved part, where it is not
    the model's.

    Raises:
        ModelError: a weight has no values.
    """

    def __init__(
        self,
        parts: Sequence[Weight],
        interleaved: bool = True,
        columns: torch.Tensor | None = None,
        row_order: torch.Tensor | None = None,
    ) -> None:
        for part in parts:
            check_not_empty(part)
        self.parts, self.interleaved = parts, interleaved and len(parts) > 1
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.columns, self.row_order = columns, row_order

    @property
    def identity(self) -> tuple[object, ...]:
        """Hashable; matrices of equal identity are the same."""
        orders = (None if order is None else tuple(order.tolist()) for order in (self.columns, self.row_order))
        return self.interleaved, *orders, *(part.identity for part in self.parts)

    def chunks(self, step: int | None = None) -> Iterator[torch.Tensor]:
        """Rows in order, `step` of each part at a time; by default, as many as memory easily holds."""
        for parts in [self.parts] if self.interleaved else [[part] for part in self.parts]:
            rows, k = parts[0].shape
            most = step or max(1, _CHUNK_VALUES // (k * len(parts)))
            views = [self._view(part) for part in parts]
            for start in range(0, rows, most):
                own = slice(start, start + most) if self.row_order is None else self.row_order[start : start + most]
                chunk = [_as_multiplied(view[own], part) * part.scale for view, part in zip(views, parts, strict=True)]
                values = torch.stack(chunk, dim=1).reshape(-1, k)
                yield values if self.columns is None else values[:, self.columns]

    @property
    def amax(self) -> torch.Tensor:
        """Largest magnitude, a float32 scalar; where this is one rank's share, that of the whole matrix.

        Raises:
            ModelError: a value is NaN or infinite.
        """
        extremes = []
        for part in self.parts:
            extreme = torch.stack(torch.aminmax(self._view(part))).abs().max()
            if (whole := part.stored.meta.get(WHOLE_AMAX)) is not None:
                extreme = torch.maximum(extreme, torch.tensor(whole[part.expert or 0], dtype=extreme.dtype))
            extremes.append(_as_multiplied(extreme, part) * abs(part.scale))
            if not torch.isfinite(extremes[-1]):
                raise ModelError(
                    f"weight '{part.stored.name}' holds NaN or Inf and cannot be quantized; repair the checkpoint"
                )
        return torch.stack(extremes).max()

    @staticmethod
    def _view(part: Weight) -> torch.Tensor:
        """The weight as stored, [rows, in_features], on its memory map."""
        stored = as_torch(constant_part(part.stored, part.expert))
        return (stored.T if part.stored_transposed else stored)[part.rows]


def _as_multiplied(values: torch.Tensor, part: Weight) -> torch.Tensor:
    """Values of a weight in float32, rounded to the type that the model multiplies them in; exact where it was this
    program that chose that type."""
    exact = isinstance(get_const_tensor(part.stored), ConvertedTensor)
    return values.float() if exact else values.to(torch_dtype(part.dtype)).float()


def bias_vector(biases: Sequence[Bias | None], features: int) -> torch.Tensor:
    """The biases [features] of the parts of a matrix, interleaved like its rows; zeros without a bias."""
    vectors = [torch.zeros(features) if bias is None else bias_rows(bias, features) for bias in biases]
    return torch.stack(vectors, dim=1).reshape(-1)


def bias_rows(bias: Bias, features: int) -> torch.Tensor:
    """A bias as it is added, float32 [features]."""
    stored = as_torch(constant_part(bias.stored, bias.expert))
    vector = stored.float().reshape(-1) * bias.scale
    return (vector[bias.rows] if vector.numel() > 1 else vector).expand(features)


def norm_weight(norm: RMSNorm | None, features: int, as_computed: bool = False) -> torch.Tensor:
    """The weights of an RMSNorm, float32 [features]; ones without a norm or a weight.

    `as_computed`: rounded as the network rounds it, where this program chose the network's type.
    """
    if norm is None or norm.weight is None:
        return torch.ones(features)
    weight = as_torch(np.asarray(constant(norm.weight)))
    tensor = get_const_tensor(norm.weight)
    if as_computed and isinstance(tensor, ConvertedTensor):
        weight = weight.to(torch_dtype(tensor.dtype))
    return weight.float().reshape(-1) + norm.offset


def initializer(name: str, data: torch.Tensor, dtype: ir.DataType) -> ir.Value:
    """`data` as an initializer of type `dtype`."""
    tensor = ir.Tensor(data.float().numpy().astype(dtype.numpy()), dtype=dtype, name=name)
    return ir.val(name, const_value=tensor)


class ConvertedTensor(StreamedTensor):
    """A float32 constant in 16 bits, converted while it is written.

    Finite values stay finite: what is beyond the range, such as the -3.4e38 of a mask, becomes the largest number; in
    float16 half of it, so that what is added to it does not make it infinite.
    """

    def __init__(self, name: str, original: ir.TensorProtocol, dtype: ir.DataType) -> None:
        self.original = original
        super().__init__(name, dtype, original.shape.numpy(), self._converted)

    def _converted(self) -> Iterator[torch.Tensor]:
        to, flat = torch_dtype(self.dtype), read_tensor(self.original).reshape(-1)
        largest = torch.finfo(to).max
        instead = largest / 2 if to == torch.float16 else largest
        for start in range(0, flat.size, _CHUNK_VALUES):
            values = as_torch(flat[start : start + _CHUNK_VALUES])
            beyond = values.isfinite() & (values.abs() > largest)
            yield torch.where(beyond, values.sign() * instead, values).to(to)

    def evaluated(self) -> ir.TensorProtocol:
        """The tensor with its values in memory."""
        return self._collect()
