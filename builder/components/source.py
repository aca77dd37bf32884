"""What a model of several parts is made from: modules, what flows between them, and what the original computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart


@dataclass(frozen=True)
class Example:
    """Inputs of the whole, and what the original makes of them: with a decoder, `logits` of the last token of one
    sequence, by its number and its tokens so far; without one, `outputs` by "part.name"."""

    inputs: Mapping[str, np.ndarray]
    prompts: Sequence[Sequence[int]] = ()
    logits: Callable[[int, Sequence[int]], np.ndarray] | None = None
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: A token that stands for something else than itself, which the original cannot read back.
    placeholder: int | None = None


@dataclass(frozen=True)
class Source:
    """A model that is built part by part; `name` is for messages."""

    name: str
    task: str
    parts: Sequence[TorchPart]
    flows: Sequence[Flow]
    settings: Mapping[str, Any]
    example: Example


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor in NumPy, bfloat16 in float32."""
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    return array
