"""The type that a network computes in outside of its quantized subgraphs, and what stays float32 in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

#: What `--activations` takes.
ACTIVATIONS = ("auto", "bf16", "fp16", "keep")
_TYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}


@dataclass(frozen=True)
class Activations:
    """How a float32 network is computed; the top-level key `activations` of a plan.

    `type`: "bf16" or "fp16", or "keep": as in the model. `float32`: by reason, the nodes that stay float32. `note` says
    why a float32 model is kept as it is, where it is.
    """

    type: str = "keep"
    float32: Mapping[str, list[str]] = field(default_factory=dict)
    note: str = ""

    @property
    def dtype(self) -> ir.DataType | None:
        """The 16-bit type; None for "keep"."""
        return _TYPES.get(self.type)

    @property
    def float32_nodes(self) -> dict[str, str]:
        """Reason by node."""
        return {node: reason for reason, nodes in self.float32.items() for node in nodes}
