"""The library's sources, compiled once per architecture for all tests: machine code as build_library makes it, and
beside it the PTX that the emulator runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from trt_nvfp4.plugins.compile.library import Build, find_build
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_nvcc

THOR, THOR_MACHINE = "sm_110a", "aarch64"


@dataclass(frozen=True)
class Compiled:
    """Objects that hold the code of an architecture, and ptxas's report on that."""

    arch: str
    build: Build
    objects: list[Path]
    report: str

    def sass(self, source: str) -> str:
        """The machine code of the sources of this name, a glob pattern."""
        return self._dump("-sass", source)

    def ptx(self, source: str) -> str:
        return self._dump("-ptx", source)

    def _dump(self, what: str, source: str) -> str:
        found = [path for path in self.objects if path.match(f"*-{source}.o")]
        assert found, source
        command = [find_cuobjdump(), what, "-arch", self.arch]
        return "".join(
            subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout for path in found
        )


@cache
def compiled(arch: str) -> Compiled:
    """Thor's for the machine that it is part of, where its cross compiler is here.

    Skips the test where there is no compiler. Raises ToolchainError when the compilation fails.
    """
    try:
        build = find_build(arch, machine=THOR_MACHINE if arch == THOR and can_cross_compile() else None, keep=True)
    except ToolchainError as error:
        if "no CUDA compiler found" in str(error):
            pytest.skip(str(error))
        raise
    objects, report = build.compile_once()
    return Compiled(arch, build, objects, report_on(arch, report))


def report_on(arch: str, report: str) -> str:
    """A report without the kernels for other architectures."""
    heading = r"ptxas info +: Compiling entry function"
    parts = re.split(rf"^(?={heading})", report, flags=re.MULTILINE)
    return "".join(part for part in parts if not re.match(rf"{heading} \S+ for '(?!{arch}')", part))


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
