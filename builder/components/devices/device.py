"""What runs the parts of a model: tensors stay where it runs them, and flow from part to part as handles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from trt_nvfp4.builder.accuracy.runners import session
from trt_nvfp4.builder.components.manifest import FILE, Manifest, Port
from trt_nvfp4.builder.components.parts import described
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export.decoder_contract import Decoder, decoder_of
from trt_nvfp4.builder.onnx_file import read
from trt_nvfp4.builder.tensorrt.bundle import MANIFEST
from trt_nvfp4.common.onnx_runtime import onnxruntime

#: A tensor on a device; what it is, the device alone knows.
Handle: TypeAlias = Any
# bfloat16 is computed in float32 on a CPU; see `widen`.
_NUMPY = {"bfloat16": np.dtype(np.float32)}


class Device(Protocol):
    """Runs parts by name. `name` says where, for messages."""

    name: str

    def put(self, name: str, array: np.ndarray, port: Port) -> Handle:
        """The array on the device, of the port's type. What was put there by the same name before is lost."""

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> Handle:
        """A tensor of zeros of the port's type, such as an empty cache; as `put`."""

    def run(self, part: str, feeds: Mapping[str, Handle], in_place: Mapping[str, str]) -> dict[str, Handle]:
        """The part's outputs, which last until it runs again. `in_place`: outputs that take the memory of an input."""

    def longest(self, part: str, name: str, axis: int) -> int | None:
        """The largest dimension that the part was built for; None where there is no limit."""

    def get(self, handle: Handle) -> np.ndarray:
        """The tensor in host memory, in float32 where NumPy lacks its type."""

    def close(self) -> None:
        """Free what it holds."""


class OnnxDevice:
    """ONNX Runtime on the CPU: the parts' ONNX files, plugins by their function bodies."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises BuilderError (model) for a part that is missing, or not what the manifest says."""
        self.name = f"{folder} (ONNX Runtime)"
        self._sessions = {name: session(model) for name, model in checked_models(folder, manifest).items()}

    def put(self, name: str, array: np.ndarray, port: Port) -> Handle:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> Handle:
        return self.put(name, np.zeros(shape, numpy_type(port)), port)

    def run(self, part: str, feeds: Mapping[str, Handle], in_place: Mapping[str, str]) -> dict[str, Handle]:
        running = self._sessions[part]
        names = [value.name for value in running.get_outputs()]
        try:
            found = running.run_with_ort_values(names, dict(feeds))
        except Exception as error:  # ONNX Runtime's own error types
            raise BuilderError(
                MODEL_AT_FAULT, f"{self.name}: ONNX Runtime cannot run the part {part!r}: {error}"
            ) from error
        return dict(zip(names, found, strict=True))

    def longest(self, part: str, name: str, axis: int) -> int | None:
        return None

    def get(self, handle: Handle) -> np.ndarray:
        array: np.ndarray = handle.numpy()
        return array

    def close(self) -> None:
        self._sessions = {}


def numpy_type(port: Port) -> np.dtype[Any]:
    return _NUMPY.get(port.dtype) or np.dtype(port.dtype)


def checked_models(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """The ONNX file of every part. Raises BuilderError (model) for one that is missing, or not as the manifest says."""
    models = {}
    for part in manifest.parts:
        models[part.name] = model = model_of(folder, part.name)
        found = described(part.name, model)
        for kind, ports, theirs in (("input", part.inputs, found.inputs), ("output", part.outputs, found.outputs)):
            for name in ports.keys() | theirs.keys():
                if name not in theirs or name not in ports or not ports[name].takes(theirs[name]):
                    raise BuilderError(
                        MODEL_AT_FAULT,
                        f"{model}: its {kind} {name} is {theirs.get(name, 'missing')}, and {FILE} says "
                        f"{ports.get(name, 'that there is none')}; build the parts together",
                    )
    return models


def model_of(folder: Path, part: str) -> Path:
    """The ONNX file of a part: the rewritten one, or the one in its bundle, or the exported one. Raises BuilderError
    (model) where there is none."""
    places = [folder / f"{part}.rewritten.onnx", folder / f"{part}.onnx"]
    if (folder / part / MANIFEST).is_file():
        places.insert(0, folder / part / "model.onnx")
    for place in places:
        if place.is_file():
            return place
    raise BuilderError(
        MODEL_AT_FAULT,
        f"{folder}: the part {part!r} is missing ({places[0].name}); copy the whole folder, or build the model again",
    )


def decoder_of_parts(folder: Path) -> Decoder:
    """The decoder among the parts, by its file's metadata. Raises BuilderError (model) where it is none."""
    model = model_of(folder, "decoder")
    decoder = decoder_of(read(model))
    if decoder is None:
        raise BuilderError(MODEL_AT_FAULT, f"{model}: its metadata does not say what its caches are; build it again")
    return decoder
