"""Which kernels serve a call on which GPU, and which of them TensorRT is offered: every branch of
kernels/heuristics/tactics.h, on the PTX emulator."""

from dataclasses import replace

import numpy as np
import op_inputs
import pytest
import torch

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation

pytestmark = pytest.mark.slow
AUTO, GENERIC, W4A16, W4A4, W4A4_PAIR, FP8, W4A16_MMA_SYNC, W4A4_UNSPLIT, W4A16_SM90 = range(9)

on = pytest.mark.parametrize


def linear(m: int, k: int = 32, dtype: torch.dtype = torch.float16, n: int = 16) -> list[torch.Tensor]:
    return op_inputs.linear(np.random.default_rng(m), m, n, k, dtype).inputs


def offered(host: PluginHost, w4a4: int, fewest: int, most: int, k: int, n: int = 16) -> list[int]:
    attributes = {"quantize_activations": w4a4}
    with host.session("NVFP4Linear", linear(fewest, k, n=n), attributes, max_inputs=linear(most, k, n=n)) as session:
        return session.tactics


@on("emulated_gpu", ["b200", "thor", "rtx-blackwell", "h200"], indirect=True)
def test_offered_to_tensorrt(emulated: PluginHost, emulated_gpu: Gpu) -> None:
    major = emulated_gpu.target.capability[0]
    streaming = [W4A16, W4A16_MMA_SYNC]
    small, more = ([*streaming, W4A16_SM90], streaming) if major == 9 else (streaming, [])
    assert [offered(emulated, 0, *tokens, 32) for tokens in ((1, 16), (17, 32))] == [small, more]
    # What is fastest for few tokens may take four times as long as AUTO for many.
    assert [offered(emulated, 0, *tokens, 32) for tokens in ((9, 64), (20, 300), (1, 300))] == [[], [], []]
    # More tiles than find room at once.
    few = [W4A16, W4A16_SM90] if major == 9 else []
    assert [offered(emulated, 0, *tokens, 32, 20000) for tokens in ((1, 8), (1, 16))] == [few, []]
    split = [] if major == 9 else [W4A4, W4A4_UNSPLIT]
    pair = [W4A4_PAIR] if major == 10 else []
    assert offered(emulated, 1, 5, 100, 2048) == split
    assert offered(emulated, 1, 5, 5, 96) == []
    assert offered(emulated, 1, 130, 256, 2048) == pair + split
    assert offered(emulated, 1, 130, 256, 96) == ([*pair, W4A4] if pair else [])
    # Where AUTO changes over from one CTA to two.
    assert offered(emulated, 1, 100, 256, 96) == []


def kernels(gpu: Gpu) -> list[str]:
    """Of the products launched so far; forgets them."""
    w4a16 = ("sm80_w4a16_token", "sm80_w4a16_mlp", "sm80_w4a16_small", "sm90_w4a16_linearI", "sm90_w4a16_mlpI")
    names = (*w4a16, "generic_gemm", "W4A4Kernel", "w4a4_reduce")
    found = [name for launch in gpu.launches for name in names if name in launch.kernel]
    gpu.launches.clear()
    return found


def run(
    host: PluginHost, gpu: Gpu, inputs: list[torch.Tensor], w4a4: int, tactic: int
) -> tuple[torch.Tensor, list[str]]:
    kernels(gpu)
    with host.session("NVFP4Linear", inputs, {"quantize_activations": w4a4}, tactic=tactic) as session:
        (y,) = session.run(inputs)
    return y, kernels(gpu)


