"""Inputs for a model when the user has none at hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from trt_nvfp4.builder.inputs.shapes import derive_opt_shapes
from trt_nvfp4.builder.model.decoder_contract import IDS, NEW_LENGTH, PAST_LENGTH
from trt_nvfp4.calibration.samples.samples import InputSpec


def random_samples(
    specs: Mapping[str, InputSpec],
    vocabulary: Mapping[str, int],
    count: int,
    rng: np.random.Generator,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[dict[str, np.ndarray]]:
    """Inputs that make sense to most models: ids within the vocabulary, masks of ones, rising positions, normal floats.

    Shapes are the derived opt shapes, overridden by `shapes`.
    """
    found = derive_opt_shapes({name: spec.shape for name, spec in specs.items()}, shapes)
    return [
        {
            name: _random_input(name, spec.dtype, found[name], vocabulary.get(name, 2), rng)
            for name, spec in specs.items()
        }
        | _lengths(specs, found)
        for _ in range(count)
    ]


def _lengths(specs: Mapping[str, InputSpec], opt_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """A decoder's lengths for empty caches and prompts without padding."""
    if not {IDS, PAST_LENGTH, NEW_LENGTH} <= set(specs):
        return {}
    batch, tokens = opt_shapes[IDS]
    return {
        PAST_LENGTH: np.zeros(batch, specs[PAST_LENGTH].dtype),
        NEW_LENGTH: np.full(batch, tokens, specs[NEW_LENGTH].dtype),
    }


def vocabulary(model: Path) -> dict[str, int]:
    """Inputs of an ONNX file that look a table up -> its rows."""
    graph = onnx.load(model, load_external_data=False).graph
    tables = {tensor.name: int(tensor.dims[0]) for tensor in graph.initializer if tensor.dims}
    return {
        node.input[1]: tables[node.input[0]]
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in tables
    }


def _random_input(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], limit: int, rng: np.random.Generator
) -> np.ndarray:
    if "mask" in name or dtype == np.bool_:
        return np.ones(shape, dtype)
    if "position" in name and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, limit, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)
