"""The settings of a manifest, which a task needs beside its parts, and the check of those that a file has.

Imports only Python's library: the device reads manifests, too.
"""

from __future__ import annotations

import keyword
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_shown = reprlib.repr
#: Methods of a pipeline's modules that become engines, and the types of what they return.
METHODS = ("forward", "decode")
TYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
#: What the encoder of a model that generates may read.
SOURCES = ("text", "sound", "images")
#: Tokens that see each other in both directions: all of a prompt, those of one image, or none.
GROUPINGS = ("prompt", "images", None)
# Positions of a video in a second, more than any model has.
_LARGEST_RATE = 1 << 16


def problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Problems of settings, which anybody may have written, as far as the pipeline reads them."""
    if "embeds" in settings:
        yield from _embeds(settings["embeds"])
    if "image" in settings:
        yield from _image(settings["image"])
        if (groups := settings.get("groups", "none given")) not in GROUPINGS:
            yield f"its groups are {_shown(groups)}, expected 'prompt', 'images' or null"
        if not _is_count(merge := settings.get("merge"), 1):
            yield f"its merge is {_shown(merge)}, expected 1 or more"
        yield from _video(settings.get("video"))
        if type(hears := settings.get("hears", False)) is not bool:
            yield f"its hears is {_shown(hears)}, expected true or false"
    if "source" in settings:
        if (source := settings["source"]) not in SOURCES:
            yield f"its source is {_shown(source)}, expected {', '.join(SOURCES)}"
        tokens = settings.get("start_tokens")
        if not isinstance(tokens, (list, tuple)) or not tokens or not all(_is_count(token) for token in tokens):
            yield f"its start_tokens are {_shown(tokens)}, expected tokens' numbers"


def call_problems(calls: Any, parts: Mapping[str, Mapping[str, Sequence[int | str]]]) -> Iterator[str]:
    """Problems of how a pipeline calls its `parts`, whose inputs have these shapes."""
    if not isinstance(calls, dict) or sorted(calls) != sorted(parts):
        yield f"its calls are {_shown(calls)}, expected those of {', '.join(parts)}"
        return
    for part, call in calls.items():
        kinds = {"constants": dict, "types": dict, "shapes": dict}
        if not isinstance(call, dict) or not all(isinstance(call.get(key), kind) for key, kind in kinds.items()):
            yield f"the call of {part} is {_shown(call)}, expected its method, constants, result, types and shapes"
        elif call.get("method") not in METHODS:
            yield f"the method of {part} is {_shown(call.get('method'))}, expected {' or '.join(METHODS)}"
        elif type(call.get("is_denoiser")) is not bool:
            yield f"is_denoiser of {part} is {_shown(call.get('is_denoiser'))}, expected true or false"
        elif not all(found in TYPES for found in call["types"].values()):
            yield f"the types of {part} are {_shown(call['types'])}, expected some of {', '.join(TYPES)}"
        elif not _is_layout(call.get("result"), call["types"]):
            yield f"the result of {part} is {_shown(call.get('result'))}, expected some of {', '.join(call['types'])}"
        else:
            yield from _shape_problems(part, call["shapes"], parts[part])


def _is_layout(result: Any, names: Collection[str]) -> bool:
    """Whether nested lists and fields of a result hold tensors of these names, or nothing."""
    pending = [result]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if not all(name.isidentifier() and not keyword.iskeyword(name) for name in value):
                return False
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif value is not None and value not in list(names):
            return False
    return True


def _shape_problems(part: str, called: Any, shapes: Mapping[str, Sequence[int | str]]) -> Iterator[str]:
    """Problems of the smallest and largest shapes of a part's calls."""
    for name, shape in shapes.items():
        ends = called.get(name)
        fits = isinstance(ends, list) and len(ends) == 2 and all(_is_of(end, len(shape)) for end in ends)
        if not fits or not all(_is_count(size) for end in ends for size in end):
            yield f"the shapes of {part}'s input {name} are {_shown(ends)}, expected the smallest and the largest"
        elif fixed := [
            size for end in ends for size, dim in zip(end, shape, strict=True) if dim not in (size, str(dim))
        ]:
            yield (
                f"{part} takes {name} of {list(shape)}, whose size torch.export fixes, and the pipeline calls it with "
                f"{fixed[0]}, too; build it for one --set image-size, without --max-batch"
            )


def _embeds(embeds: Any) -> Iterator[str]:
    """Problems of the settings about texts of a pair of encoders."""
    if not isinstance(embeds, dict) or not {"longest", "padding"} <= embeds.keys():
        yield "its embeds lack longest or padding"
        return
    longest, padding = embeds["longest"], embeds["padding"]
    if not _is_count(longest, 1):
        yield f"its embeds' longest is {_shown(longest)}, expected 1 or more"
    if padding is not None and not _is_count(padding):
        yield f"its embeds' padding is {_shown(padding)}, expected a token's number or null"


def _image(image: Any) -> Iterator[str]:
    """Problems of the settings about images of a language model."""
    known = ("token_id", "tokens", "grid", "alone", "prompt")
    missing = known if not isinstance(image, dict) else [key for key in known if key not in image]
    if missing:
        yield f"its image lacks {', '.join(missing)}"
        return
    if not _is_count(image["token_id"]):
        yield f"its image's token_id is {_shown(image['token_id'])}, expected a token's number"
    if not _is_count(image["tokens"], 1):
        yield f"its image's tokens are {_shown(image['tokens'])}, expected 1 or more"
    if type(image[key := "alone"]) is not bool:
        yield f"its image's {key} is {_shown(image[key])}, expected true or false"
    grid, prompt = image["grid"], image["prompt"]
    if grid is not None and not (_is_of(grid, 3) and all(_is_count(size, 1) for size in grid)):
        yield f"its image's grid is {_shown(grid)}, expected three numbers of patches or null"
    if prompt is not None and not (_is_of(prompt, 2) and all(isinstance(text, str) for text in prompt)):
        yield f"its image's prompt is {_shown(prompt)}, expected the texts before and behind a prompt, or null"


def _video(video: Any) -> Iterator[str]:
    """Problems of the settings about videos of a language model."""
    if video is None:
        return
    if not isinstance(video, dict) or not {"token_id", "frames", "per_second"} <= video.keys():
        yield "its video lacks token_id, frames or per_second"
        return
    if not _is_count(video["token_id"]):
        yield f"its video's token_id is {_shown(video['token_id'])}, expected a token's number"
    if not _is_count(video["frames"], 1):
        yield f"its video's frames are {_shown(video['frames'])}, expected 1 or more"
    if (rate := video["per_second"]) is not None and not (type(rate) in (int, float) and 0 < rate < _LARGEST_RATE):
        yield f"its video's per_second is {_shown(rate)}, expected positions in a second, or null"


def _is_count(number: Any, least: int = 0) -> bool:
    return type(number) is int and number >= least


def _is_of(values: Any, length: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == length
