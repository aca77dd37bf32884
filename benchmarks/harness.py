"""What the benchmarks share: plugins and read bandwidth of this GPU, errors, what a recorded run names, its file."""

import ctypes
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, interleave
from trt_nvfp4.builder.targets import arch_of
from trt_nvfp4.common import metrics
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.compile.toolchain import find_nvcc
from trt_nvfp4.plugins.host import PluginHost

HERE = Path(__file__).resolve().parent


def plugin_host() -> PluginHost:
    """The plugins, built for this GPU."""
    return PluginHost(build_library(arch_of(torch.cuda.get_device_capability())))


def read_bandwidth() -> float:
    """Bytes per second at which this GPU streams 4 GiB from its memory."""
    source = HERE / "kernels" / "read_bandwidth.cu"
    arch = arch_of(torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_bandwidth.so"
        toolchain = find_nvcc()
        subprocess.run(
            [toolchain.nvcc, "-O3", "-shared", "-Xcompiler=-fPIC", f"-arch={arch}", "-o", library, source],
            check=True,
        )
        read_all = ctypes.CDLL(str(library)).readAll
    data = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count

    def work() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), ctypes.c_void_p(out.data_ptr())
        if status := read_all(*pointers, blocks, stream):
            raise RuntimeError(f"read_bandwidth: CUDA error {status}")

    timing = interleave(CudaDevice(), {"read": work}, rounds=15)["read"]
    return data.numel() / timing.median_us * 1e6


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """||y - reference|| / ||reference||, in float64."""
    return metrics.relative_error(found=[y.double().cpu().numpy()], expected=[reference.double().cpu().numpy()])


def shown(name: str, timing: Timing) -> str:
    """A contestant's microseconds with their quartiles, to be printed."""
    return f"  {name:28s} {timing.median_us:9.2f} us [{timing.lower_quartile_us:.2f}, {timing.upper_quartile_us:.2f}]"


def command() -> str:
    """The command of this run, without the paths of its record and its models."""
    module = sys.modules["__main__"].__spec__
    words = " ".join(["python", *(["-m", module.name] if module else sys.argv[:1]), *sys.argv[1:]])
    return re.sub(r" --(out|models)[ =]\S+", "", words)


def environment() -> dict[str, Any]:
    """What a reader needs to run it again."""
    return {
        **CudaDevice().environment(),
        "torch": torch.__version__,
        "nvcc": find_nvcc().version,
        "command": command(),
    }


def record(path: Path, result: dict[str, Any]) -> None:
    """Writes a run's result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
