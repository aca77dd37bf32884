"""A Hugging Face model without caches as a Torch module, of text, images or sound."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.fixed_sizes import UNFIXED, FixedSizes
from trt_nvfp4.builder.export.loading import EXPORT_IT

if TYPE_CHECKING:
    import torch

BATCH = "batch"
IDS, PIXELS, MASK = "input_ids", "pixel_values", "attention_mask"
#: Inputs of sound, and the dimension that its length is: spectrograms [batch, frames, bins], and samples.
SOUND = {"input_features": "frames", "input_values": "samples"}
# How the names of forward's parameters end that take images, sound or proteins.
_MEDIA = (
    *(PIXELS, "pixel_values_videos", "flattened_patches", "image_patches", "protein_input_ids"),
    *SOUND,
)
# Names of the number of spectrogram bins in configurations.
_BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
# Least lengths of sound, 0.1 s, and those of examples.
_LEAST = {"frames": 10, "samples": 1600}
_EXAMPLE = {"frames": 160, "samples": 8000}
# Outputs from inside of a model: of single layers, and what its head is applied to.
_INSIDE = ("enc_", "encoder_", "decoder_", "init_", "initial_", "intermediate_", "auxiliary_", "backbone_")
_EMBEDDINGS = "image_embeddings"
# Outputs that are tuples, a map of features for each scale: those of encoders of images without a head.
_SCALES = ("fpn_hidden_states", "feature_maps", _EMBEDDINGS)


def check_kind(directory: Path, model: Any, fixed: FixedSizes = UNFIXED) -> None:
    """Raise ModelFaultError unless all that the model takes is text, sound, or images of a size that `fixed` or
    its configuration states; (usage) for sizes of what it does not take."""
    takes = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if name == IDS or name.endswith(_MEDIA) or (_is_required(parameter) and name != MASK)
    ]
    named = f"{directory}: {type(model).__name__}"
    if takes not in ([IDS], [PIXELS], *([name] for name in SOUND)):
        raise ModelFaultError(
            f"{named} takes {' and '.join(takes) or 'other inputs'}, and models of one input of {IDS}, {PIXELS} or "
            f"{' or '.join(SOUND)} are exported here; {_class_of_images(model) or EXPORT_IT}"
        )
    if getattr(model.config, "is_encoder_decoder", False) and model.can_generate():
        raise ModelFaultError(
            f"{named} generates with an encoder and a decoder, which are engines of their own; export each of them "
            "with torch.onnx.export and give the ONNX files one by one"
        )
    if getattr(model.config, "is_encoder_decoder", False) and _asks_for_more(model, fixed):
        raise ModelFaultError(
            f"{named} is an encoder and a decoder without a head, and does not run on only {takes[0]}; name the class "
            f"with the head in config.json's architectures{_class_with_head(model)}, or the encoder's class"
        )
    if fixed.image is not None and takes != [PIXELS]:
        raise UsageError(f"--set image-size: {named} takes {takes[0]} and no images; leave it out")
    if takes == ["input_features"] and _of_config(model, *_BINS) is None:
        raise ModelFaultError(
            f"{directory / 'config.json'}: states no {_BINS[0]}, the bins of its spectrograms; add it, or {EXPORT_IT}"
        )
    if takes == [PIXELS] and fixed.image is None and _of_config(model, "image_size") is None:
        raise ModelFaultError(
            f"{directory / 'config.json'}: states no image_size, of its own or in a vision_config or backbone_config; "
            "add --set image-size=HxW with the height and width of the images"
        )


def _asks_for_more(model: Any, fixed: FixedSizes) -> bool:
    """Whether the model's code refuses to run on only its main input; tried on a copy without weights."""
    import torch

    with torch.device("meta"), torch.no_grad():
        bare = type(model)(model.config)
        try:
            name, shape = next(iter(input_shapes(bare, fixed).items()))
            bare(**{name: _example(bare, name, list(map(_size, shape)))})
        except ValueError:  # what its code raises
            return True
        except Exception:  # what tensors without values do not serve
            return False
    return False


