"""AWQ's channel scales s folded into the model: what makes x is divided by s, what reads x is multiplied by it.

Two places take them exactly: the weight of the norm in front of linears, where nothing but linears reads what it gives,
and the rows of `up` in front of `down` (Lin et al., arXiv 2306.00978, section 3.2). The model computes what it did
before, to rounding; its weights are then quantized like any others.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import get_const_tensor

from trt_nvfp4.calibration.device import device
from trt_nvfp4.calibration.recipes import SEARCHED_ROWS, Recipe, channel_scales
from trt_nvfp4.calibration.statistics.statistics import Statistics
from trt_nvfp4.graph_passes.ir.last_axis import keeps_last_axis
from trt_nvfp4.graph_passes.ir.nodes import is_op, operand, optional_operand, rank
from trt_nvfp4.graph_passes.patterns.rms_norm import match_rms_norm
from trt_nvfp4.graph_passes.subgraphs.parts import Bias, FirstProducts, Linear, Mlp, Weight
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph
from trt_nvfp4.graph_passes.subgraphs.values import Matrix, constant
from trt_nvfp4.plugins.ops import GATED_ONLY

# h = act(gate) * up and h = act(up): up's factor that divides h by s, as a power of s. Others do not commute with s.
_POWER_WITHOUT_GATE = {"identity": 1.0, "relu": 1.0, "relu2": 0.5}
_NOT_WITH_GATE = tuple(activation.name.lower() for activation in GATED_ONLY)
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
# Values that are float32 at a time.
_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class _Norm:
    """y = normalized * (weight + offset) + bias."""

    weight: ir.Value
    offset: float
    bias: ir.Value | None


@dataclass(frozen=True)
class Folding:
    """One s. `readers` are quantized, each list one matrix as the plugins hold it; `others` read the same x and stay
    as they are. What precedes: `norm`, or the `up` of MLPs, divided by s^power."""

    readers: list[list[Linear]]
    others: list[Linear]
    norm: _Norm | None = None
    ups: tuple[Linear, ...] = ()
    power: float = 1.0

    @property
    def tensor(self) -> str:
        """The name of x, as the first reader sees it."""
        return self.readers[0][0].observed


def find_foldings(subgraphs: Sequence[Subgraph]) -> tuple[list[Folding], dict[str, list[str]]]:
    """Where s can be folded for `subgraphs`, all of those that get NVFP4 weights; and by name why not elsewhere."""
    foldings: list[Folding] = []
    unsupported: dict[str, dict[str, None]] = {subgraph.name: {} for subgraph in subgraphs}
    roots: dict[ir.Value, list[tuple[Subgraph, FirstProducts]]] = {}
    for subgraph in subgraphs:
        hidden: dict[ir.Value, list[Mlp]] = {}
        for mlp in subgraph.mlps:
            hidden.setdefault(mlp.down.x, []).append(mlp)
        for mlps in hidden.values():
            found = _hidden(mlps)
            if isinstance(found, Folding):
                foldings.append(found)
            else:
                unsupported[subgraph.name][f"hidden channels: {found}"] = None
        for first in subgraph.first_products:
            roots.setdefault(_root(first.x), []).append((subgraph, first))
    for root, uses in roots.items():
        readers = [linears for _, first in uses for linears in first.matrices]
        others = [linear for _, first in uses for linear in first.beside if _root(linear.x) is root]
        nodes = {node for _, first in uses for node in first.nodes}
        inside = nodes.union(*(linear.nodes for linear in others), *(part.nodes for parts in readers for part in parts))
        found = _at_norm(root, readers, others, frozenset(inside))
        if isinstance(found, Folding):
            foldings.append(found)
        else:
            for subgraph, _ in uses:
                unsupported[subgraph.name][f"input channels: {found}"] = None
    return foldings, {name: list(reasons) for name, reasons in unsupported.items() if reasons}


def fold(foldings: Sequence[Folding], recipe: Recipe, statistics: Statistics) -> Statistics:
    """Searches every s and folds it, in place. Changed weights lie in temporary files, mapped into memory. Returns the
    statistics after it, without those of quantized activations."""
    weights = _WritableWeights()
    amax, arrays = dict(statistics.amax), dict(statistics.arrays)
    for folding in foldings:
        known = [statistics.of(linears[0].observed) for linears in folding.readers]
        matrices = [_searched_rows(linears).to(device()) for linears in folding.readers]
        scales = channel_scales(list(zip(matrices, known, strict=True)), recipe).cpu()
        for linear in (*(linear for linears in folding.readers for linear in linears), *folding.others):
            weights.scale(linear.weight, scales)
        if folding.norm is not None:
            weights.divide_norm(folding.norm, scales)
        for up in folding.ups:
            weights.scale(up.weight, (scales**-folding.power)[:, None])
            if up.bias is not None:
                weights.scale_bias(up.bias, scales**-folding.power)
        for linears in folding.readers:
            name = linears[0].observed
            inputs = statistics.of(name).divided(scales)
            assert inputs.amax is not None
            amax[name] = inputs.amax
            kept = {kind: getattr(inputs, kind) for kind in statistics.arrays[name]}
            arrays[name] = {kind: value.numpy() for kind, value in kept.items() if value is not None}
    return Statistics(amax, statistics.samples, arrays, rows=statistics.rows)


def _searched_rows(linears: Sequence[Linear]) -> torch.Tensor:
    matrix = Matrix([linear.weight for linear in linears], interleaved=False)
    step = -(-matrix.shape[0] // SEARCHED_ROWS)
    return torch.cat([chunk[::step] for chunk in matrix.chunks()])


def _hidden(mlps: Sequence[Mlp]) -> Folding | str:
    """Of MLPs whose `down` reads one tensor; or what is in the way."""
    first = mlps[0]
    if first.gate is None:
        power = _POWER_WITHOUT_GATE.get(first.activation)
    else:
        power = None if first.activation in _NOT_WITH_GATE else 1.0
    if power is None:
        return f"{first.activation}, which stands between up and down, does not commute with scaling"
    ups = tuple(mlp.up for mlp in mlps)
    for linear in (*ups, *(mlp.down for mlp in mlps)):
        if linear.shares_weight:
            return f"weight '{linear.weight.stored.name}' is used more than once"
    for bias in (up.bias for up in ups if up.bias is not None):
        if constant(bias.stored).size == 1 or len(bias.stored.uses()) > 1:
            return f"bias '{bias.stored.name}' is used more than once"
    return Folding([[mlp.down] for mlp in mlps], [], ups=ups, power=power)


def _root(x: ir.Value) -> ir.Value:
    """x before it was given another shape."""
    features = _features(x)
    while (node := x.producer()) is not None and is_op(node, *_RESHAPES) and _features(operand(node, 0)) == features:
        x = operand(node, 0)
    return x


def _features(x: ir.Value) -> int | None:
    return x.shape[-1] if x.shape is not None and len(x.shape) > 0 and isinstance(x.shape[-1], int) else None


def _at_norm(
    y: ir.Value, readers: list[list[Linear]], others: list[Linear], inside: frozenset[ir.Node]
) -> Folding | str:
    """For the linears that read what a norm gives; `inside` are the nodes that may read it. Or what is in the way."""
    norm = _match_norm(y, readers[0][0].weight.shape[1])
    if isinstance(norm, str):
        return norm
    values = [y]
    while values:
        value = values.pop()
        if value.is_graph_output():
            return f"'{value.name}' is an output of the graph"
        # Not a set, whose order differs from run to run: the reason names the first in the way.
        for node in dict.fromkeys(use.node for use in value.uses() if use.node not in inside):
            if is_op(node, *_RESHAPES) and keeps_last_axis(node, readers[0][0].weight.shape[1]):
                values.append(node.outputs[0])
            elif not is_op(node, "Shape"):
                return f"'{y.name}' is also read by node '{node.name}' ({node.op_type})"
    for linear in (*(linear for linears in readers for linear in linears), *others):
        if linear.shares_weight:
            return f"weight '{linear.weight.stored.name}' is used more than once"
    if any(not other.weight.stored.is_initializer() for other in others):
        return "a router's weight is not an initializer"
    return Folding(readers, others, norm=norm)


def _match_norm(y: ir.Value, features: int) -> _Norm | str:
    node = y.producer()
    bias: ir.Value | None = None
    if is_op(node, "LayerNormalization"):
        dimensions = rank(y)
        if node.attributes.get_int("axis", -1) not in (-1, None if dimensions is None else dimensions - 1):
            return f"the norm '{node.name}' is not over the last axis"
        weight, offset, bias = operand(node, 1), 0.0, optional_operand(node, 2)
    elif (norm := match_rms_norm(y, features)) is not None:
        if norm.weight is None:
            return f"the norm in front, which gives '{y.name}', has no weight"
        weight, offset = norm.weight, norm.offset
        value = y
        while is_op(step := value.producer(), "Cast", "Identity"):
            value = operand(step, 0)
            if len(value.uses()) > 1:
                return f"'{value.name}' is read more than once"
    else:
        return "they do not come from a norm" + ("" if node is None else f" but from {node.op_type}")
    for stored in (weight,) if bias is None else (weight, bias):
        if not stored.is_initializer() or len(stored.uses()) > 1:
            return f"the norm's '{stored.name}' is used more than once, or computed"
    return _Norm(weight, offset, bias)


class _WritableWeights:
    """Constants that may be changed: each is copied to a file when it first is. The file goes when nothing maps it."""

    def __init__(self) -> None:
        self._arrays: dict[ir.Value, np.ndarray] = {}

    def scale(self, weight: Weight, factors: torch.Tensor) -> None:
        """Multiplies W [out, in] by factors that broadcast to it."""
        array = self._writable(weight.stored)
        array = array if weight.expert is None else array[weight.expert]
        _multiply((array.T if weight.stored_transposed else array)[weight.rows], factors)

    def scale_bias(self, bias: Bias, factors: torch.Tensor) -> None:
        """Multiplies b [out]."""
        array = self._writable(bias.stored)
        array = array if bias.expert is None else array[bias.expert]
        _multiply(array.reshape(-1)[bias.rows], factors)

    def divide_norm(self, norm: _Norm, scales: torch.Tensor) -> None:
        """(weight + offset) / s and bias / s."""
        weight = self._writable(norm.weight).reshape(-1)
        weight[:] = (weight.astype(np.float32) + norm.offset) / scales.numpy() - norm.offset
        if norm.bias is not None:
            _multiply(self._writable(norm.bias).reshape(-1), scales.reciprocal())

    def _writable(self, value: ir.Value) -> np.ndarray:
        if value not in self._arrays:
            stored, tensor = constant(value), get_const_tensor(value)
            assert tensor is not None
            with tempfile.TemporaryFile() as file:
                array = np.memmap(file, stored.dtype, "w+", shape=stored.shape)
            array[...] = stored
            value.const_value = ir.Tensor(array, dtype=tensor.dtype, name=value.name)
            self._arrays[value] = array
        return self._arrays[value]


def _multiply(view: np.ndarray, factors: torch.Tensor) -> None:
    """In place, in float32, some rows at a time."""
    step = max(1, _CHUNK_VALUES // max(1, view[:1].size))
    whole = np.broadcast_to(factors.numpy(), view.shape)
    for start in range(0, len(view), step):
        part = slice(start, start + step)
        view[part] = view[part].astype(np.float32) * whole[part]
