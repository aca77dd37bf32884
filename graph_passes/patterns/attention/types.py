"""Attention over a cache before its mask and positions are known, whatever operators it is written in."""

from dataclasses import dataclass

import onnx_ir as ir


class DecoderError(Exception):
    """The model keeps a cache, and one of its nodes does what the decoder contract has no place for."""


@dataclass(frozen=True)
class Rotary:
    """Tables [positions, half of what turns] that an attention operator applies to its queries and keys by itself."""

    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclass(frozen=True)
class CachedAttention:
    """softmax(scale * q k^T + mask) v, where k and v are a cache and what is new.

    `query`, `key` and `value` are [batch, heads, new, head_dim], or [batch, new, heads * head_dim] where `flat` (keys
    and values: and `flat_keys`); a query without a key holds keys and values behind it. Fewer heads of keys and values
    serve groups of queries. `result` has the query's layout.
    """

    node: ir.Node
    query: ir.Value
    key: ir.Value | None
    value: ir.Value | None
    past: tuple[ir.Value, ir.Value]
    present: tuple[ir.Value, ir.Value]
    result: ir.Value
    #: None: 1 / sqrt(head_dim).
    scale: float | None
    flat: bool
    flat_keys: bool = True
    heads: int | None = None
    kv_heads: int | None = None
    rotary: Rotary | None = None
    #: What is added to the scores (float) or says which of them count (bool); None where the operator is causal itself.
    mask: ir.Value | None = None
    #: Most tokens that a query looks back on, itself included, as far as the operator itself says.
    window: int | None = None
