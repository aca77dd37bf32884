"""Frames of a video: pictures in a folder, or an animation that Pillow reads."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trt_nvfp4.builder.components.images import Image
from trt_nvfp4.builder.errors import UnavailableError, UsageError

#: A folder of frames, an animation, or frames.
Video: TypeAlias = str | Path | np.ndarray | Sequence[Image]
#: Frames per second that the processors of vision-language models take.
USUAL_RATE = 2.0
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# Frames of a file: more would be no animation.
_MOST = 10_000


def frames_of(video: Video, rate: float, most: int) -> list[Image]:
    """Frames in their order: all of a folder or of a sequence, of an animation those that are seen `rate` times a
    second. Raises BuilderError: usage for anything else and for more than `most`, unavailable without Pillow."""
    if not (isinstance(rate, (int, float)) and math.isfinite(rate) and rate > 0):
        raise UsageError(f"--fps {rate}: expected frames per second, more than 0")
    if not isinstance(video, (str, Path)):
        found = list(video)
    elif Path(video).is_dir():
        found = sorted(file for file in Path(video).iterdir() if file.suffix.lower() in _PICTURES)
    else:
        return _of_animation(Path(video), rate, most)
    _check_count(len(found), most, "give fewer")
    return found


def _check_count(count: int, most: int, fix: str) -> None:
    if not 1 <= count <= most:
        raise UsageError(
            f"--video: {count} frames, and the model was built for 1 to {most}; {fix}, or build it with a larger "
            "--cache-capacity or a smaller --set image-size"
        )


def _of_animation(file: Path, rate: float, most: int) -> list[Image]:
    try:
        import PIL.Image
    except ImportError as error:
        raise UnavailableError(f"{file}: reading a video needs Pillow: pip install pillow ({error})") from error
    try:
        with PIL.Image.open(file) as image:
            count = getattr(image, "n_frames", 1)
            if count > _MOST:
                raise ValueError(f"it has {count} frames, expected at most {_MOST}")
            ends = np.cumsum([_seconds(image, number) for number in range(count)])
            _check_count(max(1, math.ceil(ends[-1] * rate)), most, "lower --fps")
            seen = np.searchsorted(ends, np.arange(0, ends[-1], 1 / rate), side="right")
            return [_frame(image, int(number)) for number in seen]
    except (OSError, ValueError, SyntaxError, EOFError, PIL.Image.DecompressionBombError) as error:
        raise UsageError(
            f"{file}: Pillow cannot read this video ({error}); write its frames into a folder, ffmpeg -i {file.name} "
            f"-vf fps={rate:g} frames/%05d.png, and give --video frames"
        ) from error


def _seconds(image: Any, number: int) -> float:
    """How long a frame is shown; a tenth of a second where none is stated, as in browsers."""
    image.seek(number)
    return float(image.info.get("duration") or 100) / 1000


def _frame(image: Any, number: int) -> Image:
    image.seek(number)
    return image.convert("RGB")
