"""The vision encoder of a vision-language model, images of one size in, features of a fixed number of tokens out."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.export.fixed_sizes import ImageSize
from trt_nvfp4.common.json_text import read_json

PIXELS, SOUND, FEATURES, DEEPSTACK = "pixel_values", "input_features", "image_features", "deepstack"
# Names of masks of padded frames.
_SOUND_MASKS = ("input_features_mask", "feature_attention_mask")
T = TypeVar("T")


class Vision(torch.nn.Module):
    """pixel_values [images, channels, height, width] -> image_features [images, tokens, hidden]."""

    #: What it takes, by its name in the model's own forward.
    input = PIXELS
    grid: tuple[int, int, int] | None = None
    #: Whether it takes the pixels of one image in a run, not a batch of images.
    one_by_one = False
    #: How many further outputs there are, one per layer of the language model that has features added.
    deepstack = 0

    def __init__(self, model: Any, example: torch.Tensor) -> None:
        super().__init__()
        self.model, self.example = model, example

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_stacked(_features(self.model, pixel_values=pixels)),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The images as the model's own forward takes them."""
        return {PIXELS: pixels}

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of an image; None where the encoder takes several tiles of it."""
        return int(self.example.shape[-2]), int(self.example.shape[-1])


class LoneVision(Vision):
    """pixel_values [channels, height, width] of one image -> image_features [1, tokens, hidden]: the model's code takes
    a batch of features apart (LLaVA's), which fixes how many there are."""

    one_by_one = True

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(pixels[None])

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None]}


class IdeficsVision(Vision):
    """The model drops images that are all zeros; here no image is dropped."""

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = self.model.model
        patch = inner.config.vision_config.patch_size
        size = (pixels.shape[0], pixels.shape[2] // patch, pixels.shape[3] // patch)
        # All true: only positions follow from the mask.
        hidden = inner.vision_model(
            pixel_values=pixels, patch_attention_mask=torch.ones(size, dtype=torch.bool, device=pixels.device)
        ).last_hidden_state
        return (inner.connector(hidden),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None]}


class TiledVision(Vision):
    """pixel_values [tiles, channels, height, width] of one image, the whole image first -> image_features [1, tokens,
    hidden]. How many tiles there are and where features are cut off or begin a new line follows from its size."""

    one_by_one = True

    def __init__(self, model: Any, size: ImageSize) -> None:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        self_size, tile = (size.height, size.width), model.config.vision_config.image_size
        tiles = image_size_to_num_patches(self_size, model.config.image_grid_pinpoints, tile)
        channels = getattr(model.config.vision_config, "num_channels", 3)
        super().__init__(model, torch.rand(tiles, channels, tile, tile, dtype=_dtype(model)))
        self.size = self_size

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = _features(self.model, pixel_values=pixels[None], image_sizes=[self.size])
        return (found[0][None],)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None], "image_sizes": torch.tensor([self.size])}

    @property
    def image_size(self) -> None:
        return None


class SizedVision(Vision):
    """pixel_values [channels, height, width] of one image -> image_features [1, tokens, hidden]: a tower that takes
    images of any size (Pixtral's), for one size."""

    one_by_one = True

    def __init__(self, model: Any, size: ImageSize | None) -> None:
        vision, merge = model.config.vision_config, getattr(model.config, "spatial_merge_size", 1)
        step = vision.patch_size * merge
        size = _checked(size or _usual(448, vision.image_size, step), vision.patch_size, merge)
        super().__init__(model, torch.rand(vision.num_channels, size.height, size.width, dtype=_dtype(model)))
        self.size = (size.height, size.width)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = _features(self.model, pixel_values=pixels[None], image_sizes=[self.size])
        return (_stacked(found),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None], "image_sizes": torch.tensor([self.size])}


