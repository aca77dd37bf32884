"""The parts that policies of every structure are taken apart into; the last, `action`, gives `chunk`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart

ACTION, CHUNK = "action", "chunk"
#: What the denoised actions begin as, and the noise that is added in each step of a scheduler that adds some.
NOISE, STEP_NOISE = "actions", "step_noise"
#: What a denoising step gives to the next one as NOISE.
NEXT = "next_actions"
#: The number of a denoising step, from 0 on.
TURN = "turn"


@dataclass(frozen=True)
class TakenApart:
    """`given`: an observation and noise, with what the library makes of them: `chunk` [1, rows, size], normalized."""

    parts: Sequence[TorchPart]
    flows: Sequence[Flow]
    given: Mapping[str, torch.Tensor]
    chunk: torch.Tensor
