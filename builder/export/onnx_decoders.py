"""A decoder that comes as ONNX, with caches that grow, becomes one with caches that are updated in place."""

from pathlib import Path
from typing import Any

from trt_nvfp4.common.json_text import read_json
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.decoders.inplace_cache import convert, keeps_cache
from trt_nvfp4.graph_passes.ir.save import move, write
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.attention.types import DecoderError

from ..errors import ModelFaultError
from ..model.cache_support import check_caches_run
from ..model.decoder_contract import CAPACITY, DECODER, TOKENIZER, Decoder, end_ids
from ..model.model import tokenizer_of
from .inplace_check import conversion_error
from .tokenizer_files import tokenizer_files

# How the contract spells types of caches.
_TYPES = {"FLOAT": "float32"}
_NOT_IN_PLACE = "its caches cannot be updated in place"


def convert_decoder(model: Path, destination: Path, capacity: int | None = None, max_batch: int = 8) -> Decoder:
    """Write the decoder at `model` to `destination` in the contract of `decoder_contract`.

    `capacity`: tokens that each cache holds; default: what config.json beside the model allows, at most 4096. Raises
    ModelFaultError, naming the node, for a decoder that cannot be converted, or whose results differ from the
    original's in ONNX Runtime; as `check_caches_run`; ModelError as `load` does.
    """
    check_caches_run(model)
    config = _json(model.parent / "config.json")
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if capacity is None:
        capacity = min(limit, CAPACITY) if isinstance(limit, int) and limit > 0 else CAPACITY
    source = load(model).ir_model
    if not keeps_cache(source):
        raise ModelFaultError(
            f"{model}: takes no cache (4-D inputs such as past_key_values.0.key); export it with past keys and values, "
            "or build it as it is"
        )
    try:
        found = convert(source, capacity)
    except DecoderError as error:
        raise ModelFaultError(f"{model}: {_NOT_IN_PLACE}: {error}; build it as it is") from error
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
        tokenizer=TOKENIZER if tokenizer_files(tokenizer_of(model)) else None,
    )
    source.metadata_props[DECODER] = decoder.json()
    with scratch(destination.parent) as folder:
        made = folder / destination.name
        write(source, made)
        if (why := conversion_error(model, made, decoder, found)) is not None:
            raise ModelFaultError(f"{model}: {_NOT_IN_PLACE}: {why}; build it as it is")
        move(made, destination)
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
        raise ModelFaultError(f"{file}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {}