class PatchVision(Vision):
    """pixel_values [patches, values of a patch] of one image -> image_features [1, tokens, hidden], and
    deepstack_features.{n} of the same shape. What depends only on the image's size is constant."""

    one_by_one = True

    def __init__(self, model: Any, size: ImageSize) -> None:
        vision = model.config.vision_config
        _checked(size, vision.patch_size, vision.spatial_merge_size)
        self_grid = (1, size.height // vision.patch_size, size.width // vision.patch_size)
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        values = channels * vision.temporal_patch_size * vision.patch_size**2
        super().__init__(model, torch.rand(self_grid[1] * self_grid[2], values, dtype=_dtype(model)))
        self.grid = self_grid
        self.deepstack = len(getattr(vision, "deepstack_visual_indexes", ()))
        self._constants = self._of_the_grid()
        self._positions = self._of_the_table()

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        visual = self.model.model.visual
        with _adding(getattr(visual, "embeddings", None), self._positions):
            found = visual(pixels, grid_thw=torch.tensor([self.grid]), **dict(self._constants))
        return (found.pooler_output[None], *(each[None] for each in getattr(found, "deepstack_features", ())))

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels, "image_grid_thw": torch.tensor([self.grid])}

    @property
    def image_size(self) -> tuple[int, int]:
        assert self.grid is not None
        patch = int(self.model.config.vision_config.patch_size)
        return self.grid[1] * patch, self.grid[2] * patch

    def _of_the_grid(self) -> dict[str, Any]:
        """Values that transformers would compute from the grid, which a graph cannot. Lengths are NumPy arrays, which
        are not traced."""
        from transformers import vision_utils

        visual, grid = self.model.model.visual, torch.tensor([self.grid])
        merge = self.model.config.vision_config.spatial_merge_size
        lengths, _ = vision_utils.get_vision_attention_seqlens(grid, visual.config)
        found: dict[str, Any] = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "cu_seqlens": np.asarray(lengths),
        }
        if hasattr(visual, "window_size"):
            index, windows = vision_utils.get_vision_window_index(
                grid, spatial_merge_size=merge, window_size=visual.window_size, patch_size=visual.patch_size
            )
            found |= {"window_index": index, "cu_window_seqlens": np.asarray(windows)}
        if hasattr(visual, "num_grid_per_side"):
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            found |= {"interp_indices": indices, "interp_weights": weights}
        return found

    def _of_the_table(self) -> torch.Tensor | None:
        """GLM-4V's table of positions, sampled at the grid's, which it adds to patches."""
        visual = self.model.model.visual
        if not hasattr(visual, "embeddings"):
            return None
        patches, width = len(self.example), visual.config.hidden_size
        places = torch.as_tensor(self._constants["position_ids"])
        with torch.no_grad():
            found: torch.Tensor = visual.embeddings(
                torch.zeros(patches, width, dtype=self.example.dtype),
                torch.tensor([patches]),
                torch.tensor([self.grid]),
                places[:, 0],
                places[:, 1],
            )
        return found


