"""Attention over a cache, whatever operators it is written in."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from trt_nvfp4.graph_passes.subgraphs.parts import OBSERVED, RMSNorm
from trt_nvfp4.graph_passes.subgraphs.subgraph import Subgraph


class Layout(Enum):
    """How a tensor holds heads: [batch, new, heads * dim], [batch, new, heads, dim] or [batch, heads, new, dim]."""

    FLAT = "flat"
    TOKENS_FIRST = "tokens_first"
    HEADS_FIRST = "heads_first"


@dataclass(frozen=True)
class Projection:
    """Queries, keys or values of new tokens before norm and rotation: `heads` of one size, in `value`."""

    value: ir.Value
    layout: Layout
    heads: int
    norm: RMSNorm | None = None


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding: tables [positions, rotary_dim / 2] in float32, scaled as the model has it.

    `kind` is one of the ROPE_ constants of `trt_nvfp4.plugins.ops.cached_attention`.
    """

    kind: int
    cos: np.ndarray
    sin: np.ndarray


@dataclass(frozen=True, eq=False)
class CacheAttention:
    """Keys and values are appended to `past` at `past_length`, which gives `present`, and queries attend to them.

    `core` is the Attention or Softmax; `appended` are new keys and values as they are cached, [batch, kv_heads, new,
    head_dim]. `result` is in `result_layout`; `window` counts the query's own token, 0 means all; `sinks` [heads] or
    None; `scale` multiplies products, `softcap` 0 means none. `nodes` compute presents and result and nothing else.
    """

    core: ir.Node
    query: Projection
    key: Projection
    value: Projection
    appended: tuple[ir.Value, ir.Value]
    past: tuple[ir.Value, ir.Value]
    present: tuple[ir.Value, ir.Value]
    past_length: ir.Value
    result: ir.Value
    result_layout: Layout
    head_dim: int
    capacity: int
    rotation: Rotation
    sinks: np.ndarray | None
    window: int
    scale: float
    softcap: float
    nodes: tuple[ir.Node, ...]

    @property
    def norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Those of queries and keys: both or none."""
        if self.query.norm is None or self.key.norm is None:
            return None
        return self.query.norm, self.key.norm


@dataclass(frozen=True, kw_only=True)
class AttentionSubgraph(Subgraph):
    """Attention over a cache; `attention` is None for one that cannot be replaced.

    `shapes`: heads, kv_heads, head_dim, capacity, window (0: none); none for one that cannot be replaced.
    """

    kind = "attention"

    attention: CacheAttention | None

    @property
    def op(self) -> str:
        return "CachedAttention"

    @property
    def linear_inputs(self) -> list[str]:
        """The names of the new keys and values, as they are cached."""
        if self.attention is None:
            return []
        return [str(value.meta.get(OBSERVED, value.name)) for value in self.attention.appended]
