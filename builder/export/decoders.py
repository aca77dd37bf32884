"""A Hugging Face causal language model becomes one ONNX graph with caches; `decoder_contract` says which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError, exit_code, first_line
from trt_nvfp4.builder.export.decoder_caches import StepCache, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder_check import cache_error
from trt_nvfp4.builder.export.decoder_contract import (
    IDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    TOKENIZER,
    CacheOptions,
    Decoder,
    end_ids,
)
from trt_nvfp4.builder.export.decoder_rope import switch_length
from trt_nvfp4.builder.export.decoder_step import WAYS, Step
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
    reasons: list[Exception] = []
    for way in WAYS:
        step = Step(model, capacity, options.all_logits, way).eval()
        try:
            empty = _probed(step)
            break
        except Exception as error:  # whatever modeling code raises over a cache that it does not expect
            if exit_code(error) is not None:
                raise
            reasons.append(error)
    else:
        raise _refusal(f"{directory}: {type(model).__name__} (model type {model.config.model_type})", model, reasons)
    if step.way.single and (options.max_batch or 1) > 1:
        raise BuilderError(
            USAGE,
            f"--max-batch {options.max_batch}: {type(model).__name__} can be exported for one sequence at a time only "
            f"({directory}); leave the option out",
        )
    keys, values = empty[::2], empty[1::2]
    text = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    decoder = Decoder(
        capacity=capacity,
        max_batch=1 if step.way.single else options.largest_batch,
        kv_heads=[key.shape[1] for key in keys],
        head_dim=[key.shape[3] for key in keys],
        value_head_dim=[value.shape[3] for value in values],
        vocab_size=getattr(head, "vocabulary", head.weight.shape[0]),
        eos_token_ids=end_tokens(model),
        cache_dtype=str(empty[0].dtype).removeprefix("torch."),
        sliding_window=getattr(text, "sliding_window", None),
        all_logits=options.all_logits,
        tokenizer=TOKENIZER if tokenizer_files(directory) else None,
        recompute_length=switch_length(model, capacity),
    )
    batch, new = torch.export.Dim("batch"), torch.export.Dim("new")
    lengths = torch.tensor([0] if step.way.single else [0, 1])
    inputs = {
        IDS: torch.randint(0, decoder.vocab_size, (len(lengths), 3)),
        PAST_LENGTH: lengths,
        NEW_LENGTH: lengths + 2,
        # Zeros that nothing touches take no memory.
        **{
            name: torch.zeros((len(lengths), *tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in zip(decoder.caches, empty, strict=True)
        },
    }
    sequences = {} if step.way.single else {0: batch}
    dynamic = (({**sequences, 1: new}, *(sequences,) * (len(inputs) - 1)),)
    step.outputs = (LOGITS, *decoder.presents)
    return DecoderProgram(step, inputs, dynamic, decoder)


def _refusal(named: str, model: Any, reasons: list[Exception]) -> BuilderError:
    """The one message for a model that no way of running its code serves; `reasons` are what each of them raised."""
    try:
        with torch.no_grad():
            model(input_ids=torch.ones((1, 2), dtype=torch.int64), use_cache=False)
    except Exception as error:  # whatever modeling code raises with a configuration that does not fit it
        if exit_code(error) is not None:
            raise
        refusal = BuilderError(
            MODEL_AT_FAULT,
            f"{named} does not run, without a cache either: {first_line(error)}; check that its config.json is of this "
            "model and complete",
        )
        refusal.__cause__ = error
        return refusal
    said = next((error for error in reasons if isinstance(error, UnsupportedCacheError)), None)
    if said is not None:
        why = str(said)
    elif StepCache.__name__ in str(reasons[0]):
        why = "its code accepts only its own cache class"
    else:
        why = f"its code does not run over keys and values of fixed capacity ({first_line(reasons[0])})"
    refusal = BuilderError(
        MODEL_AT_FAULT,
        f"{named} cannot be exported with a key-value cache: {why}; add --task features for the model without a cache",
    )
    refusal.__cause__ = said or reasons[0]
    return refusal


@torch.no_grad()
def _probed(step: Step) -> list[torch.Tensor]:
    """Empty caches for a batch of one. Raises UnsupportedCacheError where the step is not what the model computes, and
    whatever the model's code raises."""
    empty = step.probe()
    if not empty:
        raise UnsupportedCacheError("its layers cache no keys and values")
    if (error := cache_error(step.model, step, empty)) is not None:
        raise UnsupportedCacheError(error)
    return empty


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text, by the generation config or else the model's own."""
    configs = (getattr(model, "generation_config", None), model.config)
    found: Any = next((ids for config in configs if (ids := getattr(config, "eos_token_id", None)) is not None), [])
    return end_ids(found)
