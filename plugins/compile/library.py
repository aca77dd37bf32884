"""Builds the plugin library for one GPU architecture on first use and keeps it in a cache.

A library links the groups of kernels that a model needs (kernel_groups.py). Their objects are kept one by one, each by
the content of its source and of the headers that this includes, so that another library, or another version of the
sources, compiles only what it does not find.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock

from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.compile.cache import building, cached, is_whole, keep, place_of
from trt_nvfp4.plugins.compile.compiler import Compilers
from trt_nvfp4.plugins.compile.kernel_groups import CORE, GROUPS, all_groups, ops_of
from trt_nvfp4.plugins.compile.prebuilt import prebuilt_library
from trt_nvfp4.plugins.compile.toolchain import (
    Toolchain,
    ToolchainError,
    find_cutlass,
    find_host_compiler,
    find_nvcc,
    host_version,
)

#: Called with (steps done, steps in all, what was just done).
Progress = Callable[[int, int, str], None]

ROOT = Path(__file__).resolve().parents[1]
#: The family of kernels that an architecture runs, built on CUTLASS all or in part.
_FAMILIES = {"90": "sm90", "100": "sm100", "103": "sm100", "110": "sm100", "120": "sm120", "121": "sm120"}
#: Architectures with one PTX, whose libraries differ only in machine code.
FAMILY_PTX = {"compute_100f": ("sm_100a", "sm_103a"), "compute_120f": ("sm_120a", "sm_121a")}
#: Members of the family sm100 whose W4A4 gains nothing from clusters of two CTAs.
_WITHOUT_PAIRS = ("110",)
#: Architectures whose tensor cores take FP8 by mma.sync, as the sources sm89_* use them.
_MMA_FP8_ARCHITECTURES = ("89", "120", "121")
SOURCE_FLAGS = {
    # At -O3 ptxas spills a register of CUTLASS's SM120 kernels before their loops; at -O2 none.
    **{f"sm120_w4a4{gemm}.cu": ["-Xptxas=-O2"] for gemm in ("", "_gated", "_experts")},
    # CUTLASS's assertions are function calls, before which wgmma drains.
    "sm90_fp8_gated.cu": ["-DNDEBUG"],
    "sm90_fp8_dense.cu": ["-DNDEBUG"],
    "sm90_fp8_experts.cu": ["-DNDEBUG"],
}
_FLAGS = (
    "-std=c++17",
    "-O3",
    # Every driver that runs CUDA 13 expands it: a fourth of the size.
    "--compress-mode=size",
    "-Xptxas=-v,--warn-on-spills",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-deprecated-declarations",
)
#: Environment variable: line numbers of the sources in the machine code, for profilers. Three times the size.
LINE_INFO = "TRT_NVFP4_LINE_INFO"
#: What nvcc adds to its command line, and a checkout that may be anything.
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CUTLASS_DIR")
_SYSTEM_HEADERS = (Path("/usr/include"), Path("/usr/include") / f"{platform.machine()}-linux-gnu")
# Seen from the adapters' folder: nvcc splits what it hands to the linker where a path has spaces.
_LINK_FLAGS = ("-shared", "-Xlinker=--version-script=exports.map,--no-undefined")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """How the library for one architecture is compiled and linked.

    `headers`: the folder of TensorRT's own headers, or None. `groups`:
    the names of the groups of kernels that are linked.
    """

    arch: str
    toolchain: Toolchain
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    headers: Path | None = None
    groups: frozenset[str] = frozenset()

    @cached_property
    def generated(self) -> dict[str, str]:
        return generated_headers(self.groups)

    @cached_property
    def name(self) -> str:
        """The library's file, by the content of all that goes into it."""
        objects = "\0".join(map(self.object_name, self.sources))
        exports = (ROOT / "adapters" / "exports.map").read_text()
        digest = _digest(objects, exports, *self.toolchain_key, *_LINK_FLAGS)
        return f"libtrt_nvfp4-{self.arch}-{self.toolchain.machine}-{digest}.so"

    @cached_property
    def toolchain_key(self) -> tuple[str, ...]:
        environment = [f"{name}={value}" for name in _VARIABLES if (value := os.environ.get(name))]
        return (self.toolchain.version, self.toolchain.host_version, *environment)

    def object_name(self, source: Path) -> str:
        """The source's object in the cache, by the content of the source and its headers, flags and compilers."""
        # Where headers lie makes no other object: TensorRT's count by content, CUTLASS's by version.
        flags = [flag for flag in self.flags if not flag.startswith("-isystem=")]
        texts = [text for name, text in sorted(_with_headers(source, self.generated).items()) for text in (name, text)]
        if self.headers is not None and source.suffix == ".cpp":
            texts += [header.read_text(errors="replace") for header in sorted(self.headers.glob("NvInfer*.h"))]
        digest = _digest(*self.toolchain_key, *flags, *SOURCE_FLAGS.get(source.name, []), *texts)
        return f"objects/{source.parent.name}-{source.stem}-{self.arch}-{self.toolchain.machine}-{digest}.o"

    def missing(self) -> list[Path]:
        """The sources whose objects the cache lacks. Raises ToolchainError."""

        def is_cached(source: Path) -> bool:
            with place_of(self.object_name(source)) as file:
                return is_whole(file)

        return [source for source in self.sources if not is_cached(source)]

    def objects(self, done: Callable[[int, Path], object] = lambda number, source: None) -> dict[Path, Path]:
        """The objects of the sources, compiled as far as the cache lacks them. Beside each lie ptxas's report and, of
        kernels, the PTX (see `kept_ptx`). ``done`` sees how many were compiled, and the last of them.

        Raises ToolchainError.
        """
        compilers = Compilers()

        def make(source: Path) -> Path:
            return cached(self.object_name(source), lambda file: self._compile(source, file, compilers))

        if self.missing():
            # One process at a time: each takes all cores, and CUTLASS takes gigabytes on every one.
            with place_of("objects/compiling.lock") as lock, FileLock(lock):
                # Those on CUTLASS first: they are the last of the sources, and take longest.
                compilers.map(make, self.missing()[::-1], done)
        return {source: make(source) for source in self.sources}

    def _compile(self, source: Path, file: Path, compilers: Compilers) -> None:
        with building(file) as folder:
            for name, text in self.generated.items():
                (folder / name).write_text(text)
            # Here and not among the flags, which are hashed: a checkout that moves finds its objects again.
            headers = [f"-I{ROOT / 'kernels'}", f"-I{ROOT / 'adapters'}", f"-I{folder}"]
            made, report = folder / file.name, folder / "report"
            command: list[str | Path] = [self.toolchain.nvcc, *self.toolchain.compile_flags(), *headers, *self.flags]
            flags = [*SOURCE_FLAGS.get(source.name, []), "--keep", f"--keep-dir={folder}"]
            report.write_text(compilers.run([*command, *flags, "-c", source, "-o", made]))
            # The object goes last: where it is, what belongs to it is.
            keep(report, file.with_suffix(".ptxas.txt"))
            if (ptx := folder / f"{source.stem}.ptx").is_file():
                (folder / "ptx").write_bytes(gzip.compress(ptx.read_bytes(), mtime=0))
                keep(folder / "ptx", file.with_suffix(".ptx.gz"))
            keep(made, file)

    def link(self, objects: Collection[Path], library: Path) -> None:
        """Raises ToolchainError."""
        files: list[str | Path] = ["-o", library.absolute(), *(path.absolute() for path in objects)]
        Compilers().run([self.toolchain.nvcc, *self.toolchain.link_flags(), *_LINK_FLAGS, *files], ROOT / "adapters")


