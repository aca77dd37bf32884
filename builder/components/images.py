"""Images for a vision encoder: the model's image processor as the manifest describes it, in NumPy, so that the device
needs no transformers. Files need Pillow."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trt_nvfp4.builder.errors import ModelFaultError, UnavailableError, UsageError

#: A file or its bytes, pixels [height, width, 3] or [height, width] in uint8, or an image of Pillow's.
Image: TypeAlias = str | Path | bytes | np.ndarray | Any


def _linear(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.maximum(1 - np.abs(x), 0)
    return found


def _cubic(x: np.ndarray) -> np.ndarray:
    """The piecewise cubic with a = -1/2."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


#: Pixels of an image whose bytes a stranger sends: 400 MB while it is resized.
LARGEST_SENT = 1 << 24
#: Pixels of an edge, more than any encoder takes.
LARGEST_EDGE = 1 << 13
#: Frames that a patch stands for, more than any encoder takes.
LARGEST_TEMPORAL = 64
#: Kernels by name. Where an image shrinks they widen with the step, as Pillow's do.
KERNELS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "bilinear": _linear,
    "bicubic": _cubic,
    "lanczos": lambda x: np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0),
}


@dataclass(frozen=True)
class Patches:
    """Rows of values in place of an image: patches of `size` pixels, in the order of squares of `merge` x `merge`, each
    of `temporal` frames."""

    size: int
    merge: int
    temporal: int


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes pixel values of `height` x `width`.

    It is resized to that size, or, with `shortest`, until its shorter edge has so many pixels, and the middle is taken.
    Then values are multiplied by `scale`, less `mean`, over `std`, per channel.
    """

    height: int
    width: int
    resample: str
    scale: float
    mean: Sequence[float]
    std: Sequence[float]
    shortest: int | None = None
    patches: Patches | None = None

    def __call__(self, image: Image) -> np.ndarray:
        """float32 [3, height, width], or [patches, values]. Raises BuilderError as `opened`."""
        return self.of_frames([image])

    def of_frames(self, frames: Sequence[Image]) -> np.ndarray:
        """As of one image, of frames that one patch stands for; the last is repeated where there are too few."""
        found = np.stack([self._values(frame) for frame in frames])
        return found[0] if self.patches is None else rows_of_patches(found, self.patches)

    def _values(self, image: Image) -> np.ndarray:
        pixels = opened(image).astype(np.float64)
        if self.shortest is None:
            pixels = resized(pixels, self.height, self.width, self.resample)
        else:
            pixels = self._middle(pixels, self.shortest)
        values = (pixels * self.scale - np.asarray(self.mean)) / np.asarray(self.std)
        found: np.ndarray = values.transpose(2, 0, 1).astype(np.float32)
        return found

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "Preprocessing":
        """From JSON. Raises ModelFaultError for anything else."""
        try:
            patches = None if found["patches"] is None else Patches(**found["patches"])
            made = cls(**{**found, "patches": patches})
            made._check()
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ModelFaultError(f"components.json: its preprocessing of images cannot be read ({error})") from error
        return made

    def _check(self) -> None:
        """Raises ValueError or TypeError for what describes no image processor: anybody may have written it."""
        sizes = [(size, LARGEST_EDGE) for size in (self.height, self.width)]
        sizes += [] if self.shortest is None else [(self.shortest, LARGEST_EDGE)]
        if self.patches is not None:
            sizes += [(size, LARGEST_EDGE) for size in (self.patches.size, self.patches.merge)]
            sizes.append((self.patches.temporal, LARGEST_TEMPORAL))
        for size, most in sizes:
            if type(size) is not int or not 1 <= size <= most:
                raise ValueError(f"a size is {reprlib.repr(size)}, expected 1 to {most}")
        if self.patches is not None:
            square = self.patches.size * self.patches.merge
            if self.height % square or self.width % square:
                raise ValueError(
                    f"images of {self.height}x{self.width} are not filled by squares of {square}x{square}, "
                    f"{self.patches.merge} patches of {self.patches.size} pixels each way"
                )
        if self.resample not in KERNELS:
            raise ValueError(f"resample is {reprlib.repr(self.resample)}, expected {', '.join(KERNELS)}")
        if (len(self.mean), len(self.std)) != (3, 3):
            raise ValueError("mean and std are expected to have a number for each of three channels")
        if not all(math.isfinite(number) for number in (self.scale, *self.mean, *self.std)) or 0 in self.std:
            raise ValueError("scale, mean and std are expected to be finite, and no std to be 0")

    def _middle(self, pixels: np.ndarray, shortest: int) -> np.ndarray:
        height, width = pixels.shape[:2]
        short, long = min(height, width), max(height, width)
        other = int(shortest * long / short)
        size = (shortest, other) if height <= width else (other, shortest)
        pixels = resized(pixels, *size, self.resample)
        # What is smaller than the middle gets a black margin.
        missing = [max(0, want - have) for want, have in zip((self.height, self.width), size, strict=True)]
        pixels = np.pad(pixels, [*((-(-m // 2), m // 2) for m in missing), (0, 0)])
        top, left = ((have - want) // 2 for want, have in zip((self.height, self.width), pixels.shape, strict=False))
        return pixels[top : top + self.height, left : left + self.width]


def opened(image: Image) -> np.ndarray:
    """uint8 [height, width, 3]. Raises BuilderError: usage for anything but an image, unavailable without Pillow."""
    if isinstance(image, (str, Path)):
        image = _of_file(Path(image), str(image))
    if isinstance(image, bytes):
        image = _of_file(BytesIO(image), "an image", LARGEST_SENT)
    if hasattr(image, "convert"):  # Pillow's
        image = np.asarray(image.convert("RGB"))
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, 2)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise UsageError(
            f"an image is {pixels.dtype} {list(pixels.shape)}, expected uint8 [height, width, 3] or [height, width]; "
            "or give all images as one array of the values that the model's image processor makes (pixel_values)"
        )
    return pixels


def _of_file(file: Path | BytesIO, name: str, most: int | None = None) -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise UnavailableError(f"{name}: reading an image file needs Pillow: pip install pillow ({error})") from error
    try:
        with PIL.Image.open(file) as image:
            if most is not None and image.width * image.height > most:
                raise ValueError(f"it has {image.width}x{image.height} pixels, expected at most {most} in all")
            return PIL.ImageOps.exif_transpose(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise UsageError(f"{name}: Pillow cannot read this image: {error}") from error


def resized(pixels: np.ndarray, height: int, width: int, resample: str) -> np.ndarray:
    """[height, width, channels] in whole numbers from 0 to 255, of pixels [., ., channels]."""
    before = pixels.shape
    passes = [("oh,hwc->owc", before[0], height), ("ow,hwc->hoc", before[1], width)]
    # As Pillow does it: first the pass that leaves less to the other, and bytes between the two.
    if before[0] * width < height * before[1]:
        passes.reverse()
    for expression, old, new in passes:
        pixels = np.einsum(expression, _weights(old, new, resample), pixels, optimize=True)
        pixels = np.clip(np.rint(pixels), 0, 255)
    return pixels


def _weights(before: int, after: int, resample: str) -> np.ndarray:
    """[after, before]: how much of each old pixel is in each new one."""
    step = before / after
    centers = (np.arange(after) + 0.5) * step
    found = KERNELS[resample]((np.arange(before) + 0.5 - centers[:, None]) / max(step, 1))
    weights: np.ndarray = found / found.sum(1, keepdims=True)
    return weights


def rows_of_patches(frames: np.ndarray, patches: Patches) -> np.ndarray:
    """[patches, channels * temporal * size * size] of [frames, channels, height, width], at most `temporal` frames."""
    frames = np.pad(frames, [(0, patches.temporal - len(frames)), (0, 0), (0, 0), (0, 0)], mode="edge")
    count, channels, height, width = frames.shape
    size, merge = patches.size, patches.merge
    cut = frames.reshape(count, channels, height // size // merge, merge, size, width // size // merge, merge, size)
    rows = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7)  # squares, patches in a square, channels, frames, a patch's pixels
    flat: np.ndarray = rows.reshape(-1, channels * count * size * size)
    return flat
