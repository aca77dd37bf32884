"""Values inside a decoder whose caches grow, computed by ONNX Runtime for chosen lengths of its caches."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.graph_passes.patterns.attention.evaluate import in_memory

#: New tokens of one sequence that values are computed for.
NEW = 3


def computed(
    model: ir.Model, values: Sequence[ir.Value], lengths: Sequence[int], past: Mapping[str, tuple[int, int]]
) -> list[list[np.ndarray]]:
    """`values` for `NEW` tokens of one sequence behind each of `lengths` cached ones, all of them valid.

    `past`: (kv_heads, head_dim) of the caches by name; they hold zeros. Raises ONNX Runtime's own errors.
    """
    part = extract(model.graph, list(model.graph.inputs), list(values))
    proto = in_memory(part, model.ir_version)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    taken = {entry.name for entry in session.get_inputs()}
    inputs = [value for value in model.graph.inputs if value.name in taken]

    def feeds(length: int) -> dict[str, np.ndarray]:
        found = {}
        for value in inputs:
            name = str(value.name)
            if name in past:
                assert value.dtype is not None
                heads, dim = past[name]
                found[name] = np.zeros((1, heads, length, dim), value.dtype.numpy())
            else:
                found[name] = given(name, len(value.shape or (1, 1)), length, np.zeros((1, NEW), np.int64))
        return found

    return [session.run([value.name for value in values], feeds(length)) for length in lengths]


def given(name: str, rank: int, length: int, ids: np.ndarray) -> np.ndarray:
    """The value of an input other than a cache for the tokens `ids` [1, new] behind `length` cached ones, by its name:
    a mask of valid tokens, positions, or the tokens."""
    total = length + ids.shape[1]
    if "mask" in name:
        return np.ones((1, total), np.int64)
    if "position" in name:
        positions = np.arange(length, total)
        return positions if rank == 1 else np.broadcast_to(positions, (3,) * (rank - 2) + (1, len(positions)))
    return ids
