"""A disk that is too small is told before the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from trt_nvfp4.builder.errors import BUILD_FAILED, BuilderError
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
    ("stop_after", "needed", "what"),
    [
        ("plan", 8_000_000, "the exported model,"),
        ("rewrite", 8_000_000, "the exported and the rewritten model,"),
        (None, 9_375_000, "and the engine,"),
    ],
)
def test_needed(
    stop_after: str | None, needed: int, what: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(
        model=directory,
        target=find_target("ada"),
        output=directory.parent / "o.engine",
        stop_after=stop_after,
    )

    def free(of: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=of))

    free(needed)
    check_disk(request)
    free(needed - 1)
    with pytest.raises(BuilderError, match=what) as raised:
        check_disk(request)
    assert raised.value.exit_code == BUILD_FAILED
