"""An encoder-decoder model as two parts: an encoder that makes keys and values of the decoder's cross-attention, and a
decoder over caches of its own that reads them.

The encoder takes `input_features` or `input_values` (sound), `pixel_values` (images), or `input_ids` and
`attention_mask` (text), and gives `cross.{layer}.key` and `.value`, [batch, heads, source, head_dim]. The decoder is
`decoder_contract`'s with these as further inputs, and the source's `attention_mask` where it is text.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.processor import describe
from trt_nvfp4.builder.components.source import Example, as_array
from trt_nvfp4.builder.components.vision_language import decoder_of_caches
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export.decoder.caches import Slot, StepCache, StepLayer, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder.ops import OPSET, TRANSLATIONS
from trt_nvfp4.builder.export.decoder.step import attend, cached_attention, layer_count, of_last_tokens, step_mask
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files
from trt_nvfp4.builder.model.decoder_contract import (
    DECODER,
    IDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    TOKENIZER,
    CacheOptions,
)

MASK = "attention_mask"
#: Samples of the example for an encoder of sound whose convolutions take any number.
_SAMPLES = 16000


def is_encoder_decoder(model: Any) -> bool:
    """Whether the model generates from what an encoder reads."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and bool(model.can_generate())


class CrossLayer(StepLayer):
    """Keys and values of the source, which are not appended to."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(torch.zeros(0), key.shape[2])
        self.keys, self.values = key, value

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedCacheError("its cross-attention changes in every step")

    def get_seq_length(self) -> Any:
        return 1


class Encoder(torch.nn.Module):
    """(sound), (images) or (input_ids, attention_mask) -> keys and values of every layer's cross-attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        masked = {} if mask is None else {MASK: mask}
        encoded = self.model.get_encoder()(source, **masked)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        # The decoder itself says how it makes them; the rest of this step is left out of the graph.
        self.model(
            encoder_outputs=encoded,
            decoder_input_ids=torch.zeros((source.shape[0], 1), dtype=torch.int64, device=source.device),
            past_key_values=cache,
            use_cache=True,
            **masked,
        )
        layers: Any = cache.cross_attention_cache.layers
        return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


