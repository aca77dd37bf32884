"""Weights of equal values become one: torch's dynamo exporter transposes a weight anew for every call of its module."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.ir.computed_tensor import ComputedTensor
from trt_nvfp4.graph_passes.ir.nodes import FLOATS, is_op
from trt_nvfp4.graph_passes.ir.tensors import read_tensor

# So many bytes tell the matrices of different layers apart; only those that agree in them are read in full.
_HEAD = 4096


def unite_copies(graph: ir.Graph) -> None:
    """Makes every MatMul and Gemm that multiplies by a copy of a matrix read the first one.

    Matrices that are computed are weights of their own each, and are left: comparing would compute them all. Matrices
    that anything else reads are left, and so are those that the bodies of control flow read, where nothing is
    replaced, and those of one value throughout, as they need not be copies.
    """
    alike: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
    for value in graph.initializers.values():
        tensor = value.const_value
        if (
            tensor is not None
            and tensor.dtype in FLOATS
            and len(tensor.shape) == 2
            and not isinstance(tensor, ComputedTensor)
            and _is_only_multiplied_by(value, graph)
        ):
            alike[tensor.dtype, tuple(tensor.shape.numpy())].append(value)

    def values_of(value: ir.Value) -> np.ndarray:
        assert value.const_value is not None
        return read_tensor(value.const_value)

    for values in alike.values():
        for candidates in _groups(values, lambda value: _head(values_of(value))):
            for first, *copies in _groups(candidates, lambda value: _digest(values_of(value))):
                for copy in copies if _varies(values_of(first)) else []:
                    copy.replace_all_uses_with(first)


def _is_only_multiplied_by(value: ir.Value, graph: ir.Graph) -> bool:
    """By products of `graph` itself."""
    uses = value.uses()
    multiplied = all(is_op(node, "MatMul", "Gemm") and index == 1 and node.graph is graph for node, index in uses)
    return bool(uses) and not value.is_graph_output() and multiplied


def _groups(values: Iterable[ir.Value], key: Callable[[ir.Value], bytes]) -> Iterator[list[ir.Value]]:
    """Those of two values or more with one key."""
    values = list(values)
    if len(values) < 2:
        return
    groups: defaultdict[bytes, list[ir.Value]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    yield from (group for group in groups.values() if len(group) > 1)


def _head(array: np.ndarray) -> bytes:
    return array.reshape(-1)[: _HEAD // array.itemsize].tobytes()


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(array.tobytes()).digest()


def _varies(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    return bool((flat != flat[0]).any()) if flat.size else False
