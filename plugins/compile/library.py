"""Builds the plugin library for one GPU architecture on first use and keeps it in a cache."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, gettempdir

from filelock import FileLock, Timeout

from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.compile.ownership import check_own, own_folder
from trt_nvfp4.plugins.compile.toolchain import (
    Toolchain,
    ToolchainError,
    cache_dir,
    find_cutlass,
    find_host_compiler,
    find_nvcc,
    host_version,
)

#: Called with (steps done, steps in all, what was just done).
Progress = Callable[[int, int, str], None]

#: Environment variable: what demo and tests compile they then share (see build_library).
KEEP_OBJECTS = "TRT_NVFP4_KEEP_OBJECTS"

#: What the folders begin with in which builds go on.
_BUILD = ".build"

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = (
    "adapters/*.cpp",
    "kernels/api/*.cpp",
    "kernels/api/*/*.cu",
    "kernels/attention/*.cu",
    "kernels/decoder/*.cu",
)
#: The family of kernels that an architecture runs, built on CUTLASS all or in part.
_FAMILIES = {"90": "sm90", "100": "sm100", "103": "sm100", "110": "sm100", "120": "sm120", "121": "sm120"}
#: Architectures with one PTX, whose libraries differ in machine code alone. Objects that are kept hold all of a row, so
#: that their sources are compiled once.
_FAMILY_PTX = {"compute_100f": ("sm_100a", "sm_103a"), "compute_120f": ("sm_120a", "sm_121a")}
#: Of the family sm100, those whose W4A4 gains nothing from clusters of two CTAs.
_WITHOUT_PAIRS = ("110",)
#: FP8 by mma.sync, and the architectures whose tensor cores take it so.
_MMA_FP8 = "kernels/fp8/sm89_fp8.cu"
_MMA_FP8_ARCHITECTURES = ("89", "120", "121")
#: At -O3 ptxas spills a register of CUTLASS's SM120 kernels before their loops; at -O2 none.
_SOURCE_FLAGS = {
    "sm120_w4a4.cu": ["-Xptxas=-O2"],
    "sm120_w4a4_experts.cu": ["-Xptxas=-O2"],
    # CUTLASS's assertions are function calls, before which wgmma drains.
    "sm90_fp8_gated.cu": ["-DNDEBUG"],
    "sm90_fp8_dense.cu": ["-DNDEBUG"],
    "sm90_fp8_experts.cu": ["-DNDEBUG"],
}
_HEADERS = ("adapters/*.h", "adapters/*.map", "interface/*.h", "kernels/**/*.h", "kernels/**/*.cuh")
_HASHED = (*_SOURCES, "kernels/**/*.cu", *_HEADERS)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-Xptxas=-v,--warn-on-spills",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-deprecated-declarations",
)
#: What nvcc adds to its command line, and a checkout that may be anything.
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CUTLASS_DIR")
_SYSTEM_HEADERS = (Path("/usr/include"), Path("/usr/include") / f"{platform.machine()}-linux-gnu")
# Seen from the adapters' folder: nvcc splits what it hands to the linker where a path has spaces.
_LINK_FLAGS = ("-shared", "-Xlinker=--version-script=exports.map,--no-undefined")


@dataclass(frozen=True)
class Build:
    """How the library for one architecture is compiled and linked."""

    name: str
    toolchain: Toolchain
    sources: list[Path]
    flags: list[str]

    def compile(self, folder: Path, progress: Progress | None = None) -> tuple[list[Path], str]:
        """The sources' objects, in ``folder``, and ptxas's report on them. Raises ToolchainError."""
        # Here and not among the flags, which are hashed: a checkout that moves finds its library again.
        headers = [f"-I{ROOT / 'kernels'}", f"-I{ROOT / 'adapters'}", f"-I{folder}"]
        (folder / op_header.NAME).write_text(op_header.op_header())
        compiler: list[str | Path] = [self.toolchain.nvcc, *self.toolchain.compile_flags(), *headers, *self.flags]
        objects = {source: folder / f"{source.parent.name}-{source.name}.o" for source in self.sources}
        reports: list[str] = []
        running: set[subprocess.Popen[str]] = set()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

            def submit(source: Path, target: Path) -> Future[str]:
                command = [*compiler, *_SOURCE_FLAGS.get(source.name, []), "-c", source, "-o", target]
                return pool.submit(_run, command, running=running)

            # Those on CUTLASS first: they are the last of the sources, and take longest.
            jobs = {submit(source, target): source for source, target in reversed(objects.items())}
            try:
                for done, job in enumerate(as_completed(jobs), 1):
                    reports.append(job.result())
                    if progress:
                        progress(done, len(jobs) + 1, f"compiled {jobs[job].name}")
            except BaseException:
                # Ctrl-C among others: the rest of a compilation may take minutes.
                pool.shutdown(wait=False, cancel_futures=True)
                while any(job.running() for job in jobs):
                    _end(tuple(running))
                raise
        return list(objects.values()), "".join(reports)

    def compile_once(self, progress: Progress | None = None) -> tuple[list[Path], str]:
        """The same, in the cache, where the objects stay."""

        def make(report: Path) -> None:
            # One at a time: each takes all cores, and CUTLASS takes gigabytes on every one.
            lock = FileLock(report.parent.parent / "compiled.lock")
            with lock, _emptied(report.parent / _BUILD) as temporary:
                objects, text = self.compile(temporary, progress)
                for path in objects:
                    os.replace(path, report.parent / path.name)
                written = temporary / report.name
                written.write_text(text)
                # Last: where the report is, the objects are.
                os.replace(written, report)

        report = cached(f"{self.name}.objects/ptxas.txt", make)
        return sorted(report.parent.glob("*.o")), report.read_text()

    def link(self, objects: list[Path], library: Path) -> None:
        """Raises ToolchainError."""
        files: list[str | Path] = ["-o", library.absolute(), *(path.absolute() for path in objects)]
        _run([self.toolchain.nvcc, *self.toolchain.link_flags(), *_LINK_FLAGS, *files], ROOT / "adapters")


def build_library(arch: str, *, machine: str | None = None, progress: Progress | None = None) -> Path:
    """The plugin library for ``arch`` (for example ``sm_120a``), built if the cache does not hold it.

    ``machine`` is the host it will run on (``x86_64``, ``aarch64``; default: this one). The cache key covers sources,
    flags (``$NVCC_PREPEND_FLAGS`` and ``$NVCC_APPEND_FLAGS`` too), both compilers' versions and the TensorRT headers
    used; ptxas's resource report lies beside it as ``.ptxas.txt``. With ``$TRT_NVFP4_KEEP_OBJECTS`` set, its objects
    stay in the cache, and hold what find_build says.

    Raises ToolchainError when no compiler is found or the compilation fails.
    """
    keep = KEEP_OBJECTS in os.environ
    build = find_build(arch, machine=machine, keep=keep)

    def make(library: Path) -> None:
        steps = len(build.sources) + 1
        with _emptied(_build_folder(library)) as temporary:
            objects, text = build.compile_once(progress) if keep else build.compile(temporary, progress)
            linked, report = temporary / library.name, temporary / "report"
            build.link(objects, linked)
            report.write_text(text)
            # The library goes last: where it is, its report is.
            _keep(report, library.with_suffix(".ptxas.txt"))
            _keep(linked, library)
        if progress:
            progress(steps, steps, f"linked {library.name}")

    return cached(f"{build.name}.so", make)


def check_cache(build: Build) -> None:
    """Raises ToolchainError where build_library could neither find ``build``'s library nor keep it."""
    with _place_of(f"{build.name}.so") as library:
        if not _is_whole(library):
            with TemporaryFile(dir=library.parent):
                pass


