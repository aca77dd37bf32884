"""Whether the network that TensorRT's parser made of a model attends and caches as the model does.

Imports Python's library alone: a bundle carries it to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MASK = 3  # its place among an attention's inputs, behind query, key and value


def network_problems(
    trt: Any, network: Any, attentions: Mapping[str, bool], caches: Mapping[str, str]
) -> Iterator[str]:
    """What differs. `attentions`: names of Attention nodes and whether each has a mask; `caches`: inputs that hold a
    cache and the outputs that hold it with the new tokens."""
    if not attentions and not caches:
        return
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    yield from _attention_problems(trt, layers, attentions)
    yield from _cache_problems(trt, layers, caches)


def _attention_problems(trt: Any, layers: list[Any], attentions: Mapping[str, bool]) -> Iterator[str]:
    kind = trt.LayerType.__members__.get("ATTENTION_INPUT")
    found = {layer.name.removesuffix("_AttentionInput"): layer for layer in layers if layer.type == kind}
    for name, masked in attentions.items():
        layer = found.get(name)
        if layer is None:
            continue  # versions without an attention layer spell it out, mask included
        has_mask = layer.num_inputs > _MASK and layer.get_input(_MASK) is not None
        if has_mask != masked:
            yield f"node {name!r}: the model's attention has {_mask(masked)}, TensorRT's has {_mask(has_mask)}"


def _mask(there: bool) -> str:
    return "a mask" if there else "no mask"


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