def _class_with_head(model: Any) -> str:
    """A comma and the name of the class that generates with the same configuration, or nothing."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
    found = next((names[kind] for names in mappings if (kind := model.config.model_type) in names), None)
    return f", {found}" if found else ""


def _class_of_images(model: Any) -> str:
    """Advice for a class that follows objects through a video (SAM 2's); nothing for others."""
    import transformers

    name = type(model).__name__.replace("Video", "")
    if type(model).__name__ == name or not hasattr(getattr(transformers, name, None), "get_image_embeddings"):
        return ""
    return f"for its encoder of images name {name} in config.json's architectures"


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty


def images_of(model: Any, fixed: FixedSizes = UNFIXED) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    channels = _of_config(model, "num_channels") or 3
    if fixed.image is not None:
        return channels, fixed.image.height, fixed.image.width
    size = _of_config(model, "image_size")
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return channels, height, width


def _of_config(model: Any, *names: str) -> Any:
    """The first entry under these names in the configuration, or in a part of it where the model was half of a pair or
    has a backbone or an encoder that is a model of its own."""
    found = (getattr(config, name, None) for config in _configs(model.config) for name in names)
    return next((value for value in found if value is not None), None)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for part in ("vision_config", "backbone_config", "encoder_config"):
        if (inner := getattr(config, part, None)) is not None:
            yield from _configs(inner)


def input_shapes(model: Any, fixed: FixedSizes) -> dict[str, tuple[int | str, ...]]:
    """The model's inputs with their shapes; names are dynamic dimensions."""
    name, batch = model.main_input_name, BATCH if fixed.batch is None else fixed.batch
    if name == PIXELS:
        return {name: (batch, *images_of(model, fixed))}
    if name not in SOUND:
        return {IDS: (batch, "sequence"), MASK: (batch, "sequence")}
    length = SOUND[name]
    bins = (_of_config(model, *_BINS),) if length == "frames" else ()
    # Masks of samples become nodes that TensorRT does not have: the runs of one batch are of one length.
    masked = length == "frames" and MASK in inspect.signature(model.forward).parameters
    return {name: (batch, length, *bins), **({MASK: (batch, length)} if masked else {})}


def plain(model: Any, fixed: FixedSizes) -> tuple[Any, dict[str, torch.Tensor], tuple[tuple[dict[int, Any], ...]]]:
    """A module from tensors to a tuple of tensors, example inputs, and dynamic shapes.

    Text models take input_ids and attention_mask (int64 [batch, sequence]), image models pixel_values (float [batch,
    channels, height, width]), models of sound input_features (float [batch, frames, bins]) or input_values (float
    [batch, samples]), spectrograms with attention_mask. The outputs are those of the model's head under their
    names in transformers, most often `logits`; without a head `last_hidden_state`. Once it has run, the module's
    `outputs` names the tensors of the tuple.
    """
    import torch

    shapes = input_shapes(model, fixed)

    class Plain(torch.nn.Module):
        outputs: tuple[str, ...] = ()

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = _run(self.model, dict(zip(shapes, tensors, strict=True)))
            found = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
            lists = {name: result[name] for name in _SCALES if isinstance(result.get(name), (list, tuple))}
            scales = {f"{name}.{n}": each for name, maps in lists.items() for n, each in enumerate(maps)}
            inner = ("pooler_output", *(name for name in found if name.endswith("hidden_state")))
            head = {name: value for name, value in found.items() if name not in inner and not name.startswith(_INSIDE)}
            head |= scales
            chosen = head or {name: found[name] for name in ("last_hidden_state",) if name in found} or found
            Plain.outputs = tuple(chosen)
            return tuple(chosen.values())

    dims: dict[str, Any] = {}
    dynamic = tuple(
        {
            axis: dims.setdefault(dim, torch.export.Dim(dim, min=_LEAST.get(dim, 1)))
            for axis, dim in enumerate(shape)
            if isinstance(dim, str)
        }
        for shape in shapes.values()
    )
    inputs = {name: _example(model, name, list(map(_size, shape))) for name, shape in shapes.items()}
    return Plain().eval(), inputs, (dynamic,)


def _run(model: Any, inputs: Mapping[str, torch.Tensor]) -> Any:
    """The model's outputs by name; of one that is asked about places in images (SAM), what it answers from."""
    if hasattr(model, "get_image_embeddings"):
        return {_EMBEDDINGS: model.get_image_embeddings(*inputs.values())}
    extra = {"use_cache": False} if IDS in inputs and hasattr(model.config, "use_cache") else {}
    return model(**inputs, **extra)


def _size(dim: int | str) -> int:
    """A size of the examples."""
    return dim if isinstance(dim, int) else {BATCH: 2, "sequence": 16, **_EXAMPLE}[dim]


def _example(model: Any, name: str, size: list[int]) -> torch.Tensor:
    import torch

    if name == IDS:
        return torch.randint(0, model.config.vocab_size, size)
    if name == MASK:
        return torch.ones(size, dtype=torch.int64)
    return torch.rand(size, dtype=next(model.parameters()).dtype)
