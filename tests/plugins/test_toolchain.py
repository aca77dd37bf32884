"""Which compilers, headers and CUTLASS the plugin library is built with, and what is said where one is missing."""

import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trt_nvfp4.plugins.compile import library as plugin_library
from trt_nvfp4.plugins.compile.library import find_build
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_cutlass, find_nvcc

needs_compiler = pytest.mark.usefixtures("library")


@needs_compiler
def test_another_host_compiler_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose C++ runtime is not here may have made a library that does not load."""
    other = tmp_path / "other-g++"
    other.write_text("#!/bin/sh\necho 'other-g++ 99.1'\n")
    other.chmod(0o755)
    before = find_build("sm_80").name
    monkeypatch.setenv("CXX", str(other))
    assert find_build("sm_80").name != before


def fake_nvcc(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release, V{version}'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRT_NVFP4_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nvcc" else f"/usr/bin/{name}")
    with pytest.raises(ToolchainError, match=r"no CUDA compiler found\. .*pip install 'cuda-toolkit\["):
        find_nvcc()


def fake_toolkit(root: Path, version: str, cudart: int) -> Path:
    """Its nvcc, with what find_nvcc looks for."""
    nvcc = fake_nvcc(root / "bin", version)
    nvcc.write_text(f"{nvcc.read_text()}echo '#$ TOP={root}' >&2\n")
    for folder, files in (("lib", ["libcudart_static.a"]), ("include", ["cuda_runtime.h"])):
        (root / folder).mkdir()
        for file in files:
            (root / folder / file).touch()
    (root / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {cudart}\n")
    return nvcc


def test_a_compiler_has_an_input_where_the_callers_is_closed() -> None:
    """nvcc fails without one."""
    compiler = "import os, sys; sys.stdout.write(repr(os.read(0, 1)))"
    caller = f"""
import sys
from trt_nvfp4.plugins.compile.compiler import Compilers
print(Compilers().run([sys.executable, "-c", {compiler!r}]))
"""
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, caller], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "b''"), done.stderr


@pytest.mark.parametrize(
    ("version", "cudart", "named"),
    [
        ("13.5.37", 13000, r"nvcc is CUDA 13\.5 and the headers in .* are CUDA 13\.0"),
        ("13.0.88", 13050, r"nvcc is CUDA 13\.0 and the headers in .* are CUDA 13\.5"),
        ("13.0.88", 13000, None),
        ("13.10.1", 13100, None),
    ],
)
def test_nvcc_and_its_headers_are_of_one_release(
    version: str, cudart: int, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's packages need not be; CCCL then says so for every source."""
    nvcc = fake_toolkit(tmp_path / "cu13", version, cudart)
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(nvcc))
    if named is None:
        assert find_nvcc().nvcc == nvcc
    else:
        with pytest.raises(ToolchainError, match=rf"^TRT_NVFP4_NVCC=.*{named}.*: pip install 'cuda-toolkit\["):
            find_nvcc()


def test_a_compiler_that_is_no_use_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_toolkit(tmp_path / "cu13", "13.5.37", 13000)
    monkeypatch.delenv("TRT_NVFP4_NVCC", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")
    with pytest.raises(ToolchainError, match=r"no CUDA compiler found that works\. (.|\n)*\n  tried PATH .*CUDA 13\.5"):
        find_nvcc()


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_folder_of_temporary_files_must_be_writable(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc has no other. Python has, and would not notice."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    named = tmp_path / folder
    with pytest.raises(ToolchainError, match=rf"temporary files to TMPDIR, {named}: .*set TMPDIR to a writable"):
        find_nvcc()


@pytest.mark.parametrize(
    ("machine", "message"),
    [(None, r"no C\+\+ compiler .*install g\+\+"), ("riscv64", "riscv64-linux-gnu-g.*build on the device itself")],
)
def test_no_host_compiler(machine: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine needs its cross compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ToolchainError, match=message):
        find_nvcc(machine)


@pytest.mark.parametrize("named", ["ccache g++", "g++ -m64", "/nonexistent/g++"])
def test_named_host_compiler_must_be_a_program(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(ToolchainError, match=rf"CXX={re.escape(named)} is not a program.*without launcher or flags"):
        find_nvcc()


@pytest.fixture
def old_headers(tmp_path: Path) -> Path:
    folder = tmp_path / "tensorrt-8"
    folder.mkdir()
    (folder / "NvInferRuntime.h").write_text("namespace nvinfer1 { class IPluginV2DynamicExt; }\n")
    return folder


@needs_compiler
def test_named_headers_must_declare_the_interface(old_headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORRT_INCLUDE_DIR", str(old_headers))
    with pytest.raises(ToolchainError, match=r"TENSORRT_INCLUDE_DIR=.*tensorrt-8 .*before 10.*or unset it"):
        find_build("sm_80")


@needs_compiler
def test_old_headers_of_the_system_are_left_alone(old_headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR", raising=False)
    headers = "-DTRT_NVFP4_TENSORRT_HEADERS"
    monkeypatch.setattr(plugin_library, "_SYSTEM_HEADERS", (old_headers,))
    assert headers not in find_build("sm_80").flags
    (old_headers / "NvInferRuntime.h").write_text("namespace nvinfer1 { class IPluginV3OneBuild; }\n")
    assert headers in find_build("sm_80").flags


@needs_compiler
def test_headers_of_the_system_are_not_another_machine_s(old_headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose folders a compiler for another machine does not search all."""
    monkeypatch.delenv("TENSORRT_INCLUDE_DIR", raising=False)
    (old_headers / "NvInferRuntime.h").write_text("namespace nvinfer1 { class IPluginV3OneBuild; }\n")
    monkeypatch.setattr(plugin_library, "_SYSTEM_HEADERS", (old_headers,))
    toolchain = find_nvcc()
    monkeypatch.setattr(plugin_library, "find_nvcc", lambda machine: replace(toolchain, machine=machine))
    flags = {machine: find_build("sm_80", machine=machine).flags for machine in (platform.machine(), "riscv64")}
    assert [("-DTRT_NVFP4_TENSORRT_HEADERS" in each) for each in flags.values()] == [True, False]


@needs_compiler
def test_a_moved_cutlass_makes_no_other_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include, version = find_cutlass()
    (tmp_path / "moved").symlink_to(include)
    name = find_build("sm_120a").name
    monkeypatch.setattr(plugin_library, "find_cutlass", lambda: (tmp_path / "moved", version))
    moved = find_build("sm_120a")
    assert f"-isystem={tmp_path / 'moved'}" in moved.flags
    assert moved.name == name


def test_another_cutlass_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    names = set()
    for minor, patch in ((2, 0), (2, 1), (3, 1)):
        lines = (("MAJOR", 4), ("MINOR", minor), ("PATCH", patch))
        header.write_text("".join(f"#define CUTLASS_{part} {number}\n" for part, number in lines))
        names.add(find_build("sm_120a").name)
    assert len(names) == 3


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "TRT_NVFP4_NVCC=.*does not run"), ("12.4.99", r"CUDA 12\.4, 13\.0 or newer is needed")],
)
def test_named_compiler_must_serve(
    version: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc" if version is None else fake_nvcc(tmp_path / "bin", version)
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(nvcc))
    with pytest.raises(ToolchainError, match=message):
        find_nvcc()
