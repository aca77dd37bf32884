"""The settings of a manifest: what a task needs to know beside its parts, and what is wrong with those that a file has.

Imports Python's library alone: the device reads manifests, too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

_shown = reprlib.repr
#: What the encoder of a model that generates may read.
SOURCES = ("text", "sound", "images")
#: Tokens that see each other in both directions: all of a prompt, those of one image, or none.
GROUPINGS = ("prompt", "images", None)


def problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Of settings that anybody may have written, where the pipeline reads them."""
    if "embeds" in settings:
        yield from _embeds(settings["embeds"])
    if "image" in settings:
        yield from _image(settings["image"])
        if (groups := settings.get("groups", "none given")) not in GROUPINGS:
            yield f"its groups are {_shown(groups)}, expected 'prompt', 'images' or null"
        if not _is_count(merge := settings.get("merge"), 1):
            yield f"its merge is {_shown(merge)}, expected 1 or more"
    if "source" in settings:
        if (source := settings["source"]) not in SOURCES:
            yield f"its source is {_shown(source)}, expected {', '.join(SOURCES)}"
        tokens = settings.get("start_tokens")
        if not isinstance(tokens, (list, tuple)) or not tokens or not all(_is_count(token) for token in tokens):
            yield f"its start_tokens are {_shown(tokens)}, expected tokens' numbers"


def _embeds(embeds: Any) -> Iterator[str]:
    """Of what a pair of encoders needs to know of its texts."""
    if not isinstance(embeds, dict) or not {"longest", "padding"} <= embeds.keys():
        yield "its embeds lack longest or padding"
        return
    longest, padding = embeds["longest"], embeds["padding"]
    if not _is_count(longest, 1):
        yield f"its embeds' longest is {_shown(longest)}, expected 1 or more"
    if padding is not None and not _is_count(padding):
        yield f"its embeds' padding is {_shown(padding)}, expected a token's number or null"


def _image(image: Any) -> Iterator[str]:
    """Of what a language model needs to know of the images that it is given."""
    known = ("token_id", "tokens", "grid", "alone", "prompt")
    missing = known if not isinstance(image, dict) else [key for key in known if key not in image]
    if missing:
        yield f"its image lacks {', '.join(missing)}"
        return
    if not _is_count(image["token_id"]):
        yield f"its image's token_id is {_shown(image['token_id'])}, expected a token's number"
    if not _is_count(image["tokens"], 1):
        yield f"its image's tokens are {_shown(image['tokens'])}, expected 1 or more"
    if type(image["alone"]) is not bool:
        yield f"its image's alone is {_shown(image['alone'])}, expected true or false"
    grid, prompt = image["grid"], image["prompt"]
    if grid is not None and not (_is_of(grid, 3) and all(_is_count(size, 1) for size in grid)):
        yield f"its image's grid is {_shown(grid)}, expected three numbers of patches or null"
    if prompt is not None and not (_is_of(prompt, 2) and all(isinstance(text, str) for text in prompt)):
        yield f"its image's prompt is {_shown(prompt)}, expected the texts before and behind a prompt, or null"


def _is_count(number: Any, least: int = 0) -> bool:
    return type(number) is int and number >= least


def _is_of(values: Any, length: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == length
