"""The parts of the model in a Hugging Face directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from trt_nvfp4.builder.components import dual_encoder, encoder_decoder, vision_language
from trt_nvfp4.builder.components.source import Source
from trt_nvfp4.builder.errors import ModelFaultError, UsageError, exit_code, first_line
from trt_nvfp4.builder.export.adapter import Adapter
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.builder.export.huggingface import load_model, longest_sequence, quiet
from trt_nvfp4.builder.model.cache_support import check_caches_run
from trt_nvfp4.builder.model.decoder_contract import CacheOptions

T = TypeVar("T")


def of_directory(
    directory: Path,
    options: CacheOptions,
    image_size: str | None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
) -> Source:
    """The parts of the model in a Hugging Face directory, with `adapter` merged into it.

    Raises BuilderError: as `load_model`; model for a family that is not known here, usage for sizes that do not fit.
    """
    model, absent = load_model(directory, trust_remote_code, adapter)
    if absent:
        raise ModelFaultError(
            f"{directory}: the files lack {len(absent)} of the model's weights, {min(absent)} for one; download it "
            "again, or fix `architectures` in config.json"
        )
    with quiet(), torch.no_grad():
        if encoder_decoder.is_encoder_decoder(model):
            if image_size is not None:
                raise UsageError(f"--set image-size={image_size}: {directory} takes no images; leave it out")
            check_caches_run(directory)
            limit = getattr(model.config, "max_target_positions", None) or longest_sequence(directory)
            capacity = options.checked_capacity(directory, limit)
            found, example = _known(
                directory, model, "is an encoder-decoder", lambda: _reading(directory, model, capacity, options)
            )
        elif dual_encoder.is_dual_encoder(model):
            size = None if image_size is None else ImageSize.parse(image_size)
            parts, flows, settings, embedded = _known(
                directory, model, "embeds texts and images", lambda: dual_encoder.parts_of(directory, model, size)
            )
            return Source(directory.name, "run", parts, flows, settings, embedded)
        elif vision_language.takes_media(model):
            check_caches_run(directory)
            text = model.config.get_text_config(decoder=True)
            capacity = options.checked_capacity(directory, getattr(text, "max_position_embeddings", None))
            size = None if image_size is None else ImageSize.parse(image_size)
            found, example = _known(
                directory,
                model,
                "is a language model that takes images or sound",
                lambda: _seeing(directory, model, capacity, options, size),
            )
        else:
            raise ModelFaultError(
                f"{directory}: {type(model).__name__} is neither an encoder-decoder, a vision-language model nor a "
                "pair of encoders that is taken apart here; give a Python file with its parts (model.py:components)"
            )
    parts, flows, settings = found
    return Source(directory.name, "generate", parts, flows, settings, example)


def _reading(directory: Path, model: Any, capacity: int, options: CacheOptions) -> Any:
    found = encoder_decoder.parts_of(directory, model, capacity, options)
    return found, encoder_decoder.example_of(model, found[0])


def _seeing(directory: Path, model: Any, capacity: int, options: CacheOptions, size: ImageSize | None) -> Any:
    found = vision_language.parts_of(directory, model, capacity, options, size)
    return found, vision_language.example_of(model, found[0], found[2])


def _known(directory: Path, model: Any, what: str, take_apart: Callable[[], T]) -> T:
    """The result of `take_apart`; an exception of modeling code, which is called in another way than its own, becomes a
    BuilderError."""
    try:
        return take_apart()
    except Exception as error:
        if exit_code(error) is not None:
            raise
        raise ModelFaultError(
            f"{directory}: {type(model).__name__} {what}, but of a kind that is not known here: one of its parts "
            "does not run on only its inputs, or its features are counted in another way; give a Python file with its "
            f"parts (model.py:components); {first_line(error)}"
        ) from error
