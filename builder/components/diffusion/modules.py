"""Parts in the place of a pipeline's modules: the pipeline calls them, and knows no difference."""

from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.devices.device import Device, numpy_type
from trt_nvfp4.builder.components.diffusion.calls import Layout, bound, leaves
from trt_nvfp4.builder.components.diffusion.runs import modules_of
from trt_nvfp4.builder.components.manifest import FILE, Manifest, Part, Port
from trt_nvfp4.builder.components.source import as_array
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.plugins.ops.definition import shapes_fit


def replace_modules(pipeline: Any, manifest: Manifest, device: Device) -> None:
    """Make the pipeline call the manifest's parts, on `device`. Modules that nothing else calls lose their weights.

    Raises ModelFaultError for parts of another pipeline.
    """
    modules = modules_of(pipeline)
    for part in manifest.parts:
        setting = manifest.settings["calls"][part.name]
        if part.name not in modules or modules[part.name][1] != setting["method"]:
            raise ModelFaultError(
                f"{FILE}: its part {part.name} is not a module of {type(pipeline).__name__}; give the pipeline that it "
                "was built from"
            )
        module, method = modules[part.name]
        if method == "forward":
            _empty(module)
        setattr(module, method, _calling(part, setting, device, _original(module, method)))


def _original(module: torch.nn.Module, method: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(type(module), method).__get__(module)
    return found


def _empty(module: torch.nn.Module) -> None:
    """Forget the weights, and what moves them; the module is where its callers' tensors are: on the CPU."""
    if "place" in vars(type(module)):
        return
    module.to("meta")
    cls = type(module)
    members = {"place": "cpu", "device": property(lambda _: torch.device("cpu")), "to": lambda self, *_, **__: self}
    module.__class__ = type(cls.__name__, (cls,), members)


def _calling(
    part: Part, setting: Mapping[str, Any], device: Device, original: Callable[..., Any]
) -> Callable[..., Any]:
    """A function in the place of a method."""

    def called(*arguments: Any, **named: Any) -> Any:
        given = dict(leaves(bound(original, arguments, named)))
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        _check(part, setting["constants"], {name: value for name, value in given.items() if name not in tensors})
        return _placed(setting["result"], run_part(part, setting, device, tensors))

    return called


def run_part(
    part: Part, setting: Mapping[str, Any], device: Device, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs of a part for the tensors that it takes, by name, in the types of the module that it stands for."""
    where = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    feeds = {
        name: device.put(f"{part.name}.{name}", _array(part, name, tensors.get(name)), port)
        for name, port in part.inputs.items()
    }
    results = {}
    for name, handle in device.run(part.name, feeds, {}).items():
        # A copy: what the device has is written over in the next call.
        result = torch.from_numpy(np.array(device.get(handle)))
        results[name] = result.to(where, getattr(torch, setting["types"][name]))
    return results


def _check(part: Part, constants: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that the part was not built for."""
    for name in sorted(constants.keys() | given.keys()):
        built, found = constants.get(name), given.get(name)
        if built != found:
            raise UsageError(
                f"{part.name}: is built for {name} = {built!r}, and the pipeline calls it with {found!r}; build it "
                "with --set image-size or --set pipeline-arguments as it is used"
            )


def _array(part: Part, name: str, tensor: torch.Tensor | None) -> np.ndarray:
    """A tensor as the part takes it. Raises UsageError for one that is missing or has another shape."""
    port = part.inputs[name]
    if tensor is None or not shapes_fit(tuple(tensor.shape), port.shape):
        found = "nothing" if tensor is None else list(tensor.shape)
        raise UsageError(
            f"{part.name}: takes {name} of {_shape(port)}, and the pipeline gives it {found}; make pictures of the "
            "size and number that it is built for, or build it with --set image-size=HxW..HxW and --max-batch"
        )
    return as_array(tensor.cpu()).astype(numpy_type(port))


def _shape(port: Port) -> str:
    return f"[{', '.join(map(str, port.shape))}]"


def _placed(where: Layout, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A result as the method returns it. What was read of no result is an empty tensor."""
    if isinstance(where, dict):
        values = {name: _placed(child, tensors) for name, child in where.items()}
        from diffusers.utils.outputs import BaseOutput

        return make_dataclass("Output", values, bases=(BaseOutput,))(**values)
    if isinstance(where, list):
        return tuple(_placed(child, tensors) for child in where)
    return torch.empty(0) if where is None else tensors[where]
