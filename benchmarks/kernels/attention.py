"""CachedAttention alone, beside torch's scaled_dot_product_attention on this GPU.

    python -m benchmarks.kernels.attention [--out results/kernels/attention.json]

Decode: one new token for each sequence, caches in 16 bits and in E4M3, fraction of the read bandwidth measured in the
same run; every call of a CUDA graph has caches of its own, so that none is read from L2. At a fixed capacity the time
follows the length. Prefill: 1k to 8k tokens of an empty cache.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import attention, functional

from benchmarks.harness import HERE, environment, plugin_host, read_bandwidth, record, shown
from trt_nvfp4.builder.bench.timing import CudaDevice, Timing, interleave
from trt_nvfp4.plugins.host import PluginHost

#: Larger than any L2: what the calls of a graph read before a cache is read again.
COLD_BYTES = 512 << 20
#: Calls of a graph at least: its own start counts little.
LEAST_CALLS = 8
HEADS = {"Qwen3-8B": (32, 8, 128), "Qwen3-30B-A3B": (32, 4, 128), "Gemma-2B": (8, 1, 256), "MHA": (32, 32, 64)}


@dataclass
class Caches:
    """Random keys and values of one layer, and the inputs of a call."""

    heads: tuple[int, int, int]
    inputs: list[torch.Tensor]
    y: torch.Tensor

    @classmethod
    def random(
        cls, heads: tuple[int, int, int], batch: int, new: int, length: int, capacity: int, fp8: bool
    ) -> "Caches":
        count, kv_heads, size = heads
        cache = torch.randn(2, batch, kv_heads, capacity, size, device="cuda", dtype=torch.float16)
        if fp8:
            cache = (cache * 64).to(torch.float8_e4m3fn).view(torch.int8)
        angles = torch.rand(capacity, size // 2, device="cuda") * 6
        inputs = [
            torch.randn(batch, new, (count + 2 * kv_heads) * size, device="cuda", dtype=torch.float16),
            *cache.unbind(),
            torch.full((batch,), length - new, device="cuda"),
            angles.cos(),
            angles.sin(),
            *torch.ones(2, size, device="cuda", dtype=torch.float16).unbind(),
            torch.zeros(count, device="cuda"),
            *torch.full((2, kv_heads), 1 / 64, device="cuda").unbind(),
        ]
        return cls(heads, inputs, torch.empty(batch, new, count * size, device="cuda", dtype=torch.float16))

    def attributes(self, fp8: bool) -> dict[str, int | float]:
        return {"heads": self.heads[0], "rope": 1, "qk_norm": 1, "fp8_cache": int(fp8)}


def plugin_call(host: PluginHost, caches: Sequence[Caches], fp8: bool) -> Callable[[], None]:
    """One call for each of `caches`, in place."""
    session = host.session("CachedAttention", caches[0].inputs, caches[0].attributes(fp8))
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")

    def work() -> None:
        for each in caches:
            session.enqueue(each.inputs, [each.y, *each.inputs[1:3]], workspace)

    return work


def torch_call(caches: Sequence[Caches], length: int, causal: bool) -> Callable[[], None]:
    """torch's attention over the cached length alone: no norm, no rotation, no append."""
    count, kv_heads, size = caches[0].heads

    def work() -> None:
        for each in caches:
            batch, new, _ = each.inputs[0].shape
            q = each.inputs[0].view(batch, new, -1, size)[:, :, :count].transpose(1, 2)
            k, v = (cache[:, :, :length] for cache in each.inputs[1:3])
            functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=count != kv_heads)

    return work


