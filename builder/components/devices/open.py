"""Which device the parts of a model run on here."""

from pathlib import Path

from trt_nvfp4.builder.components.devices.device import Device
from trt_nvfp4.builder.components.devices.onnx_device import OnnxDevice
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.cuda.driver import local_compute_capability
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.open import RunnerName


def open_device(folder: Path, manifest: Manifest, runner: RunnerName = "auto") -> Device:
    """The device that `runner` names; auto: this machine's GPU where every part has an engine, else ONNX Runtime.

    Raises BuilderError as those do, and UsageError for tensorrt where a part has no engine.
    """
    files = {part.name: _engine_of(folder, part.name) for part in manifest.parts}
    missing = [part for part, file in files.items() if not file.is_file()]
    if runner == "torch":
        from trt_nvfp4.builder.components.devices.torch_device import TorchDevice

        return TorchDevice(folder, manifest)
    if runner == "tensorrt" and missing:
        raise UsageError(
            f"--runner tensorrt: {folder}: the part {missing[0]!r} has no engine; build it (build_engine.py of a "
            "bundle), or leave the option out"
        )
    if runner == "onnxruntime" or (runner == "auto" and (missing or local_compute_capability() is None)):
        return OnnxDevice(folder, manifest)
    from trt_nvfp4.builder.components.devices.tensorrt_device import open_engines

    return open_engines(folder, manifest, files)


def _engine_of(folder: Path, part: str) -> Path:
    """Where the part's engine lies: beside the manifest, or in its bundle once it is built."""
    beside = folder / f"{part}.engine"
    return beside if beside.is_file() else folder / part / "model.engine"
