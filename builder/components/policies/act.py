"""ACT: one network from an observation to a chunk of actions."""

from collections.abc import Mapping
from typing import Any

import torch

from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.policies.taken_apart import ACTION, CHUNK, TakenApart


class _Chunk(torch.nn.Module):
    """(observation, each [1, ...]) -> chunk [1, rows, size], float32."""

    def __init__(self, policy: Any, names: list[str]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, *observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.policy.predict_action_chunk(dict(zip(self.names, observation, strict=True))),)


def take_apart(policy: Any, observation: Mapping[str, torch.Tensor]) -> TakenApart:
    """One part, `action`."""
    part = TorchPart(ACTION, _Chunk(policy, list(observation)), observation, [CHUNK], {})
    return TakenApart([part], [], dict(observation), policy.predict_action_chunk(dict(observation)))
