"""Finds the files that a model's external data lies in."""

from __future__ import annotations

import os
from pathlib import Path

import onnx


def follow_links(model: onnx.ModelProto, folder: Path) -> Path:
    """Name in `model`, whose file lies in `folder`, the files that its external data is linked to, as in the Hugging
    Face cache: ONNX and ONNX Runtime read no link that leads elsewhere. Returns the folder that the names start from.

    Raises ValueError: a name leaves `folder`, where a model that comes from anywhere could read any file.
    """
    inside = folder.resolve()
    named = []
    for tensor in onnx.external_data_helper._get_all_tensors(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                file = folder / entry.value
                place = file.parent.resolve() / file.name
                if Path(entry.value).is_absolute() or inside not in place.parents:
                    raise ValueError(
                        f"external data of tensor '{tensor.name}' lies outside the model's folder: {place}; put it "
                        "beside the model (a link of that name will do) and save the model with its name"
                    )
                named.append((entry, place.resolve() if place.exists() else place))
    base = Path(os.path.commonpath([inside, *(file.parent for _, file in named)]))
    for entry, file in named:
        entry.value = str(file.relative_to(base))
    return base
