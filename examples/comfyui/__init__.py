"""A ComfyUI node that samples with the denoiser's engine of a folder that `build-engine` wrote.

Put this folder into ComfyUI's custom_nodes, and what `build-engine` wrote below models/trt_nvfp4.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import folder_paths
import torch

import trt_nvfp4.diffusers

FOLDERS = Path(folder_paths.models_dir) / "trt_nvfp4"
Tensors = dict[str, torch.Tensor]


def _flux_inputs(x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, given: dict[str, Any]) -> Tensors:
    """Latents [B, C, H, W] in patches of 2x2; places of patches and text without a batch."""
    batch, channels, height, width = x.shape
    patches = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
    return {
        "hidden_states": patches.reshape(batch, -1, 4 * channels),
        "timestep": timestep,
        "encoder_hidden_states": context,
        "pooled_projections": given["y"],
        "img_ids": places.to(x),
        "txt_ids": x.new_zeros(context.shape[1], 3),
        **({} if given.get("guidance") is None else {"guidance": given["guidance"]}),
    }


def _flux_output(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    patches = y.reshape(batch, height // 2, width // 2, channels, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def _sd3_inputs(x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, given: dict[str, Any]) -> Tensors:
    names = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
    return dict(zip(names, (x, timestep, context, given["y"]), strict=True))


#: Model type -> ComfyUI's configuration, tensors as diffusers' denoiser takes them, and its result as latents.
MODELS: dict[str, tuple[str, Callable[..., Tensors], Callable[..., torch.Tensor]]] = {
    "flux_dev": ("Flux", _flux_inputs, _flux_output),
    "flux_schnell": ("FluxSchnell", _flux_inputs, _flux_output),
    "sd3": ("SD3", _sd3_inputs, lambda y, x: y),
}


class DiffusionModel(torch.nn.Module):
    """What ComfyUI's samplers call, in the place of a network with weights."""

    def __init__(self, folder: Path, model_type: str, runner: Any) -> None:
        super().__init__()
        self.dtype = torch.bfloat16
        self._denoiser = trt_nvfp4.diffusers.load_denoiser(folder, runner=runner)
        _, self._inputs, self._output = MODELS[model_type]

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor, control: Any = None, **given: Any
    ) -> torch.Tensor:
        if control is not None:
            raise ValueError("an engine has no place for a ControlNet; build one for the model that it changes")
        batch = self._denoiser.shapes["hidden_states"][0]
        size = batch if isinstance(batch, int) else len(x)  # of one call
        tensors = self._inputs(x, timestep, context, given)
        places = {name: tensors.pop(name) for name in ("img_ids", "txt_ids") if name in tensors}
        parts = [
            self._denoiser(**{name: tensor[first : first + size] for name, tensor in tensors.items()}, **places)
            for first in range(0, len(x), size)
        ]
        return self._output(torch.cat(parts), x)


class NVFP4DenoiserLoader:
    """A folder below models/trt_nvfp4 as a MODEL."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "loaders"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 (ComfyUI calls it by this name)
        folders = sorted(path.parent.name for path in FOLDERS.glob("*/components.json"))
        return {"required": {"folder": (folders,), "model_type": (list(MODELS),)}}

    def load(self, folder: str, model_type: str, runner: str = "auto") -> tuple[Any]:
        config = getattr(comfy.supported_models, MODELS[model_type][0])({})
        config.unet_config["disable_unet_model_creation"] = True
        model = config.get_model({})
        model.diffusion_model = DiffusionModel(FOLDERS / folder, model_type, runner)
        model.memory_required = lambda *_, **__: 0  # the engine's memory is TensorRT's
        devices = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
        return (comfy.model_patcher.ModelPatcher(model, *devices),)


NODE_CLASS_MAPPINGS = {"NVFP4DenoiserLoader": NVFP4DenoiserLoader}
NODE_DISPLAY_NAME_MAPPINGS = {"NVFP4DenoiserLoader": "Load NVFP4 denoiser"}
