"""Whether a JSON object that anybody may have made is what a type says: the validator of reports and manifests."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict


def misfits(found: Mapping[str, Any], types: type | Mapping[str, Any]) -> list[str]:
    """In words, which values of a JSON object are not of their types: plain ones, unions, lists, dicts by text, and
    objects of their own. `types`: by key, or a dataclass or TypedDict."""
    if isinstance(types, type):
        types = get_type_hints(types)
    wrong = []
    for key, kind in types.items():
        value, (entry, *_) = found.get(key), get_args(kind) or (None,)
        if is_typeddict(entry) and isinstance(value, list) and all(isinstance(each, dict) for each in value):
            wrong += [f"{key}'s {misfit}" for each in value for misfit in misfits(each, entry)]
        elif not _fits(value, kind):
            wrong.append(f"{key} is {reprlib.repr(value)}, expected {_shown(kind)}")
    return wrong


def _shown(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " | ".join("None" if each is type(None) else _shown(each) for each in arguments)
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(map(_shown, arguments))}]"
    if is_typeddict(kind):
        return "object"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(entry, arguments[0]) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(entry, arguments[1]) for entry in value.values())
    if is_typeddict(kind):
        return isinstance(value, dict) and not misfits(value, kind)
    return kind is Any or isinstance(value, (int, float) if kind is float else kind)
