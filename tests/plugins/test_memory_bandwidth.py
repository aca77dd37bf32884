"""Memory's bandwidth, by a driver that counts what it is asked (memory_bandwidth_probe.cpp)."""

import subprocess
from pathlib import Path

from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import find_nvcc


def test_is_found_once_for_a_gpu(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    sources = [Path(__file__).with_name("memory_bandwidth_probe.cpp"), ROOT / "kernels" / "api" / "error.cpp"]
    flags = [*nvcc.compile_flags(), "-cudart", "none", f"-I{ROOT}", f"-I{ROOT / 'kernels'}"]
    subprocess.run([nvcc.nvcc, *flags, *sources, "-o", tmp_path / "probe"], check=True)

    devices = [0, 0, 3, 0, 3, 70, 70, 9, 9]
    printed = subprocess.run(
        [tmp_path / "probe"], input=" ".join(map(str, devices)), capture_output=True, text=True, check=True
    ).stdout

    found = [line.split() for line in printed.splitlines()]
    # Two bits a clock; those beyond the devices remembered are asked for again, one not known is not.
    assert [float(bandwidth) for bandwidth, _ in found] == [0.25, 0.25, 1.0, 0.25, 1.0, 17.75, 17.75, 0.0, 0.0]
    assert [int(asked) for _, asked in found] == [2, 2, 4, 4, 4, 6, 8, 10, 10]
