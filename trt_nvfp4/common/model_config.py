"""The config.json of a Hugging Face directory, and bounds of what it may ask for."""

from __future__ import annotations

import copy
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json

#: More layers, heads, experts, labels than any model has; transformers makes lists of such lengths.
LARGEST_COUNT = 100_000
# num_hidden_layers, n_layer, depths, num_local_experts, num_attention_heads, num_codebooks, n_group, num_labels
_COUNTS = re.compile("(layer|depth|block|stage|expert|head|codebook|group|label)s?$")


def read_config(directory: Path) -> Any:
    """The content of config.json, as a copy for the caller; the file is read once, and again when it has changed.
    Raises as `read_json`."""
    file = directory / "config.json"
    state = os.stat(file)
    return copy.deepcopy(_read(file.absolute(), state.st_ino, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=8)
def _read(file: Path, *state: int) -> Any:
    return read_json(file)


def check_counts(config: Any) -> None:
    """Raise ValueError, naming the entry, for a configuration, as JSON has it, that states more layers, heads, experts
    or labels than any model has, at any depth."""
    pending = [("", config)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{path}.{name}" if path else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [(path, inner) for inner in value]
        elif isinstance(value, (int, float)) and value > LARGEST_COUNT and _COUNTS.search(path):
            raise ValueError(f"{path} is {str(value)[:40]}, and no model has more than {LARGEST_COUNT}")
