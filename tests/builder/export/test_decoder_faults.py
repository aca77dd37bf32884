"""What modeling code raises over caches of fixed capacity is the model's fault, and what the machine lacks is not."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export import decoders
from trt_nvfp4.builder.export.decoder_contract import CacheOptions


def attempt(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    monkeypatch.setattr(decoders, "Step", MagicMock())
    monkeypatch.setattr(decoders, "_probed", Mock(side_effect=raised))
    model = SimpleNamespace(config=SimpleNamespace(model_type="some"))
    decoders.decoder_step(Path("m"), model, 16, CacheOptions(16))


@pytest.mark.parametrize(
    "raised",
    [OSError(errno.ENOSPC, "No space left on device"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=["disk", "memory", "CUDA"],
)
def test_what_the_machine_lacks_stays(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    with pytest.raises(type(raised)) as failure:
        attempt(monkeypatch, raised)
    assert failure.value is raised


def test_the_message_names_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuilderError, match=r"fixed capacity \(TypeError: no argument 'past'\); add") as failure:
        attempt(monkeypatch, TypeError("no argument 'past'\nand where"))
    assert failure.value.exit_code == MODEL_AT_FAULT
