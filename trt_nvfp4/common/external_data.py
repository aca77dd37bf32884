"""Finds the files that a model's external data lies in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx.external_data_helper import _get_all_tensors


def locations(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.StringStringEntryProto]]:
    """The tensors of `model` that lie in other files: the name of each, and the entry whose value names its file."""
    for tensor in _get_all_tensors(model):
        yield from ((tensor.name, entry) for entry in tensor.external_data if entry.key == "location")


def follow_links(model: onnx.ModelProto, folder: Path) -> Path:
    """Name in `model`, whose file lies in `folder`, the files that its external data is linked to, as in the Hugging
    Face cache: ONNX and ONNX Runtime read no link that leads elsewhere. Returns the folder that the names start from.

    Raises ValueError: a name leaves `folder`, where a model that comes from anywhere could read any file.
    """
    inside = folder.resolve()
    named = []
    for tensor, entry in locations(model):
        file = folder / entry.value
        place = file.parent.resolve() / file.name
        if Path(entry.value).is_absolute() or inside not in place.parents:
            raise ValueError(
                f"external data of tensor '{tensor}' lies outside the model's folder: {place}; put it beside the model "
                "(a link of that name will do) and save the model with its name"
            )
        named.append((entry, place.resolve() if place.exists() else place))
    base = Path(os.path.commonpath([inside, *(file.parent for _, file in named)]))
    for entry, file in named:
        entry.value = str(file.relative_to(base))
    return base
