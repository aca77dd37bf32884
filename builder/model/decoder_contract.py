"""The contract of a language model with a cache, and its description in the ONNX file's metadata, in JSON.

One graph for every family (opset 24). Inputs: `input_ids [batch, new]`, `past_length [batch]` (tokens already cached,
per sequence), `new_length [batch]` (valid new tokens per sequence; prompts are padded on the right), all int64, and for
each layer `past_key_values.{layer}.key` and `.value`, `[batch, kv_heads, capacity, head_dim]`. Outputs: `logits
[batch, min(new, logit_tokens), vocab]` of each sequence's last valid tokens, the last one's at the end, so that one
step can verify a draft (`[batch, new, vocab]`, in the order of the inputs, with all logits), and the caches with the
new tokens, `present.{layer}.key` and `.value`, meant to be bound to the addresses of the inputs. What padding or a
rejected draft writes into a cache is overwritten by the tokens that follow; `past_length + new` must not exceed the
capacity.

Layers that keep a state of fixed size take it as `past_states.{layer}.{part}` and give it out as
`present_states.{layer}.{part}`, `[batch, ...]` (opset 27). A part is `conv` or `recurrent`, with a number behind where
a layer has several. A recurrent state may lie at one address in and out, that of a convolution may not (see
`Decoder.copied`). Zeros are the state before the first token. Padding does not move a state: with `new_length` 0 it
stays as it is.

With a `hidden_size`, an output `hidden_states [batch, new, hidden_size]` holds what a head that drafts reads of every
token of the step. A head is such a decoder, too, with one more input, `previous_hidden_states [batch, new,
hidden_size]`: its position i takes token i + 1 of the text and the target's hidden state of token i, and gives logits
of token i + 2. Its own hidden state there stands for the target's of token i + 1 in the next step of a draft.

Where a plan makes one plugin of layers `first` to `last`, their caches are one tensor in the rewritten model:
`past_key_values.{first}-{last}` in, `present.{first}-{last}` out, `[layers, 2, batch, kv_heads, capacity, head_dim]`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.common.cache_names import layer_names, stacked_layers, stacked_names, state_names
from trt_nvfp4.common.json_text import parse_json

if TYPE_CHECKING:
    import onnx  # bundles carry this module, and devices need not have it

#: Key of the metadata entry.
DECODER = "trt_nvfp4.decoder"
VERSION = 1
_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}
IDS, PAST_LENGTH, NEW_LENGTH, LOGITS = "input_ids", "past_length", "new_length", "logits"
#: The output that a head reads, and the input that it reads it by.
HIDDEN, PREVIOUS_HIDDEN = "hidden_states", "previous_hidden_states"
#: Where the tokenizer's files lie, relative to the engine's or the model's folder (see `tokenizer_beside`).
TOKENIZER = "tokenizer"
_OF_A_BUILD = re.compile(r"(\.(rewritten|inplace|surgery))*\.(engine|plan|onnx)$")
#: onnx.TensorProto.INT8, for devices without that package.
INT8 = 3
#: The capacity where none is given, and the model allows for as many tokens.
CAPACITY = 4096
#: The last tokens of a step whose logits come out: a token and a draft of 15 behind it, which our decode kernels take
#: in one pass over the weights.
LOGIT_TOKENS = 16
#: The head that drafts of a model's own files.
AUTO = "auto"
#: Default number of sequences at once.
LARGEST_BATCH = 64


@dataclass(frozen=True)
class CacheOptions:
    """Options of the caches: tokens per sequence, sequences (None: as many as the model takes), whether logits of all
    tokens come out, and the head that drafts from hidden states: AUTO, or the directory of an EAGLE-3 head."""

    capacity: int | None = None
    max_batch: int | None = 1
    all_logits: bool = False
    draft: str | None = None

    @property
    def largest_batch(self) -> int:
        """Sequences at once, of a model that does not limit them."""
        return LARGEST_BATCH if self.max_batch is None else self.max_batch

    def checked_capacity(self, directory: Path, limit: int | None) -> int:
        """The capacity, or the default; `limit` is the model's longest sequence. Raises UsageError."""
        if self.capacity is None:
            return min(limit or CAPACITY, CAPACITY)
        if limit is not None and self.capacity > limit:
            raise UsageError(
                f"--cache-capacity {self.capacity}: {directory} allows for {limit} tokens; give at most that"
            )
        return self.capacity


@dataclass(frozen=True)
class State:
    """A state that a layer keeps for each sequence. `name` is {layer}.{part}, with the model's own number
    of the layer; `shape` is without the batch, `dtype` as `Decoder.cache_dtype`."""

    name: str
    shape: Sequence[int]
    dtype: str


