"""Tensors of an ONNX file in Torch."""

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from ...errors import BuilderError, ModelFaultError

_TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
}
# Types that NumPy gives by ml_dtypes, which Torch does not read: they go by their bits.
_BITS = {torch.bfloat16: np.int16, torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8}


def torch_type(element: int) -> torch.dtype:
    """Raises ModelFaultError for a type that Torch does not have."""
    try:
        return _TYPES[element]
    except KeyError as error:
        known = ", ".join(TensorProto.DataType.Name(kind).lower() for kind in _TYPES)
        raise ModelFaultError(f"the ONNX type {element} cannot be computed by torch, which has {known}") from error


def torch_tensor(tensor: onnx.TensorProto, folder: Path | None = None) -> Tensor:
    """The tensor on the CPU; external data lies in `folder`. Raises ModelFaultError as `torch_type`."""
    try:
        dtype = torch_type(tensor.data_type)
    except BuilderError as error:
        raise BuilderError(f"tensor {tensor.name}: {error}", error.exit_code) from error
    array = np.require(numpy_helper.to_array(tensor, str(folder or "")), requirements=["C", "W"])
    if (bits := _BITS.get(dtype)) is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(bits)).view(dtype)
