"""Which kernels serve a linear fastest at which number of tokens, beside what AUTO takes: the measurement behind
plugins/kernels/heuristics/tactics.h.

    python benchmarks/crossovers.py [--w4a4] [--tokens 1 16 17 ...] [--out benchmarks/results/crossovers.json]

Needs a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contestants import Weight, Work
from harness import environment, record

from trt_nvfp4.builder.timing import CudaDevice, interleave
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.library import build_library

HERE = Path(__file__).resolve().parent
SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192)]
TOKENS = [1, 8, 16, 17, 24, 32, 48, 64, 65, 96, 128, 129, 256, 512, 968]
TACTICS = {
    0: "auto",
    1: "generic",
    2: "w4a16",
    6: "w4a16 by mma.sync",
    8: "w4a16 of SM90",
    3: "w4a4",
    4: "w4a4 by pairs",
    7: "w4a4 unsplit",
}
#: Weights rotate through this many bytes: several times any L2.
COLD_BYTES = 512 << 20


def contestants(host: PluginHost, m: int, weights: list[Weight], w4a4: bool) -> dict[str, Work]:
    """Every tactic that serves the call, over all weights in turn. The generic kernels at three token counts only."""
    n, k = weights[0].dense.shape
    x, y = torch.randn(m, k, device="cuda").half(), torch.empty(m, n, device="cuda", dtype=torch.float16)
    found: dict[str, Work] = {}
    for tactic, name in TACTICS.items():
        if tactic == 1 and m not in (1, 65, 968):
            continue
        calls = []
        try:
            for weight in weights:
                inputs = [x, weight.packed, weight.block_scales, weight.tensor_scale, weight.bias.half()]
                inputs.append(torch.zeros((), device="cuda"))
                session = host.session("NVFP4Linear", inputs, {"quantize_activations": int(w4a4)}, tactic=tactic)
                workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
                session.enqueue(inputs, [y], workspace)
                calls.append(lambda s=session, i=inputs, w=workspace: s.enqueue(i, [y], w))
        except HostError as error:
            if "cannot serve this call" not in str(error):
                raise
            continue
        found[name] = lambda calls=calls: [call() for call in calls]  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--w4a4", action="store_true", help="quantized activations instead of 16-bit ones")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "crossovers.json")
    arguments = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    host = PluginHost(build_library(f"sm_{major}{minor}" + ("a" if major >= 9 else "")))
    torch.manual_seed(0)
    cases: list[dict[str, Any]] = []
    for n, k in SHAPES:
        copies = max(2, COLD_BYTES // (n * k * 9 // 16))
        weights = [Weight.random(n, k, torch.float16) for _ in range(copies)]
        for m in arguments.tokens:
            works = contestants(host, m, weights, arguments.w4a4)
            timings = interleave(CudaDevice(), works, arguments.rounds, calls=dict.fromkeys(works, copies))
            times = ", ".join(f"{name} {timing.median_us:.2f}" for name, timing in timings.items())
            print(f"{m} x {n} x {k}: {times} us", flush=True)
            cases.append({"m": m, "n": n, "k": k, "timings": {name: asdict(t) for name, t in timings.items()}})
    record(arguments.out, {"environment": environment(), "linear": cases})


if __name__ == "__main__":
    main()