@dataclass(frozen=True)
class Decoder:
    """A language model's caches, states and tokens. Lists have one entry per layer that has a cache of its own."""

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
    #: The last tokens of a step whose logits come out; of models exported before drafts were known, 1.
    logit_tokens: int = 1
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
    #: States of layers that keep one in place of every token's keys and values, or beside them.
    states: Sequence[State] = ()
    #: Width of the output HIDDEN, in the type of the caches; 0 without.
    hidden_size: int = 0
    #: Whether it is a head, which takes PREVIOUS_HIDDEN beside its tokens.
    takes_hidden: bool = False
    version: int = VERSION

    @property
    def layers(self) -> int:
        return len(self.kv_heads)

    @property
    def caches(self) -> tuple[str, ...]:
        """Names of the inputs of caches and states."""
        return tuple(past for past, _ in self._ports())

    @property
    def presents(self) -> tuple[str, ...]:
        """Names of their outputs, in the order of `caches`."""
        return tuple(present for _, present in self._ports())

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one sequence: each step reads and writes them."""
        return sum(math.prod(state.shape) * _ITEM.get(state.dtype, 4) for state in self.states)

    @property
    def copied(self) -> tuple[tuple[str, str], ...]:
        """(input, output) of states that several operators read: those of convolutions. An engine may write the output
        before the last of them has read the input, so that it needs memory of its own and a copy behind each step."""
        names = (state.name for state in self.states)
        return tuple(state_names(name) for name in names if name.partition(".")[2].startswith("conv"))

    def _ports(self) -> Iterator[tuple[str, str]]:
        together = {layer: (first, last) for first, last in self.stacked for layer in range(first, last + 1)}
        for layer in range(self.layers):
            if layer not in together:
                yield from zip(*layer_names(layer), strict=True)
            elif layer == together[layer][0]:
                yield stacked_names(*together[layer])
        yield from (state_names(state.name) for state in self.states)

    @property
    def verified_tokens(self) -> int:
        """Tokens of one step that a draft and the token before it may have together."""
        return self.capacity if self.all_logits else self.logit_tokens

    def json(self) -> str:
        return json.dumps({"layers": self.layers, **asdict(self)})

    @classmethod
    def parse(cls, text: str) -> Decoder:
        """Raises ModelFaultError for metadata of another version, or with missing or misplaced entries."""
        try:
            found = parse_json(text)
            if found["version"] != VERSION:
                raise ValueError(f"version {found['version']}, expected {VERSION}")
            known = {entry.name for entry in fields(cls)}
            given = {name: value for name, value in found.items() if name in known}
            decoder = cls(**given | {"states": tuple(State(**state) for state in found.get("states", ()))})
            decoder._check()
            if found["layers"] != decoder.layers:
                raise ValueError("it does not list one entry per layer")
        except (ValueError, TypeError, KeyError) as error:
            raise ModelFaultError(
                f"the metadata entry {DECODER} cannot be read ({error!r}); export the model again"
            ) from error
        return decoder

    def _check(self) -> None:
        """Raises ValueError for values that no decoder has: anybody may have written them."""
        sizes: tuple[object, ...] = (self.kv_heads, self.head_dim, self.value_head_dim)
        lists = (*sizes, self.eos_token_ids, self.fp8_caches, self.stacked)
        if not all(isinstance(found, (list, tuple)) for found in lists):
            raise ValueError("it has a single value where a list is expected")
        if {len(self.head_dim), len(self.value_head_dim)} != {self.layers} or not (self.layers or self.states):
            raise ValueError("it does not list one entry per layer")
        _check_integers((self.capacity, self.max_batch, self.vocab_size, self.logit_tokens), 1)
        _check_integers((*self.kv_heads, *self.head_dim, *self.value_head_dim), 1)
        _check_integers(self.eos_token_ids, -1)
        _check_integers((self.hidden_size,), 1 if self.takes_hidden is True else 0)
        if type(self.takes_hidden) is not bool:
            raise ValueError(f"it has {reprlib.repr(self.takes_hidden)} in place of true or false")
        _check_integers([size for size in (self.sliding_window, self.recompute_length) if size is not None], 0)
        texts = (self.cache_dtype, self.tokens, *self.fp8_caches)
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"it has {reprlib.repr(wrong[0])} in place of a name")
        if self.tokenizer not in (None, TOKENIZER):
            raise ValueError(f"its tokenizer is {reprlib.repr(self.tokenizer)}, expected {TOKENIZER!r}")
        for state in self.states:
            if not isinstance(state.name, str) or not re.fullmatch(r"\d{1,5}\.[a-z]{1,20}(_\d{1,5})?", state.name):
                raise ValueError(f"it has {reprlib.repr(state.name)} in place of a state's name")
            if not isinstance(state.shape, (list, tuple)) or not isinstance(state.dtype, str):
                raise ValueError(f"its state {state.name} has no shape or type")
            _check_integers(state.shape, 1)
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


def own_tokenizer(file: Path) -> Path:
    """The tokenizer's folder that only one build's files use: `t.tokenizer` of t.engine, t.rewritten.onnx or t."""
    return file.with_name(f"{_OF_A_BUILD.sub('', file.name)}.{TOKENIZER}")


def tokenizer_beside(file: Path) -> Path:
    """The folder of an engine's or a model's tokenizer: its own where there is one, else that of all files there."""
    own = own_tokenizer(file)
    return own if own.is_dir() else file.with_name(TOKENIZER)


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
        raise ModelFaultError(f"an input's name does not fit the metadata {DECODER}: {error}") from error
    bytes_ = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == INT8}
    return replace(decoder, fp8_caches=[name for name in decoder.caches if name in bytes_])
