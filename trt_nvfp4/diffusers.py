"""Engines in diffusers' own pipelines, and a pipeline's denoiser for other programs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.components.devices.open import open_device
from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.components.diffusion.modules import replace_modules, run_part
from trt_nvfp4.builder.components.manifest import DIFFUSE, Manifest
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.open import RunnerName
from trt_nvfp4.builder.options import PathLike

__all__ = ["Denoiser", "load", "load_denoiser"]


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
    manifest = _manifest(folder)
    device = open_device(Path(folder), manifest, runner)
    if isinstance(pipeline, str | Path):
        replaced = [name for name, call in manifest.settings["calls"].items() if call["method"] == "forward"]
        pipeline = open_pipeline(Path(pipeline), without_weights=replaced)
    replace_modules(pipeline, manifest, device)
    return pipeline


@dataclass(frozen=True)
class Denoiser:
    """A pipeline's denoiser: call it with the tensors that `shapes` names, as diffusers' module takes them
    (`encoder_hidden_states`, `timestep`, ...); it returns the predicted tensor.

    `shapes` has a number for each dimension that is fixed, and a name for the others.
    """

    shapes: Mapping[str, tuple[int | str, ...]]
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

    def __call__(self, **tensors: torch.Tensor) -> torch.Tensor:
        return next(iter(self.run(tensors).values()))


def load_denoiser(folder: PathLike, *, runner: RunnerName = "auto") -> Denoiser:
    """The denoiser in `folder`, without the pipeline's other parts, for programs with samplers of their own.

    Args:
        runner: As for `load`.

    Raises:
        TrtNvfp4Error: The folder holds no parts of a pipeline, or several denoisers; a call's tensors do not fit.
    """
    manifest = _manifest(folder)
    calls = manifest.settings["calls"]
    found = [part for part in manifest.parts if calls[part.name]["is_denoiser"]]
    if len(found) != 1:
        raise UsageError(f"{folder}: holds {len(found)} denoisers, expected one; use load")
    device = open_device(Path(folder), replace(manifest, parts=found), runner)
    shapes = {name: tuple(port.shape) for name, port in found[0].inputs.items()}
    return Denoiser(shapes, partial(run_part, found[0], calls[found[0].name], device))


def _manifest(folder: PathLike) -> Manifest:
    manifest = Manifest.load(Path(folder))
    if manifest.task != DIFFUSE:
        raise UsageError(f"{folder}: holds the parts of another model than a diffusers pipeline; use Pipeline")
    return manifest
