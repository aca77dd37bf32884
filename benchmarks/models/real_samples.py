"""Inputs of real models: lines of text as pictures, photographs and sentences, from files of installed packages or of
wheels that are unpacked and never imported."""

import io
import random
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

# ImageNet's, as vision transformers take them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LINE_HEIGHT = 48
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
)
CALIBRATION_PHOTOS = (
    *("camera.png", "coins.png", "color.png", "gravel.png", "ihc.png", "moon.png", "motorcycle_right.png"),
    *("page.png", "retina.jpg", "hubble_deep_field.jpg"),
)
FRESH_PHOTOS = (
    *("astronaut.png", "brick.png", "chelsea.png", "clock_motion.png", "coffee.png", "grass.png", "horse.png"),
    *("logo.png", "motorcycle_left.png", "rocket.jpg"),
)


def sentences(count: int, skip: int = 0) -> list[str]:
    """Different sentences of Python's own reference manual, in an order that is always the same."""
    from pydoc_data.topics import topics

    words = re.sub(r"\s+", " ", " ".join(re.sub(r"[*`|]|\n[-=~^+ ]{4,}\n", " ", text) for text in topics.values()))
    found = sorted(set(re.findall(r"(?<=\. )[A-Z][A-Za-z ,'-]{40,160}\.", words)))
    random.Random(51).shuffle(found)
    return found[skip : skip + count]


def lines(count: int, seed: int) -> Iterator[np.ndarray]:
    """Pictures of two to six words, [1, 3, 48, width] in [-1, 1]: fonts, colours, blur and noise vary."""
    random_ = random.Random(seed)
    noise = np.random.default_rng(seed)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for sentence in sentences(count, skip=200 * seed):
        words = sentence.split()
        start = random_.randrange(max(1, len(words) - 6))
        text = " ".join(words[start : start + random_.randint(2, 6)])
        font = ImageFont.truetype(fonts / f"{random_.choice(FONTS)}.ttf", random_.randint(24, 34))
        paper, ink = random_.randint(190, 255), random_.randint(0, 90)
        width = int(font.getlength(text)) + 24
        picture = Image.new("RGB", (width, LINE_HEIGHT), (paper, paper, random_.randint(170, 255)))
        ImageDraw.Draw(picture).text((12, LINE_HEIGHT // 2), text, fill=(ink, ink, ink), font=font, anchor="lm")
        picture = picture.filter(ImageFilter.GaussianBlur(random_.uniform(0, 1.2)))
        values = np.asarray(picture, np.float32) + noise.normal(0, 8, (LINE_HEIGHT, width, 3))
        yield (values.clip(0, 255) / 127.5 - 1).transpose(2, 0, 1)[None].astype(np.float32)


def photos(wheel: Path, names: Sequence[str], pairs: int, seed: int) -> Iterator[np.ndarray]:
    """Pairs of overlapping squares cut out of photographs in scikit-image's wheel, [1, 3, 224, 224], normalized: what a
    search for pictures of the same thing would find."""
    random_ = random.Random(seed)
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            picture = Image.open(io.BytesIO(archive.read(f"skimage/data/{name}"))).convert("RGB")
            for _ in range(pairs):
                shift = min(picture.size) // 16
                side = random_.randint(min(picture.size) // 2, min(picture.size) - shift)
                left, top = (random_.randint(0, length - side - shift) for length in picture.size)
                for corner in ((left, top), (left + shift, top + random_.randint(0, shift))):
                    yield _normalized(picture, corner, side)


def _normalized(picture: Image.Image, corner: tuple[int, int], side: int) -> np.ndarray:
    (left, top), size = corner, (224, 224)
    cut = picture.crop((left, top, left + side, top + side)).resize(size, Image.Resampling.BILINEAR)
    values = (np.asarray(cut, np.float32) / 255 - MEAN) / DEVIATION
    return values.transpose(2, 0, 1)[None].astype(np.float32)
