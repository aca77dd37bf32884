"""A model that embeds texts and images in one space (CLIP, SigLIP) as two parts, neither of which needs the other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.processor import describe
from trt_nvfp4.builder.components.source import Example, as_array
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.builder.export.plain import images_of

TEXT, VISION = "text", "vision"
TEXT_EMBEDS, IMAGE_EMBEDS = "text_embeds", "image_embeds"
#: Families that are trained on texts padded to full length, and see the padding.
_PADDED = ("siglip",)
_BATCH = 2  # of the example


def is_dual_encoder(model: Any) -> bool:
    return all(hasattr(model, f"get_{kind}_features") for kind in ("text", "image")) and not model.can_generate()


class _Text(torch.nn.Module):
    """(input_ids, attention_mask [batch, sequence]) -> text_embeds [batch, width], of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_normalized(self.model.get_text_features(input_ids=ids, attention_mask=mask)),)


class _Vision(torch.nn.Module):
    """pixel_values [images, channels, height, width] -> image_embeds [images, width], of length 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_normalized(self.model.get_image_features(pixel_values=pixels)),)


def _normalized(features: Any) -> torch.Tensor:
    embeds: torch.Tensor = getattr(features, "pooler_output", features)
    found: torch.Tensor = embeds / embeds.norm(p=2, dim=-1, keepdim=True)
    return found


def parts_of(
    directory: Path, model: Any, size: ImageSize | None
) -> tuple[list[TorchPart], list[Any], dict[str, Any], Example]:
    """The parts, no flows, the manifest's settings, and an example with what the whole model makes of it.

    Raises BuilderError: usage for another image size than the model's; model for a vision tower of another kind.
    """
    channels, height, width = images_of(model)
    if size is not None and (size.height, size.width) != (height, width):
        raise UsageError(
            f"--set image-size={size.height}x{size.width}: this vision tower takes {height}x{width}; leave it out"
        )
    text = model.config.get_text_config()
    ids = torch.randint(3, text.vocab_size - 1, (_BATCH, min(8, text.max_position_embeddings)))
    ids[:, -1] = text.eos_token_id if 0 <= (text.eos_token_id or -1) < text.vocab_size else ids[:, -1]
    mask = torch.ones_like(ids)
    pixels = torch.rand(_BATCH, channels, height, width, dtype=next(model.parameters()).dtype)
    whole = model(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    if getattr(whole, TEXT_EMBEDS, None) is None or getattr(whole, IMAGE_EMBEDS, None) is None:
        raise ModelFaultError(
            f"{directory}: {type(model).__name__} gives no {TEXT_EMBEDS} and {IMAGE_EMBEDS}; give a Python file with "
            "its parts (model.py:components)"
        )
    axes, images = {0: "batch", 1: "sequence"}, {0: "images"}
    parts = [
        TorchPart(
            TEXT,
            _Text(model).eval(),
            {"input_ids": ids, "attention_mask": mask},
            [TEXT_EMBEDS],
            {"input_ids": axes, "attention_mask": axes},
        ),
        TorchPart(VISION, _Vision(model).eval(), {"pixel_values": pixels}, [IMAGE_EMBEDS], {"pixel_values": images}),
    ]
    padded = model.config.model_type.startswith(_PADDED)
    settings = {
        "embeds": {
            # Logits of pairs are scale * image_embeds @ text_embeds.T + bias.
            "scale": float(model.logit_scale.exp()),
            "bias": float(getattr(model, "logit_bias", torch.zeros(1))),
            "longest": int(text.max_position_embeddings),
            "padding": int(text.pad_token_id or 0) if padded else None,
        },
        **describe(directory, (height, width), patched=False, image_token=None).settings(),
    }
    given: Mapping[str, torch.Tensor] = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    outputs = {f"{TEXT}.{TEXT_EMBEDS}": whole.text_embeds, f"{VISION}.{IMAGE_EMBEDS}": whole.image_embeds}
    example = Example(
        {name: as_array(tensor) for name, tensor in given.items()},
        outputs={name: as_array(tensor) for name, tensor in outputs.items()},
    )
    return parts, [], settings, example
