"""A decoder that comes as ONNX, with caches that grow, becomes one with caches that are updated in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.graph_passes.decoders.inplace_cache import convert, keeps_cache
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.attention.types import DecoderError

from ..cache_support import check_caches_run
from ..errors import MODEL_AT_FAULT, BuilderError
from .decoder_contract import CAPACITY, DECODER, TOKENIZER, Decoder, end_ids
from .tokenizer_files import copy_tokenizer

# How the contract spells types of caches.
_TYPES = {"FLOAT": "float32"}


def convert_decoder(model: Path, destination: Path, capacity: int | None = None, max_batch: int = 8) -> Decoder:
    """Write the decoder at `model` to `destination` in the contract of `decoder_contract`, and the tokenizer that lies
    beside the model, if any, into `tokenizer/` beside it.

    `capacity`: tokens that each cache holds; default: what config.json beside the model allows, at most 4096. Raises
    BuilderError (model), naming the node, for a decoder that cannot be converted; as `check_caches_run`; ModelError as
    `load` does.
    """
    check_caches_run(model)
    config = _json(model.parent / "config.json")
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if capacity is None:
        capacity = min(limit, CAPACITY) if isinstance(limit, int) and limit > 0 else CAPACITY
    source = load(model).ir_model
    if not keeps_cache(source):
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{model}: takes no cache (4-D inputs such as past_key_values.0.key); export it with past keys and values, "
            "or build it as it is",
        )
    try:
        found = convert(source, capacity)
    except DecoderError as error:
        raise BuilderError(
            MODEL_AT_FAULT, f"{model}: its caches cannot be updated in place: {error}; build it as it is"
        ) from error
    tokenizer = copy_tokenizer(model.parent, destination.parent / TOKENIZER)
    decoder = Decoder(
        capacity=capacity,
        max_batch=max_batch,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        value_head_dim=found.value_head_dim,
        vocab_size=found.vocab_size,
        eos_token_ids=_eos(model.parent, config),
        cache_dtype=_TYPES.get(found.dtype.name, found.dtype.name.lower()),
        sliding_window=found.window,
        tokenizer=None if tokenizer is None else TOKENIZER,
    )
    source.metadata_props[DECODER] = decoder.json()
    write(source, destination)
    return decoder


def _eos(folder: Path, config: dict[str, Any]) -> list[int]:
    """The tokens that end a text, by the configurations of transformers and onnxruntime-genai."""
    genai = _json(folder / "genai_config.json").get("model", {})
    for found in (_json(folder / "generation_config.json"), genai, config):
        ids = found.get("eos_token_id") if isinstance(found, dict) else None
        if ids is not None:
            return end_ids(ids)
    return []


def _json(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file) if file.is_file() else {}
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{file}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {}
