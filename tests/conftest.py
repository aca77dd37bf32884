"""Shared fixtures: a fresh seed per run, and the skipping of GPU tests where there is no GPU."""

import gc
import json
import os
import secrets
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import CellType, FunctionType
from typing import Any

import numpy as np
import pytest

# In the environment, so that all processes of a run (pytest-xdist) draw from the seed that its header prints.
SEED = int(os.environ.setdefault("TRT_NVFP4_TEST_SEED", str(secrets.randbits(31))))


def pytest_report_header() -> str:
    return f"random inputs: TRT_NVFP4_TEST_SEED={SEED} repeats this run"


@pytest.fixture
def seed() -> int:
    """The run's seed: fresh on every run, printed in the header, set by TRT_NVFP4_TEST_SEED."""
    return SEED


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session", autouse=True)
def onnx_in_this_process() -> Iterator[None]:
    """ONNX's passes run in the tests' own process: a fork per graph costs 15 to 25 ms once torch is loaded. Tests that
    use `onnx_in_processes` have them where users have them."""
    from trt_nvfp4.common import onnx_process
    from trt_nvfp4.common.limited import LimitError

    def here(function: Callable[[], Any], seconds: float, memory: int) -> Any:
        try:
            return json.loads(json.dumps(_on_copies(function)()))
        except Exception as error:
            raise LimitError(str(error)) from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_process, "limited", here)
        yield


def _on_copies(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function` with copies of the models that it holds: what a fork changes in them, its parent does not see."""
    import onnx

    if not isinstance(function, FunctionType):
        return function
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    held = tuple(CellType(deepcopy(each) if isinstance(each, onnx.ModelProto) else each) for each in cells)
    return FunctionType(function.__code__, function.__globals__, closure=held)


@pytest.fixture
def onnx_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's passes run as users have them, in a fork each, unlike in other tests."""
    from trt_nvfp4.common import onnx_process
    from trt_nvfp4.common.limited import limited

    monkeypatch.setattr(onnx_process, "limited", limited)


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what has been imported, which stays, and comes less often: in the emulator's
    tests it took a fifth of the time."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _mark_further_variants(items)
    yield  # -m chooses
    _deselect_nightly(config, items)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"))


def _mark_further_variants(items: list[pytest.Item]) -> None:
    """By default a slow test runs its first variant for each emulated GPU. All other variants are nightly, but not
    those that need a GPU, which are quick there."""
    begun: set[tuple[str, object]] = set()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "slow" in marks and not marks & {"nightly", "gpu"}:
            assert isinstance(item, pytest.Function)
            gpu = item.callspec.params.get("emulated_gpu") if hasattr(item, "callspec") else None
            variant = item.nodeid.partition("[")[0], gpu
            if variant in begun:
                item.add_marker(pytest.mark.nightly)
            begun.add(variant)


def _deselect_nightly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `-m` with "nightly", or a test named by its node, asks for."""
    if "nightly" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