def build_library(
    arch: str,
    *,
    groups: Collection[str] | None = None,
    machine: str | None = None,
    progress: Progress | None = None,
    packaged: bool = True,
) -> Path:
    """The plugin library for ``arch`` (for example ``sm_120a``), built if the cache does not hold it.

    ``groups`` are the names of the kernel groups that it links (see `kernel_groups.groups_of`); None: all. ``machine``
    is the host it will run on (``x86_64``, ``aarch64``; default: this one). The cache key covers sources, flags
    (``$NVCC_PREPEND_FLAGS`` and ``$NVCC_APPEND_FLAGS`` too), both compilers' versions and the TensorRT headers used.
    ``packaged``: whether a library in an installed wheel serves that was made of these sources; it has all kernels.

    Raises ToolchainError when no compiler is found or the compilation fails.
    """
    if packaged and (found := find_packaged(arch, machine)) is not None:
        if progress is not None:
            progress(1, 1, f"found {found.name} in a wheel")
        return found
    build = find_build(arch, groups=groups, machine=machine)

    def make(library: Path) -> None:
        steps = len(build.missing()) + 1

        def show(number: int, what: str) -> None:
            if progress is not None:
                progress(number, steps, what)

        objects = build.objects(lambda number, source: show(number, f"compiled {source.name}"))
        with building(library) as temporary:
            linked, report = temporary / library.name, temporary / "report"
            build.link(objects.values(), linked)
            report.write_text("".join(resource_report(path) for path in objects.values()))
            # The library goes last: where it is, its report is.
            keep(report, library.with_suffix(".ptxas.txt"))
            keep(linked, library)
        show(steps, f"linked {library.name}")

    return cached(build.name, make)


