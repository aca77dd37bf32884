"""Bounds of what the config.json of a Hugging Face directory may ask for: transformers makes lists of such lengths."""

from __future__ import annotations

import re
from typing import Any

#: More layers, heads, experts, labels than any model has.
LARGEST_COUNT = 100_000
# num_hidden_layers, n_layer, depths, num_local_experts, num_attention_heads, num_codebooks, n_group, num_labels
_COUNTS = re.compile("(layer|depth|block|stage|expert|head|codebook|group|label)s?$")


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
