"""Wheels with compiled libraries: installed, they serve in place of a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trt_nvfp4.builder.cli import wheels
from trt_nvfp4.builder.targets import find_target

USED = """
from trt_nvfp4.plugins.compile.library import build_library
print(build_library("sm_120a").read_text(), build_library("sm_110a", machine="aarch64", groups=["linear"]).read_text())
"""


@pytest.mark.slow
def test_installed_libraries_serve_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(arch: str, machine: str, packaged: bool) -> Path:
        (tmp_path / arch).write_text(f"of {arch}")
        return tmp_path / arch

    monkeypatch.setattr(wheels, "build_library", compiled)
    made = wheels.write_wheels([find_target("rtx-blackwell"), find_target("thor")], tmp_path / "dist")
    names = [wheel.name.partition("-")[0] for wheel in made]
    assert names == ["trt_nvfp4_kernels_sm_120a", "trt_nvfp4_kernels_sm_110a", "trt_nvfp4"]
    assert made[1].name.endswith("-py3-none-linux_aarch64.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={tmp_path / 'site'}", made[2]]
    subprocess.run(pip, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "TRT_NVFP4_NVCC": "/missing"}
    done = subprocess.run(
        [sys.executable, "-c", USED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["of", "sm_120a", "of", "sm_110a"]
