"""LinearAttention beside flash-linear-attention's Triton kernels on this GPU.

    python -m benchmarks.kernels.linear_attention [--out results/kernels/linear_attention.json]

Decode: gated delta, 1 to 16 tokens of each sequence, fraction of the read bandwidth measured in the same run, the
state being read and written once; every call of a CUDA graph has a state of its own, so that none is read from L2.
Prefill: 1k to 8k tokens of gated delta, and of a gated rule with Mamba2's heads. Without the package `fla` the plugin
is timed alone. Errors are against float64.
"""

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import HERE, environment, plugin_host, read_bandwidth, record, relative_error, shown
from trt_nvfp4.builder.bench.timing import CudaDevice, interleave
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import STANDARD_OPS

OP = "LinearAttention"
#: Larger than any L2: what the calls of a graph read before a state is read again.
COLD_BYTES = 256 << 20
LEAST_CALLS = 8
#: rule, heads, d_k, d_v
DELTA, MAMBA2 = ("gated_delta", 32, 128, 128), ("gated", 64, 128, 64)
Kind = tuple[str, int, int, int]


def random_inputs(kind: Kind, batch: int, tokens: int) -> list[torch.Tensor]:
    """In the op's order, bfloat16 and a float32 state; decays as trained gates have them."""
    rule, heads, key_dim, value_dim = kind
    lead = (batch, tokens, heads)
    rows = [torch.randn(*lead, size, device="cuda") for size in (key_dim, key_dim, value_dim)]
    if rule == "gated_delta":
        rows[:2] = [functional.normalize(x, dim=-1) for x in rows[:2]]
    gates = [-functional.softplus(torch.randn(lead, device="cuda")) / 4, torch.rand(lead, device="cuda")]
    return [
        *(x.flatten(2).bfloat16() for x in rows),
        torch.randn(batch, heads, key_dim, value_dim, device="cuda") / 8,
        *(x.bfloat16() for x in gates[: 2 if rule == "gated_delta" else 1]),
    ]


def attributes(kind: Kind) -> dict[str, Any]:
    return {"q_num_heads": kind[1], "kv_num_heads": kind[1], "update_rule": kind[0]}


def plugin_call(host: PluginHost, kind: Kind, calls: Sequence[list[torch.Tensor]]) -> Callable[[], None]:
    """One call for each of `calls`, states in place."""
    session = host.session(OP, calls[0], attributes(kind))
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(calls[0][2])

    def work() -> None:
        for each in calls:
            session.enqueue(each, [y, each[3]], workspace)

    return work


def fla_call(kind: Kind, calls: Sequence[list[torch.Tensor]], decode: bool) -> Callable[[], None] | None:
    """The same by flash-linear-attention; None without the package."""
    try:
        ops: Any = importlib.import_module("fla.ops")
        delta = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    heads = kind[1]
    prepared = []
    for q, k, v, state, decay, *beta in calls:
        rows = [x.unflatten(-1, (heads, -1)) for x in (q, k, v)]
        prepared.append((rows, {"g": decay, "initial_state": state.clone(), "output_final_state": True}, beta))

    def work() -> None:
        for rows, options, beta in prepared:
            if not beta:
                ops.simple_gla.chunk_simple_gla(*rows, **options)
            elif decode:
                delta.fused_recurrent_gated_delta_rule(*rows, beta=beta[0], **options)
            else:
                delta.chunk_gated_delta_rule(*rows, beta=beta[0], **options)

    return work


def error_of(host: PluginHost, kind: Kind, batch: int, tokens: int) -> dict[str, float]:
    """Relative errors of output and state against float64, over 4 heads."""
    tensors = random_inputs((kind[0], 4, *kind[2:]), batch, tokens)
    few = attributes((kind[0], 4, *kind[2:]))
    with host.session(OP, tensors, few) as session:
        found = session.run(tensors)
    wanted = STANDARD_OPS[OP].reference(*(x.double() for x in tensors), **few)
    return {name: relative_error(x, y) for name, x, y in zip(("output", "state"), found, wanted, strict=True)}


def bench(
    host: PluginHost, kind: Kind, batch: int, tokens: int, rounds: int, bandwidth: float, decode: bool
) -> dict[str, Any]:
    rule, heads, key_dim, value_dim = kind
    state = 2 * 4 * batch * heads * key_dim * value_dim
    rows = 2 * batch * tokens * heads * (2 * key_dim + 2 * value_dim + 2)
    count = max(LEAST_CALLS, -(-COLD_BYTES // state)) if decode else 1
    calls = [random_inputs(kind, batch, tokens) for _ in range(count)]
    contestants = {"plugin": plugin_call(host, kind, calls)}
    if other := fla_call(kind, calls, decode):
        contestants["fla"] = other
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, count))
    fraction = (state + rows) / bandwidth * 1e6 / timings["plugin"].median_us
    print(f"{rule} {heads}x{key_dim}x{value_dim} batch {batch}, {tokens} tokens: {fraction:.1%} of bandwidth")
    for name, timing in timings.items():
        print(shown(name, timing), flush=True)
    return {
        "rule": rule, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "batch": batch, "tokens": tokens,
        "bytes": state + rows, "fraction_of_bandwidth": fraction, "error": error_of(host, kind, batch, tokens),
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--library", type=Path, help="a built plugin library, instead of one built for this GPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "linear_attention.json")
    given = parser.parse_args()
    host = PluginHost(given.library) if given.library else plugin_host()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")

    def run(kind: Kind, batch: int, tokens: int, decode: bool = False) -> dict[str, Any]:
        return bench(host, kind, batch, tokens, given.rounds, bandwidth, decode)

    result = {
        "environment": environment(),
        "read_bandwidth": bandwidth,
        "decode": [run(DELTA, batch, tokens, decode=True) for batch in (1, 8, 64) for tokens in (1, 4, 8, 16)],
        "prefill": [run(kind, 1, tokens) for kind in (DELTA, MAMBA2) for tokens in (1024, 2048, 4096, 8192)],
    }
    record(given.out, result)


if __name__ == "__main__":
    main()
