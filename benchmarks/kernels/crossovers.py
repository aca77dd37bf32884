"""Which kernels serve a linear or an MLP fastest at which number of tokens, beside what AUTO takes: the measurement
behind plugins/kernels/heuristics.

    python -m benchmarks.kernels.crossovers [--only linear|small|mlp] [--w4a4] [--tokens 1 16 ...] [--out FILE]

Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Weight, in_turn, stack_inputs
from benchmarks.harness import environment, plugin_host, record
from trt_nvfp4.builder.bench.timing import CudaDevice, Work, interleave
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import Activation

HERE = Path(__file__).resolve().parents[1]
LINEARS = [(4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192)]
#: Those whose blocks all find room at once on an H100 or H200, at some numbers of tokens or at all, and neighbours.
SMALL_LINEARS = [
    (1024, 1024),
    (3072, 1024),
    (8448, 1024),
    (2048, 2048),
    (7168, 2048),
    (9216, 2048),
    (3584, 3584),
    (1024, 4096),
    (4096, 4096),
    (8192, 4096),
    (11008, 4096),
    (4096, 6144),
    (512, 8192),
    (4096, 8192),
    (1024, 11008),
    (4096, 11008),
    (4096, 14336),
    (4096, 16384),
]
SMALL_TOKENS = [1, 2, 4, 5, 8, 9, 16]
LINEAR_TOKENS = [1, 8, 16, 17, 24, 32, 48, 64, 65, 96, 128, 129, 256, 512, 968]
#: A generic kernel takes up to seconds a call.
GENERIC_TOKENS = (1, 65, 968)
MLP_TOKENS = [1, 2, 4, 6, 8, 12, 16, 24]
GENERIC = 1
TACTICS = {
    0: "auto",
    GENERIC: "generic",
    2: "w4a16",
    6: "w4a16 by mma.sync",
    8: "w4a16 of SM90",
    3: "w4a4",
    4: "w4a4 by pairs",
    7: "w4a4 unsplit",
}
#: Where activations are not quantized, AUTO is W4A16.
W4A16_TACTICS = [0, 6, 8]
W4A4_TACTICS = [tactic for tactic in TACTICS if tactic != GENERIC]
#: Weights rotate through this many bytes: several times any L2. Capturing many calls is what takes a run its time.
COLD_BYTES = 256 << 20


@dataclass(frozen=True)
class Mlp:
    """Of `layers` layers in one launch, gelu_tanh, with or without gates."""

    layers: int
    hidden: int
    intermediate: int
    gated: bool = True

    @property
    def up_rows(self) -> int:
        return (1 + self.gated) * self.intermediate

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.hidden * (self.up_rows + self.intermediate) * 9 // 16


#: From many to few SMs with a tile of 256 rows of up on an H200, which is what AUTO goes by.
MLPS = [
    Mlp(18, 2048, 16384),
    Mlp(4, 8192, 28672),
    Mlp(1, 4096, 11008),
    Mlp(2, 5120, 17408),
    Mlp(4, 2048, 8704),
    Mlp(6, 4096, 17408, gated=False),
    Mlp(4, 4096, 8192),
    Mlp(1, 3072, 8192),
    Mlp(8, 2048, 5632),
    Mlp(6, 4096, 9728, gated=False),
    Mlp(4, 4096, 4096),
    Mlp(4, 1536, 8960),
    Mlp(8, 1024, 4096),
    Mlp(4, 2048, 4096),
    Mlp(4, 2048, 8192, gated=False),
    Mlp(4, 3072, 3072),
    Mlp(4, 4096, 4096, gated=False),
    Mlp(12, 768, 3072, gated=False),
    Mlp(6, 384, 1536),
]


def by_tactic(
    host: PluginHost,
    op: str,
    attributes: dict[str, int | float],
    tactics: Iterable[int],
    x: torch.Tensor,
    width: int,
    rest: list[list[torch.Tensor]],
) -> dict[str, list[Work]]:
    """The op's calls by each of `tactics` that serves x [m, k], for y [m, width]: one for each rest of its inputs."""
    y = x.new_empty(x.shape[0], width)
    found: dict[str, list[Work]] = {}
    for tactic in tactics:
        calls = [[x, *tensors] for tensors in rest]
        try:
            session = host.session(op, calls[0], attributes, tactic=tactic)
            workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
            session.enqueue(calls[0], [y], workspace)
        except HostError as error:
            if "cannot serve this call" not in str(error):
                raise
            continue
        found[TACTICS[tactic]] = [lambda s=session, c=call, w=workspace: s.enqueue(c, [y], w) for call in calls]
    return found


