"""The parts' ONNX files in ONNX Runtime on the CPU."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.components.devices.device import Handle, numpy_type
from trt_nvfp4.builder.components.manifest import FILE, Manifest, Port
from trt_nvfp4.builder.components.parts import described
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.decoder_contract import Decoder, decoder_of
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.common.onnx_runtime import onnxruntime


class OnnxDevice:
    """ONNX Runtime on the CPU: the parts' ONNX files, plugins by their function bodies."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises ModelFaultError for a part that is missing, or not what the manifest says."""
        self.name = f"{folder} (ONNX Runtime)"
        self._sessions = {name: session(model) for name, model in checked_models(folder, manifest).items()}

    def put(self, name: str, array: np.ndarray, port: Port) -> Handle:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))

    def zeros(self, name: str, shape: tuple[int, ...], port: Port) -> Handle:
        return self.put(name, np.zeros(shape, numpy_type(port)), port)

    def run(self, part: str, feeds: Mapping[str, Handle], in_place: Mapping[str, str]) -> dict[str, Handle]:
        running = self._sessions[part]
        names = [value.name for value in running.get_outputs()]
        try:
            found = running.run_with_ort_values(names, dict(feeds))
        except Exception as error:  # ONNX Runtime's own error types
            raise ModelFaultError(f"{self.name}: ONNX Runtime cannot run the part {part!r}: {error}") from error
        return dict(zip(names, found, strict=True))

    def longest(self, part: str, name: str, axis: int) -> int | None:
        return None

    def copy_row(self, source: Handle, row: int, target: Handle, to: int, axis: int) -> None:
        np.moveaxis(target.numpy(), axis, 0)[to] = np.moveaxis(source.numpy(), axis, 0)[row]  # views

    def clear_row(self, handle: Handle, row: int, axis: int) -> None:
        np.moveaxis(handle.numpy(), axis, 0)[row] = 0

    def get(self, handle: Handle) -> np.ndarray:
        array: np.ndarray = handle.numpy()
        return array

    def close(self) -> None:
        self._sessions = {}


def checked_models(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """The ONNX file of every part. Raises ModelFaultError for one that is missing, or not as the manifest says."""
    models = {}
    for part in manifest.parts:
        models[part.name] = model = model_of(folder, part.name)
        found = described(part.name, model)
        for kind, ports, theirs in (("input", part.inputs, found.inputs), ("output", part.outputs, found.outputs)):
            for name in ports.keys() | theirs.keys():
                if name not in theirs or name not in ports or not ports[name].takes(theirs[name]):
                    raise ModelFaultError(
                        f"{model}: its {kind} {name} is {theirs.get(name, 'missing')}, and {FILE} says "
                        f"{ports.get(name, 'nothing')}; build the parts together"
                    )
    return models


def model_of(folder: Path, part: str) -> Path:
    """The ONNX file of a part: the rewritten one, or the one in its bundle, or the exported one. Raises
    ModelFaultError where it is missing."""
    places = [folder / f"{part}.rewritten.onnx", folder / f"{part}.onnx"]
    if (folder / part / MANIFEST).is_file():
        places.insert(0, folder / part / "model.onnx")
    for place in places:
        if place.is_file():
            return place
    raise ModelFaultError(
        f"{folder}: the part {part!r} is missing ({places[0].name}); copy the whole folder, or build the model again"
    )


def decoder_of_parts(folder: Path) -> Decoder:
    """The decoder among the parts, by its file's metadata. Raises ModelFaultError without such metadata."""
    model = model_of(folder, "decoder")
    decoder = decoder_of(read(model))
    if decoder is None:
        raise ModelFaultError(f"{model}: its metadata does not say what its caches are; build it again")
    return decoder