def find_build(arch: str, *, machine: str | None = None, keep: bool = False) -> Build:
    """How build_library builds. ``keep``: for objects that serve tests too, with PTX beside the machine code,
    uncompressed, without line numbers, which take a sixth of the time, and the machine code of all architectures with
    that PTX; everything else is the same.

    Raises ToolchainError when no compiler is found.
    """
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch) is None:
        raise ToolchainError(f"{arch!r} is no GPU architecture; expected sm_80, sm_90a, sm_120a or the like")
    number = arch[3:].rstrip("af")
    if number in _FAMILIES and not arch.endswith("a"):
        raise ToolchainError(
            f"{arch} is without the instructions that the kernels for this GPU are made of; name sm_{number}a"
        )
    toolchain = find_nvcc(machine)
    headers = _tensorrt_headers(toolchain.machine)
    sources, arch_flags = architecture(arch)
    alone = (arch.replace("sm", "compute"), (arch,))
    ptx, family = next(((ptx, row) for ptx, row in _FAMILY_PTX.items() if arch in row), alone)
    archs = family if keep else (arch,)
    code = ",".join([*archs, ptx] if keep else archs)
    flags = [*_FLAGS, *_headers_flags(headers), *arch_flags, f"-gencode=arch={ptx},code=[{code}]"]
    if keep:
        flags.remove("-lineinfo")
        flags.append("--no-compress")
    environment = [f"{name}={value}" for name in _VARIABLES if (value := os.environ.get(name))]
    compilers = f"{toolchain.version} {toolchain.host_version}"
    # Where headers lie makes no other library: TensorRT's count by content, CUTLASS's by version.
    counting = [flag for flag in flags if not flag.startswith("-isystem=")]
    key = _key(compilers, [*counting, repr(_SOURCE_FLAGS), *environment, op_header.op_header()], _HASHED, headers)
    return Build(f"libtrt_nvfp4-{'-'.join(archs)}-{toolchain.machine}-{key}", toolchain, sources, flags)


