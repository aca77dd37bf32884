"""Small language models for tests of ranks: eight query heads, and a vocabulary that no number of ranks divides."""

from pathlib import Path
from typing import Any

import torch

from onnx_models import small_decoders
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.builder.parallel.whole_model import share_magnitudes

_OTHERS: dict[str, Any] = {"num_attention_heads": 8, "vocab_size": 101}
DENSE: dict[str, Any] = {**small_decoders.DECODER, **_OTHERS}
MIXTURE = {**DENSE, **small_decoders.EXPERTS, "num_experts": 4}
LATENT = {**small_decoders.LATENT, **_OTHERS, "num_key_value_heads": 8}


def saved(family: str, config: dict[str, Any], folder: Path) -> Any:
    """The model of a family such as "Llama", which also lies in `folder`."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config)).eval()
    for parameter in model.parameters():  # norms and biases are ones and zeros otherwise
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def exported_ranks(
    model: Path, folder: Path, count: int, spread: int = 1, capacity: int = 16, batch: int = 1
) -> RankFolder:
    """A folder as of `--parallel`, but for engines and plugins: each rank as exported. whole.onnx is not split."""
    options = CacheOptions(capacity, batch)
    export(model, folder / "whole.onnx", "generate", options)
    ranks = [Rank(index, count, spread) for index in range(count)]
    found = RankFolder(folder, "rtx-blackwell", count, spread)
    files = [export(model, found.model(rank.index), "generate", options, rank=rank) for rank in ranks]
    share_magnitudes(files, ranks)
    found.save()
    return found
