"""Few-token speed of the W4A16 plugins against BF16, FP8, humming-kernels and torch's int4, with results checked.

    python -m benchmarks.kernels.decode [--only stack|linear] [--tokens 1 8 16] [--out FILE]

Needs a GPU; humming-kernels is left out, and reported as missing, where it is not installed.
"""

import argparse
import importlib.util
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.contestants import (
    Weight,
    dense_stack,
    fp8_stack,
    humming_linear,
    humming_stack,
    in_turn,
    int4_linear,
    plugin_layers,
    plugin_linear,
    plugin_stack,
)
from benchmarks.harness import environment, plugin_host, read_bandwidth, record, relative_error, shown
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.host import PluginHost

HERE = Path(__file__).resolve().parents[1]
BYTES_PER_WEIGHT = 0.5 + 1 / 16
HAS_HUMMING = importlib.util.find_spec("humming") is not None
#: Weights of a linear rotate through this many bytes: several times any L2.
COLD_BYTES = 512 << 20
#: Calls of a stack that a replay holds, so that the replay's own start, 4 to 11 us, is not taken for the stack's time.
STACK_CALLS = 4


def stack_reference(x: torch.Tensor, ups: list[Weight], downs: list[Weight]) -> torch.Tensor:
    """float64 arithmetic, rounded where the op rounds."""
    for up, down in zip(ups, downs, strict=True):
        both = x.double() @ up.exact().T + up.bias.to(x.dtype).double()
        hidden = functional.gelu(both[:, 0::2], approximate="tanh") * both[:, 1::2]
        x = (hidden.to(x.dtype).double() @ down.exact().T + down.bias.to(x.dtype).double()).to(x.dtype)
    return x


def bench_stack(
    host: PluginHost, spec: dict[str, Any], tokens: list[int], rounds: int, bandwidth: float
) -> list[dict[str, Any]]:
    """The reference stack at each number of tokens."""
    hidden, intermediate = spec["hidden"], spec["intermediate"]
    ups = [Weight.random(2 * intermediate, hidden, torch.bfloat16) for _ in range(spec["layers"])]
    downs = [Weight.random(hidden, intermediate, torch.bfloat16) for _ in range(spec["layers"])]
    weight_bytes = spec["layers"] * 3 * hidden * intermediate * BYTES_PER_WEIGHT
    results = []
    for m in tokens:
        x = torch.randn(m, hidden, device="cuda").bfloat16()
        contestants: dict[str, Work] = {}
        errors = {}
        for name, dtype in (("nvfp4 persistent fp16", torch.float16), ("nvfp4 persistent bf16", torch.bfloat16)):
            contestants[name], y = plugin_stack(host, x.to(dtype), ups, downs)
            contestants[name]()
            errors[name] = relative_error(y, stack_reference(x.to(dtype), ups, downs))
        contestants["nvfp4 layer by layer bf16"], _ = plugin_layers(host, x, ups, downs)
        contestants["bf16"] = dense_stack(x, ups, downs)
        # What autotuning picks is at times a third slower than cuBLAS, which the default takes.
        contestants["bf16 autotuned"] = dense_stack(x, ups, downs, "max-autotune-no-cudagraphs")
        contestants["fp8"] = fp8_stack(x, ups, downs)
        if HAS_HUMMING:
            contestants["humming"] = humming_stack(x, ups, downs)
        replays = {name: in_turn([call] * STACK_CALLS) for name, call in contestants.items()}
        timings = interleave(CudaDevice(), replays, rounds, calls=dict.fromkeys(replays, STACK_CALLS))
        case = {"stack": spec["layers"], "m": m, "calls": STACK_CALLS}
        results.append(report(case, timings, errors, weight_bytes, bandwidth))
        del contestants, replays
        torch.compiler.reset()  # which compiles eight versions of a function at most
        torch.cuda.empty_cache()
    return results


def bench_linear(host: PluginHost, m: int, n: int, k: int, rounds: int, bandwidth: float) -> dict[str, Any]:
    """One linear over rotating weights."""
    weight_bytes = n * k * BYTES_PER_WEIGHT
    copies = max(2, round(COLD_BYTES / weight_bytes))
    x = torch.randn(m, k, device="cuda").bfloat16()
    contestants: dict[str, Work] = {}
    errors = {}
    weights = [Weight.random(n, k, torch.bfloat16) for _ in range(copies)]
    for name, dtype in (("nvfp4 fp16", torch.float16), ("nvfp4 bf16", torch.bfloat16)):
        activations = x.to(dtype)
        pairs = [plugin_linear(host, activations, weight) for weight in weights]
        contestants[name] = in_turn([call for call, _ in pairs])
        contestants[name]()
        errors[name] = relative_error(
            pairs[0][1], x.to(dtype).double() @ weights[0].exact().T + weights[0].bias.double()
        )
    contestants["bf16"] = in_turn([partial(functional.linear, x, w.dense) for w in weights])
    contestants["int4"] = in_turn([int4_linear(x, w.dense) for w in weights])
    if HAS_HUMMING:
        contestants["humming"] = in_turn([partial(humming_linear(x, w.dense), x) for w in weights])
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, copies))
    return report({"m": m, "n": n, "k": k}, timings, errors, weight_bytes, bandwidth)


def report(
    case: dict[str, Any], timings: dict[str, Any], errors: dict[str, float], weight_bytes: float, bandwidth: float
) -> dict[str, Any]:
    """Prints a case and returns it. The fraction counts weights and scales once; a wrong result stops the run."""
    print(" ".join(f"{key}={value}" for key, value in case.items()), flush=True)
    fractions = {}
    for name, timing in timings.items():
        line = shown(name, timing)
        if name.startswith("nvfp4"):
            fractions[name] = weight_bytes / timing.median_us * 1e6 / bandwidth
            line += f"  {fractions[name]:6.1%} of bandwidth"
        if name in errors:
            line += f"  relative error {errors[name]:.1e}"
        print(line, flush=True)
    for name, error in errors.items():
        # Layers amplify the odd rounding that falls the other way.
        tolerance = (2e-3 if "fp16" in name else 1e-2) * case.get("stack", 1) ** 0.5
        if not error < tolerance:
            raise SystemExit(f"{name} is wrong: relative error {error:.2e}, at most {tolerance:.0e} is expected")
    return {
        **case,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "relative_errors": errors,
        "bandwidth_fractions": fractions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["stack", "linear"], help="one half of the benchmark")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="of the stack")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "decode.json")
    arguments = parser.parse_args()

    workloads = json.loads((HERE / "workloads.json").read_text())
    host = plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s" + ("" if HAS_HUMMING else "; humming-kernels is not installed"))
    result: dict[str, Any] = {"environment": environment(), "read_bandwidth": bandwidth}
    if arguments.only != "linear":
        result["stack"] = bench_stack(host, workloads["mlp_stack"], arguments.tokens, arguments.rounds, bandwidth)
        torch.cuda.empty_cache()
    if arguments.only != "stack":
        shapes = [shape for shape in workloads["linear"]["shapes"] if shape[0] <= 64]
        shapes += [(16, n, k) for m, n, k in shapes if m == 1 and (16, n, k) not in map(tuple, shapes)]
        result["linear"] = [bench_linear(host, *shape, arguments.rounds, bandwidth) for shape in shapes]
    record(arguments.out, result)


if __name__ == "__main__":
    main()
