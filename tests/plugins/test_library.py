"""What the build leaves: exports, dependencies, no spills, a cache that is never half written."""

import errno
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from compiled import compiled
from filelock import FileLock

from trt_nvfp4.plugins.compile import cache
from trt_nvfp4.plugins.compile import library as plugin_library
from trt_nvfp4.plugins.compile.compiler import Compilers
from trt_nvfp4.plugins.compile.library import (
    build_host,
    build_library,
    check_cache,
    find_build,
    kept_ptx,
    resource_report,
)
from trt_nvfp4.plugins.compile.toolchain import Toolchain, ToolchainError, cache_dir, find_cutlass, find_nvcc

#: One of each family with one PTX.
ARCHITECTURES = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_110a", "sm_120a"]
EXPORTS = {"getCreators", "setLoggerFinder", "trtNvfp4LastError", "trtNvfp4LinkedKernels"}


@pytest.fixture(scope="module")
def installed_compiler() -> None:
    try:
        find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))


needs_compiler = pytest.mark.usefixtures("installed_compiler")


def symbols(library: Path, *, defined: bool) -> set[str]:
    """Dynamic symbols but the undefined weak ones, which nothing has to define. readelf reads every machine's."""
    command = ["readelf", "--wide", "--dyn-syms", library]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^ *\d+: \w+ +\w+ \w+ +(\w+) +\w+ +(\w+) (\S+)", output, re.MULTILINE)
    assert rows, "readelf printed nothing"
    bindings = ("GLOBAL", "WEAK") if defined else ("GLOBAL",)
    return {name for binding, section, name in rows if binding in bindings and (section != "UND") == defined}


def test_exports(library: Path) -> None:
    assert symbols(library, defined=True) == EXPORTS


