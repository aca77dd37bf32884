"""Names of a decoder's caches: two tensors a layer, or one of several layers that one plugin computes; and states."""

from __future__ import annotations

import re

# Before them stands, in a graph of all ranks of a split model, the rank's name.
_PAST = re.compile(r"(rank\d+\.)?past_(key_values|states)\.")
_PRESENT = re.compile(r"(rank\d+\.)?present(_states)?\.")
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


def state_names(name: str) -> tuple[str, str]:
    """(input, output) of a state that a layer keeps in place of every token's keys and values, [batch, ...]."""
    return f"past_states.{name}", f"present_states.{name}"


def is_past(name: str) -> bool:
    """Whether an input is a cache or a state."""
    return _PAST.match(name) is not None


def is_state(name: str) -> bool:
    """Whether an input of which `is_past` holds is a state."""
    return "past_states." in name


def is_present(name: str) -> bool:
    """Whether an output is a cache with the new tokens, or the state behind them."""
    return _PRESENT.match(name) is not None


def present_of(name: str) -> str:
    """The output that belongs to a cache's or a state's input."""
    return name.replace("past_key_values.", "present.", 1).replace("past_states.", "present_states.", 1)
