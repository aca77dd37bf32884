"""What a model of several parts is made from: modules, what flows between them, and what the original computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.export.huggingface import is_model_directory
from trt_nvfp4.common.json_text import read_json

#: How the names of classes end that generate from an encoder, or from images and text.
_GENERATING = ("ForConditionalGeneration", "MTModel", "VisionEncoderDecoderModel")


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


def is_of_parts(path: Path, task: str = "auto") -> bool:
    """Whether a Hugging Face directory's model is one of several graphs, by its configuration."""
    if task == "features" or not is_model_directory(path):
        return False
    try:
        config = read_json(path / "config.json")
        names = [str(name) for name in config.get("architectures") or ()]
    except (ValueError, AttributeError, TypeError):  # said where it is read
        return False
    of_images = "vision_config" in config
    if of_images and "text_config" in config and any(name.endswith("Model") for name in names):
        return True  # a pair of encoders
    return (of_images or bool(config.get("is_encoder_decoder"))) and any(n.endswith(_GENERATING) for n in names)