def test_no_undefined_tensorrt_symbol(library: Path) -> None:
    undefined = symbols(library, defined=False)
    assert undefined
    # Whatever is undefined is the C and C++ runtimes', by their version tags.
    assert {symbol for symbol in undefined if not re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", symbol)} == set()


def test_needs_only_the_system(library: Path) -> None:
    output = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(\w[\w+-]*)", output)
    assert needed
    assert set(needed) <= {"libc", "libm", "libdl", "librt", "libpthread", "libstdc++", "libgcc_s", "ld-linux-x86-64"}


def check_resources(report: str) -> None:
    found = re.findall(r"Function properties for (\S+)\n.* (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(found) > 10
    assert [kernel for kernel, *spilled in found if max(map(int, spilled)) > 0] == []


def test_no_spills(library: Path) -> None:
    check_resources(resource_report(library))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_compiles(arch: str, tmp_path: Path) -> None:
    sources = compiled(arch)
    check_resources(sources.report)
    library = tmp_path / "library.so"
    sources.build.link(sources.objects.values(), library)
    assert symbols(library, defined=True) == EXPORTS


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), plugin_library.FAMILY_PTX.values())
def test_a_family_has_one_ptx(one: str, other: str, tmp_path: Path) -> None:
    """So that what runs of one has run of both; the other's machine code spills no register either."""
    assert plugin_library.sources_of(one) == plugin_library.sources_of(other)
    assert [flag.replace(other, one) for flag in find_build(other).flags] == list(find_build(one).flags)
    reports = []
    for source, made in compiled(one).objects.items():
        if source.suffix == ".cu":
            (tmp_path / "kernels.ptx").write_text(kept_ptx(made))
            level = "-O2" if "-Xptxas=-O2" in plugin_library.SOURCE_FLAGS.get(source.name, []) else "-O3"
            ptxas = compiled(one).build.toolchain.nvcc.with_name("ptxas")
            command = [ptxas, f"-arch={other}", level, "-v", tmp_path / "kernels.ptx", "-o", tmp_path / "kernels.cubin"]
            reports.append(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    check_resources("".join(reports))


def test_second_build_is_a_cache_hit(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(compilers: Compilers, command: list[str | Path]) -> str:
        raise AssertionError(f"compiled again: {command}")

    monkeypatch.setattr(Compilers, "run", no_compiler)
    arch = re.search(r"sm_\d+[a-z]?", library.name)
    assert arch is not None
    assert build_library(arch[0]) == library


@pytest.fixture
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of one file that compiles in a second, at a path with a space, and an empty cache beside it."""
    root = tmp_path / "of a user" / "plugins"
    for folder in ("adapters", "kernels/api/dense"):
        (root / folder).mkdir(parents=True)
    (root / "adapters" / "op.cpp").write_text('#include "op.h"\nint one() { return ONE; }\n')
    (root / "adapters" / "op.h").write_text("#define ONE 1\n")
    shutil.copy(plugin_library.ROOT / "adapters" / "exports.map", root / "adapters")
    monkeypatch.setattr(plugin_library, "ROOT", root)
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "cache"))
    return root


def cached(tmp_path: Path) -> list[str]:
    """Files, and folders that builds go on in."""
    found = (tmp_path / "cache" / "plugins").rglob("*")
    return sorted(p.name for p in found if p.suffix != ".lock" and (p.is_file() or p.name.startswith(".build")))


@needs_compiler
def test_progress_counts_to_the_end(small_tree: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    library = build_library("sm_90a", progress=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(1, 2), (2, 2)]
    assert sorted(Path(name).suffix for name in cached(tmp_path)) == [".o", ".so", ".txt", ".txt"]
    assert library.name in cached(tmp_path)


@needs_compiler
@pytest.mark.parametrize("changed", ["op.cpp", "op.h"])
def test_a_changed_source_is_another_library(small_tree: Path, changed: str) -> None:
    """Of which only the objects that it is part of are compiled anew."""
    (small_tree / "adapters" / "plugin.cpp").write_text("int two() { return 2; }\n")
    before = build_library("sm_90a")
    file = small_tree / "adapters" / changed
    file.write_text(file.read_text().replace("ONE", "ONE + 1").replace("#define ONE + 1", "#define ONE 1 +"))
    steps: list[str] = []
    assert build_library("sm_90a", progress=lambda done, steps_, what: steps.append(what)) != before
    assert steps[:-1] == ["compiled op.cpp"]


@needs_compiler
@pytest.mark.parametrize("variable", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_flags_that_nvcc_reads_from_the_environment_make_another_library(
    small_tree: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = small_tree / "adapters" / "op.cpp"
    one.write_text('#ifdef AS_ASKED\nextern "C" int as_asked() { return 1; }\n#endif\n')
    (small_tree / "adapters" / "exports.map").write_text("{ global: as_asked; local: *; };\n")
    before = build_library("sm_90a")
    monkeypatch.setenv(variable, "-DAS_ASKED")
    after = build_library("sm_90a")
    assert b"as_asked" in after.read_bytes()
    assert after != before
    monkeypatch.delenv(variable)
    assert build_library("sm_90a") == before


@needs_compiler
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("this is no C++", r"op\.cpp"),
        ("#error No space left on device", "no space left in .*cache.* TRT_NVFP4_CACHE and TMPDIR"),
    ],
    ids=["an error", "no space"],
)
def test_a_failed_compilation_leaves_nothing(small_tree: Path, tmp_path: Path, source: str, message: str) -> None:
    (small_tree / "adapters" / "op.cpp").write_text(f"{source}\n")
    with pytest.raises(ToolchainError, match=message):
        build_library("sm_90a")
    assert cached(tmp_path) == []


@needs_compiler
def test_an_interrupted_build_leaves_nothing(small_tree: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_library("sm_90a", progress=interrupt)
    # What was compiled stays.
    assert [Path(name).suffix for name in cached(tmp_path)] == [".o", ".txt"]
    build_library("sm_90a")


KILLED = """
import os, signal, sys
from pathlib import Path
from trt_nvfp4.plugins.compile import compiler, library, toolchain

def run(compilers, command, *rest):
    Path(command[command.index("-o") + 1]).write_text("half an object")
    os.kill(os.getpid(), signal.SIGKILL)

compiler.Compilers.run, library.ROOT = run, Path(sys.argv[1])
library.find_nvcc = lambda machine: toolchain.Toolchain(Path("nvcc"), "13.0.0", Path("g++"), Path("/"), "x86_64")
library.find_cutlass = lambda: (Path("/"), "4.2")
library.build_library("sm_90a")
"""


def test_what_a_killed_build_left_is_removed_by_the_next(small_tree: Path, tmp_path: Path) -> None:
    """And not what belongs to a build that goes on."""
    killed = subprocess.run([sys.executable, "-c", KILLED, small_tree])
    assert killed.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "cache" / "plugins" / "objects").glob(".build-*")
    assert list(left.glob("*.o"))
    with FileLock(left.parent / "other.lock"):
        (left.parent / ".build-other").mkdir()
        cache.cached("objects/next.o", Path.touch)
        assert cached(tmp_path) == [".build-other", "next.o"]
    cache.cached("objects/another.o", Path.touch)
    assert cached(tmp_path) == ["another.o", "next.o"]


def test_what_another_users_killed_build_left_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that users share, each may open only his own locks."""

    def of_users(lock: Path, timeout: float = -1) -> FileLock:
        if lock.name == "libtheirs.lock":
            raise PermissionError(13, "Permission denied", str(lock))
        return FileLock(lock, timeout=timeout)

    monkeypatch.setattr(cache, "FileLock", of_users)
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "cache"))
    plugins = tmp_path / "cache" / "plugins"
    (plugins / ".build-libtheirs").mkdir(parents=True)
    (plugins / "libtheirs.lock").touch()
    cache.cached("libours.txt", Path.touch)
    assert cached(tmp_path) == [".build-libtheirs", "libours.txt"]


