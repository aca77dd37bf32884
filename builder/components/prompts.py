"""Prompts of a model that is given images, and prompts in a batch."""

from collections.abc import Iterator, Sequence

import numpy as np

from trt_nvfp4.builder.errors import UsageError


def with_features(
    prompts: Sequence[Sequence[int]], images: int, image_token: int, features: int, spelt: str = ""
) -> Iterator[list[int]]:
    """The prompts with `features` tokens for every image, where each image's token, `spelt` in texts, stands once.

    Raises UsageError where the prompts name another number of images than there are.
    """
    count = sum(list(prompt).count(image_token) for prompt in prompts)
    if count not in (images, images * features):
        named = f"{spelt} ({image_token})" if spelt else str(image_token)
        raise UsageError(
            f"the prompts hold the image token {named} {count} times, and {images} images of {features} features were "
            f"given: expected it {images} times, or {images * features} times; where the model's processor puts it is "
            "known only for a prompt with one image, so write it into the prompts"
        )
    once = count == images
    for prompt in prompts:
        yield [t for token in prompt for t in [token] * (features if once and token == image_token else 1)]


def padded(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids, attention_mask), both int64 [batch, longest], padded on the right."""
    longest = max(map(len, texts))
    ids, mask = np.zeros((len(texts), longest), np.int64), np.zeros((len(texts), longest), np.int64)
    for row, seen, text in zip(ids, mask, texts, strict=True):
        row[: len(text)], seen[: len(text)] = text, 1
    return ids, mask