@on("emulated_gpu", ["rtx-blackwell", "h200"], indirect=True)
def test_crossovers_of_w4a16(emulated: PluginHost, emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """And more tokens go in blocks, of 64 on SM90 and of 32 elsewhere: each is served as if it were alone."""
    one, mma, small = ["sm80_w4a16_token"], ["sm80_w4a16_mlp"], ["sm80_w4a16_small"]
    hopper = emulated_gpu.target.capability[0] == 9
    some = ["sm90_w4a16_linearI"] if hopper else mma
    of_64 = some if hopper else 2 * mma
    for m, expected in ((1, small), (8, small), (16, small), (17, some), (64, of_64), (70, of_64 + small)):
        assert run(emulated, emulated_gpu, linear(m), 0, AUTO)[1] == expected
    with monkeypatch.context() as patch:  # more tiles than find room at once
        patch.setattr(emulated_gpu, "target", replace(emulated_gpu.target, sm_count=1))
        for m, expected in ((1, one), (2, mma), (8, mma), (9, some)):
            assert run(emulated, emulated_gpu, linear(m), 0, AUTO)[1] == expected
    inputs = linear(70, 96, torch.bfloat16)
    y, launched = run(emulated, emulated_gpu, inputs, 0, W4A16)
    assert launched == of_64 + small
    last = [inputs[0].reshape(70, 96)[64:], *inputs[1:]]
    assert torch.equal(y.reshape(70, 16)[64:], run(emulated, emulated_gpu, last, 0, W4A16)[0])
    reference = OPS["NVFP4Linear"].reference(*inputs)
    assert isinstance(reference, torch.Tensor)
    assert torch.linalg.norm((y - reference).float()) < 1e-2 * torch.linalg.norm(reference.float())


@on("emulated_gpu", ["h200"], indirect=True)
def test_other_tactics_of_a_linear(emulated: PluginHost, emulated_gpu: Gpu) -> None:
    inputs = linear(20, 96)
    y, launched = run(emulated, emulated_gpu, inputs, 0, W4A16_MMA_SYNC)
    assert launched == ["sm80_w4a16_mlp"]
    other, _ = run(emulated, emulated_gpu, inputs, 0, W4A16)
    assert torch.linalg.norm((y - other).float()) < 2e-3 * torch.linalg.norm(other.float())
    with pytest.raises(HostError, match="tactic 6 cannot serve"):  # it is AUTO's
        run(emulated, emulated_gpu, linear(3, n=20000), 0, W4A16_MMA_SYNC)
    assert run(emulated, emulated_gpu, linear(3), 0, W4A16_MMA_SYNC)[1] == ["sm80_w4a16_mlp"]
    assert run(emulated, emulated_gpu, linear(1), 0, W4A16_MMA_SYNC)[1] == ["sm80_w4a16_token"]
    assert run(emulated, emulated_gpu, linear(3), 0, W4A16_SM90)[1] == ["sm90_w4a16_linearI"]


@on("emulated_gpu", ["h200"], indirect=True)
def test_crossovers_of_an_mlp(emulated: PluginHost, emulated_gpu: Gpu) -> None:
    def launched(m: int, tactic: int) -> list[str]:
        inputs = op_inputs.gated_mlp(np.random.default_rng(m), m, 32, 32, 16, torch.float16).inputs
        kernels(emulated_gpu)
        with emulated.session("NVFP4GatedMLP", inputs, {"activation": Activation.SILU}, tactic=tactic) as session:
            (y,) = session.run(inputs)
        reference = OPS["NVFP4GatedMLP"].reference(*inputs, activation=Activation.SILU)
        assert isinstance(reference, torch.Tensor)
        assert torch.linalg.norm((y - reference).float()) < 3e-3 * torch.linalg.norm(reference.float())
        return kernels(emulated_gpu)

    one, mma, resident = ["sm80_w4a16_token"], ["sm80_w4a16_mlp"], ["sm90_w4a16_mlpI"]
    assert [launched(m, AUTO) for m in (1, 2, 16, 64, 65)] == [one, resident, resident, resident, resident + one]
    assert launched(3, W4A16_SM90) == resident
    assert launched(20, W4A16_MMA_SYNC) == mma

    def offered_mlp(fewest: int, most: int) -> list[int]:
        few, many = (
            op_inputs.gated_mlp(np.random.default_rng(0), m, 32, 32, 16, torch.float16) for m in (fewest, most)
        )
        with emulated.session(
            "NVFP4GatedMLP", few.inputs, {"activation": Activation.SILU}, max_inputs=many.inputs
        ) as session:
            return session.tactics

    assert [offered_mlp(*tokens) for tokens in ((1, 1), (2, 32), (16, 64), (1, 64))] == [
        [W4A16, W4A16_SM90],
        [W4A16, W4A16_MMA_SYNC],
        [],
        [],
    ]


def assert_near_reference(host: PluginHost, inputs: list[torch.Tensor], attributes: dict[str, int]) -> None:
    with host.session("NVFP4PersistentMLP", inputs, attributes) as session:
        (y,) = session.run(inputs)
    reference = OPS["NVFP4PersistentMLP"].reference(*inputs, **attributes)
    assert isinstance(reference, torch.Tensor)
    assert torch.linalg.norm((y - reference).float()) < 3e-3 * torch.linalg.norm(reference.float())


@on("emulated_gpu", ["rtx-blackwell"], indirect=True)
@on(("m", "hidden"), [(66, 32), (9, 2336)], ids=["more tokens than a block", "x wider than is read at once"])
def test_normed_layers(emulated: PluginHost, emulated_gpu: Gpu, seed: int, m: int, hidden: int) -> None:
    # Every block normalizes all of x.
    emulated_gpu.resize(sm_count=8)
    rng = np.random.default_rng(seed)
    inputs = op_inputs.persistent_mlp(rng, 2, m, hidden, 32, hidden, torch.float16, gated=1).inputs
    attributes = {"activation": Activation.SILU, "gated": 1, "norm": 1, "residual": 1}
    assert_near_reference(emulated, inputs, attributes)


@on("emulated_gpu", ["rtx-blackwell"], indirect=True)
@on("m", [9, 28])
def test_layers_whose_k_is_split(
    emulated: PluginHost, emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int, m: int
) -> None:
    """Warps that are done with a tile sum up parts of others while slow ones still finish it."""
    emulated_gpu.resize(sm_count=8)
    monkeypatch.setattr(emulated_gpu.device, "disorder", 0.5)
    inputs = op_inputs.persistent_mlp(np.random.default_rng(seed), 3, m, 1024, 32, 1024, torch.float16, gated=0).inputs
    assert_near_reference(emulated, inputs, {"activation": Activation.SILU, "gated": 0, "norm": 0, "residual": 0})


@on("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_layers_where_a_block_lags(
    emulated: PluginHost, emulated_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By a block that sees a part of x alone, since up's K is split and nothing is normalized: blocks must not erase or
    write what it has yet to read."""
    emulated_gpu.resize(sm_count=16)
    monkeypatch.setattr(emulated_gpu.device, "sm_count", 16)
    monkeypatch.setattr(emulated_gpu.device, "lagging", 8)
    inputs = op_inputs.persistent_mlp(np.random.default_rng(seed), 7, 8, 4096, 128, 4096, torch.float16, gated=0).inputs
    attributes = {"activation": Activation.RELU, "gated": 0, "norm": 0, "residual": 0}
    assert_near_reference(emulated, inputs, attributes)


@on("emulated_gpu", ["b200", "rtx-blackwell"], indirect=True)
def test_k_is_not_split_where_that_is_the_tactic(emulated: PluginHost, emulated_gpu: Gpu) -> None:
    inputs = linear(5, 1024, torch.bfloat16)
    split, launched = run(emulated, emulated_gpu, inputs, 1, W4A4)
    assert launched == ["W4A4Kernel", "w4a4_reduce"]
    whole, launched = run(emulated, emulated_gpu, inputs, 1, W4A4_UNSPLIT)
    assert launched == ["W4A4Kernel"]
    assert torch.linalg.norm((split - whole).float()) < 1e-2 * torch.linalg.norm(whole.float())


@on("emulated_gpu", ["h200"], indirect=True)
def test_generic_alone_where_nothing_else_serves(emulated: PluginHost, emulated_gpu: Gpu) -> None:
    for inputs, w4a4 in ((linear(3, 48), 0), (linear(3, dtype=torch.float32), 0), (linear(3), 1)):
        assert run(emulated, emulated_gpu, inputs, w4a4, AUTO)[1] == ["generic_gemm"]
        with pytest.raises(HostError, match="tactic 2 cannot serve"):
            run(emulated, emulated_gpu, inputs, w4a4, W4A16)


@on("emulated_gpu", ["b200", "b300", "thor", "rtx-blackwell", "spark", "h200", "ada"], indirect=True)
def test_workspace_has_room_for_what_may_run(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """Float32 hidden values are the generic kernels' alone, to which AUTO may come where nothing else serves a call,
    and in a library whose PTX other GPUs run too. (Whatever leaves its workspace fails on the emulator.)"""
    rng, half = np.random.default_rng(seed), torch.float16
    major = emulated_gpu.target.capability[0]
    w4a4 = {"quantize_activations": 1}
    cases: list[tuple[str, op_inputs.Case, dict[str, int], int, bool]] = [
        ("FP8GatedMLP", op_inputs.fp8_gated_mlp(rng, 200, 64, 4096, width, half), {}, 200 * 4096, fits)
        for width, fits in ((40, major in (9, 12)), (36, False))
    ]
    for k, fits in ((64, major >= 10), (80, False)):
        mlp = op_inputs.persistent_mlp(rng, 1, 200, k, 2048, 64, half, gated=1)
        cases.append(("NVFP4PersistentMLP", mlp, {**w4a4, "norm": 1, "residual": 0}, 200 * 2048, fits))
        cases.append(("NVFP4MoE", op_inputs.moe(rng, 200, k, 512, 4, half), {**w4a4, "top_k": 2}, 400 * 512, fits))
    for op, case, attributes, hidden_values, fits in cases:
        sizes = {}
        for tactic in (AUTO, GENERIC):
            with emulated.session(op, case.inputs, attributes, tactic=tactic) as session:
                sizes[tactic] = session.workspace_size
        assert sizes[GENERIC] >= 4 * hidden_values
        if op == "FP8GatedMLP":  # whose workspace is else the same
            assert sizes[GENERIC] - sizes[AUTO] == (4 * hidden_values if fits else 0)
        else:
            assert sizes[AUTO] < 4 * hidden_values if fits else sizes[AUTO] >= sizes[GENERIC], op


@on("emulated_gpu", ["rtx-blackwell"], indirect=True)
@on(("k", "fits"), [(64, True), (24064, True), (24080, False)])
def test_workspace_of_normalized_rows(emulated: PluginHost, seed: int, k: int, fits: bool) -> None:
    """Which a single pass keeps in shared memory, where they fit."""
    inputs = op_inputs.quantize(np.random.default_rng(seed), 8, k, torch.float16).inputs
    with emulated.session("NVFP4Quantize", inputs, {"norm": 1}) as session:
        assert (session.workspace_size < 8 * k * 2) == fits
