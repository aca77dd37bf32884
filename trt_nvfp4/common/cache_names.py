"""Names of a decoder's caches: two tensors a layer, or one of several layers that one plugin computes."""

from __future__ import annotations

import re

_STACKED = re.compile(r"past_key_values\.(\d+)-(\d+)")


def layer_names(layer: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """(inputs, outputs) of keys and values of one layer, [batch, kv_heads, capacity, head_dim] each."""
    past, present = f"past_key_values.{layer}", f"present.{layer}"
    return (f"{past}.key", f"{past}.value"), (f"{present}.key", f"{present}.value")


def stacked_names(first: int, last: int) -> tuple[str, str]:
    """(input, output) of the caches of layers `first` to `last` in one tensor, [layers, 2, batch, kv_heads, capacity,
    head_dim], keys before values."""
    return f"past_key_values.{first}-{last}", f"present.{first}-{last}"


def stacked_layers(name: str) -> tuple[int, int] | None:
    """(first, last) of an input named as `stacked_names` does; None for another."""
    found = _STACKED.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))
