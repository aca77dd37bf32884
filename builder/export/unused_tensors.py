"""Tells tensors that a model's files hold in vain from those without which it is another model."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

# Tables that old checkpoints hold beside the weights; models compute them.
_COMPUTED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias)$")
_FURTHER = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\..*")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_NAMED_KEYS = 3


def check_all_used(directory: Path, unused: Collection[str], model: Any) -> None:
    """Raises ModelFaultError for `unused`, keys of the files that transformers did not load and does not ignore on
    purpose: a model without them computes something else.

    No fault are tables that models compute, the head that a bare model lacks, parts that only other classes of the same
    model have (heads of other tasks, BERT's pooler), and layers that predict further tokens (DeepSeek's, GLM's).
    """
    lost = sorted(key for key in unused if not _COMPUTED.search(key) and not _predicts_further(key, model.config))
    if model.base_model is model:
        modules = {name.partition(".")[0] for name, _ in model.named_parameters()}
        prefix = f"{model.base_model_prefix}."
        lost = [key for key in lost if key.startswith(prefix) or key.partition(".")[0] in modules]
    elif lost:
        of_others = {key for keys in _keys_of_other_classes(model) for key in keys}
        lost = [key for key in lost if key not in of_others]
    if lost:
        raise ModelFaultError(
            f"{directory}: its files hold {listed(lost)}, which {type(model).__name__} does not use, so "
            "that the exported model would be another one; fix `architectures` in config.json, give the directory of "
            "the original model, or export it with torch.onnx.export and give the ONNX file"
        )


def further_layers(directory: Path) -> str | None:
    """A note on layers in a directory's files that predict further tokens, which an export leaves out; None without
    any, and for files other than safetensors."""
    try:
        files = SafetensorsFiles(directory)
        config = read_config(directory)
    except (CalibrationError, ValueError):
        return None
    text = config.get("text_config") or config
    keys = sorted(key for key in files if _FURTHER.fullmatch(key) or _is_behind(key, text.get))
    if not keys:
        return None
    return (
        f"{directory}: its files hold layers that predict further tokens ({len(keys)} tensors, {json.dumps(keys[0])} "
        "for one), which are left out: --draft auto builds them as a drafter"
    )


def listed(keys: Sequence[str]) -> str:
    """The first of some keys, and how many more there are."""
    more = f" and {len(keys) - _NAMED_KEYS} more such keys" if len(keys) > _NAMED_KEYS else ""
    return f"{', '.join(json.dumps(key) for key in keys[:_NAMED_KEYS])}{more}"


def _predicts_further(key: str, config: Any) -> bool:
    """Whether it belongs to a layer behind the last one, as many as the configuration states for further tokens, or to
    one with a name of its own."""
    text = config.get_text_config(decoder=True)
    return _FURTHER.fullmatch(key) is not None or _is_behind(key, lambda name: getattr(text, name, None))


def _is_behind(key: str, stated: Callable[[str], Any]) -> bool:
    first, more = (stated(name) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    match = _LAYER.fullmatch(key)
    return match is not None and first <= int(match[1]) < first + more


def _keys_of_other_classes(model: Any) -> Iterator[Collection[str]]:
    """Keys of the other classes of the same kind of model, built without memory for weights."""
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for mapping, classes in vars(modeling_auto).items():
        if mapping.endswith("_MAPPING_NAMES") and (found := classes.get(model.config.model_type)) is not None:
            names |= {found} if isinstance(found, str) else set(found)
    for name in sorted(names - {type(model).__name__}):
        try:
            with torch.device("meta"):
                yield getattr(transformers, name)(model.config).state_dict().keys()
        except Exception:  # whatever a class asks of its configuration: it then says nothing
            continue