@pytest.mark.parametrize("ignored", [False, True], ids=["in the foreground", "in the background"])
def test_an_interrupted_build_ends_its_compilers(
    small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    """Not only nvcc, but also what it started, as ptxas: here `sleep`."""
    trap = "trap '' INT; " if ignored else ""
    started = tmp_path / "started"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{trap}echo $$ >> '{started}'\n'{tmp_path}/sleep for ever' 60\n")
    compiler.chmod(0o755)
    (tmp_path / "sleep for ever").symlink_to(shutil.which("sleep") or "")
    (small_tree / "adapters" / "plugin.cpp").write_text("")
    toolchain = Toolchain(compiler, "13.0.0", compiler, tmp_path, "x86_64")
    monkeypatch.setattr(plugin_library, "find_nvcc", lambda machine: toolchain)
    monkeypatch.setattr(plugin_library, "find_cutlass", lambda: (tmp_path, "4.2"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})

    def interrupt(jobs: object) -> None:
        while not started.exists() or len(started.read_text().split()) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("trt_nvfp4.plugins.compile.compiler.as_completed", interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_library("sm_90a")
    assert time.monotonic() - begun < 20
    ours = str(tmp_path / "sleep for ever")
    living = [process.info for process in psutil.process_iter(["cmdline", "status"])]
    assert [each for each in living if ours in (each["cmdline"] or []) and each["status"] != psutil.STATUS_ZOMBIE] == []
    assert cached(tmp_path) == []


@needs_compiler
def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path / "file"))
    for refused in (build_library, lambda arch: check_cache(find_build(arch))):
        with pytest.raises(ToolchainError, match="set TRT_NVFP4_CACHE"):
            refused("sm_90a")


