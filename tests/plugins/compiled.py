"""The library's sources, compiled once per architecture for all tests: machine code as build_library makes it, and
beside it the PTX that the emulator runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from trt_nvfp4.plugins.library import Build, cached, find_build
from trt_nvfp4.plugins.toolchain import ToolchainError


@dataclass(frozen=True)
class Compiled:
    """Objects of one architecture, and ptxas's report on them."""

    build: Build
    objects: list[Path]
    report: str

    def sass(self, source: str) -> str:
        """The machine code of the sources of this name, a glob pattern."""
        found = [path for path in self.objects if path.match(f"*-{source}.o")]
        assert found, source
        command = [find_cuobjdump(), "-sass"]
        return "".join(
            subprocess.run([*command, path], capture_output=True, text=True, check=True).stdout for path in found
        )


@cache
def compiled(arch: str) -> Compiled:
    """Skips the test where there is no compiler. Raises ToolchainError when the compilation fails."""
    try:
        build = find_build(arch, ptx=True)
    except ToolchainError as error:
        if "no CUDA compiler found" in str(error):
            pytest.skip(str(error))
        raise

    def make(report: Path) -> None:
        # One at a time: each takes all cores, and CUTLASS takes gigabytes on every one.
        lock = FileLock(report.parent.parent / "compiled.lock")
        with lock, tempfile.TemporaryDirectory(dir=report.parent) as temporary:
            objects, text = build.compile(Path(temporary))
            for path in objects:
                os.replace(path, report.parent / path.name)
            written = Path(temporary) / report.name
            written.write_text(text)
            # Last: where the report is, the objects are.
            os.replace(written, report)

    report = cached(f"{build.name}.objects/ptxas.txt", make)
    return Compiled(build, sorted(report.parent.glob("*.o")), report.read_text())


def find_cuobjdump() -> str:
    spec = find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec else []
    packaged = [str(Path(root) / "cu13" / "bin") for root in roots]
    if found := shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(packaged)):
        return found
    pytest.skip("no cuobjdump: put a CUDA toolkit on PATH or install nvidia-cuda-cuobjdump")