class PooledVision(Vision):
    """pixel_values [patches, values of a patch] of one image -> image_features [1, tokens, hidden]: a tower that pools
    squares of patches (Gemma 4's), for one size."""

    one_by_one = True

    def __init__(self, model: Any, size: ImageSize | None) -> None:
        vision = model.config.vision_config
        most, step = vision.position_embedding_size * vision.patch_size, vision.patch_size * vision.pooling_kernel_size
        size = _checked(size or _usual(768, most, step), vision.patch_size, vision.pooling_kernel_size)
        if max(size.height, size.width) > most:
            raise UsageError(
                f"--set image-size={size.height}x{size.width}: the model's table of positions is for at most {most} "
                "pixels in each direction"
            )
        rows, columns = size.height // vision.patch_size, size.width // vision.patch_size
        super().__init__(model, torch.rand(rows * columns, 3 * vision.patch_size**2, dtype=_dtype(model)))
        self.size, self.tokens = (size.height, size.width), rows * columns // vision.pooling_kernel_size**2
        self.places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)[None]

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = self.model.model
        tower, padding = inner.vision_tower, torch.zeros(self.places.shape[:2], dtype=torch.bool)
        hidden = tower.patch_embedder(pixels[None], self.places, padding)
        hidden = tower.encoder(hidden, attention_mask=None, pixel_position_ids=self.places).last_hidden_state
        pooled, _ = tower.pooler(hidden, self.places, padding, self.tokens)
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        return (inner.embed_vision(inputs_embeds=pooled.to(pixels.dtype)),)

    def original(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {PIXELS: pixels[None], "image_position_ids": self.places}

    @property
    def image_size(self) -> tuple[int, int]:
        return self.size


class Hearing(Vision):
    """input_features [chunks, bins, frames], spectrograms of one length, no padding -> image_features [chunks, tokens,
    hidden]: the encoder of sound that takes the vision encoder's place."""

    input = SOUND

    def __init__(self, model: Any, directory: Path) -> None:
        audio = model.config.audio_config
        super().__init__(model, torch.rand(2, audio.num_mel_bins, _frames(model, directory), dtype=_dtype(model)))

    def forward(self, sound: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self._features(sound)
        return (features.reshape(sound.shape[0], -1, features.shape[-1]),)

    def _features(self, sound: torch.Tensor) -> torch.Tensor:
        inner = self.model.model
        if not hasattr(inner, "get_audio_features"):  # Qwen2-Audio
            projected: torch.Tensor = inner.multi_modal_projector(inner.audio_tower(sound).last_hidden_state)
            return projected
        with _EverythingCounts():
            found: torch.Tensor = inner.get_audio_features(sound, *self._mask(sound).values()).pooler_output
        return found

    def _mask(self, sound: torch.Tensor) -> dict[str, torch.Tensor]:
        """A mask of frames without padding, by its name in the model's own forward, where it takes one."""
        takes = inspect.signature(self.model.forward).parameters
        shape = (sound.shape[0], sound.shape[-1])
        return {name: torch.ones(shape, dtype=torch.int64) for name in _SOUND_MASKS if name in takes}

    def original(self, sound: torch.Tensor) -> dict[str, torch.Tensor]:
        return {SOUND: sound, **self._mask(sound)}

    @property
    def image_size(self) -> None:
        return None


class WindowedHearing(Hearing):
    """input_features [bins, frames] of one recording -> image_features [1, tokens, hidden]: an encoder that attends
    within windows (Qwen3-ASR's)."""

    one_by_one = True

    def __init__(self, model: Any, directory: Path) -> None:
        super().__init__(model, directory)
        self.example = self.example[0]
        audio, frames = model.config.audio_config, self.example.shape[-1]
        convolved = model.model.audio_tower._post_cnn_length
        chunk = 2 * audio.n_window
        tokens = int(convolved(torch.tensor(chunk)))
        window, total = tokens * (audio.n_window_infer // chunk), tokens * (frames // chunk)
        # A NumPy array is not traced.
        self._windows = np.asarray([*range(0, total, window), total])

    def forward(self, sound: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(sound[None])

    def _features(self, sound: torch.Tensor) -> torch.Tensor:
        tower, inner = self.model.model.audio_tower, self.model.model
        with _EverythingCounts():
            mask = self._mask(sound)["input_features_mask"]
            hidden = tower(sound, mask, cu_seqlens=self._windows).last_hidden_state
        projected: torch.Tensor = inner.multi_modal_projector(hidden)
        return projected

    def original(self, sound: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().original(sound[None])


class _EverythingCounts(TorchFunctionMode):
    """Within, masks that select rows select all of them, so that sizes do not depend on data."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1)
        if func is torch.Tensor.nonzero:
            return torch.arange(args[0].numel())[:, None]
        return func(*args, **(kwargs or {}))


def _frames(model: Any, directory: Path) -> int:
    """How many frames one run of the encoder of sound takes: as many as the feature extractor gives, or as the encoder
    has positions for."""
    stated = _of_extractor(directory)
    audio, encoder = model.config.audio_config, model.model.audio_tower
    if stated is not None:
        return stated
    if hasattr(audio, "n_window_infer"):
        return int(4 * audio.n_window_infer)
    positions = getattr(audio, "max_source_positions", None) or audio.max_position_embeddings
    return int(positions * encoder.conv1.stride[0] * encoder.conv2.stride[0])


@contextmanager
def _adding(module: Any, addend: torch.Tensor | None) -> Iterator[None]:
    """Within, the module adds this to its first input."""
    if addend is None:
        yield
        return
    module.forward = lambda patches, *_: patches + addend
    try:
        yield
    finally:
        del module.forward


def vision_of(directory: Path, model: Any, size: ImageSize | None) -> Vision:
    """The vision encoder, for images of `size` or of the size that the configuration states.

    Raises BuilderError: usage for a size that it does not take, model for a model that states none.
    """
    if hasattr(model.model, "get_rope_index") and hasattr(model.model, "visual"):
        return PatchVision(model, size or _of_processor(directory) or ImageSize(448, 448))
    if not hasattr(model.config, "vision_config"):
        if size is not None:
            raise UsageError(f"--set image-size={size.height}x{size.width}: {directory} takes no images; leave it out")
        windowed = hasattr(model.config.audio_config, "n_window_infer")
        return (WindowedHearing if windowed else Hearing)(model, directory)
    vision = model.config.vision_config
    if hasattr(vision, "pooling_kernel_size"):
        return PooledVision(model, size)
    if vision.model_type == "pixtral":
        return SizedVision(model, size)
    if not _encoders(model):
        raise ModelFaultError(
            f"{directory}: {type(model).__name__} has no function that gives the features of images "
            "(get_image_features); give a Python file with its parts (model.py:components)"
        )
    tiled = hasattr(model.config, "image_grid_pinpoints")
    if not tiled and (further := _further_inputs(model)):
        raise ModelFaultError(
            f"{directory}: the vision encoder of {type(model).__name__} takes {' and '.join(further)} beside images, "
            "which is not known here; give a Python file with its parts (model.py:components)"
        )
    stated = getattr(vision, "image_size", None)
    if stated is None:
        raise ModelFaultError(f"{directory / 'config.json'}: vision_config states no image_size; add it")
    height, width = stated if isinstance(stated, (list, tuple)) else (stated, stated)
    if tiled:
        return TiledVision(model, size or ImageSize(height, width))
    if size is not None and (size.height, size.width) != (height, width):
        raise UsageError(
            f"--set image-size={size.height}x{size.width}: the vision tower of {directory} takes {height}x{width}; "
            "leave the option out"
        )
    pixels = torch.rand(2, getattr(vision, "num_channels", 3), height, width, dtype=_dtype(model))
    if model.config.model_type in ("idefics3", "smolvlm"):
        return IdeficsVision(model, pixels)
    with torch.no_grad():
        features = _features(model, pixel_values=pixels)
    return Vision(model, pixels) if isinstance(features, torch.Tensor) else LoneVision(model, pixels[0])


def _encoders(model: Any) -> list[Callable[..., Any]]:
    """The functions from pixels to features: that of the whole model, which may hand all on, and that of its inside."""
    return [part.get_image_features for part in (model, model.model) if hasattr(part, "get_image_features")]


def _features(model: Any, **inputs: Any) -> Any:
    return _encoders(model)[0](**inputs).pooler_output


def _further_inputs(model: Any) -> list[str]:
    """Inputs of the model's encoder of images beside pixels: those it requires, and sizes of images."""
    parameters = [entry for encoder in _encoders(model) for entry in inspect.signature(encoder).parameters.items()]
    found = [
        name
        for name, parameter in parameters
        if name.endswith("grid_thw")
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty)
        if name != PIXELS
    ]
    return list(dict.fromkeys(found))


def _checked(size: ImageSize, patch: int, merge: int) -> ImageSize:
    """The size. Raises UsageError where merged patches do not fill it."""
    step = patch * merge
    if size.height % step or size.width % step:
        merged = f", merged by {merge}" if merge > 1 else ""
        raise UsageError(
            f"--set image-size={size.height}x{size.width}: this vision tower takes multiples of {step} "
            f"(patches of {patch}{merged})"
        )
    return size


def _usual(pixels: int, most: int, step: int) -> ImageSize:
    """A square of about so many pixels, at most `most`, that is a multiple of `step`."""
    side = max(min(pixels, most) // step, 1) * step
    return ImageSize(side, side)


def _of_processor(directory: Path) -> ImageSize | None:
    """The size that the directory's image processor states, where it states one."""

    def of(stated: Mapping[str, Any]) -> ImageSize | None:
        size = stated.get("size", {})
        return ImageSize(int(size["height"]), int(size["width"])) if {"height", "width"} <= size.keys() else None

    return _stated(directory, of)


def _of_extractor(directory: Path) -> int | None:
    """The number of frames of 30 s or the like that the directory's feature extractor pads sound to."""
    return _stated(directory, lambda stated: int(stated["nb_max_frames"]) if "nb_max_frames" in stated else None)


def _stated(directory: Path, read: Callable[[Mapping[str, Any]], T]) -> T | None:
    """An entry of the directory's file of its processor. Raises ModelFaultError where it cannot be read."""
    file = directory / "preprocessor_config.json"
    try:
        return read(read_json(file)) if file.is_file() else None
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelFaultError(f"{file}: its sizes cannot be read ({error})") from error


def _stacked(features: Any) -> torch.Tensor:
    """[images, tokens, hidden], of a tensor or one tensor per image."""
    return features if isinstance(features, torch.Tensor) else torch.stack(list(features))


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype
