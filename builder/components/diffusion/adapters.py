"""LoRA adapters of a diffusers pipeline, merged into its modules by diffusers."""

from typing import Any

import torch

from trt_nvfp4.builder.components.diffusion.directory import stored_files
from trt_nvfp4.builder.errors import ModelFaultError, UsageError, first_line
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.huggingface import quiet

FILE = "pytorch_lora_weights.safetensors"


def merge_adapter(pipeline: Any, adapter: Adapter) -> None:
    """Change the weights of the pipeline's modules by those in the adapter's folder, as diffusers saves them.

    Raises UsageError for a pipeline that takes none; ModelFaultError for a folder without one, an adapter of another
    model, and weights that become infinite.
    """
    file = adapter.directory / FILE
    name = type(pipeline).__name__
    if not hasattr(pipeline, "load_lora_weights"):
        raise UsageError(f"--adapter {adapter.directory}: {name} takes no LoRA; leave it out")
    if not file.is_file():
        raise ModelFaultError(f"{adapter.directory}: holds no {FILE}, as diffusers saves LoRAs")
    factors = {key.partition(".lora")[0] for key in stored_files(file) if ".lora" in key}
    try:
        with quiet():
            pipeline.load_lora_weights(adapter.directory, weight_name=FILE, local_files_only=True)
            taken = sum(
                bool(getattr(part, "lora_A", None))
                for module in pipeline.components.values()
                if isinstance(module, torch.nn.Module)
                for part in module.modules()
            )
            pipeline.fuse_lora(lora_scale=adapter.factor)
            pipeline.unload_lora_weights()
    except Exception as error:  # of diffusers and peft, of any kind
        raise ModelFaultError(
            f"{file}: cannot be merged into {name}: it is of another model ({first_line(error)})"
        ) from error
    if taken < max(len(factors), 1):
        raise ModelFaultError(
            f"{file}: it changes {len(factors)} modules, of which {name} has {taken}: it is of another model"
        )
    for part, module in pipeline.components.items():
        if isinstance(module, torch.nn.Module) and not all(weight.isfinite().all() for weight in module.parameters()):
            raise ModelFaultError(f"{file}: weights of {part} become infinite or NaN")
