"""Weights of subgraphs row by row in float32, biases, and initializers made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.graph_passes.ir.tensors import read_tensor
from trt_nvfp4.graph_passes.load.source import ModelError
from trt_nvfp4.graph_passes.subgraphs.types import Bias, Weight

# Initializers by what they were made of, and how: subgraphs with the same weights read the same ones.
MadeWeights: TypeAlias = dict[tuple[object, ...], tuple[ir.Value, ...]]
# Values held in float32 at a time.
_CHUNK_VALUES = 1 << 23


def as_torch(array: np.ndarray) -> torch.Tensor:
    """`array` in Torch, without a copy where it is writable; bfloat16 goes by its bits, which Torch does not take."""
    array = np.require(array, requirements=["C", "W"])
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
    """The array behind an initializer or Constant."""
    tensor = get_const_tensor(value)
    assert tensor is not None
    return read_tensor(tensor)


def check_not_empty(weight: Weight) -> None:
    """Raises ModelError for a weight without values, which has no scale."""
    if 0 in weight.shape:
        raise ModelError(
            f"weight '{weight.stored.name}' is empty, {list(weight.shape)}, and cannot be quantized; leave its "
            "subgraph out with --exclude, or export the model without it"
        )


class Matrix:
    """W [rows, in_features] in float32, of the given weights, their rows interleaved (gate 0, up 0, gate 1, ...).

    Raises:
        ModelError: a weight has no values.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        for part in parts:
            check_not_empty(part)
        self.parts = parts
        self.shape = (len(parts) * parts[0].shape[0], parts[0].shape[1])

    @property
    def identity(self) -> tuple[object, ...]:
        """Hashable; matrices of equal identity are the same."""
        return tuple(part.identity for part in self.parts)

    def chunks(self, step: int | None = None) -> Iterator[torch.Tensor]:
        """Rows in order, `step` of each part at a time; by default, as many as memory easily holds."""
        rows, k = self.parts[0].shape
        step = step or max(1, _CHUNK_VALUES // (k * len(self.parts)))
        views = [self._view(part) for part in self.parts]
        for start in range(0, rows, step):
            chunk = [
                view[start : start + step].to(torch_dtype(part.dtype)).float() * part.scale
                for view, part in zip(views, self.parts, strict=True)
            ]
            yield torch.stack(chunk, dim=1).reshape(-1, k)

    @property
    def amax(self) -> torch.Tensor:
        """Largest magnitude, a float32 scalar.

        Raises:
            ModelError: a value is NaN or infinite.
        """
        extremes = []
        for part in self.parts:
            extreme = torch.stack(torch.aminmax(self._view(part))).abs().max()
            extremes.append(extreme.to(torch_dtype(part.dtype)).float() * abs(part.scale))
            if not torch.isfinite(extremes[-1]):
                raise ModelError(
                    f"weight '{part.stored.name}' holds NaN or Inf and cannot be quantized; repair the checkpoint"
                )
        return torch.stack(extremes).max()

    @staticmethod
    def _view(part: Weight) -> torch.Tensor:
        """The weight as stored, [rows, in_features], on its memory map."""
        array = constant(part.stored)
        stored = as_torch(array if part.expert is None else array[part.expert])
        return (stored.T if part.stored_transposed else stored)[part.rows]


def bias_vector(biases: Sequence[Bias | None], features: int) -> torch.Tensor:
    """The biases [features] of the parts of a matrix, interleaved like its rows; zeros where there is none."""
    vectors = [torch.zeros(features) if bias is None else bias_rows(bias, features) for bias in biases]
    return torch.stack(vectors, dim=1).reshape(-1)


def bias_rows(bias: Bias, features: int) -> torch.Tensor:
    """A bias as it is added, float32 [features]."""
    array = constant(bias.stored)
    stored = as_torch(array if bias.expert is None else array[bias.expert])
    vector = stored.float().reshape(-1) * bias.scale
    return (vector[bias.rows] if vector.numel() > 1 else vector).expand(features)


def initializer(name: str, data: torch.Tensor, dtype: ir.DataType) -> ir.Value:
    """`data` as an initializer of type `dtype`."""
    tensor = ir.Tensor(data.float().numpy().astype(dtype.numpy()), dtype=dtype, name=name)
    return ir.val(name, const_value=tensor)
