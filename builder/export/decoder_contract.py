"""What a language model with a cache says about itself: metadata of its ONNX file, in JSON.

One graph for every family (opset 24). Inputs: `input_ids [batch, new]`, `past_length [batch]` (tokens already cached,
per sequence), `new_length [batch]` (valid new tokens per sequence; prompts are padded on the right), all int64, and for
each layer `past_key_values.{layer}.key` and `.value`, `[batch, kv_heads, capacity, head_dim]`. Outputs: `logits
[batch, 1, vocab]` of each sequence's last valid token (`[batch, new, vocab]` with all logits) and the caches with the
new tokens, `present.{layer}.key` and `.value`, meant to be bound to the addresses of the inputs. What padding writes
into a cache is overwritten by the tokens that follow; `past_length + new` must not exceed the capacity.

Where a plan makes one plugin of layers `first` to `last`, their caches are one tensor in the rewritten model:
`past_key_values.{first}-{last}` in, `present.{first}-{last}` out, `[layers, 2, batch, kv_heads, capacity, head_dim]`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, USAGE, BuilderError
from trt_nvfp4.common.cache_names import layer_names, stacked_layers, stacked_names
from trt_nvfp4.common.json_text import parse_json

if TYPE_CHECKING:
    import onnx  # bundles carry this module, and devices need not have it

#: Key of the metadata entry.
DECODER = "trt_nvfp4.decoder"
VERSION = 1
IDS, PAST_LENGTH, NEW_LENGTH, LOGITS = "input_ids", "past_length", "new_length", "logits"
#: Where the tokenizer's files lie, relative to the engine's or the model's folder.
TOKENIZER = "tokenizer"
#: onnx.TensorProto.INT8, for devices without that package.
INT8 = 3
#: The capacity where none is given, and the model allows for as many tokens.
CAPACITY = 4096
#: Sequences at once where nobody asked for a number.
LARGEST_BATCH = 64


@dataclass(frozen=True)
class CacheOptions:
    """What the user asks of the caches: tokens per sequence, sequences (None: as many as the model takes), and whether
    logits of all tokens come out."""

    capacity: int | None = None
    max_batch: int | None = 1
    all_logits: bool = False

    @property
    def largest_batch(self) -> int:
        """Sequences at once, of a model that does not limit them."""
        return LARGEST_BATCH if self.max_batch is None else self.max_batch

    def checked_capacity(self, directory: Path, limit: int | None) -> int:
        """The capacity, or the default; `limit` is the model's longest sequence. Raises BuilderError (usage)."""
        if self.capacity is None:
            return min(limit or CAPACITY, CAPACITY)
        if limit is not None and self.capacity > limit:
            raise BuilderError(
                USAGE, f"--cache-capacity {self.capacity}: {directory} allows for {limit} tokens; give at most that"
            )
        return self.capacity


