"""The plugin library for a machine of another kind than this one: Thor's, compiled on x86-64."""

import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from compiled import THOR, THOR_MACHINE, compiled, find_cuobjdump
from test_machine_code import BLOCK_SCALED

from trt_nvfp4.plugins.compile.cross_runtime import RuntimeUnavailableError, cuda_runtime
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_nvcc
from trt_nvfp4.plugins.ops import OPS

# A whole library for another machine: RTX's and B200's hold the same kernels.
pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
COMPILER = f"{THOR_MACHINE}-linux-gnu-g++"


@pytest.fixture(scope="module")
def thor_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() == THOR_MACHINE:
        pytest.skip("this machine is of Thor's kind")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER}: install g++-aarch64-linux-gnu")
    try:
        find_nvcc(THOR_MACHINE)
    except ToolchainError as error:
        pytest.skip(str(error))
    sources = compiled(THOR)
    library = tmp_path_factory.mktemp("thor") / "library.so"
    sources.build.link(sources.objects.values(), library)
    return library


@pytest.mark.slow
def test_library_is_the_devices(thor_library: Path) -> None:
    header = subprocess.run(["readelf", "-hd", thor_library], capture_output=True, text=True, check=True).stdout
    assert re.search(r"Machine:\s+AArch64", header)
    assert set(re.findall(r"NEEDED.*\[(\w[\w+-]*)", header)) <= {
        "libc",
        "libm",
        "libstdc++",
        "libgcc_s",
        "ld-linux-aarch64",
    }
    sass = subprocess.run([find_cuobjdump(), "-sass", thor_library], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(BLOCK_SCALED[THOR], sass)) >= 2


@pytest.mark.slow
def test_library_loads_and_offers_its_plugins(thor_library: Path, tmp_path: Path) -> None:
    qemu = shutil.which(f"qemu-{THOR_MACHINE}-static") or shutil.which(f"qemu-{THOR_MACHINE}")
    if qemu is None:
        pytest.skip("no qemu: install qemu-user-static")
    program = tmp_path / "probe"
    flags = ["-std=c++17", f"-I{ROOT / 'interface'}", "-ldl"]
    subprocess.run([COMPILER, HERE / "creators_probe.cpp", "-o", program, *flags], check=True)
    command = [qemu, "-L", f"/usr/{THOR_MACHINE}-linux-gnu", program, thor_library]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.split("\n")[:-1]) == sorted(f"::{name} 1" for name in OPS)


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str | None, stderr: str = "") -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(next(part for part in command if part.startswith("--dest=")).removeprefix("--dest="))
        if member is not None:
            with zipfile.ZipFile(folder / "runtime.whl", "w") as wheel:
                wheel.writestr(member, b"archive")
        return subprocess.CompletedProcess(command, 0 if member else 1, "", stderr)

    monkeypatch.setattr("trt_nvfp4.plugins.compile.cross_runtime.subprocess.run", run)
    return calls


def test_runtime_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, "nvidia/cu13/lib/libcudart_static.a")
    folder = cuda_runtime(THOR_MACHINE, "13.0.88", tmp_path)
    assert (folder / "libcudart_static.a").read_bytes() == b"archive"
    assert cuda_runtime(THOR_MACHINE, "13.0.88", tmp_path) == folder
    assert len(calls) == 1
    assert "nvidia-cuda-runtime==13.0.*" in calls[0]
    assert [path.name for path in folder.iterdir()] == ["libcudart_static.a"]


def test_runtime_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None, "ERROR: No matching distribution found\n")
    with pytest.raises(RuntimeUnavailableError, match=r"nvidia-cuda-runtime 13\.0 for aarch64: ERROR: No matching"):
        cuda_runtime(THOR_MACHINE, "13.0.88", tmp_path)
    fake_pip(monkeypatch, "nvidia/cu13/include/cuda.h")
    with pytest.raises(RuntimeUnavailableError, match=r"holds no libcudart_static\.a"):
        cuda_runtime(THOR_MACHINE, "13.0.88", tmp_path)


def test_runtime_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine() == THOR_MACHINE or shutil.which(COMPILER) is None:
        pytest.skip(f"no cross compiler {COMPILER}")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("trt_nvfp4.plugins.compile.toolchain._toolkit_root", lambda nvcc: tmp_path)
    with pytest.raises(ToolchainError, match=r"no libcudart_static\.a for aarch64.*set TRT_NVFP4_CACHE to a writable"):
        find_nvcc(THOR_MACHINE)
