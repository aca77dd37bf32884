"""Subgraph by subgraph on this GPU: the plugins, through the plugin host, against cuBLAS on the same shapes.

For machines whose GPU no TensorRT at hand serves. The baselines multiply and do nothing else: no activation, no gate,
no conversion of what one product hands to the next. They do less work than the plugin.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, final

import onnx
import torch

from trt_nvfp4.builder.accuracy.plugins import constants_of
from trt_nvfp4.builder.bench.timing import Device, Timing, Work, interleave
from trt_nvfp4.builder.errors import VerificationError
from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.graph_passes.planning.kinds.registry import kind_of
from trt_nvfp4.graph_passes.planning.plan import Plan, PlannedSubgraph
from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import OPS

# Weights rotate through this many times the L2 cache, so that they come from memory as in a model larger than it.
COLD = 4
MOST_COPIES = 256
# Per square root of layers: a sum in another order now and then rounds to another neighbour, of 4 bits in W4A4.
TOLERANCE = 5e-2
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@final
class TimedSubgraph(TypedDict):
    """Equal subgraphs, timed as one: microseconds by contestant, and why one is missing."""

    names: list[str]
    kind: str
    op: str
    decision: str
    dtype: str
    shapes: dict[str, int]
    tokens: int
    relative_error: float
    timings: dict[str, dict[str, Any]]
    missing: dict[str, str]


def bench_subgraphs(
    device: Device,
    host: Any,
    rewritten: Path,
    plan: Plan,
    tokens: Mapping[str, int],
    cache_bytes: int,
    rounds: int,
    warm_up: int,
    progress: Callable[[int, int, str], None],
) -> list[TimedSubgraph]:
    """One entry per group of equal NVFP4 subgraphs of `plan`: names, shapes, tokens, timings and the plugin's error.

    `host` is a PluginHost; `rewritten` holds the plugin nodes. Raises VerificationError when a plugin's
    result is not that of its reference, HostError when it fails.
    """
    proto = onnx.load(rewritten, load_external_data=False)
    nodes = {node.name: node for node in proto.graph.node}
    groups: dict[tuple[Any, ...], list[PlannedSubgraph]] = {}
    for entry in plan.subgraphs:
        # The experts of an MoE block have no dense product to be compared with.
        if entry.lowering.is_nvfp4_plugin and entry.name in nodes and kind_of(entry).gemms(entry.shapes):
            shapes = tuple(entry.shapes.items())
            key = (entry.op, shapes, entry.decision, entry.activation, entry.dtype, tokens[entry.name])
            groups.setdefault(key, []).append(entry)
    results = []
    for number, entries in enumerate(groups.values()):
        entry = entries[0]
        progress(number, len(groups), entry.name)
        rows = tokens[entry.name]
        node = nodes[entry.name]
        given = constants_of(node, proto, rewritten.parent)
        constants = [given[name].to(device.name) for name in node.input[1:]]
        x = torch.randn(rows, entry.shapes["in_features"], device=device.name).to(DTYPES[entry.dtype])
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        with ExitStack() as stack:
            ours, copies, error = _plugin(stack, host, node.op_type, x, constants, attributes, cache_bytes)
            contestants, calls = {"nvfp4": ours}, {"nvfp4": copies}
            missing = {}
            for name, baseline in (("fp8", _fp8), ("bf16", _bf16)):
                try:
                    contestants[name], calls[name] = baseline(entry, rows, device, cache_bytes)
                    contestants[name]()
                except RuntimeError as unsupported:
                    contestants.pop(name, None)
                    missing[name] = str(unsupported).splitlines()[0]
            timings = interleave(device, contestants, rounds, warm_up, calls)
        results.append(_entry(entries, rows, timings, error, missing))
        del contestants, ours
    progress(len(groups), len(groups), "")
    return results


def _entry(
    entries: list[PlannedSubgraph], rows: int, timings: Mapping[str, Timing], error: float, missing: dict[str, str]
) -> TimedSubgraph:
    first = entries[0]
    return {
        "names": [entry.name for entry in entries],
        "kind": first.kind,
        "op": first.op,
        "decision": first.decision,
        "dtype": first.dtype,
        "shapes": dict(first.shapes),
        "tokens": rows,
        "relative_error": error,
        "timings": {name: asdict(timing) for name, timing in timings.items()},
        "missing": missing,
    }


def _copies(weight_bytes: float, cache_bytes: int) -> int:
    return max(2, min(MOST_COPIES, math.ceil(COLD * cache_bytes / weight_bytes)))


def _plugin(
    stack: ExitStack,
    host: PluginHost,
    op: str,
    x: torch.Tensor,
    constants: list[torch.Tensor],
    attributes: Mapping[str, int | float],
    cache_bytes: int,
) -> tuple[Work, int, float]:
    """Calls over rotating copies of the weights, how many, and the relative error of the result."""
    session = stack.enter_context(host.session(op, [x, *constants], dict(attributes)))
    size = sum(tensor.numel() * tensor.element_size() for tensor in constants)
    copies = [[x, *constants]]
    copies += [[x, *(tensor.clone() for tensor in constants)] for _ in range(_copies(size, cache_bytes) - 1)]
    (shape,) = session.output_shapes(copies[0])
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device=x.device)
    session.enqueue(copies[0], [y], workspace)
    expected = OPS[op].reference(*copies[0], **attributes)
    assert isinstance(expected, torch.Tensor)
    error = relative_error(found=[y.double().cpu().numpy()], expected=[expected.double().cpu().numpy()])
    layers = constants[0].shape[0] if op == "NVFP4PersistentMLP" else 1
    if not error < TOLERANCE * math.sqrt(layers):
        raise VerificationError(
            f"{op} on {list(x.shape)}: relative error {error:.2e} to its reference, {TOLERANCE} is expected at most"
        )

    def work() -> None:
        for inputs in copies:
            session.enqueue(inputs, [y], workspace)

    return work, len(copies), error


def _products(entry: PlannedSubgraph) -> Iterator[tuple[int, int]]:
    for gemm in kind_of(entry).gemms(entry.shapes):
        yield from [(gemm.n, gemm.k)] * gemm.count


def _bf16(entry: PlannedSubgraph, rows: int, device: Device, cache_bytes: int) -> tuple[Work, int]:
    """cuBLAS by torch.mm, 16-bit operands and results."""
    products = list(_products(entry))
    copies = _copies(sum(2 * n * k for n, k in products), cache_bytes)
    pairs = [(_operand(rows, k, device), [_operand(n, k, device).t() for _ in range(copies)]) for n, k in products]
    return _multiply(copies, pairs, torch.mm), copies


def _fp8(entry: PlannedSubgraph, rows: int, device: Device, cache_bytes: int) -> tuple[Work, int]:
    """cuBLASLt by torch._scaled_mm, per-tensor scales, 16-bit results. It takes rows in sixteens."""
    products = list(_products(entry))
    copies = _copies(sum(n * k for n, k in products), cache_bytes)
    fp8, one = torch.float8_e4m3fn, torch.ones((), device=device.name)
    padded = -(-rows // 16) * 16
    pairs = [
        (_operand(padded, k, device).to(fp8), [_operand(n, k, device).to(fp8).t() for _ in range(copies)])
        for n, k in products
    ]
    return _multiply(copies, pairs, lambda a, b: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)), copies


def _operand(rows: int, columns: int, device: Device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device.name, dtype=torch.bfloat16) / math.sqrt(columns)


def _multiply(
    copies: int,
    pairs: list[tuple[torch.Tensor, list[torch.Tensor]]],
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Work:
    def work() -> None:
        for copy in range(copies):
            for x, weights in pairs:
                multiply(x, weights[copy])

    return work