def find_packaged(arch: str, machine: str | None = None) -> Path | None:
    """The library with all kernels in an installed wheel, if one was made of these sources. None also where the
    environment asks for flags of its own."""
    if any(name in os.environ for name in (LINE_INFO, *_VARIABLES)):
        return None
    return prebuilt_library(packaged_name(arch, machine or platform.machine()))


def packaged_name(arch: str, machine: str) -> str:
    """The file of the library with all kernels in a wheel, by the content of its sources; compilers do not count."""
    headers = generated_headers(all_groups())
    texts = {name: text for source in sources_of(arch) for name, text in _with_headers(source, headers).items()}
    digest = _digest(*_FLAGS, repr(SOURCE_FLAGS), *(part for item in sorted(texts.items()) for part in item))
    return f"libtrt_nvfp4-{arch}-{machine}-{digest}.so"


def check_cache(build: Build) -> None:
    """Raises ToolchainError where build_library could keep no library, and the cache has none for this architecture."""
    with place_of(build.name) as library:
        others = library.parent.glob(f"libtrt_nvfp4-{build.arch}-{build.toolchain.machine}-*.so")
        if not any(map(is_whole, others)):
            with TemporaryFile(dir=library.parent):
                pass


def find_build(arch: str, *, groups: Collection[str] | None = None, machine: str | None = None) -> Build:
    """How build_library builds. Raises ToolchainError when no compiler is found."""
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch) is None:
        raise ToolchainError(f"{arch!r} is no GPU architecture; expected sm_80, sm_90a, sm_120a or the like")
    number = arch[3:].rstrip("af")
    if number in _FAMILIES and not arch.endswith("a"):
        raise ToolchainError(
            f"{arch} is without the instructions that the kernels for this GPU are made of; name sm_{number}a"
        )
    linked = all_groups() if groups is None else frozenset(groups)
    toolchain = find_nvcc(machine)
    headers = _tensorrt_headers(toolchain.machine)
    ptx = next((ptx for ptx, family in FAMILY_PTX.items() if arch in family), arch.replace("sm", "compute"))
    flags = [*_FLAGS, *_headers_flags(headers), *architecture_flags(arch), f"-gencode=arch={ptx},code=[{arch}]"]
    if LINE_INFO in os.environ:
        flags.append("-lineinfo")
    return Build(arch, toolchain, tuple(sources_of(arch, linked)), tuple(flags), headers, linked)


