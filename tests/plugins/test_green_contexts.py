"""Plugins in streams of green contexts, which have some of the GPU's SMs: kernels whose blocks wait for each other must
ask for no more than these."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import op_inputs
import pytest
import torch
from op_inputs import Case
from test_kernels import require_gpu_of

from trt_nvfp4.plugins.host import PluginHost
from trt_nvfp4.plugins.ops import Activation

pytestmark = pytest.mark.gpu

AUTO, W4A16_MMA_SYNC, W4A16_SM90 = 0, 6, 8
SMS = 24


def call(function: str, *arguments: Any) -> Any:
    """A function of the CUDA driver; its last result."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    status, *results = getattr(driver, function)(*arguments)
    assert status == driver.CUresult.CUDA_SUCCESS, f"{function}: {status.name}"
    return results[0] if len(results) == 1 else results


@contextmanager
def green_contexts(count: int) -> Iterator[list[tuple[Any, torch.cuda.ExternalStream]]]:
    """As many green contexts, each of about SMS SMs of its own, with a stream of theirs."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    torch.zeros(1, device="cuda")
    device = call("cuDeviceGet", torch.cuda.current_device())
    every = call("cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    parts, found, _ = call("cuDevSmResourceSplitByCount", count, every, 0, SMS)
    assert found == count
    contexts = [
        call(
            "cuGreenCtxCreate",
            call("cuDevResourceGenerateDesc", [part], 1),
            device,
            driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM,
        )
        for part in parts
    ]
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    streams = [call("cuGreenCtxStreamCreate", context, non_blocking, 0) for context in contexts]
    try:
        yield [(c, torch.cuda.ExternalStream(int(s))) for c, s in zip(contexts, streams, strict=True)]
        torch.cuda.synchronize()
    finally:
        for stream, context in zip(streams, contexts, strict=True):
            call("cuStreamDestroy", stream)
            call("cuGreenCtxDestroy", context)


def persistent(rng: np.random.Generator, m: int) -> Case:
    return op_inputs.persistent_mlp(rng, 3, m, 1024, 4096, 1024, torch.float16, gated=1)


def linear(rng: np.random.Generator, m: int) -> Case:
    return op_inputs.linear(rng, m, 4096, 2048, torch.bfloat16)


def mixture(rng: np.random.Generator, m: int) -> Case:
    return op_inputs.moe(rng, m, 512, 512, 16, torch.bfloat16)


def fp8(rng: np.random.Generator, m: int) -> Case:
    return op_inputs.fp8_gated_mlp(rng, m, 512, 1024, 512, torch.bfloat16)


CALLS: dict[str, tuple[Callable[[np.random.Generator, int], Case], dict[str, Any]]] = {
    "NVFP4PersistentMLP": (persistent, {"gated": 1, "activation": Activation.SILU, "norm": 1, "residual": 1}),
    "NVFP4Linear": (linear, {"activation": Activation.SILU}),
    "NVFP4MoE": (mixture, {"top_k": 2, "activation": Activation.SILU}),
    "FP8GatedMLP": (fp8, {"activation": Activation.SILU}),
}
CASES = [
    *(("NVFP4PersistentMLP", m, tactic) for m in (1, 8, 24) for tactic in (AUTO, W4A16_MMA_SYNC, W4A16_SM90)),
    ("NVFP4PersistentMLP", 64, W4A16_SM90),
    *(("NVFP4Linear", m, tactic) for m in (1, 16, 64) for tactic in (AUTO, W4A16_MMA_SYNC, W4A16_SM90)),
    *(("NVFP4MoE", m, tactic) for m in (1, 8, 64) for tactic in (AUTO, W4A16_MMA_SYNC, W4A16_SM90)),
    ("FP8GatedMLP", 128, AUTO),
]


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("op", "m", "tactic"), CASES)
def test_on_some_sms(host: PluginHost, seed: int, op: str, m: int, tactic: int) -> None:
    """As on the whole GPU, but for the order of sums; the same bits each time, in a graph too."""
    require_gpu_of(tactic)
    make, attributes = CALLS[op]
    inputs = [x.cuda() for x in make(np.random.default_rng(seed), m).inputs]
    with host.session(op, inputs, attributes, tactic=tactic) as session:
        if tactic not in (AUTO, *session.tactics):
            pytest.skip("by the same kernels as tactic W4A16")
        (expected,) = session.run(inputs)
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        with green_contexts(1) as ((_, stream),), torch.cuda.stream(stream):
            outputs = []
            for _ in range(3):
                outputs.append(torch.full_like(expected, float("nan")))
                session.enqueue(inputs, [outputs[-1]], workspace)
            stream.synchronize()
            replayed = torch.full_like(expected, float("nan"))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                session.enqueue(inputs, [replayed], workspace)
            graph.replay()
            stream.synchronize()
    assert error(outputs[0], expected) < 2e-2
    assert all(torch.equal(y, outputs[0]) for y in (*outputs, replayed))


@pytest.mark.parametrize("tactic", [W4A16_MMA_SYNC, W4A16_SM90])
def test_default_stream_of_the_current_context(host: PluginHost, seed: int, tactic: int) -> None:
    require_gpu_of(tactic)
    make, attributes = CALLS["NVFP4PersistentMLP"]
    inputs = [x.cuda() for x in make(np.random.default_rng(seed), 8).inputs]
    with host.session("NVFP4PersistentMLP", inputs, attributes, tactic=tactic) as session:
        (expected,) = session.run(inputs)
        y, workspace = torch.empty_like(expected), torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with green_contexts(1) as ((context, _),):
            call("cuCtxPushCurrent", call("cuCtxFromGreenCtx", context))
            session.enqueue(inputs, [y], workspace)
            call("cuStreamSynchronize", 0)
            call("cuCtxPopCurrent")
    assert error(y, expected) < 2e-2


@pytest.mark.parametrize(
    ("op", "tactic"),
    [
        *(("NVFP4PersistentMLP", tactic) for tactic in (W4A16_MMA_SYNC, W4A16_SM90)),
        *(("NVFP4MoE", tactic) for tactic in (AUTO, W4A16_SM90)),
    ],
)
def test_contexts_beside_each_other(host: PluginHost, seed: int, op: str, tactic: int) -> None:
    require_gpu_of(tactic)
    make, attributes = CALLS[op]
    inputs = [x.cuda() for x in make(np.random.default_rng(seed), 8).inputs]
    with host.session(op, inputs, attributes, tactic=tactic) as session:
        (expected,) = session.run(inputs)
        with green_contexts(3) as contexts:
            streams = [stream for _, stream in contexts]
            outputs = [torch.empty_like(expected) for _ in streams]
            workspaces = [torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda") for _ in streams]
            torch.cuda.synchronize()
            for _ in range(300):
                for stream, y, workspace in zip(streams, outputs, workspaces, strict=True):
                    with torch.cuda.stream(stream):
                        session.enqueue(inputs, [y], workspace)
    assert error(outputs[0], expected) < 2e-2
    assert all(torch.equal(y, outputs[0]) for y in outputs)
