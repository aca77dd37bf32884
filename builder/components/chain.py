"""Runs parts one behind the other, tensors flowing as the manifest says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trt_nvfp4.builder.components.devices.device import Device, Handle, numpy_type
from trt_nvfp4.builder.components.manifest import Manifest, Part, Port
from trt_nvfp4.builder.errors import UsageError

#: Tensors by "part.name".
Values = dict[str, Handle]


def run_chain(device: Device, manifest: Manifest, given: Mapping[str, Handle]) -> Values:
    """Every output of every part, in the manifest's order."""
    values: Values = {}
    for part in manifest.parts:
        values |= run_part(device, manifest, part, given, values)
    return values


def run_whole(device: Device, manifest: Manifest, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results of a model without a decoder, by "part.name". Raises UsageError for other inputs."""
    check_given(manifest, inputs)
    values = run_chain(device, manifest, put_all(device, manifest, inputs))
    return {name: device.get(values[name]) for name in manifest.results()}


def put_all(device: Device, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> dict[str, Handle]:
    """Inputs of the whole on the device."""
    ports = manifest.given()
    return {name: device.put(name, array, ports[name]) for name, array in arrays.items()}


def run_part(
    device: Device, manifest: Manifest, part: Part, given: Mapping[str, Handle], values: Mapping[str, Handle]
) -> Values:
    """The part's outputs by "part.name"; a part with a loop runs as often as that says."""
    sources = manifest.sources(part)
    loop = part.loop
    numbers = {} if loop is None else loop.values
    feeds = {
        name: values[sources[name]] if name in sources else given[name] for name in part.inputs if name not in numbers
    }
    times = 1 if loop is None else loop.times
    found: Mapping[str, Handle] = {}
    for turn in range(times):
        for name, of_turns in numbers.items():
            feeds[name] = device.put(
                f"{part.name}.{name}", _number(part.inputs[name], of_turns[turn]), part.inputs[name]
            )
        found = device.run(part.name, feeds, {})
        if loop is not None:
            feeds |= {target: found[output] for output, target in loop.carry.items()}
    return {f"{part.name}.{name}": handle for name, handle in found.items()}


def _number(port: Port, value: float) -> np.ndarray:
    """A tensor that holds one number."""
    return np.full([int(dim) for dim in port.shape], value, numpy_type(port))


def check_given(manifest: Manifest, inputs: Mapping[str, np.ndarray]) -> None:
    """Raise UsageError for inputs that the model of parts does not take."""
    expected = manifest.given()
    for name in sorted(expected.keys() - inputs.keys()):
        raise UsageError(f"the input {name} is missing: expected {expected[name]}")
    for name, array in inputs.items():
        if name not in expected:
            raise UsageError(f"there is no input {name}; the model takes {', '.join(sorted(expected))}")
        check_array(name, array, expected[name])


def check_array(name: str, array: np.ndarray, port: Port) -> None:
    """Raise UsageError for an array that does not fit the port."""
    if array.dtype != numpy_type(port) or not port.takes(Port(port.dtype, array.shape)):
        raise UsageError(f"the input {name} is {array.dtype} [{', '.join(map(str, array.shape))}], expected {port}")
