"""Each check says what is missing on a machine, and the command that mends it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trt_nvfp4.builder.cuda.driver import Driver, Gpu
from trt_nvfp4.builder.doctor import machine
from trt_nvfp4.builder.doctor.check import Check
from trt_nvfp4.plugins.compile.toolchain import ToolchainError

BLACKWELL = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 * 10**9)


def by_name() -> dict[str, Check]:
    return {check.name: check for check in machine.checks()}


def raising(error: Exception) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("driver", "state", "found", "fix"),
    [
        (None, "note", "no NVIDIA driver", "install its driver"),
        (Driver((13, 0), (), 100), "note", "CUDA error 100", "nvidia-smi"),
        (Driver((12, 8), (BLACKWELL,)), "missing", "RTX 5090 (sm_120a, 32 GB); the driver serves CUDA 12.8", "580"),
        (Driver((13, 1), (BLACKWELL, BLACKWELL)), "ok", "CUDA 13.1", ""),
    ],
)
def test_gpu(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, state: str, found: str, fix: str) -> None:
    monkeypatch.setattr(machine, "local_driver", lambda: driver)
    checks = by_name()
    assert checks["GPU"].state == state
    assert found in checks["GPU"].found
    assert fix in checks["GPU"].fix
    here = driver is not None and bool(driver.gpus)
    assert checks["target rtx-blackwell"].found.startswith("builds and runs" if here else "builds; runs on that GPU")


def test_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: found.get(name))
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: found[name])
    found["trt-nvfp4"] = "0"
    none = next(machine._tensorrt())
    assert (none.state, none.fix) == ("missing", "pip install tensorrt-rtx, or pip install tensorrt")
    found |= {"tensorrt_rtx": "1.6.0", "tensorrt": "11.4.1"}
    old, new = machine._tensorrt()
    assert (old.state, old.fix) == ("missing", "pip install --upgrade 'tensorrt-rtx>=1.7'")
    assert (new.state, new.found) == ("ok", "tensorrt 11.4.1")


def test_without_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "find_nvcc", raising(ToolchainError("no CUDA compiler found. Install one")))
    monkeypatch.setattr(machine, "find_cutlass", raising(ToolchainError("CUTLASS is not installed")))
    monkeypatch.setattr(machine, "find_host_compiler", raising(ToolchainError("no C++ compiler for aarch64 found")))
    checks = by_name()
    assert [checks[name].state for name in ("nvcc", "CUTLASS", "compiler for Arm")] == ["missing", "missing", "note"]
    assert "cuda-toolkit" in checks["nvcc"].fix
    monkeypatch.setattr(machine, "packaged_libraries", lambda: [tmp_path / "libtrt_nvfp4-sm_120a.so"])
    checks = by_name()
    assert checks["packaged kernels"].found == "libtrt_nvfp4-sm_120a.so"
    assert [checks[name].state for name in ("nvcc", "CUTLASS")] == ["note", "note"]


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "deep" / "cache"))
    assert {check.state for check in machine._folders()} == {"ok"}
    with monkeypatch.context() as patch:
        patch.setattr(machine, "mounted_noexec", lambda folder: True)
        assert ["noexec" in check.found for check in machine._folders()] == [True, True]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * 10**8))
        full = list(machine._folders())
        assert [check.state for check in full] == ["missing", "missing"]
        assert "0.3 GB free; 5 GB are needed" in full[0].found
        assert "TRT_NVFP4_CACHE" in full[1].fix
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "file"))
    assert "not writable" in list(machine._folders())[1].found


def test_a_folder_that_this_user_may_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    stat = os.stat

    def refusing(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(path).parent == tmp_path / "locked":
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "access", lambda folder, mode: Path(folder) != tmp_path / "locked")
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "locked" / "cache"))
    assert "not writable" in list(machine._folders())[1].found


def test_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OPTIONAL", {"pictures": (("no_such_package.part", "json"), "pip install it")})
    assert list(machine._optional()) == [Check("pictures", "note", "no_such_package.part missing", "pip install it")]
