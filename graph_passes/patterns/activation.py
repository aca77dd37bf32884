"""Names the function that a region between linears computes, from its values."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from trt_nvfp4.graph_passes.patterns.elementwise import Region
from trt_nvfp4.plugins.ops.activation import GATED_ONLY, Activation, activate

# Those that stand between two linears; identity is served only as a gate, and clamped ones are matched apart.
_SERVED = [a for a in Activation if a not in (Activation.IDENTITY, *GATED_ONLY)]
# GELU's erf and tanh forms differ by 4.7e-4; constants rounded to bfloat16 move either by up to 1e-3.
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 2e-3
# Dense about 0, where activations differ in shape, and on either side of it, where a threshold may be; then to the end
# of float32's range, where a clamp may begin.
_RANGES = (-6, -2, 100), (1, 5, 400), (5, 38.5, 100)  # powers of ten, points
_POSITIVE = torch.cat([torch.logspace(low, high, count, dtype=torch.float64) for low, high, count in _RANGES])
_POINTS = torch.cat((-_POSITIVE, torch.linspace(-10, 10, 1001, dtype=torch.float64), _POSITIVE))


@dataclass(frozen=True)
class Recognized:
    """A region's function: `activation` of leaf `gate` (times leaf `up` where given).

    `unsupported` says why a region that looks like an activation is not served; `activation` then lists its operators.
    """

    activation: str
    gate: int
    up: int | None = None
    alpha: float = 1.702
    limit: float = 7.0
    unsupported: str | None = None


def recognize(region: Region) -> Recognized | None:
    """The activation of one value, or the gate of two, that `region` computes; None for other functions."""
    if len(region.leaves) == 1:
        return _recognize_plain(region)
    if len(region.leaves) == 2:
        return _recognize_gated(region)
    return None


def _recognize_plain(region: Region) -> Recognized | None:
    y = region.evaluate(_POINTS)
    one = torch.ones_like(_POINTS)
    low, high = region.evaluate(torch.tensor([0, 10], dtype=torch.float64))
    if _distance(y, low + (high - low) * _POINTS / 10, one) < _TOLERANCE:
        return None  # a linear function is not an activation
    activation = _nearest(region, y, _POINTS, one)
    return Recognized(activation, 0) if activation else _unserved(region, None)


def _recognize_gated(region: Region) -> Recognized | None:
    leaves = _POINTS, _POINTS[torch.randperm(len(_POINTS), generator=torch.Generator().manual_seed(0))]
    h = region.evaluate(*leaves)
    for gate, up in ((0, 1), (1, 0)):
        g, u = leaves[gate], leaves[up]
        activation = _nearest(region, h, g, u)
        if activation is None and _distance(h, g, u) < _TOLERANCE:
            activation = "identity"
        if activation is not None:
            return Recognized(activation, gate, up)
        clamped = _match_clamped(region, h, g, u)
        if clamped is not None:
            name, alpha, limit = clamped
            return Recognized(name, gate, up, alpha, limit)
    return _unserved(region, 1) if region.multiplies_leaves else None


def _match_clamped(
    region: Region, h: torch.Tensor, g: torch.Tensor, u: torch.Tensor
) -> tuple[str, float, float] | None:
    """The clamped activation by which h is computed from gate g and up u, its alpha and its limit, the region's.

    silu clamped behind instead of before differs by less than the tolerance from limits of 10 on.
    """
    candidates = sorted({value for value in region.constants.values() if 0 < value < math.inf})
    for limit in candidates:
        clipped, other = torch.clip(g, max=limit), torch.clip(u, -limit, limit)
        if _distance(h, functional.silu(clipped), other) < _TOLERANCE:
            return "silu_clamped", Recognized.alpha, limit
        for alpha in candidates:
            if _distance(h, clipped * torch.sigmoid(alpha * clipped), other + 1) < _TOLERANCE:
                return "swiglu_clamped", alpha, limit
    return None


def _nearest(region: Region, h: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> str | None:
    """The served activation for which act(g) * u is nearest to h, within the tolerance of the region's constants."""
    op_types = {node.op_type for node in region.nodes}
    foreign = {Activation.GELU: "Tanh", Activation.GELU_TANH: "Erf"}
    distances = {a: _distance(h, activate(a, g), u) for a in _SERVED if foreign.get(a) not in op_types}
    nearest = min(distances, key=distances.__getitem__)
    return (
        nearest.name.lower()
        if distances[nearest] < (_TOLERANCE_HALF if region.half_constants else _TOLERANCE)
        else None
    )


def _unserved(region: Region, up: int | None) -> Recognized:
    served = ", ".join(a.name.lower() for a in (*_SERVED, *([] if up is None else GATED_ONLY)))
    return Recognized(
        region.operators, 0, up, unsupported=f"its activation ({region.operators}) is not one of {served}"
    )


def _distance(h: torch.Tensor, f: torch.Tensor, u: torch.Tensor) -> float:
    """Largest difference of h from f * u, relative where f or u are above 1; infinite where it is not a number."""
    difference = ((h - f * u).abs() / ((1 + f.abs()) * u.abs().clamp_min(1))).max().item()
    return math.inf if math.isnan(difference) else difference
