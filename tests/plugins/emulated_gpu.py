"""The whole plugin library on GPUs that are not here: fixtures that run it on the PTX emulator.

The library's objects (see compiled.py) are linked against the emulator's CUDA runtime; the plugin host drives it
unchanged, with tensors on the CPU that are exposed as device memory while enqueue runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled import compiled

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import TARGETS, Gpu, Program, find_toolkit
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.host import PluginHost, Session

# Whose PTX a GPU runs where that is not its own: its family's; Thor's objects are for its own machine, and the PTX of
# its W4A4 is B200's (test_machine_code.py).
_PTX_OF = {"b300": "b200", "thor": "b200", "spark": "rtx-blackwell"}
_TARGETS = {**TARGETS, **{gpu: replace(TARGETS[gpu], ptx_arch=TARGETS[of].arch) for gpu, of in _PTX_OF.items()}}
# Waits, peeks and stores that are disturbed: slow warps, and what lands late.
DISORDER = 0.1
_emulated: dict[str, tuple[Gpu, Program]] = {}


def _library(target: str) -> tuple[Gpu, Program]:
    """Once per session: a library that is loaded twice registers its kernels twice."""
    if target not in _emulated:
        gpu = Gpu(_TARGETS[target])
        flags = ["-Xcompiler=-fvisibility=hidden", f"-Xlinker=--version-script={ROOT / 'adapters' / 'exports.map'}"]
        objects = compiled(gpu.target.ptx_arch or gpu.target.arch).objects
        _emulated[target] = gpu, Program.compile(objects, gpu, flags=flags)
    return _emulated[target]


@pytest.fixture(params=["b200", "rtx-blackwell"])
def emulated_gpu(request: pytest.FixtureRequest, seed: int) -> Gpu:
    """Each test draws its own order of events from the run's seed."""
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    gpu, _ = _library(request.param)
    gpu.device.reseed(seed ^ zlib.crc32(request.node.name.encode()))
    gpu.device.disorder = DISORDER
    gpu.use()
    return gpu


@pytest.fixture
def emulated(emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    program = next(program for gpu, program in _emulated.values() if gpu is emulated_gpu)
    gpu = emulated_gpu
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
