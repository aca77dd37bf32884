"""Small language models with random weights, for tests of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 101,  # which no number of ranks divides
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DENSE = {**SMALL, "head_dim": 16}


def saved(family: str, config: dict[str, Any], folder: Path) -> Any:
    """The model, which also lies in `folder`."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config)).eval()
    for parameter in model.parameters():  # norms and biases are ones and zeros otherwise
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 1 else None
    model.save_pretrained(folder)
    return model
