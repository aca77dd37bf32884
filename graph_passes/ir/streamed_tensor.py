"""Tensors that are computed while they are written."""

from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch


class StreamedTensor(ir.LazyTensor):
    """An initializer whose bytes are computed when it is written, piece by piece."""

    def __init__(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], pieces: Callable[[], Iterator[torch.Tensor]]
    ):
        self.pieces = pieces
        self.on_write: Callable[[int], None] | None = None  # called with the bytes of each piece written
        super().__init__(self._collect, dtype=dtype, shape=ir.Shape(shape), name=name)

    def _collect(self) -> ir.TensorProtocol:
        data = b"".join(_bytes(piece) for piece in self.pieces())
        if self.dtype.bitwidth < 8:
            return ir.PackedTensor(np.frombuffer(data, np.uint8), self.dtype, shape=self.shape, name=self.name)
        array = np.frombuffer(data, self.dtype.numpy()).reshape(self.shape.numpy())
        return ir.Tensor(array, dtype=self.dtype, name=self.name)

    def tofile(self, file: BinaryIO) -> None:
        """Writes the tensor, one piece in memory at a time."""
        for piece in self.pieces():
            written = file.write(_bytes(piece))
            if self.on_write is not None:
                self.on_write(written)


def _bytes(piece: torch.Tensor) -> memoryview:
    return piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
