"""Engines in diffusers' own pipelines."""

from pathlib import Path
from typing import Any

from trt_nvfp4.builder.components.devices.open import open_device
from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.components.diffusion.modules import replace_modules
from trt_nvfp4.builder.components.manifest import DIFFUSE, Manifest
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.open import RunnerName
from trt_nvfp4.builder.options import PathLike

__all__ = ["load"]


def load(pipeline: Any, folder: PathLike, *, runner: RunnerName = "auto") -> Any:
    """Puts the engines in `folder`, which `build-engine` wrote, in the place of a diffusers pipeline's modules; returns
    the pipeline.

    Args:
        pipeline: A pipeline, whose replaced modules lose their weights; or its directory, of which only the weights of
            other modules are read.
        runner: "tensorrt", "onnxruntime" or "auto", as for `trt_nvfp4.Pipeline`; "torch" for parts without group norms.

    Raises:
        TrtNvfp4Error: The folder holds no parts of a pipeline, or those of another one; the pipeline is called with
            sizes that the parts are not built for.
    """
    manifest = Manifest.load(Path(folder))
    if manifest.task != DIFFUSE:
        raise UsageError(f"{folder}: holds the parts of another model than a diffusers pipeline; use Pipeline")
    device = open_device(Path(folder), manifest, runner)
    if isinstance(pipeline, str | Path):
        replaced = [name for name, call in manifest.settings["calls"].items() if call["method"] == "forward"]
        pipeline = open_pipeline(Path(pipeline), without_weights=replaced)
    replace_modules(pipeline, manifest, device)
    return pipeline