@needs_compiler
def test_a_cache_with_the_library_need_not_be_writable(
    small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that an image brings."""

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(plugin_library, "TemporaryFile", refuse)  # root may write everywhere
    build = find_build("sm_90a")
    with pytest.raises(ToolchainError, match="set TRT_NVFP4_CACHE"):
        check_cache(build)
    library = build_library("sm_90a")
    check_cache(build)
    assert build_library("sm_90a") == library


@needs_compiler
def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run under a user of its own."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("TRT_NVFP4_CACHE", raising=False)
    with pytest.raises(ToolchainError, match=r"no home folder.* set TRT_NVFP4_CACHE"):
        build_library("sm_90a")


@pytest.mark.parametrize("variable", ["~/kept", "/kept"])
def test_cache_of_the_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands the ~ of a Dockerfile's ENV."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRT_NVFP4_CACHE", variable)
    assert cache_dir() == Path(variable.replace("~", str(tmp_path)))


@pytest.mark.parametrize("name", ["a.so", "a.o"])
@pytest.mark.parametrize("kept", [0, 20, 200, -1])
def test_a_library_that_lost_its_end_is_built_again(
    kept: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the power failed: what loads it would end by SIGBUS, and what links it, by the linker's text."""
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path))
    content = Path(sys.executable).resolve().read_bytes()
    builds: list[Path] = []

    def build(library: Path) -> None:
        builds.append(library)
        library.write_bytes(content)

    library = cache.cached(name, build)
    cache.cached(name, build)
    assert builds == [library]
    library.write_bytes(content[:kept])
    assert cache.cached(name, build) == library
    assert library.read_bytes() == content
    assert builds == [library, library]


def test_no_such_architecture() -> None:
    with pytest.raises(ToolchainError, match="'blackwell' is no GPU architecture"):
        build_library("blackwell")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100f", "sm_120"])
def test_architecture_without_its_generations_instructions(small_tree: Path, arch: str) -> None:
    """Its library would lack the kernels made for that GPU."""
    with pytest.raises(ToolchainError, match=rf"{arch} is without .*name {arch.rstrip('f')}a"):
        build_library(arch)


@needs_compiler
def test_architecture_unknown_to_nvcc(small_tree: Path) -> None:
    with pytest.raises(ToolchainError, match="sm_60"):
        build_library("sm_60")


def installed_compilers() -> list[Path]:
    on_path = shutil.which("nvcc")
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    packaged = [folder / "cu13" / "bin" / "nvcc" for folder in folders]
    return [*([Path(on_path)] if on_path else []), *(nvcc for nvcc in packaged if nvcc.is_file())]


@pytest.mark.parametrize("nvcc", installed_compilers(), ids=str)
def test_each_installed_compiler_links_device_code(
    small_tree: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA toolkit and the PyPI packages keep headers and runtime in different places."""
    kernel = "#include <cuda_bf16.h>\n__global__ void two(__nv_bfloat16* x) { *x = 2; }\n"
    launch = "void launch(__nv_bfloat16* x) { two<<<1, 1>>>(x); }\n"
    (small_tree / "kernels" / "api" / "dense" / "quantize.cu").write_text(kernel + launch)
    monkeypatch.setenv("TRT_NVFP4_NVCC", str(nvcc))
    library = build_library("sm_90a")
    assert "two" in resource_report(library)


@needs_compiler
def test_compilers_named_from_the_working_directory(
    small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link runs in another folder. A bare name is looked up on PATH, as CXX's is."""
    toolchain = find_nvcc()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(toolchain.nvcc.parent), prepend=":")
    monkeypatch.setenv("CXX", os.path.relpath(toolchain.host_compiler))
    for folder, nvcc in (("first", os.path.relpath(toolchain.nvcc)), ("second", "nvcc")):
        monkeypatch.setenv("TRT_NVFP4_NVCC", nvcc)
        monkeypatch.setenv("TRT_NVFP4_CACHE", folder)
        assert build_library("sm_90a").parent == tmp_path / folder / "plugins"


