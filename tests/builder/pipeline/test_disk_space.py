"""A disk that is too small is told before the export."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trt_nvfp4.builder.errors import BuilderError, BuildFailedError
from trt_nvfp4.builder.pipeline import disk_space
from trt_nvfp4.builder.pipeline.disk_space import check_disk
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A weight of 1,000 rows and columns in FP8, 2 MB in 16 bits, and 1,000,000 values in 32."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weight = torch.zeros(1000, 1000).to(torch.float8_e4m3fn)
    tensors = {UP: weight, f"{UP}_scale": torch.ones(()), "model.norm.weight": torch.ones(10**6)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("asked", "needed", "what"),
    [
        ({"stop_after": "plan"}, 6_000_000, "for the exported model, and"),
        ({"stop_after": "rewrite"}, 7_687_500, "for the exported model and the rewritten model, and"),
        ({}, 9_375_000, "for the exported model and the rewritten model and the engine, and"),
        ({"bundle": Path("bundle")}, 7_687_500, "for the exported model and the rewritten model, and"),
        (
            {"bundle": Path("bundle"), "strip": True},
            9_375_000,
            "for the exported model and the rewritten model and the bundle, and",
        ),
    ],
)
@pytest.mark.parametrize("by_reference", [False, True])
def test_needed(
    by_reference: bool, asked: dict[str, Any], needed: int, what: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the exported model where that refers to the directory's files, as that of a large model does."""
    if by_reference:
        monkeypatch.setattr(disk_space, "EXTERNAL_DATA_BYTES", 0)
        needed, what = needed - 6_000_000, what.removeprefix("for the exported model and ")
    request = Request(model=directory, target=find_target("ada"), output=directory.parent / "o.engine", **asked)

    def free(of: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=of))

    free(needed)
    check_disk(request)
    if not needed:
        return
    free(needed - 1)
    with pytest.raises(BuildFailedError, match=what):
        check_disk(request)


@pytest.mark.parametrize("asked", [{}, {"bundle": Path("bundle")}])
def test_file_systems_without_hard_links(
    asked: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that the engine is built from then holds the rewritten weights once more."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    request = Request(model=directory, target=find_target("ada"), output=directory.parent / "o.engine", **asked)
    with pytest.raises(BuilderError, match=r"the rewritten model and a copy of it,? and"):
        check_disk(request)
