"""Types of a bundle's manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

#: The manifest's file in a bundle.
MANIFEST = "manifest.json"
#: The folder of the drafter's bundle in the model's.
DRAFT = "draft"
#: The script that holds the engine against recorded logits, and these.
ACCEPT_SCRIPT, REFERENCE = "accept.py", "reference.npz"


def named_file(folder: Path, name: str) -> Path:
    """The file that a bundle's manifest calls `name`. Raises ValueError for a name that leaves the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"{name!r} lies outside of its folder")
    return folder / name


class PlannedInBundle(TypedDict):
    """A subgraph in a bundle's manifest, as far as it is used."""

    name: str
    decision: str
    engine_nodes: list[str]


class BundleManifest(TypedDict):
    """A bundle's manifest, as far as it is used. `modules`: TensorRT's packages that can build it, and their oldest
    versions; `profiles`: by input, min, opt and max shape."""

    model: str
    planned: list[PlannedInBundle]
    checksums: dict[str, str]
    target: str
    arch: str
    modules: dict[str, str]
    profiles: list[dict[str, list[list[int]]]]
    plugin_library: str | None
    plugin_sources: str | None
