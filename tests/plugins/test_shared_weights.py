"""The file of weights that stripped engines share: from C++, and read by plugins from GPU memory."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from weights_files import BROKEN, file_of, written

from trt_nvfp4.builder.cuda.runtime import Cuda
from trt_nvfp4.builder.tensorrt.bound_weights import DeviceWeights
from trt_nvfp4.builder.tensorrt.weights_file import METADATA
from trt_nvfp4.plugins.host import PluginHost

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("probe") / "weights_file_probe"
    headers = f"-I{HERE.parents[1] / 'examples' / 'cpp'}"
    subprocess.run([compiler, "-std=c++17", headers, HERE / "weights_file_probe.cpp", "-o", built], check=True)
    return built


def read(probe: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([probe, *map(str, arguments)], capture_output=True, text=True)


def test_cpp_reads_it(probe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        'a "quoted" \\ \u00e9 \U0001f600': rng.integers(-128, 128, (33, 17)).astype(np.int8),
        "b": rng.standard_normal((5,)).astype(np.float32),
    }
    file = written(tmp_path, arrays)
    digest, *lines = read(probe, file.path, file.digest).stdout.splitlines()
    assert digest == file.digest
    sums = {name: int(np.frombuffer(array.tobytes(), np.uint8).sum(dtype=np.int64)) for name, array in arrays.items()}
    expected = [f"b|F32|5|{sums['b']}", *(f"{name}|I8|33|17|{sums[name]}" for name in arrays if name != "b")]
    assert lines == expected  # the widest types first
    other = read(probe, file.path, "0" * 64)
    assert other.returncode == 1
    assert "holds the weights of another model" in other.stderr


def test_cpp_refuses_what_python_does(probe: Path, tmp_path: Path) -> None:
    for index, (header, data) in enumerate(BROKEN):
        done = read(probe, file_of(tmp_path / f"{index}", header, data))
        assert done.returncode == 1, header
        assert "not a file of weights, or a damaged one" in done.stderr
    (tmp_path / "short").write_bytes(b"1234")
    assert "too short" in read(probe, tmp_path / "short").stderr
    assert "cannot be opened" in read(probe, tmp_path / "missing").stderr


def test_cpp_takes_no_entry_for_another(probe: Path, tmp_path: Path) -> None:
    """A list that it does not know passed for the offsets."""
    entry = {"dtype": "I8", "shape": [8], "strides": [0, 8]}
    for offsets in ({}, {"data_offsets": [0, 8]}):
        header = {"__metadata__": {METADATA: "0" * 64}, "a": {**entry, **offsets}}
        done = read(probe, file_of(tmp_path / "w", header))
        assert done.returncode == 1
        assert "a has an entry that this program does not know: strides" in done.stderr


class View:
    """GPU memory at an address, for torch."""

    def __init__(self, address: int, like: torch.Tensor) -> None:
        kinds = {torch.int8: "|i1", torch.float32: "<f4", torch.float16: "<f2"}
        self.__cuda_array_interface__ = {
            "shape": tuple(like.shape),
            "typestr": kinds[like.dtype],
            "data": (address, False),
            "version": 3,
        }


@pytest.mark.gpu
def test_plugins_read_the_file_in_gpu_memory(host: PluginHost, tmp_path: Path) -> None:
    """Two plugins, as of two engines, over one copy of weights from the file: bit for bit as over their own."""
    inputs = op_inputs.gated_mlp(np.random.default_rng(1), 3, 256, 512, 256, torch.float16).inputs
    weights = {str(index): tensor.numpy() for index, tensor in enumerate(inputs) if index and tensor.nbytes >= 1024}
    file = written(tmp_path, weights)
    shared = DeviceWeights(file, Cuda())
    given = [tensor.cuda() for tensor in inputs]
    bound: list[Any] = [
        torch.as_tensor(View(shared.addresses[str(index)], tensor), device="cuda") if str(index) in weights else tensor
        for index, tensor in enumerate(given)
    ]
    assert len(weights) >= 4
    for index in weights:
        assert bound[int(index)].data_ptr() == shared.addresses[index]
    with host.session("NVFP4GatedMLP", given) as own, host.session("NVFP4GatedMLP", given) as second:
        (expected,) = own.run(given)
        outputs = [torch.empty_like(expected) for _ in range(2)]
        for session, y in zip((own, second), outputs, strict=True):
            workspace = torch.empty(max(session.workspace_size, 1), dtype=torch.uint8, device="cuda")
            session.enqueue(bound, [y], workspace)
        torch.cuda.synchronize()
        assert expected.abs().max() > 0
        for y in outputs:
            assert torch.equal(y, expected)
