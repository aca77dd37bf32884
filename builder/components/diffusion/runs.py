"""Runs of a pipeline: what it is called with while it is built, and what it calls its modules with."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trt_nvfp4.builder.components.diffusion.calls import Call, recording
from trt_nvfp4.builder.errors import ModelFaultError, UsageError, exit_code, first_line
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.builder.export.huggingface import quiet

SEED = 20
#: Denoising steps of runs that show shapes, and are compared.
STEPS = 2
#: A prompt of few tokens, and one that fills what a pipeline takes of it.
SHORT, MIDDLE = "a cat", "a cat sits on a red chair, and looks at the rain"
LONG = " ".join([MIDDLE] * 60)
#: Arguments of pipelines that runs set themselves.
_OWN = ("prompt", "height", "width", "num_inference_steps", "generator", "output_type")


@dataclass(frozen=True)
class PictureOptions:
    """Sizes that parts are built for, from the smallest to the largest; None: the pipeline's own. `prompts`: the most
    at once. `arguments`: others that the pipeline is called with."""

    smallest: ImageSize | None = None
    largest: ImageSize | None = None
    prompts: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, size: str | None, prompts: int, arguments: str | None) -> "PictureOptions":
        """From `HxW` or `HxW..HxW`, and `NAME=VALUE,...`. Raises UsageError."""
        ends = [ImageSize.parse(text) for text in size.split("..", 1)] if size is not None else [None]
        found: dict[str, Any] = {}
        # Values may have commas of their own: lists.
        for entry in re.split(r",(?=\w+=)", arguments) if arguments else ():
            name, equals, text = entry.partition("=")
            if not equals or not name.isidentifier() or name in _OWN:
                raise UsageError(
                    f"--set pipeline-arguments={arguments}: expected NAME=VALUE,..., other names than "
                    f"{', '.join(_OWN)}; found {entry!r}"
                )
            try:
                found[name] = json.loads(text)
            except ValueError:
                found[name] = text
        return cls(ends[0], ends[-1], prompts, found)


def modules_of(pipeline: Any) -> dict[str, tuple[torch.nn.Module, str]]:
    """The pipeline's modules, and the method of each that may become an engine: of an autoencoder its decoder."""
    return {
        name: (module, "decode" if hasattr(module, "decode") and hasattr(module, "encode") else "forward")
        for name, module in pipeline.components.items()
        if isinstance(module, torch.nn.Module)
    }


def run_pipeline(
    pipeline: Any, prompts: Sequence[str], size: ImageSize | None, arguments: Mapping[str, Any], steps: int | None
) -> dict[str, list[Call]]:
    """The calls of all modules while the pipeline makes a picture of each prompt.

    Raises UsageError for arguments that the pipeline does not take; ModelFaultError where it does not run.
    """
    name = type(pipeline).__name__
    takes = inspect.signature(pipeline.__call__).parameters
    if unknown := sorted(set(arguments) - set(takes)):
        raise UsageError(
            f"--set pipeline-arguments: {name} takes no {unknown[0]}; it takes {', '.join(set(takes) - set(_OWN))}"
        )
    if "prompt" not in takes:
        raise ModelFaultError(f"{name} takes no prompt, and only pipelines that do are built")
    given = {"prompt": list(prompts), "generator": torch.Generator().manual_seed(SEED), "output_type": "pt"}
    if steps is not None:
        given["num_inference_steps"] = steps
    if size is not None:
        given |= {"height": size.height, "width": size.width}
    given = {key: value for key, value in given.items() if key in takes} | dict(arguments)
    try:
        with torch.no_grad(), quiet(), recording(modules_of(pipeline)) as calls:
            pipeline(**given)
    except Exception as error:
        if exit_code(error) is not None:
            raise
        kind = UsageError if isinstance(error, (ValueError, TypeError)) else ModelFaultError
        at = "" if size is None else f" at --set image-size={size.height}x{size.width}"
        raise kind(f"{name} does not run{at}: {first_line(error)}") from error
    return calls
