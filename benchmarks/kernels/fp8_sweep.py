"""Times FP8GatedMLP's two GEMMs on Hopper under many tiles, clusters and splits of K, with results checked.

    python -m benchmarks.kernels.fp8_sweep [--tokens 64 256 968] [--out benchmarks/results/kernels/fp8_sweep.json]

Needs a Hopper GPU, nvcc and CUTLASS. What is fastest belongs into plugins/kernels/heuristics/fp8.h.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import environment, record, relative_error
from benchmarks.kernels.fp8_mlp import Fp8Weight
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, interleave
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import find_cutlass, find_nvcc
from trt_nvfp4.plugins.ops.number_formats import E4M3_MAX, e4m3_round

HERE = Path(__file__).resolve().parents[1]
SPLITS = (1, 2, 4, 8)
#: Weights in turn, so that none is found in L2.
COPIES = 6


@dataclass(frozen=True)
class Config:
    """Rows and columns of a tile and of a cluster, and the warps that share a tile: 4, or 8 on one tile together."""

    rows: int
    columns: int
    cluster_rows: int = 1
    cluster_columns: int = 1
    warps: int = 4

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} cluster {self.cluster_rows}x{self.cluster_columns} warps {self.warps}"


def configs() -> list[Config]:
    clusters = ((1, 1), (2, 1), (1, 2))
    pingpong = [Config(*tile, *c) for tile in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128)) for c in clusters]
    shared = [Config(*tile, *c, 8) for tile in ((128, 256), (256, 128)) for c in (*clusters, (2, 2))]
    return [*pingpong, *shared, Config(128, 128, 4, 1), Config(128, 128, 2, 2)]


def compile_gemm(config: Config, output: str, folder: Path) -> Any:
    """The C function fp8_gemm of fp8_configs.cu, or None where the tile does not compile."""
    toolchain = find_nvcc()
    include, _ = find_cutlass()
    numbers = ",".join(str(value) for value in asdict(config).values())
    library = folder / f"{output}_{numbers.replace(',', '_')}.so"
    command = [
        toolchain.nvcc,
        *toolchain.compile_flags(),
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-shared",
        "-Xcompiler=-fPIC",
    ]
    command += [
        "--expt-relaxed-constexpr",
        f"-I{ROOT / 'kernels'}",
        f"-isystem={include}",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    command += [f"-DCONFIG={numbers}".replace(",", r"\,"), f"-DOUTPUT=trt_nvfp4::{output}", *toolchain.link_flags()]
    command += ["-o", library, HERE / "kernels" / "fp8_configs.cu", ROOT / "kernels" / "api" / "error.cpp", "-lcuda"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        print(f"{output} {config}: does not compile\n{result.stderr[-400:]}")
        return None
    return ctypes.CDLL(str(library)).fp8_gemm


def sweep(gemms: dict[Config, Any], m: int, weights: list[Fp8Weight], gated: bool, rounds: int) -> dict[str, Timing]:
    n, k = weights[0].values.shape
    a_scale = torch.full((), 4 / E4M3_MAX, device="cuda")
    # In room for whole tiles, as the GEMM wants them.
    a = e4m3_round(torch.randn((m + 255) // 256 * 256, k, device="cuda") / a_scale)[:m]
    checked = weights[-1]  # what the last call of several leaves
    sums = a.float() @ checked.values.float().T * (a_scale * checked.scale) + checked.bias.float()
    hidden_scale = torch.full((), 16 / E4M3_MAX, device="cuda")
    expected = sums
    if gated:
        hidden = functional.gelu(sums[:, 0::2], approximate="tanh") * sums[:, 1::2]
        expected = e4m3_round(hidden / hidden_scale).float()
    out = torch.empty_like(expected, dtype=torch.float8_e4m3fn if gated else torch.bfloat16)
    partials = torch.empty(0 if gated else max(SPLITS) * (m + 256) * (n + 256), device="cuda")
    arrivals = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")

    def call(gemm: Any, splits: int) -> None:
        for weight in weights:
            if splits > 1:
                arrivals.zero_()  # counts against splits, a few microseconds; the quantizer does it in the product
            tensors = (a, a_scale, weight.values, weight.scale, weight.bias, hidden_scale, out, partials, arrivals)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = gemm(m, n, k, splits, *(ctypes.c_void_p(t.data_ptr()) for t in tensors), stream)
            if status != 0:
                raise RuntimeError(f"status {status}")

    works = {}
    for (config, gemm), splits in itertools.product(gemms.items(), (1,) if gated else SPLITS):
        name = f"{config} splits {splits}"
        call(gemm, splits)
        error = relative_error(out.float(), expected)
        if not error < 2e-2:
            raise SystemExit(f"{name}: relative error {error}")
        works[name] = lambda gemm=gemm, splits=splits: call(gemm, splits)
    return interleave(CudaDevice(), works, rounds, calls=dict.fromkeys(works, len(weights)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 968])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "fp8_sweep.json")
    arguments = parser.parse_args()

    spec = json.loads((HERE / "workloads.json").read_text())["mlp_stack"]
    hidden, intermediate = spec["hidden"], spec["intermediate"]
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = {
            output: {config: pool.submit(compile_gemm, config, output, Path(folder)) for config in configs()}
            for output in ("Fp8GatedOutput", "Fp8DenseOutput")
        }
        compiled = {
            output: {config: job.result() for config, job in of.items() if job.result() is not None}
            for output, of in jobs.items()
        }
        for output, n, k in (("Fp8GatedOutput", 2 * intermediate, hidden), ("Fp8DenseOutput", hidden, intermediate)):
            weights = [Fp8Weight.random(n, k) for _ in range(COPIES)]
            for m in arguments.tokens:
                timings = sweep(compiled[output], m, weights, output == "Fp8GatedOutput", arguments.rounds)
                ranked = sorted(timings.items(), key=lambda item: item[1].median_us)
                result[f"{output} {m}"] = {name: timing.median_us for name, timing in ranked}
                print(output, m, *(f"\n    {timing.median_us:7.1f} us  {name}" for name, timing in ranked[:6]))
    record(arguments.out, result)


if __name__ == "__main__":
    main()