def architecture(arch: str) -> tuple[list[Path], list[str]]:
    """Sources of the library for ``arch``, and the compiler flags that this choice asks for.

    Raises ToolchainError when CUTLASS is needed and not found.
    """
    sources = sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern))
    number = re.sub(r"\D", "", arch)
    family = _FAMILIES.get(number)
    flags: list[str] = []
    if number in _MMA_FP8_ARCHITECTURES:
        sources.append(ROOT / _MMA_FP8)
        flags = ["-DTRT_NVFP4_SM89"]
    if family is None:
        return sources, flags
    include, version = find_cutlass()
    # The version is in a macro so that it counts in the cache's key.
    flags += [f"-DTRT_NVFP4_{family.upper()}", f"-DTRT_NVFP4_CUTLASS={version}", "--expt-relaxed-constexpr"]
    if number in _WITHOUT_PAIRS:
        flags.append("-DTRT_NVFP4_WITHOUT_PAIRS")
    own = sorted((ROOT / "kernels").rglob(f"{family}_*.cu"))
    return [*sources, *own], [*flags, f"-isystem={include}"]


def build_host() -> Path:
    """The plugin host (see host.py), built by the C++ compiler alone.

    Raises ToolchainError when no compiler is found or the compilation fails.
    """
    compiler = find_host_compiler(platform.machine())
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    source = ROOT / "plugin_host" / "plugin_host.cpp"

    def build(library: Path) -> None:
        with _emptied(_build_folder(library)) as temporary:
            linked = temporary / library.name
            _run([compiler, *flags, source, "-o", linked, "-ldl"])
            _keep(linked, library)

    key = _key(host_version(compiler), flags, ("plugin_host/*.*", "interface/*.h"))
    return cached(f"libplugin_host-{platform.machine()}-{key}.so", build)


def resource_report(library: Path) -> str:
    """ptxas's report (registers, shared memory, spills per kernel) of a library that build_library returned."""
    return library.with_suffix(".ptxas.txt").read_text()


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's file ``name``; ``build`` makes it if it is not there whole, one process at a time."""
    with _place_of(name) as library:
        if not _is_whole(library):
            _remove_left(library.parent)
            with FileLock(library.with_suffix(".lock")):
                if not _is_whole(library):
                    build(library)
                    library.chmod(library.stat().st_mode & ~0o022)
        check_own(library)
    return library


@contextmanager
def _place_of(name: str) -> Iterator[Path]:
    """Where the cache has its file ``name``, in a folder that is there. Raises ToolchainError for what the system
    refuses there."""
    library = cache_dir() / "plugins" / name
    try:
        # Whoever can write here, or owns the file, has their code run by this process.
        own_folder(cache_dir(), *library.parent.relative_to(cache_dir()).parts)
        yield library
    except OSError as error:
        raise ToolchainError(
            f"cannot keep {library}: {error}; set TRT_NVFP4_CACHE to a writable folder of your own"
        ) from error