def bench_decode(
    host: PluginHost, name: str, batch: int, length: int, capacity: int, fp8: bool, rounds: int, bandwidth: float
) -> dict[str, Any]:
    heads = HEADS[name]
    read = 2 * batch * heads[1] * length * heads[2] * (1 if fp8 else 2)
    count = max(LEAST_CALLS, -(-COLD_BYTES // read))
    distinct = min(count, -(-COLD_BYTES // read) + 1)
    caches = [Caches.random(heads, batch, 1, length, capacity, fp8) for _ in range(distinct)]
    order = [caches[i % distinct] for i in range(count)]
    contestants = {"plugin": plugin_call(host, order, fp8)}
    if not fp8:
        contestants["torch"] = torch_call(order, length, causal=False)
    timings = interleave(CudaDevice(), contestants, rounds, calls=dict.fromkeys(contestants, count))
    fraction = read / bandwidth * 1e6 / timings["plugin"].median_us
    print(
        f"{name} batch {batch} length {length} of {capacity} {'E4M3' if fp8 else 'FP16'}: {fraction:.1%} of bandwidth"
    )
    return {
        "shape": name, "batch": batch, "length": length, "capacity": capacity, "cache": "e4m3" if fp8 else "float16",
        "bytes": read, "floor_us": read / bandwidth * 1e6, "fraction_of_bandwidth": fraction, **described(timings),
    }  # fmt: skip


def bench_prefill(host: PluginHost, name: str, new: int, fp8: bool, rounds: int) -> dict[str, Any]:
    heads = HEADS[name]
    caches = [Caches.random(heads, 1, new, new, new, fp8)]
    contestants = {"plugin": plugin_call(host, caches, fp8)}
    device = CudaDevice()
    if not fp8:
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            call = torch_call(caches, new, causal=True)

            def work(call: Callable[[], None] = call, backend: str = backend) -> None:
                with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
                    call()

            try:
                device.capture(work)
            except RuntimeError as error:
                print(f"torch's {backend}: {str(error).splitlines()[0]}")
                continue
            contestants[f"torch {backend.lower()}"] = work
    timings = interleave(device, contestants, rounds)
    operations = 2 * new * new * heads[0] * heads[2]  # of what is not masked
    rate = operations / timings["plugin"].median_us / 1e6
    print(f"{name} prefill of {new} {'E4M3' if fp8 else 'FP16'}: {rate:.0f} TFLOP/s")
    return {
        "shape": name, "new": new, "cache": "e4m3" if fp8 else "float16", "tflops": rate, **described(timings),
    }  # fmt: skip


def described(timings: dict[str, Timing]) -> dict[str, Any]:
    for name, timing in timings.items():
        print(shown(name, timing))
    return {"timings": {name: asdict(timing) for name, timing in timings.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--library", type=Path, help="a built plugin library, instead of one built for this GPU")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "kernels" / "attention.json")
    arguments = parser.parse_args()
    host = PluginHost(arguments.library) if arguments.library else plugin_host()
    torch.manual_seed(0)
    bandwidth, rounds = read_bandwidth(), arguments.rounds
    print(f"read bandwidth {bandwidth / 1e12:.3f} TB/s")

    def decode(name: str, batch: int, length: int, capacity: int, fp8: bool) -> dict[str, Any]:
        return bench_decode(host, name, batch, length, capacity, fp8, rounds, bandwidth)

    both = (False, True)
    result = {
        "environment": environment(),
        "read_bandwidth": bandwidth,
        "decode": [
            decode("Qwen3-8B", batch, length, length, fp8)
            for batch in (1, 8)
            for length in (1024, 8192, 32768)
            for fp8 in both
        ]
        + [decode(name, batch, 8192, 8192, fp8) for name in list(HEADS)[1:] for batch in (1, 8) for fp8 in both],
        "fixed_capacity": [decode("Qwen3-8B", 1, length, 32768, False) for length in (512, 2048, 8192, 32768)],
        "prefill": [
            bench_prefill(host, "Qwen3-8B", new, fp8, rounds) for new in (1024, 2048, 4096, 8192) for fp8 in both
        ],
    }
    record(arguments.out, result)


if __name__ == "__main__":
    main()
