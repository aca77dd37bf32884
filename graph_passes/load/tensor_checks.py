"""Checks that a model's tensors hold the values that their type and shape need.

ONNX's readers take a tensor without values for zeros, and its shape inference ends the process at negative dimensions.
"""

import math

import onnx
import onnx_ir as ir
from onnx.external_data_helper import uses_external_data

from trt_nvfp4.common.external_data import tensors

_TYPED_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# Two entries of a field hold a complex number; one entry, a byte of 4-bit and 2-bit numbers.
_COMPLEX = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
# onnx before 1.20 does not know 2 bits.
_PACKED = {
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2")
}


def check_tensors(proto: onnx.ModelProto) -> None:
    """Checks every tensor of `proto`; external data is checked where it is found (see `external_files`).

    Raises:
        ValueError: a negative dimension, an unknown type, or more or fewer values than the shape needs. The message
            names the tensor.
    """
    for tensor in tensors(proto):
        if any(dimension < 0 for dimension in tensor.dims):
            raise ValueError(f"tensor '{tensor.name}' has a negative dimension: {list(tensor.dims)}")
        if uses_external_data(tensor):
            continue
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != (needed := _bytes(tensor)):
                raise ValueError(f"tensor '{tensor.name}' needs {needed} bytes, it has {len(tensor.raw_data)}")
        else:
            _check_typed(tensor)


def _bytes(tensor: onnx.TensorProto) -> int:
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError) as error:
        raise ValueError(f"tensor '{tensor.name}' is damaged: {error}") from error
    return int(-(-math.prod(tensor.dims) * bits // 8))


def _check_typed(tensor: onnx.TensorProto) -> None:
    """The values lie in the field that belongs to the type, and in no other."""
    try:
        expected = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    except KeyError:
        raise ValueError(f"tensor '{tensor.name}' is damaged: it has no known type") from None
    needed = math.prod(tensor.dims)
    if tensor.data_type in _PACKED:
        needed = _bytes(tensor)
    elif tensor.data_type in _COMPLEX:
        needed *= 2
    for name in _TYPED_FIELDS:
        found, wanted = len(getattr(tensor, name)), needed if name == expected else 0
        if found != wanted:
            raise ValueError(
                f"tensor '{tensor.name}' of shape {list(tensor.dims)} needs {wanted} values in its {name}, it has "
                f"{found}; save the model with all its weights"
            )
