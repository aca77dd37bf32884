"""What the configuration of a quantized directory says of its format, as far as the tensors alone do not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json

# What is said of activations is not of weights.
_OF_ACTIVATIONS = ("input_activations", "output_activations", "kv_cache_scheme")
_KINDS = {"int", "float"}
_FP8_METHODS = ("fp8", "fbgemm_fp8")
# As compressed-tensors wrote blocks at first.
_BLOCK_TEXT = re.compile(r"(\d{1,9})x(\d{1,9})")
# Where configurations of several parts keep it.
_PARTS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class Settings:
    """Of `quantization_config` in config.json, or of hf_quant_config.json (ModelOpt); None where neither states it.

    `method`: the library or format. `blocks`: rows and columns that share a scale of blockwise FP8, and `groups`:
    columns that do; modules may have several. `bits`: of packed integers. `layout`: GPTQ's `checkpoint_format` or AWQ's
    `version`, in lower case. `kinds`: "int" and "float", which values are. `cache`: the format of caches of keys and
    values, such as "FP8".
    """

    method: str | None = None
    bits: int | None = None
    blocks: frozenset[tuple[int, int]] = frozenset()
    groups: frozenset[int] = frozenset()
    layout: str | None = None
    kinds: frozenset[str] = frozenset()
    cache: str | None = None

    @staticmethod
    def of(directory: Path, config: Mapping[str, Any]) -> Settings:
        """Those of a directory and its config.json."""
        found, beside = quantization_config(config), _modelopt(directory)
        if found is None:
            return Settings("modelopt" if beside is not None else None, cache=_cache(beside or {}))
        method = found.get("quant_method")
        layout = found.get("checkpoint_format", found.get("version"))
        if isinstance(packing := found.get("packing_format"), str):  # auto-round's "auto_round:auto_gptq"
            layout = "gptq" if packing.endswith("gptq") else packing
        stated = [*_stated(found, "weight_block_size"), *_stated(found, "block_structure")]
        blocks = {block for value in stated if (block := _block(value)) is not None}
        groups = {group for value in _stated(found, "group_size") if (group := _positive(value)) is not None}
        return Settings(
            method.lower() if isinstance(method, str) else None,
            _positive(found.get("bits", found.get("w_bit"))),
            frozenset(block for block in blocks if block[0] > 1),
            frozenset(groups | {columns for rows, columns in blocks if rows == 1}),
            layout.lower() if isinstance(layout, str) else None,
            frozenset({"float"} if method in _FP8_METHODS else _KINDS & {str(kind) for kind in _stated(found, "type")}),
            _cache(found) or _cache(beside or {}),
        )


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object in config.json that describes the quantization, or None."""
    for part in (config, *(config.get(name) for name in _PARTS)):
        if isinstance(part, Mapping):
            for key in ("quantization_config", "compression_config"):
                if isinstance(found := part.get(key), Mapping):
                    return found
    return None


def read_config(directory: Path) -> Any:
    """What is in config.json. Raises ValueError where it is not JSON."""
    return read_json(directory / "config.json")


def _modelopt(directory: Path) -> Mapping[str, Any] | None:
    """What is in hf_quant_config.json; None where there is none. Raises ValueError where it is not JSON."""
    if not (file := directory / "hf_quant_config.json").is_file():
        return None
    content = read_json(file)
    found = content.get("quantization") if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _cache(found: Mapping[str, Any]) -> str | None:
    """The format of caches: ModelOpt's name of it, or compressed-tensors' description."""
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, str):
        return scheme.upper()
    if not isinstance(scheme, Mapping):
        return None
    bits, of = scheme.get("num_bits"), str(scheme.get("type", "")).upper()
    return "FP8" if (bits, of) == (8, "FLOAT") else f"{of or 'another type'} of {bits} bits"


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _block(value: Any) -> tuple[int, int] | None:
    if isinstance(value, str) and (match := _BLOCK_TEXT.fullmatch(value)):
        value = [int(size) for size in match.groups()]
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = map(_positive, value)
    return (rows, columns) if rows and columns else None


def _stated(found: Mapping[str, Any], name: str) -> Iterator[Any]:
    """What it states under `name` for weights: of all modules, of groups of them, or of single ones."""
    pending = [found]
    while pending:
        for key, value in pending.pop().items():
            if key == name:
                yield value
            elif isinstance(value, Mapping) and key not in _OF_ACTIVATIONS:
                pending.append(value)
