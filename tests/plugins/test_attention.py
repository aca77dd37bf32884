"""CachedAttention's kernels against float64, on this machine's GPU and on emulated ones."""

import numpy as np
import pytest
import torch
from attention_cases import (
    LONG_HEAD,
    MANY_SEQUENCES,
    NORMED,
    PADDED_HEAD,
    RAGGED,
    SEVERAL_BLOCKS,
    SEVERAL_TILES,
    SHAPES,
    Shape,
    attend,
    cached_values,
    inputs,
    new_rows,
    sizes,
)
from op_inputs import float64

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS

GENERIC, AUTO, DECODE, PREFILL = 1, 0, 9, 10
OP = "CachedAttention"
#: Of the outputs' norm: queries, probabilities and results are rounded to T, with E4M3 caches the former to float16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: Steps between neighbours in a cache, of a value: rounding may fall on the other side.
STEP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.int8: 2.0**-3}

#: For emulators: splits, padded and full heads, all options.
SMALL = [RAGGED, LONG_HEAD, PADDED_HEAD, SEVERAL_BLOCKS, MANY_SEQUENCES, SEVERAL_TILES]


def check(host: PluginHost, shape: Shape, dtype: torch.dtype, fp8: bool, tactic: int, seed: int, device: str) -> None:
    tensors = inputs(np.random.default_rng(seed), shape, dtype, fp8)
    moved = [x.to(device) for x in tensors]
    with host.session(OP, moved, shape.attributes(fp8), tactic=tactic) as session:
        y, *present = (x.cpu() for x in session.run(moved))
        again = [x.cpu() for x in session.run(moved)]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((y, *present), again, strict=True))

    q, *new = new_rows(tensors, shape)
    held = []
    for past, now, scale, rows in zip(tensors[1:3], present, tensors[9:], new, strict=True):
        values = cached_values(now, scale)
        for b, length in enumerate(shape.lengths):
            end = length + shape.new
            for part in (slice(length), slice(end, None)):
                assert torch.equal(past[b, :, part].view(torch.uint8), now[b, :, part].view(torch.uint8))
            wanted = rows[b].swapaxes(0, 1)
            # In float32 a row is normalised and turned: ten roundings, of terms that may cancel, together at most the
            # square root of two of their pair's length.
            noise = 10 * 2.0**-24 * 2**0.5 * sizes(wanted, shape)
            if fp8:
                wanted = np.clip(wanted, *(float64(scale)[:, None, None] * 448 * sign for sign in (-1, 1)))
            # Half of the smallest step: of E4M3, of float16.
            smallest = float64(scale).max() * 2.0**-9 if fp8 else 2.0**-25 * (now.dtype == torch.float16)
            bound = abs(wanted) * STEP[now.dtype] / 1.9 + noise + smallest
            assert np.all(abs(values[b, :, length:end] - wanted) <= bound)
        held.append(values)
    expected = attend(q, *held, float64(tensors[8]), shape)
    assert np.linalg.norm(float64(y) - expected) <= TOLERANCE[dtype] * np.linalg.norm(expected)