def _build_folder(library: Path) -> Path:
    return library.with_name(f"{_BUILD}-{library.stem}")


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """A folder to build in, under the lock of what is built; a build that was killed may have left its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _remove_left(cache: Path) -> None:
    """Remove the folders of builds that were killed: those whose lock nobody holds, and that are this user's."""
    for folder in cache.glob(f"{_BUILD}-*"):
        lock = cache / f"{folder.name[len(_BUILD) + 1 :]}.lock"
        if lock.is_file():
            with suppress(Timeout, PermissionError), FileLock(lock, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)


def _is_whole(file: Path) -> bool:
    """Whether the file is there, and, of a library, all of it: loading one that lost its end is a SIGBUS."""
    if not file.is_file() or file.suffix != ".so":
        return file.is_file()
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    # ELF's section headers, with which a linker ends the file.
    (start,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return file.stat().st_size >= int(start) + int(size) * int(count)


def _keep(made: Path, file: Path) -> None:
    """Put what was made in its place, once it is on the disk: what ends the machine leaves all of it, or nothing."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(made, file)


def _run(
    command: Sequence[str | Path], folder: Path | None = None, running: set[subprocess.Popen[str]] | None = None
) -> str:
    """Runs the compiler, in ``folder``, and returns what it printed; its folder for temporary files is the system's.
    ``running`` holds its process meanwhile."""
    running = set() if running is None else running
    # A group of its own: nvcc does not end the compilers that it starts.
    process = subprocess.Popen(
        command,
        cwd=folder,
        # nvcc fails where the caller's is closed.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running.add(process)
    try:
        printed, _ = process.communicate()
    except BaseException:
        _end([process])
        raise
    finally:
        running.discard(process)
    if process.returncode != 0:
        if os.strerror(errno.ENOSPC) in printed:
            raise ToolchainError(
                f"compilation failed: no space left in {cache_dir()} or in {gettempdir()}; free some, or name folders "
                "with space by TRT_NVFP4_CACHE and TMPDIR"
            )
        line = " ".join(map(str, command))
        raise ToolchainError(f"compilation failed (exit status {process.returncode}): {line}\n{printed[-4000:]}")
    return printed


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends processes of _run's and those that they started."""
    # nvcc removes its temporary files on SIGINT, which is ignored where the command was started in the background.
    for ending in (signal.SIGINT, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, ending)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.02)


def _tensorrt_headers(machine: str) -> Path | None:
    """The folder of TensorRT's own headers where the user has them; None: the project's declaration of them serves.

    Raises ToolchainError for a named folder without headers, or with those of a TensorRT that is too old; the system's
    are then left alone.
    """
    if named := os.environ.get("TENSORRT_INCLUDE_DIR"):
        if not (Path(named) / "NvInferRuntime.h").is_file():
            raise ToolchainError(f"TENSORRT_INCLUDE_DIR={named} holds no NvInferRuntime.h")
        if not _declares_plugins(Path(named)):
            raise ToolchainError(
                f"TENSORRT_INCLUDE_DIR={named} holds the headers of a TensorRT before 10, which has no IPluginV3; name "
                "those of 10 or newer, or unset it: the library builds without TensorRT's headers too"
            )
        return Path(named)
    # A compiler for another machine does not search all of this one's folders.
    folders = _SYSTEM_HEADERS if machine == platform.machine() else ()
    return next(filter(_declares_plugins, folders), None)


def _declares_plugins(folder: Path) -> bool:
    """Whether TensorRT's headers in `folder`, if any, have the interface that the adapters implement."""
    headers = folder.glob("NvInfer*.h") if (folder / "NvInferRuntime.h").is_file() else ()
    return any(b"IPluginV3OneBuild" in header.read_bytes() for header in headers)


def _headers_flags(headers: Path | None) -> list[str]:
    if headers is None:
        return []
    # The compiler searches the system's folders anyway, and in an order that naming them would upset.
    named = [] if headers in _SYSTEM_HEADERS else [f"-isystem={headers}"]
    return ["-DTRT_NVFP4_TENSORRT_HEADERS", *named]


def _key(compiler: str, flags: list[str], patterns: tuple[str, ...], headers: Path | None = None) -> str:
    """Hash of everything that a build depends on; paths are relative, so a moved checkout finds its library again."""
    digest = hashlib.sha256("\0".join([compiler, *flags]).encode())
    for header in sorted(headers.glob("NvInfer*.h")) if headers else ():
        digest.update(header.read_bytes())
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
