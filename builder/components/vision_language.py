"""A vision-language model as three parts: vision encoder, embedding of tokens and features, decoder with caches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.embeds_step import EMBEDS, GROUPS, PER_LAYER, POSITIONS, EmbedsStep
from trt_nvfp4.builder.components.manifest import Flow
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.processor import describe
from trt_nvfp4.builder.components.source import Example, as_array
from trt_nvfp4.builder.components.vision import DEEPSTACK, FEATURES, SOUND, Vision, vision_of
from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.decoder.ops import OPSET, TRANSLATIONS
from trt_nvfp4.builder.export.decoders import end_tokens
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.builder.export.tokenizer_files import tokenizer_files
from trt_nvfp4.builder.model.decoder_contract import (
    DECODER,
    IDS,
    LOGIT_TOKENS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    TOKENIZER,
    CacheOptions,
    Decoder,
)

#: Families in which tokens see others that follow them: all of the prompt, or those of one image.
GROUPED = {"paligemma": "prompt", "gemma3": "images", "gemma4": "images"}
#: Those in which they do so only in layers with a window.
GROUPED_LOCALLY = ("gemma4",)
#: Those in which the frames of a video follow each other as one image of several moments.
OF_VIDEO = ("qwen2_vl", "qwen2_5_vl")
#: Tokens of text that a cache holds beside an image, at least: those of the example that chains are compared on.
LEAST_TEXT = 8
#: Families that number their first token otherwise than 0.
FIRST_POSITION = {"paligemma": 1}


def takes_media(model: Any) -> bool:
    """Whether this is a language model that is given images or sound, too."""
    inner = getattr(model, "model", None)
    speaks = hasattr(inner, "language_model") or hasattr(inner, "text_model")
    sees = hasattr(model.config, "vision_config") or hasattr(model.config, "audio_config")
    return speaks and sees and bool(model.can_generate())


class Embed(torch.nn.Module):
    """(input_ids [batch, new], image_features [images, tokens, hidden], *deepstack) -> (inputs_embeds, *deepstack,
    [per_layer_inputs]).

    Features take the places of the image's tokens, in their order. `per_layer` is a further table, of what each layer
    gets of a token, an image's counting as padding.
    """

    def __init__(
        self, table: torch.nn.Module, image_token: int, per_layer: torch.nn.Module | None = None, padding: int = 0
    ) -> None:
        super().__init__()
        self.table, self.image_token, self.per_layer, self.padding = table, image_token, per_layer, padding

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, *features = tensors
        images = ids == self.image_token
        embeds = self.table(torch.where(images, 0, ids))
        # In a step without images the first feature is looked up, and not used.
        index = (torch.cumsum(images.reshape(-1).long(), 0) - 1).clamp(min=0).reshape(ids.shape)
        here = images[..., None]
        found = [torch.where(here, each.reshape(-1, each.shape[-1])[index].to(embeds.dtype), 0) for each in features]
        further = [] if self.per_layer is None else [self.per_layer(torch.where(images, self.padding, ids))]
        return (torch.where(here, found[0], embeds), *found[1:], *further)


def image_token(model: Any) -> int:
    """The token that stands for a feature of an image."""
    config, names = model.config, ("image_token_id", "image_token_index", "audio_token_id")
    return next(int(token) for name in names if (token := getattr(config, name, None)) is not None)


def groups_of(model: Any) -> str | None:
    """Which tokens see those that follow them, as `GROUPED` says; None where all see only those before."""
    kind = model.config.model_type
    if kind == "gemma4" and model.config.text_config.use_bidirectional_attention is None:
        return None
    return GROUPED.get(kind)


def per_layer_table(model: Any) -> Any:
    """The table of what each layer gets of a token (Gemma 4's small models); None for models without."""
    text = model.config.get_text_config(decoder=True)
    return model.get_per_layer_input_embeddings() if getattr(text, "hidden_size_per_layer_input", None) else None


def parts_of(
    directory: Path, model: Any, capacity: int, options: CacheOptions, size: ImageSize | None
) -> tuple[list[TorchPart], list[Flow], dict[str, Any]]:
    """The parts, what flows between them, and the manifest's settings. Raises BuilderError as `vision_of`; model where
    tokens see others by a rule that is not known here."""
    if hasattr(model, "create_masks_for_generate") and model.config.model_type not in GROUPED:
        raise ModelFaultError(
            f"{directory}: {type(model).__name__} has a rule of its own for which tokens see each other, which is not "
            "known here; give a Python file with its parts (model.py:components)"
        )
    vision = vision_of(directory, model, size).eval()
    with torch.no_grad():
        features = vision(vision.example)
    tokens = features[0].shape[1]
    if tokens + LEAST_TEXT > capacity:
        raise UsageError(
            f"--cache-capacity {capacity}: one image of {directory} is {tokens} tokens, which leaves no room for text; "
            f"name {tokens + LEAST_TEXT} or more, or a smaller --set image-size where the model takes one"
        )
    hidden = features[0].shape[-1]
    names = [f"{DEEPSTACK}.{n}" for n in range(vision.deepstack)]
    per_layer = per_layer_table(model)
    names += [PER_LAYER] * (per_layer is not None)
    outputs = [FEATURES, *(f"{DEEPSTACK}_features.{n}" for n in range(vision.deepstack))]
    token = image_token(model)
    seeing = TorchPart(
        "vision",
        vision,
        {vision.input: vision.example},
        outputs,
        {} if vision.one_by_one else {vision.input: {0: "images"}},
    )
    # Two images in a batch of two, so that nothing is taken for 1.
    examples = {name: torch.cat([each] * (2 // len(each))) for name, each in zip(outputs, features, strict=True)}
    ids = torch.full((2, features[0].shape[1] + 3), 1)
    ids[:, 1:-2] = token
    embedding = TorchPart(
        "embed",
        Embed(model.get_input_embeddings(), token, per_layer, _padding(model)).eval(),
        {IDS: ids, **examples},
        [EMBEDS, *names],
        {IDS: {0: "batch", 1: "new"}, **{name: {0: "images"} for name in outputs}},
    )
    decoding = _decoder(model, capacity, options, vision, hidden)
    flows = [Flow(f"vision.{name}", f"embed.{name}") for name in outputs]
    flows += [Flow(f"embed.{name}", f"decoder.{name}") for name in (EMBEDS, *names)]
    described = describe(directory, vision.image_size, vision.grid is not None, token)
    settings = {
        "image": {
            "token_id": token,
            "tokens": tokens,
            "grid": vision.grid,
            "alone": vision.one_by_one,
            "prompt": described.prompt,
        },
        "hears": vision.input == SOUND,
        **described.settings(),
        "merge": getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1),
        "groups": groups_of(model),
        "video": _video(model),
        "tokenizer": TOKENIZER if tokenizer_files(directory) else None,
    }
    return [seeing, embedding, decoding], flows, settings


def _decoder(model: Any, capacity: int, options: CacheOptions, vision: Vision, hidden: int) -> TorchPart:
    kind = model.config.model_type
    step = EmbedsStep(
        model,
        capacity,
        mrope=vision.grid is not None,
        grouped=groups_of(model) is not None,
        only_local=kind in GROUPED_LOCALLY,
        per_layer=0 if (table := per_layer_table(model)) is None else int(table.embedding_dim),
        deepstack=vision.deepstack,
        first_position=FIRST_POSITION.get(kind, 0),
    ).eval()
    with torch.no_grad():
        empty = step.probe(hidden)
    decoder = decoder_of_caches(model, empty, capacity, options)
    lengths = torch.tensor([0, 1])
    inputs = {
        EMBEDS: torch.randn(2, 3, hidden, dtype=empty[0].dtype),
        PAST_LENGTH: lengths,
        NEW_LENGTH: lengths + 2,
    }
    dynamic = {EMBEDS: {0: "batch", 1: "new"}, PAST_LENGTH: {0: "batch"}, NEW_LENGTH: {0: "batch"}}
    if step.mrope:
        inputs[POSITIONS], dynamic[POSITIONS] = torch.arange(3).expand(3, 2, 3), {1: "batch", 2: "new"}
    if step.grouped:
        inputs[GROUPS], dynamic[GROUPS] = torch.tensor([[0, 0, -1]] * 2), {0: "batch", 1: "new"}
    for n in range(step.deepstack):
        inputs[f"{DEEPSTACK}.{n}"], dynamic[f"{DEEPSTACK}.{n}"] = torch.zeros_like(inputs[EMBEDS]), dynamic[EMBEDS]
    if step.per_layer:
        inputs[PER_LAYER] = torch.randn(2, 3, step.per_layer, dtype=empty[0].dtype)
        dynamic[PER_LAYER] = dynamic[EMBEDS]
    for name, tensor in zip(decoder.caches, empty, strict=True):
        inputs[name], dynamic[name] = tensor.repeat(2, 1, 1, 1), {0: "batch"}
    decoder = replace(decoder, tokens=EMBEDS)
    return TorchPart(
        "decoder",
        step,
        inputs,
        [LOGITS, *decoder.presents],
        dynamic,
        OPSET,
        TRANSLATIONS,
        {DECODER: decoder.json()},
    )


def _video(model: Any) -> dict[str, Any] | None:
    """How a video is taken: its token, how many frames are one image, and how many positions a second (None: one for
    each image of it). None: the model's code takes it in another way."""
    if model.config.model_type not in OF_VIDEO:
        return None
    vision, token = model.config.vision_config, int(model.config.video_token_id)
    per_second = getattr(vision, "tokens_per_second", None)
    return {"token_id": token, "frames": int(vision.temporal_patch_size), "per_second": per_second}


def _padding(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).pad_token_id or 0)


def decoder_of_caches(model: Any, empty: list[torch.Tensor], capacity: int, options: CacheOptions) -> Decoder:
    """The metadata of a decoder with these caches."""
    keys, values = empty[::2], empty[1::2]
    return Decoder(
        logit_tokens=LOGIT_TOKENS,
        capacity=capacity,
        max_batch=options.largest_batch,
        kv_heads=[key.shape[1] for key in keys],
        head_dim=[key.shape[3] for key in keys],
        value_head_dim=[value.shape[3] for value in values],
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=end_tokens(model),
        cache_dtype=str(empty[0].dtype).removeprefix("torch."),
        sliding_window=getattr(model.config.get_text_config(decoder=True), "sliding_window", None),
        tokenizer=None,  # which lies beside all parts
        alone=False,
    )


def example_of(model: Any, parts: Sequence[TorchPart], settings: Mapping[str, Any]) -> Example:
    """An image among text in each of two prompts, or in one where the encoder takes only one image."""
    vision, image = parts[0].module, settings["image"]
    assert isinstance(vision, Vision)
    pixels = torch.rand_like(vision.example)
    run = [image["token_id"]] * image["tokens"]
    prompts = [[1, *run, 3, 4, 5]] if vision.one_by_one else [[1, *run, 3, 4, 5], [1, 4, *run, 6]]
    groups, is_local = groups_of(model), model.config.model_type in GROUPED_LOCALLY

    def logits(number: int, tokens: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([list(tokens)])
        images = ids == image["token_id"]
        extra = {}
        if vision.grid or (groups is not None and is_local):
            extra["mm_token_type_ids"] = images.int()
        elif groups == "images":
            extra["token_type_ids"] = images.long()
        elif groups == "prompt":
            extra["token_type_ids"] = (torch.arange(ids.shape[1])[None] >= len(prompts[number])).long()
        seen = vision.original(pixels if vision.one_by_one else pixels[number : number + 1])
        last: np.ndarray = model(input_ids=ids, use_cache=False, **seen, **extra).logits[0, -1].float().numpy()
        return last

    return Example({vision.input: as_array(pixels)}, prompts, logits, placeholder=image["token_id"])
