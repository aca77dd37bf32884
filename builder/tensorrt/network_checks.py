"""Compares the network that TensorRT's parser made of a model with it: attention, caches and products.

Imports only Python's library: a bundle carries it to the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Its place among an attention's inputs, behind query, key and value.
_MASK = 3
_TOLERANCE = 1e-3  # of a scale: factors may be kept in 16 bits
_ATTENTION = "_AttentionInput"  # what the parser adds to the node's name
_PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "DECONVOLUTION", "EINSUM", "ATTENTION_INPUT")


@dataclass(frozen=True)
class AttentionNode:
    """An Attention node of the model: whether it has a mask and is causal; its scale, None: 1 / sqrt(head size)."""

    masked: bool
    causal: bool = False
    scale: float | None = None


def network_problems(
    trt: Any, network: Any, attentions: Mapping[str, AttentionNode], caches: Mapping[str, str]
) -> Iterator[str]:
    """The differences. `attentions`: Attention nodes by name; `caches`: inputs that hold a cache and the outputs that
    hold it with the new tokens."""
    if not attentions and not caches:
        return
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    yield from _attention_problems(trt, layers, attentions)
    yield from _cache_problems(trt, layers, caches)


def products(trt: Any, network: Any) -> dict[str, bool]:
    """Layers of matrix products, convolutions and attention, and whether they multiply float32: the network is strongly
    typed, so what TensorRT builds does the same."""
    kinds = {kind for name in _PRODUCTS if (kind := trt.LayerType.__members__.get(name)) is not None}
    layers = (network.get_layer(index) for index in range(network.num_layers))
    found = ((layer.name.removesuffix(_ATTENTION), layer) for layer in layers if layer.type in kinds)
    return {name: layer.get_input(0).dtype == trt.DataType.FLOAT for name, layer in found}


def _attention_problems(trt: Any, layers: list[Any], attentions: Mapping[str, AttentionNode]) -> Iterator[str]:
    kind = trt.LayerType.__members__.get("ATTENTION_INPUT")
    found = {layer.name.removesuffix(_ATTENTION): layer for layer in layers if layer.type == kind}
    factors = _Factors(trt, layers) if found else None
    for name, node in attentions.items():
        layer = found.get(name)
        if layer is None or factors is None:
            continue  # versions without an attention layer spell it out, mask included
        has_mask = layer.num_inputs > _MASK and layer.get_input(_MASK) is not None
        for expected, actual in (
            (_mask(node.masked), _mask(has_mask)),
            *_conditions(trt, layer, node),
            *_scales(layer, node, factors),
        ):
            if expected != actual:
                yield f"node {name!r}: the model's attention has {expected}, TensorRT's has {actual}"


def _mask(there: bool) -> str:
    return "a mask" if there else "no mask"


def _conditions(trt: Any, layer: Any, node: AttentionNode) -> Iterator[tuple[str, str]]:
    """(what the model has, what TensorRT has) of causality, lengths and normalization, in words."""
    typed = getattr(trt, "IAttentionInputLayer", None)
    if typed is None:
        return
    layer.__class__ = typed  # the bindings give out the base class
    attention = layer.attention
    causal = getattr(attention, "causal_kind", None)
    if causal is None:
        causal = "UPPER_LEFT" if attention.causal else "NONE"
    yield f"causality {'UPPER_LEFT' if node.causal else 'NONE'}", f"causality {getattr(causal, 'name', causal)}"
    for name in ("query_lengths", "key_value_lengths"):
        yield f"no {name}", f"{'no ' if getattr(attention, name, None) is None else ''}{name}"
    norm = getattr(attention, "norm_op", None)
    yield "a SOFTMAX", f"a {getattr(norm, 'name', 'SOFTMAX')}"


def _scales(layer: Any, node: AttentionNode, factors: _Factors) -> Iterator[tuple[str, str]]:
    """The scale, which TensorRT's parser multiplies queries and keys by, a root each. Where it put no such product,
    nothing is known."""
    found = [factor for index in (0, 1) if (factor := factors.of(layer.get_input(index))) is not None]
    head_dim = layer.get_input(0).shape[-1]
    if not found or (node.scale is None and head_dim < 1):
        return
    expected = 1 / math.sqrt(head_dim) if node.scale is None else node.scale
    if not math.isclose(actual := math.prod(found), expected, rel_tol=_TOLERANCE):
        yield f"the scale {expected:.6g}", f"the scale {actual:.6g}"


class _Factors:
    """The numbers that layers which the parser put in multiply tensors by."""

    def __init__(self, trt: Any, layers: list[Any]) -> None:
        self._trt, self._kinds = trt, trt.LayerType
        self._producers = {
            layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)
        }

    def of(self, tensor: Any) -> float | None:
        """The factor of the product that gives `tensor`; None for other layers, and for the model's own nodes."""
        layer = self._producers.get(tensor.name)
        if layer is None or layer.type != self._kinds.ELEMENTWISE or layer.metadata:
            return None
        layer.__class__ = self._trt.IElementWiseLayer
        if layer.op != self._trt.ElementWiseOperation.PROD:
            return None
        numbers = [number for index in (0, 1) if (number := self._number(layer.get_input(index))) is not None]
        return numbers[0] if len(numbers) == 1 else None

    def _number(self, tensor: Any) -> float | None:
        """The value of a tensor that is computed from one constant number."""
        layer = self._producers.get(tensor.name)
        if layer is None:
            return None
        if layer.type == self._kinds.CONSTANT:
            layer.__class__ = self._trt.IConstantLayer
            # Weights of types that numpy lacks are not arrays.
            return float(layer.weights.reshape(-1)[0]) if getattr(layer.weights, "size", 0) == 1 else None
        if layer.type in (self._kinds.CAST, self._kinds.UNSQUEEZE, self._kinds.SHUFFLE):
            return self._number(layer.get_input(0))
        if layer.type == self._kinds.UNARY and (number := self._number(layer.get_input(0))) is not None:
            layer.__class__ = self._trt.IUnaryLayer
            operations = self._trt.UnaryOperation
            if layer.op == operations.SQRT and number >= 0:
                return math.sqrt(number)
            if layer.op == operations.RECIP and number:
                return 1 / number
        return None


def _cache_problems(trt: Any, layers: list[Any], caches: Mapping[str, str]) -> Iterator[str]:
    kinds = trt.LayerType.__members__
    updates = [layer for layer in layers if layer.type == kinds.get("KV_CACHE_UPDATE")]
    updated = {(layer.get_input(0).name, layer.get_output(0).name) for layer in updates}
    # A plugin writes into its cache, which the caller binds to one address as input and output.
    for layer in layers:
        if layer.type == kinds.get("PLUGIN_V3"):
            read = [tensor.name for index in range(layer.num_inputs) if (tensor := layer.get_input(index)) is not None]
            updated |= {(name, layer.get_output(index).name) for name in read for index in range(layer.num_outputs)}
    for past, present in caches.items():
        if (past, present) not in updated:
            yield f"cache {past!r}: TensorRT does not update it in place as {present!r}"
