"""Finds quantized weights in Hugging Face directories, which transformers may load without their scales."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError

# Scales, zero points and packed weights by ModelOpt, compressed-tensors, DeepSeek, GPTQ, AWQ and bitsandbytes.
_QUANTIZED = re.compile(
    r"(^|[._])((weight|input)_(scale(_inv|_2)?|global_scale|zero_point|packed)|(qweight|qzeros)|SCB|weight\.(absmax|"
    r"quant_map|quant_state\..*)|weight_format)$"
)
_SMALL_TYPES = re.compile(r"F8_|F4|I8|U8|I4|U4")
# Methods whose weights transformers decodes as it loads them.
_DECODED = ("mxfp4",)
# Tables that old checkpoints hold beside the weights; models compute them.
_COMPUTED = re.compile(r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias)$")


def check_not_quantized(directory: Path, config: dict[str, Any]) -> None:
    """Raises BuilderError (model) for a directory whose safetensors hold quantized weights or their scales."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in _DECODED:
        return
    found = [key for file in sorted(directory.glob("*.safetensors")) for key in _quantized_keys(file)]
    if not found and method is None:
        return
    stated = f"by {method} ({_quantization_file(directory)})" if method else "though config.json does not say so"
    held = f": its files hold {_listed(found)}" if found else ""
    raise BuilderError(
        MODEL_AT_FAULT,
        f"{directory}: its weights are quantized, {stated}{held}. Such weights are not read from here yet; give the "
        "directory of the original model in 16 or 32 bits (its NVFP4 weights can come from this one: --packed-weights)",
    )


def check_all_used(directory: Path, unused: Collection[str], modules: Collection[str]) -> None:
    """Raises BuilderError (model) where `unused`, keys of the files that transformers did not load, belong to `modules`
    of the model, which without them computes something else. Heads and layers that the model lacks are no fault."""
    lost = sorted(key for key in unused if key.rpartition(".")[0] in modules and not _COMPUTED.search(key))
    if lost:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: its files hold {_listed(lost)}, which transformers does not load, so that the "
            "exported model would be another one; give the directory of the original model, or export it with "
            "torch.onnx.export and give the ONNX file",
        )


def _quantized_keys(file: Path) -> Iterator[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                dtype = tensors.get_slice(key).get_dtype()
                if _QUANTIZED.search(key) or (key.endswith("weight") and _SMALL_TYPES.match(dtype)):
                    yield key
    except (SafetensorError, OSError):
        return  # transformers says what is wrong with the file


def _quantization_file(directory: Path) -> str:
    return "hf_quant_config.json" if (directory / "hf_quant_config.json").is_file() else "config.json"


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more such keys" if len(keys) > 3 else ""
    return f"{', '.join(json.dumps(key) for key in keys[:3])}{more}"