def generated_headers(groups: Collection[str]) -> dict[str, str]:
    """Headers that are written when the sources of a library are compiled."""
    return {
        op_header.NAME: op_header.op_header(),
        op_header.LINKED: op_header.linked_header(ops_of(groups), groups),
    }


def architecture_flags(arch: str) -> list[str]:
    """The compiler flags that this choice of GPU needs. Raises ToolchainError when CUTLASS is needed and not found."""
    number = re.sub(r"\D", "", arch)
    flags = ["-DTRT_NVFP4_SM89"] if number in _MMA_FP8_ARCHITECTURES else []
    if (family := _FAMILIES.get(number)) is not None:
        include, version = find_cutlass()
        # The version is in a macro so that it counts in the cache's key.
        flags += [f"-DTRT_NVFP4_{family.upper()}", f"-DTRT_NVFP4_CUTLASS={version}", "--expt-relaxed-constexpr"]
        if number in _WITHOUT_PAIRS:
            flags.append("-DTRT_NVFP4_WITHOUT_PAIRS")
        flags.append(f"-isystem={include}")
    return flags


def sources_of(arch: str, groups: Collection[str] | None = None) -> list[Path]:
    """Sources of the library for ``arch`` with these groups (None: all)."""
    number = re.sub(r"\D", "", arch)
    family = _FAMILIES.get(number)
    families = {"sm80", family} | ({"sm89"} if number in _MMA_FP8_ARCHITECTURES else set())
    linked = [group for group in GROUPS if groups is None or group.name in groups]
    patterns = [*CORE, *(pattern for group in linked for pattern in group.sources)]
    sources = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})

    def is_of(source: Path) -> bool:
        of_family = re.match(r"sm\d+(?=_)", source.name)
        return of_family is None or of_family[0] in families

    # Those of newer families, on CUTLASS, last.
    return sorted(filter(is_of, sources), key=lambda source: source.name.startswith(f"{family}_"))


def build_host() -> Path:
    """The plugin host (see host.py), built by the C++ compiler without nvcc.

    Raises ToolchainError when no compiler is found or the compilation fails.
    """
    compiler = find_host_compiler(platform.machine())
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    source = ROOT / "plugin_host" / "plugin_host.cpp"

    def build(library: Path) -> None:
        with building(library) as temporary:
            linked = temporary / library.name
            Compilers().run([compiler, *flags, source, "-o", linked, "-ldl"])
            keep(linked, library)

    texts = [text for name, text in sorted(_with_headers(source, {}).items()) for text in (name, text)]
    return cached(f"libplugin_host-{platform.machine()}-{_digest(host_version(compiler), *flags, *texts)}.so", build)


def resource_report(file: Path) -> str:
    """ptxas's report (registers, shared memory, spills per kernel) of a library or an object in the cache."""
    return file.with_suffix(".ptxas.txt").read_text()


def kept_ptx(file: Path) -> str:
    """The PTX of an object in the cache, which itself holds only machine code."""
    return gzip.decompress(file.with_suffix(".ptx.gz").read_bytes()).decode()


def _with_headers(source: Path, generated: dict[str, str]) -> dict[str, str]:
    """Texts of a source and of all headers in quotes that it includes, directly or not, by name; paths are relative, so
    that a moved checkout finds its objects again."""
    texts: dict[str, str] = {}
    left = [source.resolve()]
    while left:
        path = left.pop()
        name = os.path.relpath(path, ROOT.resolve())
        if name in texts:
            continue
        texts[name] = path.read_text()
        for included in _INCLUDE.findall(texts[name]):
            if included in generated:
                texts[included] = generated[included]
                continue
            folders = (path.parent, ROOT / "kernels", ROOT / "adapters")
            left += [found.resolve() for folder in folders if (found := folder / included).is_file()][:1]
    return texts


def _tensorrt_headers(machine: str) -> Path | None:
    """The folder of TensorRT's own headers where the user has them; None: the project's declaration of them serves.

    Raises ToolchainError for a named folder without headers, or with those of a TensorRT that is too old; the system's
    are then not used.
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


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
