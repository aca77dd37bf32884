"""Sizes that are fixed when a model without caches is exported."""

from dataclasses import dataclass

from trt_nvfp4.builder.errors import UsageError


@dataclass(frozen=True)
class ImageSize:
    """Height and width in pixels."""

    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "ImageSize":
        """`HxW`, or one number for both. Raises UsageError."""
        parts = text.split("x")
        if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) < 1 << 16 for part in parts):
            raise UsageError(f"--set image-size={text!r}: expected HEIGHTxWIDTH in pixels, such as 448x448")
        return cls(int(parts[0]), int(parts[-1]))


@dataclass(frozen=True)
class FixedSizes:
    """`image`: of images; None leaves it to the configuration. `batch`: None leaves it dynamic."""

    image: ImageSize | None = None
    batch: int | None = None


#: As the configuration says.
UNFIXED = FixedSizes()