def timed(case: dict[str, Any], calls: dict[str, list[Work]], rounds: int) -> dict[str, Any]:
    """The case with each tactic's microseconds a call, printed too."""
    works = {name: in_turn(all_calls) for name, all_calls in calls.items()}
    counts = {name: len(all_calls) for name, all_calls in calls.items()}
    timings = interleave(CudaDevice(), works, rounds, calls=counts)
    times = ", ".join(f"{name} {timing.median_us:.2f}" for name, timing in timings.items())
    print(", ".join(f"{name} {value}" for name, value in case.items()) + f": {times} us", flush=True)
    return {**case, "timings": {name: asdict(timing) for name, timing in timings.items()}}


def bench_linears(
    host: PluginHost, linears: list[tuple[int, int]], tokens: list[int], rounds: int, w4a4: bool
) -> list[dict[str, Any]]:
    """In FP16."""
    attributes: dict[str, int | float] = {"quantize_activations": int(w4a4)}
    cases = []
    for n, k in linears:
        weights = [Weight.random(n, k, torch.float16) for _ in range(max(2, COLD_BYTES // (n * k * 9 // 16)))]
        scale = torch.zeros((), device="cuda")
        rest = [[w.packed, w.block_scales, w.tensor_scale, w.bias.half(), scale] for w in weights]
        for m in tokens:
            x = torch.randn(m, k, device="cuda").half()
            calls = by_tactic(host, "NVFP4Linear", attributes, W4A4_TACTICS if w4a4 else W4A16_TACTICS, x, n, rest)
            if m in GENERIC_TOKENS:
                calls |= by_tactic(host, "NVFP4Linear", attributes, [GENERIC], x, n, rest[:1])
            cases.append(timed({"m": m, "n": n, "k": k}, calls, rounds))
    return cases


def bench_mlps(host: PluginHost, tokens: list[int], rounds: int) -> list[dict[str, Any]]:
    """In FP16 and BF16, and in FP16 with RMSNorm and residual."""
    cases = []
    for mlp in MLPS:
        shapes = (mlp.up_rows, mlp.hidden), (mlp.hidden, mlp.intermediate)
        copies = range(max(1, COLD_BYTES // mlp.weight_bytes))
        weights = [[[Weight.random(*s, torch.bfloat16) for _ in range(mlp.layers)] for s in shapes] for _ in copies]
        for dtype, norm in ((torch.float16, 0), (torch.bfloat16, 0), (torch.float16, 1)):
            like = torch.empty(1, mlp.hidden, dtype=dtype, device="cuda")
            rest = [stack_inputs(like, ups, downs)[1:] for ups, downs in weights]
            attributes: dict[str, int | float] = {"activation": int(Activation.GELU_TANH), "gated": int(mlp.gated)}
            attributes |= {"norm": norm, "residual": norm}
            for m in tokens:
                x = torch.randn(m, mlp.hidden, device="cuda").to(dtype)
                calls = by_tactic(host, "NVFP4PersistentMLP", attributes, W4A16_TACTICS, x, mlp.hidden, rest)
                case = {"m": m, **asdict(mlp), "dtype": str(dtype).removeprefix("torch."), "norm": bool(norm)}
                cases.append(timed(case, calls, rounds))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=["linear", "small", "mlp"], help="linears, small ones or MLPs alone (default: all)"
    )
    parser.add_argument("--w4a4", action="store_true", help="linears with quantized activations instead of 16-bit ones")
    parser.add_argument("--tokens", type=int, nargs="+", help="other numbers of tokens than the recorded ones")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "crossovers.json")
    arguments = parser.parse_args()
    host = plugin_host()
    torch.manual_seed(0)
    result: dict[str, Any] = {"environment": environment()}
    for kind, linears, tokens in (("linear", LINEARS, LINEAR_TOKENS), ("small", SMALL_LINEARS, SMALL_TOKENS)):
        if arguments.only in (kind, None):
            chosen = arguments.tokens or tokens
            result[kind] = bench_linears(host, linears, chosen, arguments.rounds, arguments.w4a4)
    if arguments.only in ("mlp", None):
        result["mlp"] = bench_mlps(host, arguments.tokens or MLP_TOKENS, arguments.rounds)
    record(arguments.out, result)


if __name__ == "__main__":
    main()
