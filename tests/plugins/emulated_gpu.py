"""Plugin libraries on GPUs that are not here: fixtures that run them on the PTX emulator.

Objects (see compiled.py) are linked against the emulator's CUDA runtime, for each node those that it needs; the plugin
host drives them unchanged, with tensors on the CPU that are exposed as device memory while enqueue runs.
"""

import subprocess
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from split_host import SplitHost

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import TARGETS, Gpu, Program, find_toolkit
from ptx_emulator.shim.fatbin import digest_of
from trt_nvfp4.plugins.compile.library import ROOT, find_build, kept_ptx
from trt_nvfp4.plugins.host import Session

# Whose PTX a GPU runs where that is not its own: its family's; Thor's objects are for its own machine, and the PTX of
# its W4A4 is B200's (test_machine_code.py).
_PTX_OF = {"b300": "b200", "thor": "b200", "spark": "rtx-blackwell"}
_TARGETS = {**TARGETS, **{gpu: replace(TARGETS[gpu], ptx_arch=TARGETS[of].arch) for gpu, of in _PTX_OF.items()}}
# Waits, peeks and stores that are disturbed: slow warps, and what lands late.
DISORDER = 0.1
_gpus: dict[str, Gpu] = {}
_hosts: dict[str, SplitHost] = {}


def _gpu(target: str) -> Gpu:
    """Once per session, as its hosts: a library that is loaded twice registers its kernels twice."""
    if target not in _gpus:
        _gpus[target] = Gpu(_TARGETS[target])
    return _gpus[target]


def _host(gpu: Gpu) -> SplitHost:
    arch = gpu.target.ptx_arch or gpu.target.arch
    if arch not in _hosts:
        _hosts[arch] = SplitHost(partial(_library, gpu, arch))
    return _hosts[arch]


def _library(gpu: Gpu, arch: str, groups: frozenset[str]) -> Path:
    flags = ["-Xcompiler=-fvisibility=hidden", f"-Xlinker=--version-script={ROOT / 'adapters' / 'exports.map'}"]
    objects = find_build(arch, groups=groups).objects()
    for made in objects.values():
        if made.with_suffix(".ptx.gz").is_file():
            gpu.kept_ptx[digest_of(_image(made))] = partial(kept_ptx, made)
    return Path(Program.compile(list(objects.values()), gpu, flags=flags).library._name)


def _image(made: Path) -> bytes:
    """The fat binary in an object."""
    command = ["objcopy", "--dump-section", ".nv_fatbin=/dev/stdout", made, "/dev/null"]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.fixture(params=["b200", "rtx-blackwell"])
def emulated_gpu(request: pytest.FixtureRequest, seed: int) -> Gpu:
    """Each test draws its own order of events from the run's seed."""
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    gpu = _gpu(request.param)
    gpu.target = _TARGETS[request.param]  # tests resize it
    gpu.device.reseed(seed ^ zlib.crc32(request.node.name.encode()))
    gpu.device.disorder = DISORDER
    gpu.use()
    return gpu


@pytest.fixture
def emulated(emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> SplitHost:
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
    return _host(gpu)
