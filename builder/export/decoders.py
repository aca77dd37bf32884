"""A Hugging Face causal language model becomes one ONNX graph with caches; `decoder_contract` says which."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UsageError, exit_code, first_line
from trt_nvfp4.builder.export.decoder.caches import StepCache, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder.check import cache_error
from trt_nvfp4.builder.export.decoder.rope import switch_length
from trt_nvfp4.builder.export.decoder.step import WAYS, Step
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files
from trt_nvfp4.builder.model.decoder_contract import (
    HIDDEN,
    IDS,
    LOGIT_TOKENS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    PREVIOUS_HIDDEN,
    TOKENIZER,
    CacheOptions,
    Decoder,
    State,
    end_ids,
)


@dataclass(frozen=True)
class DecoderProgram:
    """A traced step: what `torch.onnx.export` takes beside the module, and the metadata."""

    step: Step
    inputs: dict[str, torch.Tensor]
    dynamic: tuple[tuple[dict[int, Any], ...]]
    decoder: Decoder


def decoder_step(
    directory: Path, model: Any, capacity: int, options: CacheOptions, hidden: HiddenStates | None = None
) -> DecoderProgram:
    """The step of `model`, probed and compared with the model itself; `hidden` states of it come out, too. Raises
    BuilderError with the reason why not."""
    reasons: list[Exception] = []
    for way in WAYS:
        step = Step(model, capacity, options.all_logits, way, hidden).eval()
        try:
            empty = _probed(step)
            break
        except Exception as error:  # whatever modeling code raises over a cache that it does not expect
            if exit_code(error) is not None:
                raise
            reasons.append(error)
    else:
        raise _unsupported(
            f"{directory}: {type(model).__name__} (model type {model.config.model_type})", model, reasons
        )
    if step.way.single and (options.max_batch or 1) > 1:
        raise UsageError(
            f"--max-batch {options.max_batch}: {type(model).__name__} can be exported for one sequence at a time only "
            f"({directory}); leave the option out"
        )
    found = dict(zip(step.slots, empty, strict=True))
    keys, values = ([tensor for slot, tensor in found.items() if slot.part == part] for part in ("key", "value"))
    states = [
        State(f"{slot.layer}.{slot.part}", tuple(tensor.shape[1:]), _name(tensor.dtype))
        for slot, tensor in found.items()
        if slot.is_state
    ]
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
        cache_dtype=_name(keys[0].dtype if keys else model.dtype),
        sliding_window=getattr(text, "sliding_window", None),
        all_logits=options.all_logits,
        logit_tokens=LOGIT_TOKENS,
        tokenizer=TOKENIZER if tokenizer_files(directory) else None,
        recompute_length=switch_length(model, capacity),
        states=states,
        hidden_size=0 if hidden is None else hidden.width,
        takes_hidden=isinstance(model, Head),
    )
    batch, new = torch.export.Dim("batch"), torch.export.Dim("new")
    lengths = torch.tensor([0] if step.way.single else [0, 1])
    ids = torch.randint(0, decoder.vocab_size, (len(lengths), 3))
    previous = step.previous(ids)
    inputs = {
        IDS: ids,
        PAST_LENGTH: lengths,
        NEW_LENGTH: lengths + 2,
        **({PREVIOUS_HIDDEN: previous[0]} if previous else {}),
        # Zeros that nothing touches take no memory.
        **{
            name: torch.zeros((len(lengths), *tensor.shape[1:]), dtype=tensor.dtype)
            for name, tensor in zip(decoder.caches, empty, strict=True)
        },
    }
    sequences = {} if step.way.single else {0: batch}
    tokens = (IDS, PREVIOUS_HIDDEN)
    dynamic = (tuple({**sequences, 1: new} if name in tokens else sequences for name in inputs),)
    step.outputs = (LOGITS, *([] if hidden is None else [HIDDEN]), *decoder.presents)
    return DecoderProgram(step, inputs, dynamic, decoder)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unsupported(named: str, model: Any, reasons: list[Exception]) -> BuilderError:
    """The one message for a model that no way of running its code serves; `reasons` are what each of them raised."""
    try:
        with torch.no_grad():
            model(input_ids=torch.ones((1, 2), dtype=torch.int64), use_cache=False)
    except Exception as error:  # whatever modeling code raises with a configuration that does not fit it
        if exit_code(error) is not None:
            raise
        unsupported = ModelFaultError(
            f"{named} does not run, without a cache either: {first_line(error)}; check that its config.json is of this "
            "model and complete"
        )
        unsupported.__cause__ = error
        return unsupported
    said = next((error for error in reasons if isinstance(error, UnsupportedCacheError)), None)
    if said is not None:
        why = str(said)
    elif StepCache.__name__ in str(reasons[0]):
        why = "its code accepts only its own cache class"
    else:
        why = f"its code does not run over keys and values of fixed capacity ({first_line(reasons[0])})"
    unsupported = ModelFaultError(
        f"{named} cannot be exported with a key-value cache: {why}; add --task features for the model without a cache"
    )
    unsupported.__cause__ = said or reasons[0]
    return unsupported


@torch.no_grad()
def _probed(step: Step) -> list[torch.Tensor]:
    """Empty caches for a batch of one. Raises UnsupportedCacheError where the step is not what the model computes, and
    whatever the model's code raises."""
    empty = step.probe()
    if not empty:
        raise UnsupportedCacheError("its layers cache no keys and values, and keep no state that is known here")
    if (error := cache_error(step.model, step, empty)) is not None:
        raise UnsupportedCacheError(error)
    return empty


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text, by the generation config or else the model's own."""
    configs = (getattr(model, "generation_config", None), model.config)
    found: Any = next((ids for config in configs if (ids := getattr(config, "eos_token_id", None)) is not None), [])
    return end_ids(found)
