"""The settings of a quantized directory's format that its tensors do not show."""

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
# Columns of a group that is a whole row, which configurations write as -1: more than any row has.
WHOLE_ROW = 1 << 40
# ModelOpt's formats whose weights have no other groups; where group_size is missing, their names state it.
_ALGORITHM_GROUPS = {"NVFP4": 16, "NVFP4_AWQ": 16, "W4A16_NVFP4": 16, "W4A8_NVFP4_FP8": 32, "MXFP4": 32, "MXFP8": 32}
_STRATEGIES = {"tensor", "channel", "group", "block"}
# As compressed-tensors wrote blocks at first.
_BLOCK_TEXT = re.compile(r"(\d{1,9})x(\d{1,9})")
# Where configurations of several parts keep it.
_PARTS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class Settings:
    """Settings in `quantization_config` of config.json, or in hf_quant_config.json (ModelOpt); None where neither has
    it.

    `method`: the library or format. `blocks`: rows and columns that share a scale of blockwise FP8, and `groups`:
    columns that do (`WHOLE_ROW` for -1); modules may have several. `bits`: of packed integers, and `all_bits` with
    those of single modules. `layout`: GPTQ's `checkpoint_format` or AWQ's `version`, in lower case. `kinds`: "int" and
    "float", which values are. `cache`: the format of caches of keys and values, such as "FP8". `strategies`: what
    shares a scale, of "tensor", "channel", "group" and "block". `symmetric`: whether values have no zero points.
    """

    method: str | None = None
    bits: int | None = None
    blocks: frozenset[tuple[int, int]] = frozenset()
    groups: frozenset[int] = frozenset()
    layout: str | None = None
    kinds: frozenset[str] = frozenset()
    cache: str | None = None
    all_bits: frozenset[int] = frozenset()
    strategies: frozenset[str] = frozenset()
    symmetric: frozenset[bool] = frozenset()

    @property
    def is_symmetric(self) -> bool | None:
        """Whether all weights are symmetric; None where some are, or neither is stated."""
        return next(iter(self.symmetric)) if len(self.symmetric) == 1 else None

    @property
    def stated_groups(self) -> str:
        """The groups and blocks for messages; "" without any."""
        blocks = [f"{rows} x {columns}" for rows, columns in sorted(self.blocks)]
        return ", ".join([*blocks, *("whole rows" if size == WHOLE_ROW else str(size) for size in sorted(self.groups))])

    @staticmethod
    def of(directory: Path, config: Mapping[str, Any]) -> "Settings":
        """Those of a directory and its config.json."""
        found, beside = quantization_config(config), _modelopt(directory)
        if found is None:
            found = {"quant_method": "modelopt", **beside} if beside is not None else {}
        method = found.get("quant_method")
        layout = found.get("checkpoint_format", found.get("version"))
        if isinstance(packing := found.get("packing_format"), str):  # auto-round's "auto_round:auto_gptq"
            layout = "gptq" if packing.endswith("gptq") else packing
        stated = [*_stated(found, "weight_block_size"), *_stated(found, "block_structure")]
        blocks = {block for value in stated if (block := _block(value)) is not None}
        columns = frozenset(columns for rows, columns in blocks if rows == 1)
        blocks = {block for block in blocks if block[0] > 1}
        bits = _positive(found.get("bits", found.get("w_bit")))
        symmetric = [*_stated(found, "sym"), *_stated(found, "symmetric")]
        if method == "awq":
            symmetric += [value is False for value in _stated(found, "zero_point") if isinstance(value, bool)]
        return Settings(
            method.lower() if isinstance(method, str) else None,
            bits,
            frozenset(blocks),
            _groups(found) | _groups(beside or {}) | columns,
            layout.lower() if isinstance(layout, str) else None,
            frozenset({"float"} if method in _FP8_METHODS else _KINDS & _texts(found, "type")),
            _cache(found) or _cache(beside or {}),
            frozenset(_sizes(found, "bits", "w_bit", "num_bits")),
            _strategies(found, bool(blocks)),
            frozenset(value for value in symmetric if isinstance(value, bool)),
        )


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object in config.json that describes the quantization, or None."""
    for part in (config, *(config.get(name) for name in _PARTS)):
        if isinstance(part, Mapping):
            for key in ("quantization_config", "compression_config"):
                if isinstance(found := part.get(key), Mapping):
                    return found
    return None


def _modelopt(directory: Path) -> Mapping[str, Any] | None:
    """The content of hf_quant_config.json; None without the file. Raises ValueError where it is not JSON."""
    if not (file := directory / "hf_quant_config.json").is_file():
        return None
    content = read_json(file)
    found = content.get("quantization") if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _groups(found: Mapping[str, Any]) -> frozenset[int]:
    """Columns that share a scale, as group sizes or names of algorithms state them."""
    groups = _sizes(found, "group_size")
    if -1 in _stated(found, "group_size"):
        groups.add(WHOLE_ROW)
    named = {_ALGORITHM_GROUPS[name] for name in _texts(found, "quant_algo") if name in _ALGORITHM_GROUPS}
    return frozenset(groups or named)


def _strategies(found: Mapping[str, Any], has_blocks: bool) -> frozenset[str]:
    if not (stated := _STRATEGIES & _texts(found, "strategy")):
        return frozenset({"block"} if has_blocks else ())
    return frozenset(stated | ({"group"} if _sizes(found, "group_size") else set()))


def _sizes(found: Mapping[str, Any], *names: str) -> set[int]:
    return {size for name in names for value in _stated(found, name) if (size := _positive(value)) is not None}


def _texts(found: Mapping[str, Any], name: str) -> set[str]:
    return {value for value in _stated(found, name) if isinstance(value, str)}


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
    """Values under `name` for weights: of all modules, of groups of them, or of single ones."""
    pending = [found]
    while pending:
        for key, value in pending.pop().items():
            if key == name:
                yield value
            elif isinstance(value, Mapping) and key not in _OF_ACTIVATIONS:
                pending.append(value)
