"""Whether a JSON object that anybody may have made is what a type says: the validator of reports and manifests."""

import reprlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict


def misfits(found: Mapping[str, Any], types: type | Mapping[str, Any]) -> list[str]:
    """Messages about the values of a JSON object that are not of their types: plain ones, unions, lists, dicts by text,
    and nested objects. `types`: by key, or a dataclass or TypedDict, some of whose keys may be missing."""
    wrong = []
    optional = getattr(types, "__optional_keys__", frozenset[str]())
    if isinstance(types, type):
        types = get_type_hints(types)
    for key, kind in types.items():
        if key in found or key not in optional:
            wrong += _misfits(key, found.get(key), kind)
    return wrong


def _misfits(key: str, value: Any, kind: Any) -> list[str]:
    """Misfits of one value; of an object, or of objects in a list, those of their keys."""
    origin, arguments = get_origin(kind), get_args(kind)
    objects = [each for each in (kind, *(arguments if origin is UnionType else ())) if is_typeddict(each)]
    if objects and isinstance(value, dict):
        return [f"{key}'s {misfit}" for misfit in misfits(value, objects[0])]
    if origin is list and is_typeddict(arguments[0]) and isinstance(value, list):
        return [misfit for each in value for misfit in _misfits(key, each, arguments[0])]
    return [] if _fits(value, kind) else [f"{key} is {reprlib.repr(value)}, expected {_shown(kind)}"]


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
    if isinstance(value, bool):  # which Python has for an int
        return kind in (bool, Any)
    return kind is Any or isinstance(value, (int, float) if kind is float else kind)
