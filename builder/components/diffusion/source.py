"""A diffusers pipeline as a source of parts: every module that a run calls, with the shapes of that run's tensors."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.devices.device import Device
from trt_nvfp4.builder.components.diffusion.adapters import merge_adapter
from trt_nvfp4.builder.components.diffusion.calls import Call, Layout, filled, layout, leaves
from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.components.diffusion.modules import replace_modules
from trt_nvfp4.builder.components.diffusion.quantized import held
from trt_nvfp4.builder.components.diffusion.runs import (
    LONG,
    MIDDLE,
    SHORT,
    STEPS,
    PictureOptions,
    modules_of,
    run_pipeline,
)
from trt_nvfp4.builder.components.manifest import DIFFUSE, Manifest
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.source import Example, Source, as_array
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.common.metrics import relative_error


def of_pipeline(directory: Path, options: PictureOptions, adapter: Adapter | None = None) -> Source:
    """The parts of the pipeline in a folder, with `adapter` merged into it. The pipeline runs a few steps for that.

    Raises as `open_pipeline` and `run_pipeline`; ModelFaultError where a module is not called with tensors.
    """
    pipeline = _opened(directory, adapter)
    pictures = _Pictures(pipeline, options)
    runs = [pictures.calls(*end, STEPS) for end in pictures.ends]
    # Sizes that change are taken from a run between, so that no end of a range is special.
    changes = any(len(set(shapes)) > 1 for name in runs[0] for shapes in _shapes(_of(runs, name)).values())
    examples = pictures.calls([MIDDLE] * options.prompts, options.largest, STEPS) if changes else runs[-1]
    parts, settings = [], {}
    for name, (module, method) in modules_of(pipeline).items():
        calls = _of([*runs, examples], name)
        if not calls:
            continue
        where = f"{directory}: {name} ({type(module).__name__})"
        parts.append(_part(where, name, module, method, calls))
        # Encoders of text and images are transformers'.
        is_denoiser = method == "forward" and type(module).__module__.startswith("diffusers.")
        settings[name] = _setting(method, is_denoiser, calls, parts[-1])
    outputs = _outputs(pipeline, runs)
    rounding = partial(_rounding, directory, options, adapter, outputs)
    example = Example({}, outputs=outputs, run=pictures, rounding=rounding)
    return Source(directory.name, DIFFUSE, parts, [], {"calls": settings}, example)


def _opened(directory: Path, adapter: Adapter | None) -> Any:
    pipeline = open_pipeline(directory)
    if adapter is not None:
        merge_adapter(pipeline, adapter)
    return pipeline


def _rounding(
    directory: Path, options: PictureOptions, adapter: Adapter | None, outputs: Mapping[str, np.ndarray]
) -> float:
    """The relative error of `outputs` against those of the pipeline in float32: rounding adds up over the steps."""
    pipeline = _opened(directory, adapter)
    for module, _ in modules_of(pipeline).values():
        module.float()
    pictures = _Pictures(pipeline, options)
    exact = _outputs(pipeline, [pictures.calls(*end, STEPS) for end in pictures.ends])
    return relative_error(found=list(outputs.values()), expected=list(exact.values()))


def _outputs(pipeline: Any, runs: Sequence[Mapping[str, Sequence[Call]]]) -> dict[str, np.ndarray]:
    """The results of each run, by "number.name"."""
    results = [_results(pipeline, run) for run in runs]
    return {f"{number}.{name}": array for number, run in enumerate(results) for name, array in run.items()}


def _of(runs: Sequence[Mapping[str, Sequence[Call]]], module: str) -> list[Call]:
    return [call for run in runs for call in run[module]]


class _Pictures:
    """Makes the pictures that parts are compared by, and others to calibrate with."""

    def __init__(self, pipeline: Any, options: PictureOptions) -> None:
        self.pipeline, self._arguments = pipeline, options.arguments
        #: Prompts and size at both ends of what parts are built for.
        self.ends = (([SHORT], options.smallest), ([LONG] * options.prompts, options.largest))

    def calls(self, prompts: Sequence[str], size: ImageSize | None, steps: int | None) -> dict[str, list[Call]]:
        return run_pipeline(self.pipeline, prompts, size, self._arguments, steps)

    def __call__(
        self, device: Device, manifest: Manifest, prompt: str | None = None, steps: int | None = STEPS
    ) -> list[np.ndarray]:
        """Final latents and picture of each end, or of `prompt`, from parts on a device."""
        replace_modules(self.pipeline, manifest, device)
        runs = self.ends if prompt is None else (([prompt], self.ends[-1][1]),)
        return [array for run in runs for array in _results(self.pipeline, self.calls(*run, steps)).values()]


def _results(pipeline: Any, calls: Mapping[str, Sequence[Call]]) -> dict[str, np.ndarray]:
    """The final latents, and the picture that an autoencoder makes of them."""
    for name, (_, method) in modules_of(pipeline).items():
        if method == "decode" and calls[name]:
            last = calls[name][-1]
            ends = {"latents": last.inputs(), "picture": last.outputs()}
            return {end: as_array(next(iter(tensors.values()))) for end, tensors in ends.items()}
    raise ModelFaultError(f"{type(pipeline).__name__} decodes no latents with an autoencoder")


class _Method(torch.nn.Module):
    """A module's method as a function of tensors: (those among its arguments) -> (those that are read of its result).

    All else is as in the call that was recorded.
    """

    def __init__(self, module: torch.nn.Module, method: str, call: Call, outputs: Sequence[str]) -> None:
        super().__init__()
        self.module, self.method, self.outputs = module, method, outputs
        self.arguments, self.names = dict(call.arguments), list(call.inputs())

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = filled(self.arguments, dict(zip(self.names, tensors, strict=True)))
        found = dict(leaves(getattr(self.module, self.method)(**arguments), "out"))
        return tuple(found[name] for name in self.outputs)


def _part(where: str, name: str, module: torch.nn.Module, method: str, calls: Sequence[Call]) -> TorchPart:
    """The part for all of a module's calls; what differs between their tensors' shapes is dynamic."""
    for problem in _problems(calls):
        raise ModelFaultError(f"{where}: {problem}")
    example = calls[-1]
    outputs = list(dict.fromkeys(output for call in calls for output in call.outputs()))
    dynamic = {
        tensor: {
            axis: f"{tensor}.{axis}" for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
        }
        for tensor, shapes in _shapes(calls).items()
    }
    wrapped = _Method(module, method, example, outputs).eval()
    # A part's module is wrapped twice.
    packed = held(module, "module.module.")
    return TorchPart(name, wrapped, example.inputs(), outputs, dynamic, as_far_as_possible=True, packed=packed)


def _problems(calls: Sequence[Call]) -> Iterator[str]:
    """Why calls have no graph in common."""
    first = calls[0]
    if not first.inputs():
        yield "it is called without a tensor"
    for name, value in first.constants().items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            yield f"its argument {name} is a {type(value).__name__}, expected tensors, numbers or text"
    for call in calls[1:]:
        constants = first.constants()
        if call.constants().keys() != constants.keys() or call.inputs().keys() != first.inputs().keys():
            yield (
                "it is called with other arguments for several pictures, or at another size; leave --max-batch out, "
                "and name one size with --set image-size=HxW"
            )
        for name, value in call.constants().items():
            if value != constants[name]:
                yield (
                    f"its argument {name} is a number that changes, {constants[name]!r} and {value!r}, which an engine "
                    "has fixed; name one size with --set image-size=HxW"
                )
        for name, tensor in call.inputs().items():
            if tensor.dim() != first.inputs()[name].dim() or tensor.dtype != first.inputs()[name].dtype:
                yield f"its tensor {name} changes its type or number of dimensions between calls"


def _shapes(calls: Sequence[Call]) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of every input, one for each call."""
    inputs = [call.inputs() for call in calls]
    names = inputs[0] if inputs else {}
    return {name: [tuple(tensors[name].shape) for tensors in inputs if name in tensors] for name in names}


def _setting(method: str, is_denoiser: bool, calls: Sequence[Call], part: TorchPart) -> dict[str, Any]:
    """The manifest's entry for a part's calls."""
    results = {name: tensor for call in calls for name, tensor in call.outputs().items()}
    placed: Layout = layout(calls[0].result, part.outputs)
    return {
        "method": method,
        "is_denoiser": is_denoiser,
        "constants": calls[0].constants(),
        "result": placed,
        "types": {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in results.items()},
        "shapes": {
            name: [[pick(sizes) for sizes in zip(*shapes, strict=True)] for pick in (min, max)]
            for name, shapes in _shapes(calls).items()
        },
    }
