"""Sparse initializers and Constants become dense ones, which are all that the passes and TensorRT know."""

import math

import numpy as np
import onnx
from onnx import numpy_helper

from trt_nvfp4.common.nested_graphs import nested

# Bytes of a dense tensor; a few bytes of a sparse one may stand for any size.
_LARGEST = 2 << 30


def densify(proto: onnx.ModelProto) -> None:
    """Makes every sparse initializer and Constant of `proto` a dense one.

    Raises:
        ValueError: indices or values that do not fit the dimensions, or more than 2 GiB of values. The message names
            the tensor.
    """
    for graph in nested(proto.graph):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        graph.ClearField("sparse_initializer")
    for holder in (*nested(proto.graph), *proto.functions):
        for node in holder.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    dense = _dense(attribute.sparse_tensor)
                    attribute.CopyFrom(onnx.helper.make_attribute("value", dense))


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name, dims = sparse.values.name, list(sparse.dims)
    try:
        if any(dim < 0 for dim in dims):
            raise ValueError("a dimension is negative")
        values, indices = (numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
        if math.prod(dims) * values.itemsize > _LARGEST:
            raise ValueError("it is larger than 2 GiB when dense; save it as a dense initializer in external data")
        flat = np.ravel_multi_index(tuple(indices.T), dims) if indices.ndim == 2 else indices
        dense = np.zeros(math.prod(dims), values.dtype)
        if flat.shape != values.shape or (flat < 0).any():
            raise ValueError(f"it has {values.size} values and indices of shape {list(indices.shape)}")
        dense[flat] = values
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"sparse tensor '{name}' of shape {dims} is damaged: {error}") from error
    return numpy_helper.from_array(dense.reshape(dims), name)
