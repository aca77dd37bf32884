"""Reads a bundle's manifest, and checks the bundle's files by it."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trt_nvfp4.builder.errors import ModelFaultError, UsageError
from trt_nvfp4.builder.records.bundle import MANIFEST, BundleManifest
from trt_nvfp4.builder.records.json_types import misfits
from trt_nvfp4.builder.tensorrt import build_script
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.json_text import read_json


def read_manifest(folder: Path) -> BundleManifest:
    """The manifest of a bundle. Raises UsageError for another folder, ModelFaultError for a broken bundle."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise UsageError(f"{folder}: not a bundle (it has no {MANIFEST})")
    try:
        data = read_json(manifest)
    except ValueError as error:
        raise ModelFaultError(f"{manifest}: not JSON ({error}); copy the bundle again") from error
    needed = BundleManifest.__annotations__.keys()
    if missing := sorted(needed - data.keys() if isinstance(data, dict) else needed):
        raise UsageError(f"{folder}: not a bundle (its {MANIFEST} has no '{missing[0]}')")
    if wrong := misfits(data, BundleManifest):
        raise ModelFaultError(f"{manifest}: {wrong[0]}; copy the bundle again")
    return cast(BundleManifest, data)


def changed_files(folder: Path, checksums: Mapping[str, str]) -> list[str]:
    """The files of a bundle that are missing or not as they were when it was written."""
    try:
        files = {name: inside(folder, name) for name in checksums}
    except ValueError as error:
        raise ModelFaultError(f"{folder / MANIFEST}: {error}; copy the bundle again") from error
    return [
        name
        for name, digest in checksums.items()
        if not files[name].is_file() or build_script.sha256(files[name]) != digest
    ]