@needs_compiler
def test_the_plugin_host_is_of_one_machine_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be shared."""
    named: list[str] = []
    monkeypatch.setattr(plugin_library, "cached", lambda name, build: named.append(name) or tmp_path)
    build_host()
    monkeypatch.setattr(plugin_library, "host_version", lambda compiler: "g++ 99")
    build_host()
    assert len(set(named)) == 2
    assert all(platform.machine() in name for name in named)


@pytest.mark.parametrize("nvcc", installed_compilers(), ids=str)
def test_cmake_compiles_the_same_sources(nvcc: Path, tmp_path: Path) -> None:
    """For packaging, all architectures at once; build_library is what the tests compile."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("no cmake and ninja")
    try:
        include, _ = find_cutlass()
    except ToolchainError as error:
        pytest.skip(str(error))
    settings = [f"-DCUTLASS_DIR={include.parent}", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    command = ["cmake", "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *settings]
    result = subprocess.run(
        [*command, "-S", plugin_library.ROOT, "-B", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:]
    commands = {
        Path(entry["file"]).relative_to(plugin_library.ROOT): entry["command"]
        for entry in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    for arch in ARCHITECTURES:
        sources, flags = plugin_library.sources_of(arch), plugin_library.architecture_flags(arch)
        families = {flag for flag in flags if flag.startswith("-DTRT_NVFP4_SM")}
        for source in sources:
            found = commands[source.relative_to(plugin_library.ROOT)].split()
            assert source.suffix == ".cpp" or any(f"code=[{arch}]" in word for word in found), (source, arch)
            own = f"-DTRT_NVFP4_{source.name.split('_')[0].upper()}"
            assert (families & {own} or families) <= set(found), (source, arch)
    assert {Path(source) for source in commands} == {
        source.relative_to(plugin_library.ROOT) for arch in ARCHITECTURES for source in plugin_library.sources_of(arch)
    }


@needs_compiler
def test_clusters_stay_out_of_code_for_gpus_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library for all GPUs has them, as cmake's does, and code for the oldest."""
    families = [f"-DTRT_NVFP4_{family}" for family in ("SM89", "SM90", "SM100", "SM120")]
    build = find_build("sm_80")
    launcher = plugin_library.ROOT / "kernels" / "api" / "dense" / "w4a16_small.cu"
    monkeypatch.setenv("TRT_NVFP4_CACHE", str(tmp_path))
    replace(build, sources=(launcher,), flags=(*build.flags, *families)).objects()


def test_cmake_refuses_an_old_cutlass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cmake") is None or shutil.which("nvcc") is None:
        pytest.skip("no cmake and nvcc on PATH")
    command = ["cmake", "-S", plugin_library.ROOT, "-B", tmp_path / "build"]
    for version in ("3.9", "3.8"):  # the second in a build folder that knows the first
        root = tmp_path / f"cutlass-{version}"
        headers = root / "include" / "cutlass"
        headers.mkdir(parents=True)
        (headers / "cutlass.h").touch()
        major, minor = version.split(".")
        (headers / "version.h").write_text(f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n")
        monkeypatch.setenv("CUTLASS_DIR", str(root))
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode != 0
        assert f"is CUTLASS {version}, 4.2 or newer is needed: set CUTLASS_DIR" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["CMAKE_CUDA_ARCHITECTURES=89-real;120-real"], r"120-real is without the instructions .* name 120a"),
        (["CMAKE_CUDA_ARCHITECTURES=89;90a"], r"89 holds PTX, which newer GPUs would run .* name 89-real"),
        (["CMAKE_CUDA_ARCHITECTURES=90"], r"90 is without the instructions .* name 90a"),
        (["CMAKE_CUDA_ARCHITECTURES=native"], r"native is no architecture; name 80, 90a, 120a or the like"),
        (["CMAKE_CUDA_ARCHITECTURES=120a"], r"CUTLASS, .* was not found: set CUTLASS_DIR to a checkout"),
    ],
)
def test_cmake_says_what_it_needs(
    settings: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a library that silently lacks the kernels made for its GPU."""
    monkeypatch.delenv("CUTLASS_DIR", raising=False)
    if shutil.which("cmake") is None or shutil.which("nvcc") is None:
        pytest.skip("no cmake and nvcc on PATH")
    command = ["cmake", "-S", plugin_library.ROOT, "-B", tmp_path, *(f"-D{setting}" for setting in settings)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
