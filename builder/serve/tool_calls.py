"""Calls of functions in a model's text, as the families write them."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trt_nvfp4.common.json_text import parse_json

# Hermes, Qwen and others write <tool_call>{...}</tool_call>; Mistral [{...}] and Llama 3 {...} with `parameters`, whose
# marks are special tokens, which the text is without.
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """`arguments` is JSON, as a model wrote it."""

    name: str
    arguments: str


def calls_in(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """The text before the first call, and the calls of the functions `names`; all of the text where there is no
    call."""
    tagged = _TAGGED.search(text)
    before = "" if tagged is None else text[: tagged.start()].strip()
    written = [text] if tagged is None else _TAGGED.findall(text)
    found = [call for each in written for call in _calls(each, names)]
    return (before, found) if found else (text, [])


def _calls(written: str, names: Collection[str]) -> Iterator[Call]:
    try:
        value = parse_json(written.strip())
    except ValueError:
        return
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, Mapping) and call.get("name") in names:
            yield Call(call["name"], _arguments(call))


def _arguments(call: Mapping[str, Any]) -> str:
    found = call.get("arguments", call.get("parameters", {}))
    return found if isinstance(found, str) else json.dumps(found)