def tactics(shape: Shape, dtype: torch.dtype) -> list[int]:
    if dtype == torch.float32:
        return [AUTO]
    return [GENERIC, PREFILL, *([DECODE] if shape.new <= 16 else [])]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(host: PluginHost, shape: Shape, dtype: torch.dtype, fp8: bool, seed: int) -> None:
    for tactic in tactics(shape, dtype):
        check(host, shape, dtype, fp8, tactic, seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("shape", [
    Shape(32, 8, 128, 4100, 1, (4099, 0, 1, 2047, 3000), 128, {"qk_norm": 1}),
    Shape(8, 1, 256, 2000, 4, (1996, 700), 256),
    Shape(8, 2, 64, 1200, 1, tuple(range(0, 1200, 18)), 64),  # more than a warp's worth of sequences
    Shape(8, 2, 128, 1100, 700, (0, 400), 128, {"window": 512}),
], ids=str)  # fmt: skip
def test_many_splits_and_tiles(host: PluginHost, shape: Shape, fp8: bool, seed: int) -> None:
    check(host, shape, torch.float16, fp8, AUTO, seed, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_emulated(emulated: PluginHost, shape: Shape, fp8: bool, seed: int) -> None:
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    for tactic in (PREFILL, *([DECODE] if shape.new <= 16 else [])):
        check(emulated, shape, dtype, fp8, tactic, seed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["h200"], indirect=True)
@pytest.mark.parametrize("shape", [PADDED_HEAD, SEVERAL_TILES], ids=str)
def test_wgmma_emulated(emulated: PluginHost, emulated_gpu: Gpu, shape: Shape, seed: int) -> None:
    """Prefill's kernel of SM90: padded heads, a window, sinks and a soft cap; several tiles of rows and of keys."""
    dtype = (torch.float16, torch.bfloat16)[seed % 2]
    emulated_gpu.launches.clear()
    check(emulated, shape, dtype, False, PREFILL, seed, "cpu")
    assert any("sm90_attention_prefill" in launch.kernel for launch in emulated_gpu.launches)


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_generic_emulated(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, True)):
        check(emulated, NORMED, dtype, fp8, GENERIC, seed, "cpu")
    # A head that the tensor cores' kernels do not take.
    emulated_gpu.launches.clear()
    check(emulated, Shape(2, 1, 36, 20, 2, (0, 18), 12), torch.float16, False, AUTO, seed, "cpu")
    assert any("generic_attention" in launch.kernel for launch in emulated_gpu.launches)


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 36), (torch.bfloat16, 64)])
def test_nan_stays_in_its_head(emulated: PluginHost, dtype: torch.dtype, head_dim: int, seed: int) -> None:
    shape = Shape(2, 1, head_dim, 40, 1, (20,))
    tensors = inputs(np.random.default_rng(seed), shape, dtype, False)
    tensors[0][0, 0, 5] = torch.nan
    wanted = torch.arange(2 * head_dim) < head_dim  # head 0
    assert torch.equal(OPS[OP].reference(*tensors, **shape.attributes(False))[0].isnan().view(-1), wanted)
    for tactic in tactics(shape, dtype) if head_dim % 16 == 0 else [GENERIC]:
        with emulated.session(OP, tensors, shape.attributes(False), tactic=tactic) as session:
            assert torch.equal(session.run(tensors)[0].isnan().view(-1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_beyond_the_capacity(emulated: PluginHost, head_dim: int, seed: int) -> None:
    """Whatever past_length holds, nothing outside the caches is touched; run() checks the guards. A row whose window
    holds no key is 0."""
    shape = Shape(4, 2, head_dim, 40, 3, (0, 1, 2, 3), head_dim, {"window": 2})
    tensors = inputs(np.random.default_rng(seed), shape, torch.float16, False)
    tensors[3] = torch.tensor([38, 40, 2**40, -5])
    for cache in tensors[1:3]:
        cache.nan_to_num_()
    for tactic in (GENERIC, DECODE, PREFILL):
        with emulated.session(OP, tensors, shape.attributes(False), tactic=tactic) as session:
            y, keys, _ = session.run(tensors)
        assert y[0].isfinite().all()
        assert not y[1, 2].any()
        assert torch.equal(keys[1:3].view(torch.int16), tensors[1][1:3].view(torch.int16))
        assert keys[0, :, 38:].isfinite().all()


MISFITS = [
    ({"heads": 3}, "kv_heads must divide heads|must have shape"),
    ({"heads": 8}, "qkv must have shape"),
    ({"fp8_cache": 1}, "caches must be INT8"),
    ({"rope": 3}, "rope must be 0 to 2, it is 3"),
    ({"window": -1}, "window must be 0 to 2147483647, it is -1"),
]


@pytest.mark.parametrize(("attributes", "message"), MISFITS)
def test_misfits_are_named(host: PluginHost, attributes: dict[str, int | float], message: str, seed: int) -> None:
    shape = Shape(4, 2, 64, 40, 3, (0,), 64)
    tensors = inputs(np.random.default_rng(seed), shape, torch.float16, False)
    with pytest.raises(HostError, match=message):
        host.session(OP, tensors, shape.attributes(False) | attributes)


def random_layer(capacity: int, new: int) -> tuple[Shape, list[torch.Tensor]]:
    shape = Shape(4, 2, 64, capacity, new, (0, 0), 64, {"qk_norm": 1})
    tensors = [x.cuda() for x in inputs(np.random.default_rng(), shape, torch.bfloat16, False)]
    return shape, tensors


@pytest.mark.gpu
def test_ten_thousand_steps_are_one_prefill(host: PluginHost) -> None:
    """Each step appends in place; the caches hold the same bits, and the last tokens see the same."""
    steps = 10_000
    shape, tensors = random_layer(steps, steps)
    qkv, *rest = tensors
    with host.session(OP, tensors, shape.attributes(False)) as session:
        expected, *present = session.run(tensors)
    caches = [torch.zeros_like(cache) for cache in rest[:2]]
    length = torch.zeros_like(rest[2])
    token, y = qkv[:, :1].clone(), torch.empty(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    given = [token, *caches, length, *rest[3:]]
    with host.session(OP, given, shape.attributes(False)) as session:
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        for step in range(steps):
            token.copy_(qkv[:, step : step + 1])
            session.enqueue(given, [y, *caches], workspace)
            length += 1
            if step in (0, 31, 4999, steps - 1):
                wanted = expected[:, step : step + 1].double()
                assert (y.double() - wanted).norm() <= TOLERANCE[torch.bfloat16] * wanted.norm()
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(caches, present, strict=True))


@pytest.mark.gpu
def test_two_streams_at_once(host: PluginHost) -> None:
    """Calls of two contexts that overlap give the bits of calls one by one."""
    layers = [random_layer(3000, 1) for _ in range(2)]
    for _, tensors in layers:
        tensors[3].fill_(2500)
    alone, together = [], []
    sessions = [host.session(OP, tensors, shape.attributes(False)) for shape, tensors in layers]
    workspaces = [torch.empty(s.workspace_size, dtype=torch.uint8, device="cuda") for s in sessions]
    streams = [torch.cuda.Stream() for _ in sessions]
    outputs = [torch.empty(2, 1, 256, device="cuda", dtype=torch.bfloat16) for _ in sessions]

    def call(index: int) -> None:
        tensors = layers[index][1]
        sessions[index].enqueue(tensors, [outputs[index], *tensors[1:3]], workspaces[index])

    for index in range(2):
        call(index)
        alone.append(outputs[index].clone())
    torch.cuda.synchronize()
    for _ in range(200):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                call(index)
                together.append((index, outputs[index].clone()))
    torch.cuda.synchronize()
    assert all(torch.equal(y.view(torch.int16), alone[i].view(torch.int16)) for i, y in together)
