"""NVFP4Quantize (residual, RMSNorm and quantization in one pass) against the same under torch.compile.

    python -m benchmarks.kernels.quantize [--out benchmarks/results/kernels/quantize.json]
    python -m benchmarks.kernels.quantize --searches [--out benchmarks/results/kernels/quantize_searches.json]

The second form times the plugin alone, by `scale_search` and `residual_channels`.
Needs a GPU. The fraction counts x, residual, r, codes and scales once each, against the read bandwidth measured in
the run.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, plugin_host, read_bandwidth, record
from trt_nvfp4.builder.bench.timing import CudaDevice, interleave
from trt_nvfp4.plugins.host import PluginHost

HERE = Path(__file__).resolve().parents[1]
SHAPES = [(1, 2048), (64, 2048), (968, 2048), (8192, 8192), (131072, 2048)]
ATTRIBUTES: dict[str, int | float] = {"norm": 1, "add_residual": 1, "epsilon": 1e-5}
#: Inputs rotate through this many bytes: several times any L2.
COLD_BYTES = 512 << 20


def reference(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, tensor_scale: torch.Tensor, found: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, block scales row by row (not tiled, which is less work) and r."""
    r = x + residual
    inverse_rms = (r.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    blocks = (r.float() * inverse_rms * norm_weight.float()).to(x.dtype).float().view(len(x), -1, 16)
    scale = blocks.abs().amax() / 2688 if found else tensor_scale
    block_scales = (blocks.abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn)
    q = (blocks * (1 / scale / block_scales.float())).flatten(-2)
    a = q.abs()
    code = (
        (a > 0.25).byte()
        + (a >= 0.75)
        + (a > 1.25)
        + (a >= 1.75)
        + (a > 2.5)
        + (a >= 3.5)
        + (a > 5)
        + 8 * (q < 0).byte()
    )
    return code[..., 0::2] | code[..., 1::2] << 4, block_scales, r


def bench(host: PluginHost, m: int, k: int, scale: float, rounds: int, bandwidth: float) -> dict[str, Any]:
    """One shape; ``scale`` 0 has the tensor scale found at run time."""
    copies = max(2, min(64, COLD_BYTES // (m * k * 4)))
    compiled: Callable[..., Any] = torch.compile(reference)

    def inputs() -> list[torch.Tensor]:
        x, residual = (torch.randn(m, k, device="cuda").half() for _ in range(2))
        return [x, residual, torch.randn(k, device="cuda").half(), torch.tensor(scale, device="cuda")]

    sets = [inputs() for _ in range(copies)]
    with host.session("NVFP4Quantize", sets[0], ATTRIBUTES) as session:
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        types = (torch.int8, torch.int8, torch.float32, torch.float16)
        outputs = [
            torch.empty(s, dtype=t, device="cuda") for s, t in zip(session.output_shapes(sets[0]), types, strict=True)
        ]

        def plugin() -> None:
            for each in sets:
                session.enqueue(each, outputs, workspace)

        contestants = {"plugin": plugin, "torch.compile": lambda: [compiled(*each, scale == 0) for each in sets]}
        timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, copies))
        session.enqueue(sets[0], outputs, workspace)
        expected = compiled(*sets[0], scale == 0)
    agreeing = float((outputs[0] == expected[0].view(torch.int8)).float().mean())
    if agreeing < 0.98:  # the norm may round to T's other neighbour, which moves few codes
        raise SystemExit(f"only {agreeing:.1%} of the codes agree at {m}x{k}")
    fraction = m * k * (3 * 2 + 0.5 + 1 / 16) / timings["plugin"].median_us * 1e6 / bandwidth
    times = ", ".join(f"{name} {timing.median_us:.2f} us" for name, timing in timings.items())
    print(f"m={m} k={k} scale {'given' if scale else 'found'}: {times}; {fraction:.0%} of bandwidth", flush=True)
    return {
        "m": m,
        "k": k,
        "scale_given": scale != 0.0,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "bandwidth_fraction": fraction,
        "codes_agreeing": agreeing,
    }


def bench_searches(host: PluginHost, m: int, k: int, scale: float, rounds: int, bandwidth: float) -> dict[str, Any]:
    """One shape: block scales by amax, the best of two and the best of four, with residual channels and without."""
    copies = max(2, min(64, COLD_BYTES // (m * k * 4)))
    sets = [
        [
            *(torch.randn(m, k, device="cuda").half() for _ in range(2)),
            torch.ones(k, device="cuda").half(),
            torch.tensor(scale, device="cuda"),
        ]
        for _ in range(copies)
    ]
    with ExitStack() as stack:

        def contestant(scale_search: int, channels: int) -> Callable[[], None]:
            attributes = {**ATTRIBUTES, "scale_search": scale_search, "residual_channels": channels}
            session = stack.enter_context(host.session("NVFP4Quantize", sets[0], attributes))
            workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
            types = (torch.int8, torch.int8, torch.float32, torch.float16)
            shapes = session.output_shapes(sets[0])
            outputs = [torch.empty(s, dtype=t, device="cuda") for s, t in zip(shapes, types, strict=True)]

            def work() -> None:
                for each in sets:
                    session.enqueue(each, outputs, workspace)

            return work

        contestants = {
            f"{scale_search}+{channels}": contestant(scale_search, channels)
            for scale_search, channels in ((0, 0), (1, 0), (2, 0), (0, 64), (2, 32), (2, 64))
        }
        timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, copies))
    bytes_moved = m * k * (3 * 2 + 0.5 + 1 / 16)
    fractions = {name: bytes_moved / timing.median_us * 1e6 / bandwidth for name, timing in timings.items()}
    shown = ", ".join(f"{name}: {timings[name].median_us:.2f} us, {fractions[name]:.0%}" for name in timings)
    print(f"m={m} k={k} scale {'given' if scale else 'found'}: {shown}", flush=True)
    return {
        "m": m,
        "k": k,
        "scale_given": scale != 0.0,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "bandwidth_fraction": fractions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--searches", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name = "quantize_searches" if arguments.searches else "quantize"
    out = arguments.out or HERE / "results" / "kernels" / f"{name}.json"
    work = bench_searches if arguments.searches else bench
    host = plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")
    cases = [work(host, m, k, scale, arguments.rounds, bandwidth) for m, k in SHAPES for scale in (0.01, 0.0)]
    result = {"environment": environment(), "read_bandwidth": bandwidth, "cases": cases}
    record(out, result)


if __name__ == "__main__":
    main()