@dataclass(frozen=True)
class Decoder:
    """A language model's caches and tokens. Lists have one entry per layer that has a cache of its own."""

    capacity: int
    max_batch: int
    kv_heads: Sequence[int]
    head_dim: Sequence[int]
    #: Values may have another size than keys (latent attention).
    value_head_dim: Sequence[int]
    vocab_size: int
    eos_token_ids: Sequence[int]
    #: As ONNX spells it in lower case: float32, float16, bfloat16.
    cache_dtype: str
    #: The shortest attention window of any layer, in tokens; None where all layers attend to everything.
    sliding_window: int | None = None
    all_logits: bool = False
    #: A sequence that grows beyond so many tokens must run again from its first (past_length 0): its rotary
    #: frequencies change there (long rope). None for most models.
    recompute_length: int | None = None
    tokenizer: str | None = TOKENIZER
    #: The input that new tokens come in by: a part of a model may be given embeddings in place of ids.
    tokens: str = IDS
    #: Whether it is a model of its own, or a part that others feed.
    alone: bool = True
    #: Inputs whose caches hold E4M3 bytes (int8): a plan makes them so.
    fp8_caches: Sequence[str] = field(default_factory=list)
    #: [first, last] of layers whose caches are one tensor.
    stacked: Sequence[Sequence[int]] = field(default_factory=list)
    version: int = VERSION

    @property
    def layers(self) -> int:
        return len(self.kv_heads)

    @property
    def caches(self) -> tuple[str, ...]:
        """Names of the caches' inputs."""
        return tuple(past for past, _ in self._ports())

    @property
    def presents(self) -> tuple[str, ...]:
        """Names of the caches' outputs, in the order of `caches`."""
        return tuple(present for _, present in self._ports())

    def _ports(self) -> Iterator[tuple[str, str]]:
        together = {layer: (first, last) for first, last in self.stacked for layer in range(first, last + 1)}
        for layer in range(self.layers):
            if layer not in together:
                yield from zip(*layer_names(layer), strict=True)
            elif layer == together[layer][0]:
                yield stacked_names(*together[layer])

    def json(self) -> str:
        return json.dumps({"layers": self.layers, **asdict(self)})

    @classmethod
    def parse(cls, text: str) -> Decoder:
        """Raises BuilderError (model) for metadata of another version, or with missing or misplaced entries."""
        try:
            found = parse_json(text)
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}, expected {VERSION}")
            known = {entry.name for entry in fields(cls)}
            decoder = cls(**{name: value for name, value in found.items() if name in known})
            decoder._check()
            if found["layers"] != decoder.layers:
                raise ValueError("it does not list one entry per layer")
        except (ValueError, TypeError, KeyError) as error:
            raise BuilderError(
                MODEL_AT_FAULT,
                f"the metadata entry {DECODER} cannot be read ({error!r}); export the model again",
            ) from error
        return decoder

    def _check(self) -> None:
        """Raises ValueError for values that no decoder has: anybody may have written them."""
        sizes: tuple[object, ...] = (self.kv_heads, self.head_dim, self.value_head_dim)
        lists = (*sizes, self.eos_token_ids, self.fp8_caches, self.stacked)
        if not all(isinstance(found, (list, tuple)) for found in lists):
            raise ValueError("it has a single value where a list is expected")
        if {len(self.head_dim), len(self.value_head_dim)} != {self.layers} or not self.layers:
            raise ValueError("it does not list one entry per layer")
        _check_integers((self.capacity, self.max_batch, self.vocab_size), 1)
        _check_integers((*self.kv_heads, *self.head_dim, *self.value_head_dim), 1)
        _check_integers(self.eos_token_ids, -1)
        _check_integers([size for size in (self.sliding_window, self.recompute_length) if size is not None], 0)
        texts = (self.cache_dtype, self.tokens, *self.fp8_caches)
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"it has {reprlib.repr(wrong[0])} in place of a name")
        if self.tokenizer not in (None, TOKENIZER):
            raise ValueError(f"its tokenizer is {reprlib.repr(self.tokenizer)}, expected {TOKENIZER!r}")
        for layers in self.stacked:
            first, last = layers
            _check_integers((first, last), 0)
            if not first <= last < self.layers:
                raise ValueError(f"caches of the layers {first} to {last} are one tensor, and there are {self.layers}")


def _check_integers(values: Sequence[object], least: int) -> None:
    for value in values:
        if type(value) is not int or not least <= value < 1 << 31:
            raise ValueError(f"it has {reprlib.repr(value)} in place of an integer of at least {least}")


def end_ids(stated: object) -> list[int]:
    """The tokens that end a text, as configurations state them: one or a list. What can be none is left out."""
    found = stated if isinstance(stated, (list, tuple)) else [stated]
    return [token for token in found if type(token) is int and 0 <= token < 1 << 31]


def decoder_of(model: onnx.ModelProto) -> Decoder | None:
    """The decoder that the model's metadata describes, None for a model without that entry; raises as `parse`."""
    entry = next((entry for entry in model.metadata_props if entry.key == DECODER), None)
    if entry is None:
        return None
    decoder = Decoder.parse(entry.value)
    # A rewritten model's inputs say which caches its plan made one tensor, and which FP8.
    stacked = [layers for value in model.graph.input if (layers := stacked_layers(value.name)) is not None]
    decoder = replace(decoder, stacked=stacked)
    try:
        decoder._check()
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"an input's name does not fit the metadata {DECODER}: {error}") from error
    bytes_ = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == INT8}
    return replace(decoder, fp8_caches=[name for name in decoder.caches if name in bytes_])
