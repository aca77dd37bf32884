"""A plugin host for machines without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trt_nvfp4.plugins.ops import OPS


class ReferenceHost:
    """Stands for the plugin host: computes by the ops' Torch references, `wrong` times what is right."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.workspace_size, self.calls = wrong, 16, 0

    @contextmanager
    def session(self, op: str, inputs: list[torch.Tensor], attributes: dict[str, Any]) -> "Iterator[ReferenceHost]":
        self.op, self.attributes = op, attributes
        yield self

    def output_shapes(self, inputs: list[torch.Tensor]) -> list[tuple[int, ...]]:
        return [tuple(OPS[self.op].reference(*inputs, **self.attributes).shape)]

    def enqueue(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], workspace: torch.Tensor) -> None:
        assert workspace.numel() >= self.workspace_size
        self.calls += 1
        outputs[0].copy_(OPS[self.op].reference(*inputs, **self.attributes) * self.wrong)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [OPS[self.op].reference(*inputs, **self.attributes)]
