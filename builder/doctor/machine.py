"""Checks of this machine: GPU, TensorRT, compilers, folders, packages, and the targets that they allow for."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from trt_nvfp4.builder.cuda.driver import Driver, local_driver
from trt_nvfp4.builder.doctor.check import Check, State
from trt_nvfp4.builder.targets import TARGETS, Target, arch_of
from trt_nvfp4.builder.tensorrt.backend import mounted_noexec, version_tuple
from trt_nvfp4.plugins.compile.prebuilt import packaged_libraries
from trt_nvfp4.plugins.compile.toolchain import (
    PYPI_PACKAGES,
    ToolchainError,
    cache_dir,
    find_cutlass,
    find_host_compiler,
    find_nvcc,
)

#: CUDA 13's first driver; engines' kernels are compiled with CUDA 13.
OLDEST_CUDA = (13, 0)
_GB = 1e9
#: Free bytes below which a build is likely to fail: a compilation of CUTLASS kernels takes these.
MEMORY = 6 * _GB
DISK = 5 * _GB
#: What only some uses need: purpose -> modules, and what brings them.
OPTIONAL: Mapping[str, tuple[tuple[str, ...], str]] = {
    "Hugging Face models": (("transformers", "onnxscript"), "pip install 'trt-nvfp4[hf]'"),
    "text from engines": (("cuda.bindings",), "pip install cuda-bindings"),
    "nodes put in by hand": (("onnx_graphsurgeon",), "pip install 'trt-nvfp4[surgeon]'"),
}


def checks() -> Iterator[Check]:
    """Every check of this machine, in the order in which they are shown. Quick: nothing is compiled or imported that
    takes seconds."""
    driver = local_driver()
    yield _python()
    yield _gpu(driver)
    yield from _tensorrt()
    yield from _compilers()
    yield from _folders()
    yield _memory()
    yield from _optional()
    yield from _targets(driver)


def _python() -> Check:
    version = platform.python_version()
    return Check("Python", "ok", f"{version} on {platform.machine()}, trt-nvfp4 {_version('trt-nvfp4')}")


def _gpu(driver: Driver | None) -> Check:
    if driver is None:
        return Check("GPU", "note", "no NVIDIA driver", "engines run on an NVIDIA GPU only; install its driver there")
    if driver.error or not driver.gpus:
        fix = "nvidia-smi shows whether the driver sees it; in a container: docker run --gpus all"
        return Check("GPU", "note", f"the driver finds no GPU (CUDA error {driver.error})", fix)
    listed = ", ".join(
        f"{gpu.name} ({arch_of(gpu.compute_capability)}, {gpu.memory / _GB:.0f} GB)" for gpu in driver.gpus
    )
    found = f"{listed}; the driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    if driver.cuda < OLDEST_CUDA:
        return Check("GPU", "missing", found, "update the NVIDIA driver to 580 or newer, which serves CUDA 13")
    return Check("GPU", "ok", found)


def _tensorrt() -> Iterator[Check]:
    oldest = {
        module: min(
            (target.modules[module] for target in TARGETS.values() if module in target.modules), key=version_tuple
        )
        for module in ("tensorrt_rtx", "tensorrt")
    }
    found = [module for module in oldest if importlib.util.find_spec(module) is not None]
    if not found:
        yield Check(
            "TensorRT",
            "missing",
            "neither tensorrt-rtx nor tensorrt",
            "pip install tensorrt-rtx, or pip install tensorrt",
        )
    for module in found:
        name, version = module.replace("_", "-"), _version(module)
        if version_tuple(version) < version_tuple(oldest[module]):
            fix = f"pip install --upgrade '{name}>={oldest[module]}'"
            yield Check("TensorRT", "missing", f"{name} {version}; {oldest[module]} or newer is needed", fix)
        else:
            yield Check("TensorRT", "ok", f"{name} {version}")


def _compilers() -> Iterator[Check]:
    """The compilers; a wheel with compiled libraries needs none."""
    packaged = packaged_libraries()
    state: State = "note" if packaged else "missing"
    if packaged:
        yield Check("packaged kernels", "ok", ", ".join(library.name for library in packaged))
    try:
        toolchain = find_nvcc()
    except ToolchainError as error:
        first, _, rest = str(error).partition("; ")
        yield Check("nvcc", state, first.partition(". ")[0], rest or f"pip install {PYPI_PACKAGES}")
    else:
        yield Check("nvcc", "ok", f"CUDA {toolchain.version}, {toolchain.nvcc}; {toolchain.host_version}")
    try:
        include, version = find_cutlass()
    except ToolchainError as error:
        yield Check("CUTLASS", state, str(error).partition(":")[0], "pip install 'nvidia-cutlass>=4.2'")
    else:
        yield Check("CUTLASS", "ok", f"{version}, {include}")
    if platform.machine() != "aarch64":
        try:
            yield Check("compiler for Arm", "ok", str(find_host_compiler("aarch64")))
        except ToolchainError:
            fix = "apt install g++-aarch64-linux-gnu (without it, bundles compile on the device)"
            yield Check("compiler for Arm", "note", "no aarch64-linux-gnu-g++", fix)


def _folders() -> Iterator[Check]:
    temporary = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    yield _folder("temporary files", temporary, "TMPDIR", holds_libraries=True)
    try:
        cache = cache_dir()
    except ToolchainError as error:
        yield Check("cache", "missing", str(error).partition(";")[0], "set TRT_NVFP4_CACHE to a writable folder")
        return
    yield _folder("cache", cache, "TRT_NVFP4_CACHE", holds_libraries=True)


def _folder(name: str, folder: Path, variable: str, holds_libraries: bool) -> Check:
    """A folder that files are written to; `variable` names another one."""
    # os.path.exists is False, too, where this user may not look.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    elsewhere = f"set {variable} to a folder of another file system"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "missing", f"{folder} is not writable", f"set {variable} to a writable folder")
    free = shutil.disk_usage(there).free
    found = f"{folder}, {free / _GB:.1f} GB free"
    if holds_libraries and mounted_noexec(there):
        return Check(name, "missing", f"{found}, mounted noexec: plugin libraries cannot be loaded from it", elsewhere)
    if free < DISK:
        return Check(name, "missing", f"{found}; {DISK / _GB:.0f} GB are needed", f"free some space, or {elsewhere}")
    return Check(name, "ok", found)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GB:.1f} of {memory.total / _GB:.1f} GB free"
    if memory.available < MEMORY:
        return Check(
            "memory", "note", found, f"end other programs: compiling kernels takes up to {MEMORY / _GB:.0f} GB"
        )
    return Check("memory", "ok", found)


def _optional() -> Iterator[Check]:
    for purpose, (modules, fix) in OPTIONAL.items():
        if missing := [module for module in modules if not _is_installed(module)]:
            yield Check(purpose, "note", f"{', '.join(missing)} missing", fix)
        else:
            yield Check(purpose, "ok", ", ".join(modules))


def _targets(driver: Driver | None) -> Iterator[Check]:
    here = {gpu.compute_capability for gpu in driver.gpus} if driver is not None else set()
    for target in TARGETS.values():
        yield _target(target, here)


def _target(target: Target, here: set[tuple[int, int]]) -> Check:
    name = f"target {target.name}"
    if (reason := target.unsupported_here()) is not None:
        return Check(name, "note", f"bundles only ({target.description}): {reason}", "build-engine ... --bundle DIR")
    runs = "builds and runs" if target.compute_capability in here else "builds; runs on that GPU"
    return Check(name, "ok", f"{runs} ({target.description})")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it
        return False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "of unknown version"))
