"""Inputs of plugin nodes that compute MLPs: dense ones, stacks of layers, and the experts of a mixture."""

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch
from torch.nn.functional import pad

from trt_nvfp4.graph_passes.subgraphs.parts import Linear, Mlp
from trt_nvfp4.graph_passes.subgraphs.values import bias_vector, initializer

#: Makes the initializers of one projection, by the rest of their inputs' names (weight, ...), from the MLPs, whether it
#: is down (otherwise gate and up), whether each gets a leading dimension, and the names' beginning.
MakeWeights = Callable[[Sequence[Mlp], bool, bool, str], Mapping[str, ir.Value]]

#: The order of the rows of gate and of up, or of down (whether it is), where it is not the model's.
RowOrder = Callable[[Mlp, bool], torch.Tensor | None]


def linears_of(mlp: Mlp, is_down: bool) -> Sequence[Linear]:
    """Those whose weights' rows interleave in one projection."""
    return mlp.linears[-1:] if is_down else mlp.linears[:-1]


def mlp_inputs(
    mlps: Sequence[Mlp],
    prefix: str,
    stacked: bool,
    make: MakeWeights,
    up: str = "gate_up",
    added: int = 0,
    row_order: RowOrder = lambda *_: None,
) -> dict[str, ir.Value]:
    """Weights, their scales and biases of `mlps`, one matrix each for gate and up, as `up`, and for down.

    `added`: rows of gate and of up beyond those of the model, which `make` has filled; their biases are 0.
    """
    inputs: dict[str, ir.Value] = {}
    for key, is_down in ((up, False), ("down", True)):
        inputs |= {f"{key}_{part}": value for part, value in make(mlps, is_down, stacked, f"{prefix}{key}").items()}
        parts = [linears_of(mlp, is_down) for mlp in mlps]
        rows = [bias_vector([linear.bias for linear in linears], linears[0].weight.shape[0]) for linears in parts]
        for number, mlp in enumerate(mlps):
            if (order := row_order(mlp, is_down)) is not None:
                rows[number] = rows[number].view(len(order), -1)[order].reshape(-1)
        if not is_down:
            rows = [pad(row, (0, added * len(linears))) for row, linears in zip(rows, parts, strict=True)]
        data = torch.stack(rows) if stacked else rows[0]
        inputs[f"{key}_bias"] = initializer(f"{prefix}{key}_bias", data, parts[0][0].weight.dtype)
    return inputs
