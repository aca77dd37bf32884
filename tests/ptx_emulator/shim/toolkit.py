"""nvcc and the host compiler: compiling CUDA sources to cached host libraries that carry their PTX."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ptx_emulator.errors import EmulatorError

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Toolkit:
    """An nvcc, its version text and its include directory."""

    nvcc: Path
    version: str
    include: Path


def cache_directory() -> Path:
    """`$TRT_NVFP4_CACHE`, or `~/.cache/trt-nvfp4`; created."""
    path = Path(os.environ.get("TRT_NVFP4_CACHE") or Path.home() / ".cache" / "trt-nvfp4") / "ptx_emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


@lru_cache
def find_toolkit() -> Toolkit:
    """nvcc from `$CUDA_HOME`, PATH or the nvidia-cuda-nvcc package; raises EmulatorError where there is none."""
    candidates = []
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    spec = find_spec("nvidia")
    candidates += [
        Path(root) / "cu13" / "bin" / "nvcc" for root in (spec.submodule_search_locations or [] if spec else [])
    ]
    for nvcc in candidates:
        if nvcc.is_file():
            version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
            dry_run = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True)
            top = re.search(r"^#\$ TOP=(.*)$", dry_run.stderr, re.MULTILINE)
            if top is None:
                raise EmulatorError(f"{nvcc} --dryrun does not say where its toolkit is")
            return Toolkit(nvcc, version.strip(), Path(top[1].strip()) / "include")
    raise EmulatorError(
        "no nvcc: put one on PATH, set CUDA_HOME, or install nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt"
    )


def cutlass_includes() -> list[Path]:
    """Include directories of the nvidia-cutlass package; raises EmulatorError where it is not installed."""
    spec = find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise EmulatorError("the nvidia-cutlass package is not installed")
    source = Path(spec.origin).parent / "source"
    return [source / "include", source / "tools" / "util" / "include", source / "examples" / "common"]


def example_includes() -> list[Path]:
    """What CUTLASS's examples include beyond CUTLASS: a stand-in for cuRAND where the toolkit has none."""
    return [] if (find_toolkit().include / "curand_kernel.h").is_file() else [_HERE / "include"]


def build_runtime() -> Path:
    """The shim's library, built if the cache does not hold it. CUDA's own, which torch loads, has another name."""
    name = "libcudart_emulated.so"
    sources = [_HERE / name for name in ("cudart.cpp", "streams.cpp", "driver.cpp")]
    exports, header = _HERE / "cudart.map", _HERE / "callbacks.h"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{find_toolkit().include}", *map(str, sources)]
    command += [f"-Wl,-Bsymbolic,-soname,{name}", f"-Wl,--version-script={exports}"]
    return _cached([p.read_bytes() for p in (*sources, exports, header)], command, name)


def build_program(
    sources: Sequence[Path],
    arch: str,
    flags: Sequence[str] = (),
    includes: Sequence[Path] = (),
    depends: Sequence[Path] = (),
) -> Path:
    """A host library of .cu and .cpp sources with uncompressed PTX for `arch` inside and no SASS.

    Objects among the sources are linked as they are.

    Its CUDA runtime is the shim.

    The cache key covers the sources, `depends` (headers that may change), the flags and nvcc's version.
    Raises EmulatorError with the compiler's output.
    """
    toolkit = find_toolkit()
    compute = arch.replace("sm_", "compute_")
    command = [str(toolkit.nvcc), "-std=c++17", "-O2", "-w", "-shared", "-cudart", "none", "--no-compress"]
    command += [f"-gencode=arch={compute},code={compute}", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr", *flags]
    command += [f"-I{path}" for path in includes]
    runtime = build_runtime()
    command += [*map(str, sources), str(runtime), f"-Xlinker=-rpath={runtime.parent}"]
    contents = [path.read_bytes() for path in [*sources, *depends]]
    return _cached([toolkit.version.encode(), *contents], command, f"program-{arch}.so")


def keep_source(text: str) -> Path:
    """CUDA text as a file of the cache, named by its content."""
    path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.cu"
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    return path


def _cached(contents: Sequence[bytes], command: list[str], name: str) -> Path:
    """Run `command -o FILE` unless the file for these contents and this command exists."""
    digest = hashlib.sha256("\0".join(command).encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    directory = cache_directory() / digest.hexdigest()[:20]
    target = directory / name
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may want the same program
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            built = Path(temporary) / name
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
            if done.returncode:
                raise EmulatorError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[:6000]}")
            built.replace(target)
    return target
