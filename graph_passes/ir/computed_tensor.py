"""Weights that are computed whenever they are read: dequantized, or put together of several tensors of a checkpoint."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.streamed_tensor import StreamedTensor

# A stack has matrices as parts.
_STACK = 3


class ComputedTensor(StreamedTensor):
    """A constant that `read` computes; none of its values is kept. `part` computes only `read()[index]`."""

    def __init__(
        self,
        name: str,
        dtype: ir.DataType,
        shape: Sequence[int],
        read: Callable[[], torch.Tensor],
        part: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._read, self._part = read, part
        super().__init__(name, dtype, shape, self._pieces)

    def numpy(self) -> np.ndarray:
        """The values; a view of what `read` returned."""
        return _as_numpy(self._read(), self.dtype)

    def part(self, index: int) -> np.ndarray:
        """The values at `index` of the first axis."""
        return _as_numpy(self._at(index), self.dtype)

    def reshaped(self, shape: Sequence[int]) -> "ComputedTensor":
        """The same values in another shape."""
        part = None
        if self._part is not None and len(shape) > 1 and shape[0] == self.shape.numpy()[0]:
            part = lambda index: self._at(index).reshape(tuple(shape[1:]))  # noqa: E731
        return ComputedTensor(self.name or "", self.dtype, shape, lambda: self._read().reshape(tuple(shape)), part)

    def picked(self, name: str, begin: int, end: int, kept: bool) -> "ComputedTensor":
        """`begin` to `end` of the first axis, or, where the axis is not `kept`, the values at `begin`."""
        rest = self.shape.numpy()[1:]
        if not kept:
            return ComputedTensor(name, self.dtype, rest, lambda: self._at(begin))
        part = None if self._part is None else lambda index: self._at(begin + index)
        return ComputedTensor(name, self.dtype, (end - begin, *rest), lambda: self._read()[begin:end], part)

    def _at(self, index: int) -> torch.Tensor:
        return self._read()[index] if self._part is None else self._part(index)

    def _pieces(self) -> Iterator[torch.Tensor]:
        shape = self.shape.numpy()
        if len(shape) < _STACK or self._part is None:  # each part would read all
            yield self._read()
        else:
            yield from map(self._at, range(shape[0]))

    def _collect(self) -> ir.TensorProtocol:
        return ir.Tensor(self.numpy(), dtype=self.dtype, name=self.name)


def _as_numpy(tensor: torch.Tensor, dtype: ir.DataType) -> np.ndarray:
    """`tensor` without a copy; of types that Torch does not hand to NumPy, by their bits."""
    bits = {1: torch.int8, 2: torch.int16}.get(tensor.element_size())
    array: np.ndarray = tensor.detach().numpy() if bits is None else tensor.detach().view(bits).numpy()
    return array.view(dtype.numpy())
