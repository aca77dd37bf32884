"""A Hugging Face causal language model becomes one ONNX graph with caches; `decoder_contract` says which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export.decoder_check import cache_error
from trt_nvfp4.builder.export.decoder_contract import (
    IDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    TOKENIZER,
    CacheOptions,
    Decoder,
)
from trt_nvfp4.builder.export.decoder_rope import switch_length
from trt_nvfp4.builder.export.decoder_step import Step, UnsupportedCacheError
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files


@dataclass(frozen=True)
class DecoderProgram:
    """A traced step: what `torch.onnx.export` takes beside the module, and the metadata."""

    step: Step
    inputs: dict[str, torch.Tensor]
    dynamic: tuple[tuple[dict[int, Any], ...]]
    decoder: Decoder


def decoder_step(directory: Path, model: Any, capacity: int, options: CacheOptions) -> DecoderProgram:
    """The step of `model`, probed and compared with the model itself. Raises BuilderError with the reason why not."""
    reasons = []
    for masked in (False, True):
        step = Step(model, capacity, options.all_logits, masked).eval()
        empty, reason = _tried(step)
        if reason is None:
            break
        reasons.append(reason)
    else:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{directory}: {type(model).__name__} cannot be exported with a key-value cache: {reasons[0]}; add --task "
            "features for the model without a cache",
        )
    keys, values = empty[::2], empty[1::2]
    text = model.config.get_text_config(decoder=True)
    decoder = Decoder(
        capacity=capacity,
        max_batch=options.max_batch,
        kv_heads=[key.shape[1] for key in keys],
        head_dim=[key.shape[3] for key in keys],
        value_head_dim=[value.shape[3] for value in values],
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=end_tokens(model),
        cache_dtype=str(empty[0].dtype).removeprefix("torch."),
        sliding_window=getattr(text, "sliding_window", None),
        all_logits=options.all_logits,
        tokenizer=TOKENIZER if tokenizer_files(directory) else None,
        recompute_length=switch_length(model, capacity),
    )
    batch, new = torch.export.Dim("batch"), torch.export.Dim("new")
    lengths = torch.tensor([0, 1])
    inputs = {
        IDS: torch.randint(0, decoder.vocab_size, (2, 3)),
        PAST_LENGTH: lengths,
        NEW_LENGTH: lengths + 2,
        **{name: tensor.repeat(2, 1, 1, 1) for name, tensor in zip(decoder.caches, empty, strict=True)},
    }
    dynamic = (({0: batch, 1: new}, *({0: batch},) * (len(inputs) - 1)),)
    step.outputs = (LOGITS, *decoder.presents)
    return DecoderProgram(step, inputs, dynamic, decoder)


def _tried(step: Step) -> tuple[list[torch.Tensor], str | None]:
    """Empty caches for a batch of one, and why the step is not what the model computes; None if it is."""
    try:
        with torch.no_grad():
            empty = step.probe()
            return empty, cache_error(step.model, step, empty) if empty else "its layers cache no keys and values"
    except UnsupportedCacheError as error:
        return [], str(error)
    except Exception as error:  # whatever modeling code raises over a cache that it does not expect
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [], f"its code does not run over one ({line.rstrip('.')})"


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text, by the generation config or else the model's own."""
    configs = (getattr(model, "generation_config", None), model.config)
    found: Any = next((ids for config in configs if (ids := getattr(config, "eos_token_id", None)) is not None), [])
    return list(found) if isinstance(found, (list, tuple)) else [int(found)]
