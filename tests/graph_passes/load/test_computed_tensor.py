"""Weights that are computed when they are read: each value once."""

import io

import numpy as np
import onnx_ir as ir
import torch

from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor


def test_how_often_a_stack_is_computed() -> None:
    values, computed = torch.arange(24.0).reshape(4, 3, 2), list[object]()

    def read() -> torch.Tensor:
        computed.append("all")
        return values

    def part(index: int) -> torch.Tensor:
        computed.append(index)
        return values[index]

    def written(tensor: ComputedTensor) -> np.ndarray:
        computed.clear()
        tensor.tofile(file := io.BytesIO())
        return np.frombuffer(file.getvalue(), np.float32).reshape(tensor.shape.numpy())

    whole = ComputedTensor("whole", ir.DataType.FLOAT, values.shape, read)
    by_parts = ComputedTensor("parts", ir.DataType.FLOAT, values.shape, read, part)
    for tensor, times in (
        (whole, ["all"]),
        (by_parts, [0, 1, 2, 3]),
        (by_parts.picked("some", 1, 3, True), [1, 2]),
        (by_parts.reshaped((4, 1, 6)), [0, 1, 2, 3]),
        (by_parts.reshaped((2, 2, 6)), ["all"]),
    ):
        expected = values[1:3] if tensor.name == "some" else values
        np.testing.assert_array_equal(written(tensor).ravel(), expected.numpy().ravel())
        assert computed == times