class DecoderStep(torch.nn.Module):
    """(input_ids, past_length, new_length, [attention_mask], *cross, *caches) -> (logits, *caches)."""

    def __init__(self, model: Any, capacity: int, masked: bool) -> None:
        super().__init__()
        self.model, self.capacity, self.masked = model, capacity, masked
        self.layers = layer_count(model)
        self.slots: list[Slot] = []
        self.crossing = 0
        self.width = width_of_source(model)

    def probe(self, cross: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Empty caches for a batch of one; `cross` are keys and values of the source, of one sequence."""
        self.crossing = len(cross)
        ids, length = torch.ones((1, 2), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        mask = torch.ones((1, cross[0].shape[2]), dtype=torch.int64) if self.masked else None
        cache = StepCache(length, self.capacity, self.layers, (), ())
        self._run(ids, length, length + 2, mask, cross, cache)
        self.slots = cache.slots
        return [torch.zeros_like(tensor) for tensor in cache.tensors(self.slots)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, past_length, new_length, *rest = tensors
        mask = rest.pop(0) if self.masked else None
        cache = StepCache(past_length, self.capacity, self.layers, self.slots, rest[self.crossing :])
        logits = self._run(ids, past_length, new_length, mask, rest[: self.crossing], cache)
        return (logits, *cache.tensors(self.slots))

    def _run(
        self,
        ids: torch.Tensor,
        past_length: torch.Tensor,
        new_length: torch.Tensor,
        mask: torch.Tensor | None,
        cross: Sequence[torch.Tensor],
        cache: StepCache,
    ) -> torch.Tensor:
        layers = [CrossLayer(key, value) for key, value in zip(cross[::2], cross[1::2], strict=True)]
        both = EncoderDecoderCache(cache, Cache(layers=list(layers)))
        both.is_updated = dict.fromkeys(range(len(layers)), True)
        # Its values are not read: keys and values are there already.
        states = cross[0].new_zeros((ids.shape[0], cross[0].shape[2], self.width))
        encoded: Any = BaseModelOutput(last_hidden_state=states)
        encoded.attention_mask = None  # Moonshine's, of sound without padding
        extra: dict[str, Any] = {} if mask is None else {MASK: mask}
        # Some count their tokens by it.
        extra["decoder_attention_mask"] = torch.ones_like(past_length[:, None]).expand(-1, self.capacity)
        if "decoder_position_ids" in inspect.signature(self.model.forward).parameters:
            # Padding repeats the last valid position, which tables have a row for.
            index = torch.arange(ids.shape[1], device=ids.device)[None]
            extra["decoder_position_ids"] = past_length[:, None] + torch.minimum(index, new_length[:, None] - 1)
        with (
            cached_attention(self.model, _attend, _mask),
            _positions_per_sequence(self.model),
            of_last_tokens(self.model, new_length),
        ):
            found = self.model(
                encoder_outputs=encoded,
                decoder_input_ids=ids,
                past_key_values=both,
                use_cache=True,
                **extra,
            )
        logits: torch.Tensor = found.logits
        return logits


def _mask(**arguments: Any) -> torch.Tensor | None:
    """The step's own over the decoder's cache; over the source, the tokens that its mask says."""
    if isinstance(arguments["q_offset"], torch.Tensor):
        return step_mask(**arguments)
    padding = arguments["attention_mask"]
    if padding is None:
        return None
    shape = (-1, 1, arguments["q_length"], padding.shape[-1])
    valid: torch.Tensor = padding[:, None, None, :].bool().expand(shape)
    return valid


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is None:  # all of the source
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device)
    if position_bias is None:
        return attend(module, query, key, value, attention_mask, scaling=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)) * scale + position_bias
    scores = torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores.float(), -1).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


@contextmanager
def _positions_per_sequence(model: Any) -> Iterator[None]:
    """Within, biases that follow from relative positions (T5), and positions that are looked up (BART), are each
    sequence's own."""
    changed = [part for part in model.modules() if hasattr(part, "compute_bias")]
    for part in changed:
        part.compute_bias = _bias_of(part)
    hooks = [
        part.register_forward_hook(_without_a_batch_more)
        for name, part in model.named_modules()
        if name.endswith("embed_positions")
    ]
    try:
        yield
    finally:
        for part in changed:
            del part.compute_bias
        for hook in hooks:
            hook.remove()


def _without_a_batch_more(_: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """BART's positions are of one sequence, and get a batch in front: each sequence's have one already."""
    return output.squeeze(0) if output.ndim == 4 else output


def _bias_of(part: Any) -> Any:
    def compute_bias(
        query_length: int, key_length: int, device: Any = None, past_seen_tokens: torch.Tensor | int = 0
    ) -> torch.Tensor:
        past = torch.as_tensor(past_seen_tokens).reshape(-1, 1, 1)
        queries = torch.arange(query_length, device=device)[None, :, None] + past
        options = {
            "bidirectional": not part.is_decoder,
            "num_buckets": part.relative_attention_num_buckets,
            "max_distance": part.relative_attention_max_distance,
        }
        taken = inspect.signature(part._relative_position_bucket).parameters  # UMT5's knows its own
        buckets = part._relative_position_bucket(
            torch.arange(key_length, device=device)[None, None] - queries,
            **{name: value for name, value in options.items() if name in taken},
        )
        bias: torch.Tensor = part.relative_attention_bias(buckets).permute(0, 3, 1, 2)
        return bias

    return compute_bias


def width_of_source(model: Any) -> int:
    """The width of the encoder's states."""
    config = getattr(model.config, "encoder", model.config)
    return int(config.hidden_size)


@dataclass(frozen=True)
class Read:
    """The input of an encoder: "text", "sound" or "images"; an example of two, and the dimensions that may change."""

    kind: str
    inputs: Mapping[str, torch.Tensor]
    dynamic: Mapping[str, Mapping[int, str]]

    @property
    def length(self) -> dict[int, str]:
        """Dimensions of the cross-attention's keys and values that may change."""
        fixed = all(axes.keys() == {0} for axes in self.dynamic.values())
        return {0: "batch"} if fixed else {0: "batch", 2: "source_length"}


def read_by(directory: Path, model: Any) -> Read:
    """The input of the model's encoder. Raises ModelFaultError for one that is not known here."""
    config, name, dtype = model.config, model.main_input_name, next(model.parameters()).dtype
    if name == IDS and not hasattr(config, "vision_config"):
        ids = torch.randint(0, config.vocab_size, (2, 16))
        axes = {0: "batch", 1: "source_length"}
        return Read("text", {IDS: ids, MASK: torch.ones_like(ids)}, {IDS: axes, MASK: axes})
    if name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
        return Read("sound", {name: frames}, {name: {0: "batch"}})
    if name == "input_values":
        samples = torch.randn(2, _SAMPLES, dtype=dtype)
        return Read("sound", {name: samples}, {name: {0: "batch", 1: "samples"}})
    if name == "pixel_values" and hasattr(getattr(config, "encoder", None), "image_size"):
        size, channels = config.encoder.image_size, getattr(config.encoder, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return Read("images", {name: torch.rand(2, channels, height, width, dtype=dtype)}, {name: {0: "batch"}})
    beside = " beside images" if hasattr(config, "vision_config") else ""
    raise ModelFaultError(
        f"{directory}: the encoder of {type(model).__name__} reads {name}{beside} in a way that is not known here "
        "(text, images of one size, mel bins of a fixed number of frames or samples of sound are); give a Python file "
        "with its parts (model.py:components)"
    )


def parts_of(
    directory: Path, model: Any, capacity: int, options: CacheOptions
) -> tuple[list[TorchPart], list[Flow], dict[str, Any]]:
    """The parts, what flows between them, and the manifest's settings."""
    read = read_by(directory, model)
    encoder, text = Encoder(model).eval(), read.kind == "text"
    inputs, dynamic, source = read.inputs, read.dynamic, read.length
    with torch.no_grad():
        cross = encoder(*inputs.values())
        step = DecoderStep(model, capacity, masked=text).eval()
        empty = step.probe([tensor[:1] for tensor in cross])
    decoder = decoder_of_caches(model, empty, capacity, options)
    names = [f"cross.{layer}.{part}" for layer in range(len(cross) // 2) for part in ("key", "value")]
    lengths = torch.tensor([0, 1])
    given = {IDS: torch.ones((2, 3), dtype=torch.int64), PAST_LENGTH: lengths, NEW_LENGTH: lengths + 2}
    moving: dict[str, Mapping[int, str]] = {IDS: {0: "batch", 1: "new"}, PAST_LENGTH: {0: "batch"}}
    moving[NEW_LENGTH] = {0: "batch"}
    if text:
        given[MASK], moving[MASK] = inputs[MASK], dynamic[MASK]
    given |= dict(zip(names, cross, strict=True))
    given |= {name: tensor.repeat(2, 1, 1, 1) for name, tensor in zip(decoder.caches, empty, strict=True)}
    moving |= dict.fromkeys(names, source) | {name: {0: "batch"} for name in decoder.caches}
    parts = [
        TorchPart("encoder", encoder, inputs, names, dynamic),
        TorchPart(
            "decoder",
            step,
            given,
            [LOGITS, *decoder.presents],
            moving,
            OPSET,
            TRANSLATIONS,
            {DECODER: decoder.json()},
        ),
    ]
    settings = {
        "source": read.kind,
        "start_tokens": [_start_token(directory, model)],
        "tokenizer": TOKENIZER if tokenizer_files(directory) else None,
    }
    if read.kind == "images":
        height, width = next(iter(inputs.values())).shape[-2:]
        settings |= describe(directory, (height, width), patched=False, image_token=None).settings()
    return parts, [Flow(f"encoder.{name}", f"decoder.{name}") for name in names], settings


def _start_token(directory: Path, model: Any) -> int:
    """The token that the decoder begins with. Raises ModelFaultError where no file states it."""
    for config in (getattr(model, "generation_config", None), model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            token = getattr(config, name, None)
            if token is not None:
                return int(token)
    raise ModelFaultError(f"{directory / 'config.json'}: states no decoder_start_token_id; add it")


def example_of(model: Any, parts: Sequence[TorchPart]) -> Example:
    """Two sources of different lengths, if they are text, with prompts of the decoder of different lengths."""
    inputs = dict(parts[0].inputs)
    if MASK in inputs:
        mask = inputs[MASK].clone()
        mask[1, mask.shape[1] // 2 :] = 0
        inputs[MASK] = mask
    prompts = [[1, 2, 3], [1]]

    def logits(number: int, tokens: Sequence[int]) -> np.ndarray:
        one = {name: tensor[number : number + 1] for name, tensor in inputs.items()}
        found = model(**one, decoder_input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        last: np.ndarray = found[0, -1].float().numpy()
        return last

    return Example({name: as_array(tensor) for name, tensor in inputs.items()}, prompts, logits)
