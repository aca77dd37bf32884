"""The source of a model of several parts: modules, the flows between them, and the original's results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.export.huggingface import TEXT
from trt_nvfp4.builder.model.model_files import is_model_directory, is_pipeline, is_policy
from trt_nvfp4.common.model_config import read_config

#: How the names of classes end that generate from an encoder, or from images and text.
_GENERATING = ("ForConditionalGeneration", "MTModel", "VisionEncoderDecoderModel")
#: Pairs of encoders that transformers does not classify images with.
_MORE_PAIRS = ("VisionTextDualEncoderModel", "GroupViTModel", "OwlViTModel", "Owlv2Model")


@dataclass(frozen=True)
class Example:
    """Inputs of the whole, and the original's results for them: with a decoder, `logits` of the last token of one
    sequence, by its number and its tokens so far; without one, `outputs` by "part.name"."""

    inputs: Mapping[str, np.ndarray]
    prompts: Sequence[Sequence[int]] = ()
    logits: Callable[[int, Sequence[int]], np.ndarray] | None = None
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: A token that stands for something else than itself, which the original cannot read back.
    placeholder: int | None = None
    #: What parts on a device make of the inputs, in the order of `outputs`, where no chain runs them.
    run: Callable[..., list[np.ndarray]] | None = None
    #: The relative error that 16 bits make in the original itself, against float32, where that may be large.
    rounding: Callable[[], float] | None = None


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


def _is_pair(name: str) -> bool:
    """Whether a class is a pair of encoders, and not the inside of a model that generates."""
    if not name.endswith("Model"):
        return False
    if name in _MORE_PAIRS:
        return True
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:  # said where it loads the model
        return False
    return name in modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()


def is_of_parts(path: Path, task: str = "auto") -> bool:
    """Whether the model of a Hugging Face directory, or a policy, is one of several graphs, by its configuration."""
    if is_policy(path) or is_pipeline(path):
        return True
    if task in ("features", TEXT) or not is_model_directory(path):
        return False
    try:
        config = read_config(path)
        names = [str(name) for name in config.get("architectures") or ()]
    except (ValueError, AttributeError, TypeError):  # said where it is read
        return False
    of_images = "vision_config" in config
    if of_images and "text_config" in config and any(map(_is_pair, names)):
        return True
    return (of_images or "audio_config" in config or bool(config.get("is_encoder_decoder"))) and any(
        n.endswith(_GENERATING) for n in names
    )
