"""Files that are given as a model and are no ONNX: what they are, and what to give instead."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.records.bundle import MANIFEST
from trt_nvfp4.common.model_config import check_counts, read_config

#: How files of engines end.
ENGINES = (".engine", ".plan")
_WEIGHTS = "weights without the graph that they belong to"
_TORCH = (
    f"{_WEIGHTS}, or Python objects; give the Hugging Face directory with its config.json, or export the model with "
    "torch.onnx.export(model, inputs, 'model.onnx', dynamo=True)"
)
_BY_SUFFIX = {
    **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), f"a checkpoint of PyTorch: {_TORCH}"),
    ".pt2": "a program of torch.export; call its to ONNX exporter: torch.onnx.export(program, ...).save('model.onnx')",
    ".safetensors": f"{_WEIGHTS}; give the folder that it lies in, with config.json, or an ONNX file; of a "
    "diffusion model the folder with model_index.json (diffusers' from_single_file and save_pretrained make one)",
    ".gguf": "a model of llama.cpp; give the Hugging Face directory that it was made from",
    ".ort": "a model in ONNX Runtime's own format; give the ONNX file that it was made from",
    ".npz": "arrays; give them with --calib-data, and the model as an ONNX file or Hugging Face directory",
    **dict.fromkeys((".engine", ".plan", ".trt"), "an engine of TensorRT; give the ONNX file it was built from"),
    **dict.fromkeys((".h5", ".keras", ".pb", ".tflite"), "a model of TensorFlow; convert it to ONNX with tf2onnx"),
    **dict.fromkeys((".pdmodel", ".pdiparams"), "a model of Paddle; convert it to ONNX with paddle2onnx"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), "a model of Core ML; give the ONNX file, or what it was made from"),
}
_POINTER = "a Git LFS pointer"
_BY_SUFFIX[_POINTER] = f"{_POINTER} in its place; fetch the file with git lfs pull"
_BY_MAGIC = {
    b"version https://git-lfs.": _POINTER,
    b"GGUF": ".gguf",
    b"ftrt": ".engine",
    b"PK\x03\x04": ".pt",
    b"\x80\x02": ".pt",
    b"\x89HDF": ".h5",
}
_FIRST_BYTE_OF_ONNX = b"\x08"
# With the function in it that returns a model's parts.
_PYTHON = re.compile(r"\.py(:\w+)?$")
#: Which classes a diffusers pipeline is made of.
PIPELINE = "model_index.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_model_directory(path: Path) -> bool:
    """True for a Hugging Face directory: it has a config.json and no bundle's manifest."""
    return path.is_dir() and (path / "config.json").is_file() and not (path / MANIFEST).is_file()


def is_eagle(path: Path) -> bool:
    """Whether a directory holds an EAGLE-3 head, by its configuration."""
    try:
        names = read_config(path).get("architectures")
    except (ValueError, OSError, AttributeError):
        return False
    return isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)


def is_pipeline(path: Path) -> bool:
    """Whether a path is the folder of a diffusers pipeline."""
    return path.is_dir() and (path / PIPELINE).is_file()


def is_policy(path: Path) -> bool:
    """Whether a directory is a policy of LeRobot's: its configuration has a type and features in place of a
    transformers architecture."""
    try:
        config = read_config(path) if (path / "config.json").is_file() else None
    except (OSError, ValueError):  # said where it is read
        return False
    return isinstance(config, dict) and "type" in config and "output_features" in config


def check_config(directory: Path) -> None:
    """Raise ModelFaultError for an invalid configuration, and for one with more layers or the like than any model
    has."""
    try:
        config = read_config(directory)
    except ValueError as error:
        raise ModelFaultError(f"{directory / 'config.json'}: not JSON ({error})") from error
    try:
        check_counts(config)
    except ValueError as error:
        raise ModelFaultError(f"{directory / 'config.json'}: {error}; correct it") from error
    if isinstance(config, dict) and "_diffusers_version" in config:
        raise ModelFaultError(
            f"{directory}: holds one module of a diffusers pipeline; give the pipeline's folder, with model_index.json"
        )
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelFaultError(f"{directory / 'config.json'}: no model_type, so not a transformers model")
    if is_eagle(directory):
        raise ModelFaultError(
            f"{directory}: holds an EAGLE-3 head, which drafts for another model; build it with that: build-engine "
            f"MODEL --draft {directory}"
        )


def check_model_file(path: Path) -> None:
    """Raise ModelFaultError for a path that is not there, and for a file of a known format other than ONNX (but a
    Python file)."""
    if _PYTHON.search(str(path)):
        return
    check_exists(path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(max(map(len, _BY_MAGIC)))
    if start[:1] == _FIRST_BYTE_OF_ONNX:
        return  # whatever it is called
    suffix = next((suffix for magic, suffix in _BY_MAGIC.items() if start.startswith(magic)), path.suffix.lower())
    if suffix in _BY_SUFFIX:
        raise ModelFaultError(f"{path}: not an ONNX file, but {_BY_SUFFIX[suffix]}")


def check_exists(path: Path) -> None:
    """Raise ModelFaultError for a path that is not there, with what was probably meant, and as `check_config` for a
    Hugging Face directory."""
    if path.exists():
        if is_model_directory(path) and not is_policy(path) and not is_pipeline(path):
            check_config(path)
        return
    hint = _meant(path)
    if _HUB_NAME.fullmatch(str(path)) and path.suffix != ".onnx":
        hint = (
            f"; get a model of the Hugging Face Hub by: hf download {path} --local-dir DIR (which goes on where it was "
            "interrupted, and needs a network), and give DIR"
        )
    raise ModelFaultError(f"{path}: no such file or folder{hint}")


def _meant(path: Path) -> str:
    """The file or folder whose name is nearly the one of `path`."""
    try:
        names = [beside.name for beside in path.parent.iterdir()]
    except OSError:  # no folder, or none that may be read
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
