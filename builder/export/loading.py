"""Loads the model of a Hugging Face directory; one with quantized weights is loaded from what they dequantize to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export.checkpoints.directory import QuantizedDirectory, held_tensors
from trt_nvfp4.builder.export.checkpoints.stated_size import check_size
from trt_nvfp4.builder.export.deferred import ChangedInPlaceError, read_small
from trt_nvfp4.builder.export.unused_tensors import check_all_used

if TYPE_CHECKING:
    import torch

# Parameters of recurrences, whatever the family.
_DECAYS = ("A_log", "dt_bias")
_ABSENT = object()
EXPORT_IT = "export it with torch.onnx.export and give the ONNX file"


@dataclass(frozen=True)
class Loaded:
    """A model; the names of the weights that its files lack, which transformers made up; and what the files hold
    quantized, None where nothing is."""

    model: torch.nn.Module
    absent: Set[str]
    quantized: QuantizedDirectory | None


def load_directory(directory: Path, transformers: Any, trust_remote_code: bool) -> Loaded:
    """The model, of the class named in the configuration or else the bare one. Large weights from safetensors are
    deferred: read, and dequantized, each time that something computes with them.

    Raises ModelFaultError: another class than transformers has; weights that do not fit the configuration, are
    quantized in a format that is not read, or are not the model's.
    """
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    held = held_tensors(directory)
    config = transformers.AutoConfig.from_pretrained(directory, **options)
    names = getattr(config, "architectures", None) or []
    own = _own_class(config, names) if trust_remote_code else None
    known = [name for name in names if hasattr(transformers, name)]
    if names and not known and own is None:
        raise ModelFaultError(
            f"{directory}: config.json names the architecture {', '.join(names)}, which transformers "
            f"{transformers.__version__} does not have; install the version that has it, or {EXPORT_IT}"
        )
    loader = getattr(transformers, own or next(iter(known), "AutoModel"))
    if own is None:
        check_size(directory, _concrete(loader, config, None), config)
    of_loading = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model: Any
    concrete = _concrete(loader, config, directory if own else None)
    with _decays_in_float32(concrete):
        if held is None:
            model, info = loader.from_pretrained(directory, dtype="auto", **of_loading, **options)
        else:
            try:
                model, info = _load_held(directory, concrete, held, of_loading, deferred=True)
            except ChangedInPlaceError:  # by what initializes a part of a weight
                model, info = _load_held(directory, concrete, held, of_loading, deferred=False)
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise ModelFaultError(
            f"{directory}: weights and config.json do not fit: {name} is {list(found)} in the weights, and "
            f"{list(expected)} by config.json"
        )
    check_all_used(directory, info["unexpected_keys"], model)
    prepare(model)
    return Loaded(model.eval(), set(info["missing_keys"]), held if held is not None and held.is_quantized else None)


def prepare(model: Any) -> None:
    """Make a loaded model one that exporters can trace."""
    if hasattr(model, "set_experts_implementation"):
        # Grouped matrix products, the default, have no ONNX operator, and loops over the experts depend on the data.
        model.set_experts_implementation("batched_mm")
    read_small(model)


@contextmanager
def _decays_in_float32(model_class: Any) -> Iterator[None]:
    """Within, models of the class are loaded with what decays are made of in float32: many tokens multiply them."""
    own = "_keep_in_fp32_modules_strict"
    before = vars(model_class).get(own, _ABSENT)
    setattr(model_class, own, {*(getattr(model_class, own, None) or ()), *_DECAYS})
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(model_class, own)
        else:
            setattr(model_class, own, before)


def _load_held(
    directory: Path, model_class: Any, held: QuantizedDirectory, options: dict[str, Any], deferred: bool
) -> tuple[Any, dict[str, Any]]:
    """The plain model with its weights, which are read later where they are `deferred`, and what transformers says of
    its loading."""
    config = options["config"]
    dtype = _plain_dtype(config, held)
    _forget_quantization(config)
    try:
        # A name beside a state dict is refused, so that generation_config.json is not read.
        state = held.deferred(dtype) if deferred else held.state_dict()
        model, info = model_class.from_pretrained(None, dtype=dtype, state_dict=state, **options)
    except Exception as error:
        # transformers says that a conversion failed, and logs why.
        raise (held.failure or error) from error
    if held.failure is not None:
        raise held.failure
    if model.can_generate() and (directory / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(directory, local_files_only=True)
    return model, info


def _concrete(loader: Any, config: Any, own_code: Path | None) -> Any:
    """The model's class, where `loader` is one that chooses among them; of the code in a folder, or of transformers."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import _get_model_class

    if own_code is not None:
        return get_class_from_dynamic_module(config.auto_map[loader.__name__], own_code, local_files_only=True)
    return _get_model_class(config, loader._model_mapping) if hasattr(loader, "_model_mapping") else loader


def class_of(config: Any, transformers: Any) -> Any:
    """The class in transformers of the model that `config` describes. Raises errors of any kind without one."""
    names = [name for name in getattr(config, "architectures", None) or ["AutoModel"] if hasattr(transformers, name)]
    return _concrete(getattr(transformers, names[0]), config, None)


def class_of_text(config: Any) -> Any:
    """The class in transformers of the language model that `config`, only of text, describes."""
    import transformers

    return _concrete(transformers.AutoModelForCausalLM, config, None)


def _own_class(config: Any, names: Sequence[str]) -> str | None:
    """The Auto class by which the directory's own code defines its architecture, as `auto_map` in its configuration
    says; None where it defines none."""
    own = getattr(config, "auto_map", None) or {}
    return next((auto for auto, place in own.items() if str(place).rpartition(".")[2] in names), None)


def _plain_dtype(config: Any, held: QuantizedDirectory) -> torch.dtype:
    """The type that the model computes in: the configuration's, or that of the weights that are not quantized."""
    import torch

    stated = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(stated, str):
        stated = getattr(torch, stated, None)
    return stated if stated in (torch.float32, torch.bfloat16, torch.float16) else held.dtype


def _forget_quantization(config: Any) -> None:
    """Make transformers build the plain model."""
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for name in ("quantization_config", "compression_config"):
            if name in vars(part):
                delattr(part, name)
