"""Thread-value layouts printed by CuTe itself: the independent reference for fragment and descriptor layouts."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

PROGRAM = """
#include <cute/tensor.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/float8.h>
#include <cutlass/float_subbyte.h>
#include <cstdio>
using namespace cute;
template <class L>
void show(const char* name, L layout) {
    auto columns = size(layout) / size<0>(layout);
    printf("@%s %d %d", name, int(size<0>(layout)), int(columns));
    for (int t = 0; t < size<0>(layout); ++t)
        for (int v = 0; v < columns; ++v) printf(" %ld", long(layout(t + v * size<0>(layout))));
    printf("\\n");
}
int main() {
@BODY@
}
"""


def include_directories() -> list[Path]:
    """CUTLASS and CUDA headers of the installed packages; skips the test where they are missing."""
    cutlass = pytest.importorskip("cutlass_library", reason="needs the nvidia-cutlass package")
    nvidia = pytest.importorskip("nvidia.cu13", reason="needs the CUDA 13 compiler packages")
    cuda = Path(nvidia.__path__[0]) / "include"
    source = Path(cutlass.__file__).parent / "source"
    return [source / "include", source / "tools" / "util" / "include", cuda, cuda / "cccl"]


def layouts(body: str, directory: Path) -> dict[str, NDArray[np.int64]]:
    """Run statements such as `show("a", Layout{});` on the host.

    Returns name -> int64 [size of mode 0, size of the rest]: the layout's value at each coordinate.
    """
    source = directory / "layouts.cpp"
    source.write_text(PROGRAM.replace("@BODY@", body))
    binary = directory / "layouts"
    includes = [f"-I{path}" for path in include_directories()]
    subprocess.run(["g++", "-w", "-std=c++17", "-O0", *includes, str(source), "-o", str(binary)], check=True)
    output = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    result = {}
    for line in output.splitlines():
        if not line.startswith("@"):  # CuTe prints a warning where it takes a shared-memory address on the host
            continue
        name, rows, columns, *values = line[1:].split()
        result[name] = np.array(values, dtype=np.int64).reshape(int(rows), int(columns))
    return result
