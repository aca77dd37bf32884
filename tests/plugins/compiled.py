"""The library's objects, as build_library makes and keeps them, for tests of their machine code and PTX."""

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from trt_nvfp4.plugins.compile.library import Build, find_build, kept_ptx, resource_report
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_nvcc

THOR, THOR_MACHINE = "sm_110a", "aarch64"


@dataclass(frozen=True)
class Compiled:
    """Objects, and ptxas's report on them."""

    build: Build
    objects: dict[Path, Path]  # by source
    report: str

    def sass(self, source: str) -> str:
        """The machine code of the sources of this name, a glob pattern."""
        command = [find_cuobjdump(), "-sass"]
        return "".join(
            subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout
            for path in self.find(source)
        )

    def ptx(self, source: str) -> str:
        return "".join(map(kept_ptx, self.find(source)))

    def find(self, source: str) -> list[Path]:
        found = [made for path, made in self.objects.items() if path.match(source)]
        assert found, source
        return found


@cache
def compiled(arch: str) -> Compiled:
    """Thor's for the machine that it is part of, where its cross compiler is here.

    Skips the test where there is no compiler. Raises ToolchainError when the compilation fails.
    """
    try:
        build = find_build(arch, machine=THOR_MACHINE if arch == THOR and can_cross_compile() else None)
    except ToolchainError as error:
        if "no CUDA compiler found" in str(error):
            pytest.skip(str(error))
        raise
    objects = build.objects()
    return Compiled(build, objects, "".join(map(resource_report, objects.values())))


@cache
def can_cross_compile() -> bool:
    try:
        find_nvcc(THOR_MACHINE)
    except ToolchainError:
        return False
    return True


def find_cuobjdump() -> str:
    spec = find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    packaged = [str(Path(root) / "cu13" / "bin") for root in roots]
    if found := shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(packaged)):
        return found
    pytest.skip("no cuobjdump: put a CUDA toolkit on PATH or install nvidia-cuda-cuobjdump")
