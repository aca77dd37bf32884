"""Opens the folder of a diffusers pipeline, whose modules are classes of diffusers and transformers."""

import importlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.components.diffusion.quantized import is_nvfp4, load_nvfp4, plain_dtype
from trt_nvfp4.builder.errors import ModelFaultError, UnavailableError, exit_code, first_line
from trt_nvfp4.builder.export.checkpoints.stated_size import check_size
from trt_nvfp4.builder.export.huggingface import check_weight_files, quiet
from trt_nvfp4.builder.model.model_files import PIPELINE
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.model_config import check_counts
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

_LIBRARIES = ("diffusers", "transformers")
_AGAIN = "download the whole directory again"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_pipeline(directory: Path, without_weights: Collection[str] = ()) -> Any:
    """The pipeline on the CPU, in the types of its files. The modules `without_weights` have shapes, but no values.

    Raises UnavailableError without diffusers; ModelFaultError for a folder that is incomplete, names other classes than
    diffusers and transformers have, or whose weights do not fit its configurations.
    """
    diffusers = _diffusers(directory)
    pipeline_class, classes = _classes(directory, diffusers)
    with quiet():
        modules = {
            name: _empty(directory / name, cls) if name in without_weights else _loaded(directory / name, cls)
            for name, cls in classes.items()
            if issubclass(cls, torch.nn.Module)
        }
        pipeline = _named(
            directory,
            pipeline_class,
            lambda: pipeline_class.from_pretrained(directory, local_files_only=True, **modules),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _diffusers(directory: Path) -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise UnavailableError(
            f"{directory}: a diffusers pipeline needs diffusers: pip install 'trt-nvfp4[diffusion]' ({error})"
        ) from error


def _classes(directory: Path, diffusers: Any) -> tuple[Any, dict[str, Any]]:
    """The pipeline's class, and those of its components. Raises ModelFaultError for classes of other libraries,
    and components that are missing."""
    file = directory / PIPELINE
    try:
        index = read_json(file)
        name = index["_class_name"]
        named = {key: value for key, value in index.items() if isinstance(value, list) and value != [None, None]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFaultError(f"{file}: cannot be read ({first_line(error)}); {_AGAIN}") from error
    pipeline_class = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(pipeline_class, type) or not issubclass(pipeline_class, diffusers.DiffusionPipeline):
        raise ModelFaultError(
            f"{file}: names the pipeline {name!r}, which diffusers {diffusers.__version__} does not have; install the "
            "version that has it (code of the directory's own is not run)"
        )
    classes = {}
    for key, value in named.items():
        if len(value) != 2 or value[0] not in _LIBRARIES or not isinstance(value[1], str):
            raise ModelFaultError(
                f"{file}: {key} is {value!r}, expected a class of diffusers or transformers; write [null, null] in the "
                "place of a safety checker; code of the directory's own is not run"
            )
        found = getattr(importlib.import_module(value[0]), value[1], None)
        if not isinstance(found, type):
            raise ModelFaultError(f"{file}: {key} is {value[1]}, which the installed {value[0]} lacks")
        if Path(key).name != key or not (directory / key).is_dir():
            where = f"{directory}: {PIPELINE} names {key} ({value[1]})"
            raise ModelFaultError(f"{where}, and its folder is missing; {_AGAIN}")
        classes[key] = found
    return pipeline_class, classes


def _loaded(folder: Path, cls: Any) -> Any:
    """A module with its weights, all of which its files must hold."""
    config = _config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFaultError(f"{folder}: holds no weights (*.safetensors); {_AGAIN}")
    check_weight_files(folder)
    check_size(folder, lambda config: _configured(folder, cls), config)
    if cls.__module__.startswith("diffusers.") and is_nvfp4(stored_files(folder)):
        return _named(folder, cls, lambda: load_nvfp4(folder, cls, config))
    module, info = _named(
        folder,
        cls,
        lambda: cls.from_pretrained(
            folder, dtype=_dtype(files[0]), use_safetensors=True, local_files_only=True, output_loading_info=True
        ),
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelFaultError(f"{folder}: the files lack {len(missing)} of its weights, {missing[0]} for one; {_AGAIN}")
    return module.eval().requires_grad_(False)


def _empty(folder: Path, cls: Any) -> Any:
    """A module without values."""
    _config(folder)
    with torch.device("meta"):
        module = _named(folder, cls, lambda: _configured(folder, cls))
    files = sorted(folder.glob("*.safetensors"))
    if files and is_nvfp4(stored_files(folder)):
        return module.eval().to(plain_dtype(stored_files(folder)))
    return module.eval().to(_dtype(files[0]) if files else torch.float32)


def stored_files(path: Path) -> SafetensorsFiles:
    """The tensors of a safetensors file or a folder of them. Raises ModelFaultError for files that cannot be read."""
    try:
        return SafetensorsFiles(path)
    except CalibrationError as error:
        raise ModelFaultError(str(error)) from error


def _configured(folder: Path, cls: Any) -> Any:
    if cls.__module__.startswith("diffusers."):
        return cls.from_config(cls.load_config(folder))
    return cls(cls.config_class.from_pretrained(folder, local_files_only=True))


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        config = read_json(file)
        check_counts(config)
    except (OSError, ValueError) as error:
        raise ModelFaultError(f"{file}: {first_line(error)}; {_AGAIN}") from error
    return dict(config)


def _dtype(file: Path) -> torch.dtype:
    """The type of most tensors of a file. Raises ModelFaultError for weights that are quantized already."""
    files = SafetensorsFiles(file)
    most = Counter(files.dtype(name) for name in files).most_common(1)
    name = most[0][0] if most else "F32"
    if name not in _DTYPES:
        raise ModelFaultError(
            f"{file}: its weights are {name}, expected {', '.join(_DTYPES)}; give the original weights"
        )
    return _DTYPES[name]


def _named(folder: Path, cls: Any, load: Callable[[], Any]) -> Any:
    """Returns what `load` does; errors of the libraries become one message that names the folder."""
    try:
        return load()
    except Exception as error:
        if exit_code(error) is not None and not isinstance(error, OSError):
            raise
        raise ModelFaultError(f"{folder}: {cls.__name__} cannot be loaded: {first_line(error)}; {_AGAIN}") from error
