"""A plugin host for machines without a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS


class ReferenceHost:
    """Stands for the plugin host: computes by the ops' Torch references, `wrong` times what is right."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.calls = wrong, 0

    def session(self, op: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> "ReferenceSession":
        return ReferenceSession(self, op, attributes)


class ReferenceSession:
    """One node; outputs behind the first may lie where an input does."""

    workspace_size = 16

    def __init__(self, host: ReferenceHost, op: str, attributes: Mapping[str, Any]) -> None:
        self.host, self.op, self.attributes = host, {**OPS, **STANDARD_OPS}[op], attributes

    def __enter__(self) -> "ReferenceSession":
        return self

    def __exit__(self, *_: object) -> None: ...

    def output_shapes(self, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        return [tuple(y.shape) for y in self.run(inputs)]

    def enqueue(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], workspace: torch.Tensor) -> None:
        assert workspace.numel() >= self.workspace_size
        assert all(x.is_contiguous() for x in [*inputs, *outputs])
        self.host.calls += 1
        first, *others = self.run(inputs)
        for y, value in zip(outputs, [first * self.host.wrong, *others], strict=True):
            assert (y.shape, y.dtype) == (value.shape, value.dtype)
            y.copy_(value)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = self.op.reference(*inputs, **self.attributes)
        return [found] if isinstance(found, torch.Tensor) else list(found)
