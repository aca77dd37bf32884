"""A part of a model as a Torch module, and its way to an ONNX file with ports that the manifest states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from safetensors.torch import save_file

from trt_nvfp4.builder.components.manifest import Loop, Part, Port
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export.huggingface import OPSET, quiet, reason_of
from trt_nvfp4.builder.export.torch_module import save, traced
from trt_nvfp4.builder.model.onnx_file import EXPORTED, read
from trt_nvfp4.calibration.samples.samples import dimension


@dataclass(frozen=True)
class TorchPart:
    """A module that takes the tensors of `inputs`, in this order, and returns a tuple of those that `outputs` names.

    `dynamic`: input -> axis -> name of the dimension; all else is static.
    """

    name: str
    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    outputs: Sequence[str]
    dynamic: Mapping[str, Mapping[int, str]]
    opset: int = OPSET
    translations: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    loop: Loop | None = None
    #: Dimensions in `dynamic` that torch.export fixes are static, too.
    as_far_as_possible: bool = False
    #: NVFP4 weights as they were published, in ModelOpt's layout by the names of the exported module.
    packed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def export(self, where: str, folder: Path) -> Part:
        """Write `folder`/`name`.onnx, and published weights beside it (`packed_of`); `where` is for messages.

        Raises ModelFaultError where torch.onnx cannot.
        """
        dims: dict[str, Any] = {}
        made = (lambda _: torch.export.Dim.AUTO) if self.as_far_as_possible else torch.export.Dim
        axes = [
            {axis: dims.setdefault(dim, made(dim)) for axis, dim in self.dynamic.get(name, {}).items()}
            for name in self.inputs
        ]
        with quiet():
            try:
                program = traced(_Varied(self.module), self.inputs, (tuple(axes),), self.opset, self.translations)
            except Exception as error:  # the exporter raises types of its own for whatever it cannot translate
                raise ModelFaultError(
                    f"{where}: torch.onnx cannot export the part {self.name!r}: "
                    f"{reason_of(error.__cause__ or error, self.module)}"
                ) from error
            destination = folder / f"{self.name}.onnx"
            save(program, self.module, self.outputs, {EXPORTED: where, **self.metadata}, destination)
        if self.packed:
            save_file(dict(self.packed), packed_of(folder, self.name))
        part = described(self.name, destination, self.loop)
        for name, named in self.dynamic.items():
            for axis, dim in named.items():
                size = part.inputs[name].shape[axis]
                if isinstance(size, int) and not self.as_far_as_possible:
                    raise ModelFaultError(
                        f"{where}: torch.onnx fixes the {dim} of {name} of the part {self.name!r} at the {size} of the "
                        "example; give a Python file with parts whose code does not depend on it (model.py:components)"
                    )
        return part


def packed_of(folder: Path, part: str) -> Path:
    """Where the published NVFP4 weights of an exported part lie, if it has any."""
    return folder / f"{part}.nvfp4.safetensors"


class _Varied(torch.nn.Module):
    """Takes any number of tensors, as torch.export counts them."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.module(*tensors)
        return found


def described(name: str, model: Path, loop: Loop | None = None) -> Part:
    """The part that an ONNX file is, by its inputs and outputs."""
    graph = read(model).graph
    constants = {tensor.name for tensor in graph.initializer}
    return Part(
        name,
        {value.name: port_of(value) for value in graph.input if value.name not in constants},
        {value.name: port_of(value) for value in graph.output},
        loop,
    )


def port_of(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return Port({"float": "float32"}.get(dtype, dtype), tuple(dimension(dim) or "?" for dim in tensor.shape.dim))
