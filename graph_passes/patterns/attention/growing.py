"""Values inside a decoder whose caches grow, computed by ONNX Runtime for a chosen length of its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.graph_passes.patterns.attention.evaluate import in_memory

#: New tokens of one sequence that values are computed for.
NEW = 3


def computed(
    model: ir.Model, values: Sequence[ir.Value], length: int, past: Mapping[str, tuple[int, int]]
) -> list[np.ndarray]:
    """What `values` are for `NEW` tokens of one sequence behind `length` cached ones, all of them valid.

    `past`: (kv_heads, head_dim) of the caches by name; they hold zeros. Raises ONNX Runtime's own errors.
    """
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None
        if value.name in past:
            heads, dim = past[value.name]
            assert value.dtype is not None
            feeds[value.name] = np.zeros((1, heads, length, dim), value.dtype.numpy())
        elif "mask" in value.name:
            feeds[value.name] = np.ones((1, length + NEW), np.int64)
        elif "position" in value.name:
            positions = np.arange(length, length + NEW)
            feeds[value.name] = positions if len(value.shape or ()) == 1 else positions[None]
        else:
            feeds[value.name] = np.zeros((1, NEW), np.int64)
    part = extract(model.graph, list(model.graph.inputs), list(values))
    proto = in_memory(part, model.ir_version)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    taken = {entry.name for entry in session.get_inputs()}
    found: list[np.ndarray] = session.run(
        [value.name for value in values], {name: array for name, array in feeds.items() if name in taken}
    )
    return found
