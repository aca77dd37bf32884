"""Pages of mapped weights are given back, and what was written to them is kept."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_nvfp4.builder.pipeline.mapped_pages import bounded_mapped_pages, resident_file_bytes

SIZE = 64 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"w": torch.arange(SIZE // 4, dtype=torch.float32)}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_pages_are_given_back_and_read_again(weights: Path) -> None:
    mapped = np.memmap(weights, np.uint8, mode="r")
    before = resident_file_bytes()
    total = int(mapped.sum(dtype=np.int64))
    assert resident_file_bytes() >= before + SIZE // 2
    with bounded_mapped_pages(limit=-(SIZE // 2)):
        assert eventually(lambda: resident_file_bytes() < before + SIZE // 4)
    assert int(mapped.sum(dtype=np.int64)) == total


def test_what_was_written_to_private_pages_is_kept(weights: Path) -> None:
    tensor = load_file(weights)["w"]
    tensor[: 1 << 20] = 7.0
    with bounded_mapped_pages(limit=-SIZE):
        tensor.sum()
        time.sleep(0.5)
    assert (tensor[: 1 << 20] == 7.0).all()
    assert tensor[-1] == SIZE // 4 - 1
