"""Files that are given as a model and are no ONNX: what they are, and what to give instead."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError

_WEIGHTS = "weights without the graph that they belong to"
_TORCH = (
    f"{_WEIGHTS}, or Python objects; give the Hugging Face directory with its config.json, or export the model with "
    "torch.onnx.export(model, inputs, 'model.onnx', dynamo=True)"
)
_BY_SUFFIX = {
    **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), f"a checkpoint of PyTorch: {_TORCH}"),
    ".pt2": "a program of torch.export; call its to ONNX exporter: torch.onnx.export(program, ...).save('model.onnx')",
    ".safetensors": f"{_WEIGHTS}; give the folder that it lies in, with config.json, or an ONNX file",
    ".gguf": "a model of llama.cpp; give the Hugging Face directory that it was made from",
    ".ort": "a model in ONNX Runtime's own format; give the ONNX file that it was made from",
    ".npz": "arrays; give them with --calib-data, and the model as an ONNX file or Hugging Face directory",
    **dict.fromkeys((".engine", ".plan", ".trt"), "an engine of TensorRT; give the ONNX file it was built from"),
    **dict.fromkeys((".h5", ".keras", ".pb", ".tflite"), "a model of TensorFlow; convert it to ONNX with tf2onnx"),
    **dict.fromkeys((".pdmodel", ".pdiparams"), "a model of Paddle; convert it to ONNX with paddle2onnx"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "a model of Core ML; give the ONNX file, or what it was made from"),
}
_BY_MAGIC = {b"GGUF": ".gguf", b"ftrt": ".engine", b"PK\x03\x04": ".pt", b"\x80\x02": ".pt", b"\x89HDF": ".h5"}
_FIRST_BYTE_OF_ONNX = b"\x08"
# With the function in it that returns a model's parts.
_PYTHON = re.compile(r"\.py(:\w+)?$")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_file(path: Path) -> None:
    """Raise BuilderError (model) for a path that is not there, and for a file of a known format other than ONNX (but a
    Python file)."""
    if _PYTHON.search(str(path)):
        return
    if not path.exists():
        hint = _meant(path)
        if _HUB_NAME.fullmatch(str(path)) and path.suffix != ".onnx":
            hint = f"; get a model of the Hugging Face Hub by: hf download {path} --local-dir DIR, and give DIR"
        raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file or folder{hint}")
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(4)
    if start[:1] == _FIRST_BYTE_OF_ONNX:
        return  # whatever it is called
    suffix = next((suffix for magic, suffix in _BY_MAGIC.items() if start.startswith(magic)), path.suffix.lower())
    if suffix in _BY_SUFFIX:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: not an ONNX file, but {_BY_SUFFIX[suffix]}")


def _meant(path: Path) -> str:
    """The file or folder whose name is nearly the one of `path`."""
    try:
        names = [beside.name for beside in path.parent.iterdir()]
    except OSError:  # no folder, or none that may be read
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
