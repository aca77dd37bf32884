"""Finds the CUDA compiler: named by the environment, on PATH, or from the PyPI packages (``nvidia-cuda-nvcc``, ...)."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trt_nvfp4.errors import TrtNvfp4Error
from trt_nvfp4.plugins.compile.cross_runtime import RuntimeUnavailableError, cuda_runtime

#: Oldest nvcc that compiles every target: sm_110a came with 13.0.
OLDEST_NVCC = (13, 0)

#: Oldest CUTLASS with main loops for every Blackwell target.
OLDEST_CUTLASS = (4, 2)

#: nvcc and the headers of one release, quoted for a shell. The extra ``compiler`` of pyproject.toml names the same.
PYPI_PACKAGES = "'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]>=13'"


def cache_dir() -> Path:
    """``$TRT_NVFP4_CACHE``, or ``~/.cache/trt-nvfp4``. Raises ToolchainError for a user without a home folder."""
    try:
        # A ~ that no shell has expanded: in the environment of a container or a service, or quoted.
        if named := os.environ.get("TRT_NVFP4_CACHE"):
            return Path(named).expanduser().absolute()
        return Path.home() / ".cache" / "trt-nvfp4"
    except RuntimeError as error:  # users of containers may have none
        raise ToolchainError(
            "this user has no home folder to keep the plugin library in; set TRT_NVFP4_CACHE to a writable folder"
        ) from error


class ToolchainError(TrtNvfp4Error, RuntimeError):
    """No usable compiler, or a compilation that failed; the message says what to install or fix."""

    exit_code = 4


@dataclass(frozen=True)
class Toolchain:
    """An nvcc with the host compiler and the static CUDA runtime that go with it, at absolute paths: the link runs in a
    folder of its own."""

    nvcc: Path
    version: str
    host_compiler: Path
    library_dir: Path
    machine: str
    include_dirs: tuple[Path, ...] = ()
    host_version: str = ""

    def compile_flags(self) -> list[str]:
        """nvcc flags that select the host compiler and, for another machine, the toolkit's headers: nvcc looks for
        those of the other machine, which are the same and not there."""
        headers = [f"-isystem={folder}" for folder in self.include_dirs]
        return ["-ccbin", str(self.host_compiler), *headers]

    def link_flags(self) -> list[str]:
        """nvcc flags that link the CUDA runtime statically, so that the library needs only the driver."""
        return [*self.compile_flags(), "-cudart", "static", "-cudadevrt", "none", f"-L{self.library_dir}"]


def find_nvcc(machine: str | None = None) -> Toolchain:
    """Finds nvcc 13.0 or newer and a host compiler for ``machine`` (``x86_64``, ``aarch64``; default: this machine's).

    Searched in order: ``$TRT_NVFP4_NVCC``, ``$CUDA_HOME/bin``, ``PATH``, the PyPI compiler packages. A compiler that
    the environment names must work; one merely found is skipped when it does not.

    Raises ToolchainError, saying what was tried and how to install a compiler.
    """
    machine = machine or platform.machine()
    host_compiler = find_host_compiler(machine)
    _check_temporary_files()
    tried: list[str] = []
    for origin, nvcc, required in _candidates():
        try:
            version = _nvcc_version(nvcc)
            runtime = _runtime_dir(nvcc, version, machine)
            _check_headers(nvcc, version)
            includes = () if machine == platform.machine() else _include_dirs(nvcc)
            absolute = Path(shutil.which(nvcc) or nvcc).absolute()
            of_host = host_version(host_compiler)
            return Toolchain(absolute, version, host_compiler, runtime, machine, includes, of_host)
        except ToolchainError as error:
            if required:
                raise ToolchainError(f"{origin}: {error}") from error
            tried.append(f"{origin}: {error}")
    raise ToolchainError(
        f"no CUDA compiler found{' that works' if tried else ''}. Install one (pip install {PYPI_PACKAGES}), or put "
        "nvcc on PATH, or set CUDA_HOME or TRT_NVFP4_NVCC." + "".join(f"\n  tried {line}" for line in tried)
    )


def find_cutlass() -> tuple[Path, str]:
    """CUTLASS's include folder and version: ``$CUTLASS_DIR`` (a checkout), else the package ``nvidia-cutlass``.

    Raises ToolchainError, saying where it looked and how to install CUTLASS.
    """
    if named := os.environ.get("CUTLASS_DIR"):
        origin, include = f"CUTLASS_DIR={named}", Path(named) / "include"
    else:
        spec = importlib.util.find_spec("cutlass_library")
        if spec is None or spec.origin is None:
            raise ToolchainError(
                "CUTLASS, which kernels for Hopper and Blackwell GPUs are built with, is not installed: pip install "
                "nvidia-cutlass, or set CUTLASS_DIR to a checkout"
            )
        origin, include = "package nvidia-cutlass", Path(spec.origin).parent / "source" / "include"
    try:
        text = (include / "cutlass" / "version.h").read_text()
    except OSError as error:
        raise ToolchainError(f"{origin} holds no CUTLASS: {error}") from error
    parts = ("MAJOR", "MINOR", "PATCH")
    found = [int(match[1]) for part in parts if (match := re.search(rf"CUTLASS_{part} (\d+)", text))]
    if tuple(found) < OLDEST_CUTLASS:
        oldest = ".".join(map(str, OLDEST_CUTLASS))
        raise ToolchainError(f"{origin} is CUTLASS {'.'.join(map(str, found))}, {oldest} or newer is needed")
    return include, ".".join(map(str, found))


def _candidates() -> list[tuple[str, Path, bool]]:
    """(where it was found, nvcc, whether the user named it)."""
    found: list[tuple[str, Path, bool]] = []
    if named := os.environ.get("TRT_NVFP4_NVCC"):
        found.append((f"TRT_NVFP4_NVCC={named}", Path(named), True))
    if home := os.environ.get("CUDA_HOME"):
        found.append((f"CUDA_HOME={home}", Path(home) / "bin" / "nvcc", True))
    if on_path := shutil.which("nvcc"):
        found.append((f"PATH ({on_path})", Path(on_path), False))
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        nvcc = Path(root) / "cu13" / "bin" / "nvcc"
        if nvcc.is_file():
            found.append((f"package nvidia-cuda-nvcc ({nvcc})", nvcc, False))
    return found


def _nvcc_version(nvcc: Path) -> str:
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{nvcc} does not run: {error}") from error
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise ToolchainError(f"{nvcc} --version names no version: {output.strip()!r}")
    if (int(match[1]), int(match[2])) < OLDEST_NVCC:
        raise ToolchainError(
            f"{nvcc} is CUDA {match[1]}.{match[2]}, {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or newer is needed"
        )
    return match[0][1:]


def host_version(compiler: Path) -> str:
    """The name and version that a C++ compiler prints. Raises ToolchainError when it does not run."""
    try:
        printed = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise ToolchainError(f"{compiler} does not run: {error}") from error
    return printed.partition("\n")[0]


def _runtime_dir(nvcc: Path, version: str, machine: str) -> Path:
    """The folder of libcudart_static.a for ``machine``, downloaded if need be where that is not this machine."""
    top = _toolkit_root(nvcc)
    target = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(machine, machine)
    native = machine == platform.machine()
    folders = [top / "targets" / target / "lib"]
    if native:
        folders += [top / "lib64", top / "lib"]
    for folder in folders:
        if (folder / "libcudart_static.a").is_file():
            return folder
    looked = f"no libcudart_static.a for {machine} beside {nvcc} (looked in {', '.join(map(str, folders))})"
    if native:
        raise ToolchainError(f"{looked}; pip install {PYPI_PACKAGES}")
    try:
        return cuda_runtime(machine, version, cache_dir())
    except OSError as error:
        raise ToolchainError(
            f"{looked}; cannot write it to the cache: {error}; set TRT_NVFP4_CACHE to a writable folder"
        ) from error
    except RuntimeUnavailableError as error:
        raise ToolchainError(
            f"{looked}; {error}. Install the toolkit's cross-compilation package ({target})"
        ) from error


def _include_dirs(nvcc: Path) -> tuple[Path, ...]:
    """The folders of CUDA's headers and of CCCL's in the toolkit for this machine."""
    if (found := _headers(nvcc)) is None:
        raise ToolchainError(f"no cuda_runtime_api.h beside {nvcc}; pip install {PYPI_PACKAGES}")
    return tuple(folder for folder in (found, found / "cccl") if folder.is_dir())


def _headers(nvcc: Path) -> Path | None:
    top = _toolkit_root(nvcc)
    parents = (top / "targets" / f"{platform.machine().replace('aarch64', 'sbsa')}-linux", top)
    folders = [parent / "include" for parent in parents]
    return next((folder for folder in folders if (folder / "cuda_runtime_api.h").is_file()), None)


def _check_headers(nvcc: Path, version: str) -> None:
    """Raise ToolchainError for headers of another release than nvcc's, which CCCL refuses: PyPI's packages of them have
    versions of their own. A compiler without headers beside it knows where they are."""
    if (folder := _headers(nvcc)) is None:
        return
    defined = re.search(r"define\s+CUDART_VERSION\s+(\d+)", (folder / "cuda_runtime_api.h").read_text(errors="replace"))
    release = tuple(map(int, version.split(".")[:2]))
    if defined is None or (found := (int(defined[1]) // 1000, int(defined[1]) % 1000 // 10)) == release:
        return
    raise ToolchainError(
        f"nvcc is CUDA {release[0]}.{release[1]} and the headers in {folder} are CUDA {found[0]}.{found[1]}, "
        f"one release is needed: pip install {PYPI_PACKAGES}"
    )


def _check_temporary_files() -> None:
    """Raise ToolchainError where nvcc cannot write to $TMPDIR, which it needs even to say where its toolkit is; its own
    error names some output file. Python's choice of a folder would pass over such a one."""
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ToolchainError(
            f"compilers cannot write temporary files to TMPDIR, {folder}: {error.strerror}; set TMPDIR to a writable "
            "folder that has space"
        ) from error


def _toolkit_root(nvcc: Path) -> Path:
    """nvcc's own idea of its toolkit: PATH may hold a wrapper script far away from it."""
    probe = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    match = re.search(r"^#\$ TOP=(.+)$", probe.stderr, re.MULTILINE)
    if match is None:
        raise ToolchainError(f"{nvcc} --dryrun does not say where its toolkit is: {probe.stderr.strip()[:200]!r}")
    return Path(match[1].strip()).resolve()


def find_host_compiler(machine: str) -> Path:
    """``$CXX`` or the usual C++ compiler; for another machine, the GNU cross compiler. Raises ToolchainError."""
    native = machine == platform.machine()
    named = os.environ.get("CXX") if native else None
    names = [named] if named else ["g++", "clang++", "c++"] if native else [f"{machine}-linux-gnu-g++"]
    for name in names:
        if found := shutil.which(name):
            return Path(found).absolute()
    if named:
        raise ToolchainError(
            f"CXX={named} is not a program; name a C++ compiler without launcher or flags, or unset CXX"
        )
    raise ToolchainError(
        f"no C++ compiler for {machine} found (tried {', '.join(names)}); install "
        + ("g++ or set CXX" if native else f"g++-{machine.replace('_', '-')}-linux-gnu, or build on the device itself")
    )
