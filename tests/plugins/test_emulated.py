"""The whole plugin library, from enqueue down to its PTX, on GPUs that are not here: tests of test_kernels.py on the
PTX emulator, at sizes that it can bear.

The library is compiled from the sources that build_library takes, against the emulator's CUDA runtime; the plugin host
drives it unchanged, with tensors on the CPU that are exposed as device memory while enqueue runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_kernels
import torch

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import Gpu, Program, find_toolkit
from trt_nvfp4.plugins import library
from trt_nvfp4.plugins.host import PluginHost, Session

pytestmark = pytest.mark.slow

TARGETS = ["thor", "b200", "rtx-blackwell"]
_emulated: dict[str, tuple[Gpu, Program]] = {}


def _library(target: str) -> tuple[Gpu, Program]:
    """Once per session: a library that is loaded twice registers its kernels twice."""
    if target not in _emulated:
        root = library.ROOT
        gpu = Gpu(target)
        sources, arch_flags = library.architecture(gpu.target.arch)
        headers = sorted(path for pattern in library._HASHED for path in root.glob(pattern))
        flags = ["-Xcompiler=-fvisibility=hidden", f"-Xlinker=--version-script={root / 'adapters' / 'exports.map'}"]
        _emulated[target] = gpu, Program.compile(sources, gpu, flags=[*flags, *arch_flags], depends=headers)
    return _emulated[target]


@pytest.fixture(params=TARGETS)
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    gpu, program = _library(request.param)
    gpu.use()
    enqueue: Callable[..., None] = Session.enqueue

    def exposed(
        session: Session, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], workspace: torch.Tensor
    ) -> None:
        buffers = [(x.data_ptr(), x.numel() * x.element_size()) for x in (*inputs, *outputs, workspace) if x.numel()]
        with gpu.exposed(*buffers):
            try:
                enqueue(session, inputs, outputs, workspace)
            finally:
                gpu.raise_pending()

    monkeypatch.setattr(Session, "enqueue", exposed)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return PluginHost(Path(program.library._name))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 16), (3, 77, 48)])
@pytest.mark.parametrize("w4a4", [0, 1])
def test_linear(emulated: PluginHost, seed: int, m: int, n: int, k: int, w4a4: int) -> None:
    test_kernels.test_linear(emulated, seed, m, n, k, torch.float16, w4a4, 3)


def test_gated_mlp(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_gated_mlp(emulated, seed, 3, 32, 48, 17, torch.bfloat16, 1, 7)


def test_persistent_layers(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_one_persistent_layer(emulated, seed, torch.float16, 0, 1, 1, 1)


@pytest.mark.parametrize("add_residual", [0, 1])
def test_quantize_bits(emulated: PluginHost, seed: int, add_residual: int) -> None:
    test_kernels.test_quantize_bits(emulated, seed, 7, 48, torch.bfloat16, add_residual)


def test_nan_reaches_the_output(emulated: PluginHost, seed: int) -> None:
    test_kernels.test_nan_reaches_the_output(emulated, seed, 1)
