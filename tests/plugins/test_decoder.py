"""The launch for all layers of NVFP4Decoder and NVFP4MoEDecoder, and its parts, against float64, here and emulated."""

import math

import numpy as np
import pytest
import torch
from attention_cases import cached_values
from decoder_cases import MIXTURES, PARTS_ALONE, SHAPES, Case, CloseChoiceError, Shape, expected, random_case
from op_inputs import float64

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost

AUTO, GENERIC, DECODER = 0, 1, 11
OP = "NVFP4Decoder"
#: Of the outputs' norm: what layers hand over is rounded to T.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
#: Of new keys and values, of their norm: these are rounded once more, to E4M3 in 16ths.
CACHE_TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.int8: 5e-2}


def check(host: PluginHost, case: Case, tactic: int, device: str) -> None:
    shape, inputs = case.shape, [x.to(device) for x in case.inputs]
    with host.session(shape.op, inputs, shape.attributes(case.fp8), tactic=tactic) as session:
        y, present = (x.cpu() for x in session.run(inputs))
        again = [torch.empty_like(x, device=device) for x in (y, present)]
        # An earlier launch may leave words of layer 0 there.
        session.enqueue(inputs, again, torch.zeros(session.workspace_size, dtype=torch.uint8, device=device))
        again = [x.cpu() for x in again]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((y, present), again, strict=True))

    wanted, appended = expected(case, present)
    # Rounding errors of the layers add up like random steps; the tolerances are those of a few layers.
    deep = max(1.0, math.sqrt(shape.layers / 4))
    assert np.linalg.norm(float64(y) - wanted) <= deep * TOLERANCE[y.dtype] * np.linalg.norm(wanted)
    for layer, rows in enumerate(appended):
        for which, new in enumerate(rows):
            past, now = case.inputs[1][layer, which], present[layer, which]
            values = cached_values(now, case.inputs[8 + which][layer])
            tolerance = deep * max(CACHE_TOLERANCE[now.dtype], CACHE_TOLERANCE[y.dtype])
            for b, length in enumerate(shape.lengths):
                end = length + shape.new
                for part in (slice(length), slice(end, None)):
                    assert torch.equal(past[b, :, part].view(torch.uint8), now[b, :, part].view(torch.uint8))
                given = new[b].swapaxes(0, 1)
                if case.fp8:
                    bound = float64(case.inputs[8 + which][layer])[:, None, None] * 448
                    given = np.clip(given, -bound, bound)
                assert np.linalg.norm(values[b, :, length:end] - given) <= tolerance * np.linalg.norm(given)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(host: PluginHost, shape: Shape, dtype: torch.dtype, fp8: bool, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), shape, dtype, fp8)
    for tactic in (DECODER, GENERIC):
        check(host, case, tactic, "cuda")


def check_mixture(
    host: PluginHost, rng: np.random.Generator, shape: Shape, dtype: torch.dtype, fp8: bool, tactics: tuple[int, ...],
    device: str,
) -> None:  # fmt: skip
    """Of a case whose choices rounding does not decide."""
    for _ in range(20):
        case = random_case(rng, shape, dtype, fp8)
        try:
            for tactic in tactics:
                check(host, case, tactic, device)
        except CloseChoiceError:
            continue
        return
    pytest.fail("rounding decided between experts in every case")


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [
    *MIXTURES,
    Shape(2, 512, 256, 16, 2, 128, 900, 1, (899,), {"top_k": 8, "renormalize": 1}, experts=128),
    Shape(1, 1024, 512, 16, 2, 128, 900, 1, (899, 0, 33, 512), {"top_k": 2, "renormalize": 1}, experts=32),
    Shape(1, 512, 256, 8, 1, 128, 200, 16, (100,), {"top_k": 3, "scoring": 1}, experts=4),
], ids=str)  # fmt: skip
def test_mixtures(host: PluginHost, shape: Shape, dtype: torch.dtype, fp8: bool, seed: int) -> None:
    check_mixture(host, np.random.default_rng(seed), shape, dtype, fp8, (DECODER, GENERIC), "cuda")


@pytest.mark.gpu
def test_mixtures_of_the_parts(host: PluginHost, seed: int) -> None:
    check_mixture(host, np.random.default_rng(seed), PARTS_ALONE, torch.float16, False, (AUTO,), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["T", "E4M3"])
@pytest.mark.parametrize("shape", [
    Shape(4, 2048, 6144, 16, 8, 128, 3000, 1, (2999,), {"qk_norm": 1}),
    Shape(3, 1024, 3072, 16, 8, 128, 1200, 1, (1199, 0, 600, 77, 1, 2, 3, 1100), {"qk_norm": 1}),
    Shape(3, 1024, 3072, 16, 2, 64, 1200, 16, (1184,)),
    Shape(3, 2048, 4096, 8, 1, 256, 3000, 1, (2999,)),
    Shape(3, 1024, 4096, 8, 1, 256, 3000, 1, (2999, 0, 1, 77, 1500, 2, 3, 4)),
    Shape(2, 1024, 2048, 8, 2, 256, 700, 4, (600, 0, 31, 99)),
    Shape(40, 64, 64, 2, 1, 32, 64, 1, (40,)),  # more hand-overs than work
], ids=str)  # fmt: skip
def test_many_tasks(host: PluginHost, shape: Shape, fp8: bool, seed: int) -> None:
    case = random_case(np.random.default_rng(seed), shape, torch.float16, fp8)
    check(host, case, DECODER, "cuda")


def in_place(seed: int, length: int, capacity: int) -> tuple[Shape, list[torch.Tensor]]:
    shape = Shape(2, 256, 512, 8, 2, 64, capacity, 1, (length,), {"qk_norm": 1})
    case = random_case(np.random.default_rng(seed), shape, torch.float16, False)
    return shape, [x.cuda() for x in case.inputs]


@pytest.mark.gpu
def test_ten_thousand_steps(host: PluginHost, seed: int) -> None:
    """One launch each, in place; now and then the parts, from the same caches, give nearly the same."""
    steps = 10_000
    shape, tensors = in_place(seed, 0, steps)
    x, past, length, *rest = tensors
    past.zero_()
    given = [x, past, length, *rest]
    y, other = torch.empty_like(x), torch.empty_like(x)
    attributes = shape.attributes(False)
    with (
        host.session(OP, given, attributes, tactic=DECODER) as one,
        host.session(OP, given, attributes, tactic=GENERIC) as parts,
    ):
        workspaces = [torch.empty(s.workspace_size, dtype=torch.uint8, device="cuda") for s in (one, parts)]
        for step in range(steps):
            x.normal_()
            if step in (0, 31, 4999, steps - 1):
                copy = past.clone()
                parts.enqueue([x, copy, length, *rest], [other, copy], workspaces[1])
            one.enqueue(given, [y, past], workspaces[0])
            if step in (0, 31, 4999, steps - 1):
                assert (y - other).double().norm() <= 2 * TOLERANCE[torch.float16] * other.double().norm()
            length += 1
    assert torch.isfinite(past).all()


@pytest.mark.gpu
def test_two_streams_at_once(host: PluginHost, seed: int) -> None:
    """Launches of two contexts give the bits of launches one by one."""
    calls = [in_place(seed + index, 700, 800) for index in range(2)]
    sessions = [host.session(OP, tensors, shape.attributes(False), tactic=DECODER) for shape, tensors in calls]
    workspaces = [torch.empty(s.workspace_size, dtype=torch.uint8, device="cuda") for s in sessions]
    streams = [torch.cuda.Stream() for _ in sessions]
    outputs = [torch.empty_like(tensors[0]) for _, tensors in calls]

    def call(index: int) -> None:
        tensors = calls[index][1]
        sessions[index].enqueue(tensors, [outputs[index], tensors[1]], workspaces[index])

    alone, together = [], []
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fp8"), [(2, False), (4, True), (5, False), (7, True), (8, False), (9, True)])
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_emulated(emulated: PluginHost, emulated_gpu: Gpu, number: int, fp8: bool, seed: int) -> None:
    """On few SMs, so that blocks have several tasks and wait for each other."""
    emulated_gpu.resize(sm_count=6)
    dtype = (torch.float16, torch.bfloat16)[(seed + number + fp8) % 2]
    case = random_case(np.random.default_rng(seed), SHAPES[number], dtype, fp8)
    check(emulated, case, DECODER, "cpu")
    assert "sm80_decoder" in emulated_gpu.launches[-1].kernel


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fp8"), [(0, True), (1, False), (2, False), (3, True), (4, False), (5, True)])
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_mixtures_emulated(emulated: PluginHost, emulated_gpu: Gpu, number: int, fp8: bool, seed: int) -> None:
    emulated_gpu.resize(sm_count=6)
    dtype = (torch.float16, torch.bfloat16)[(seed + number + fp8) % 2]
    check_mixture(emulated, np.random.default_rng(seed), MIXTURES[number], dtype, fp8, (DECODER,), "cpu")
    assert "sm80_decoder" in emulated_gpu.launches[-1].kernel


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_parts_emulated(emulated: PluginHost, emulated_gpu: Gpu, seed: int) -> None:
    """More tokens than one launch takes, by AUTO: the parts."""
    shape = Shape(2, 64, 96, 4, 2, 64, 40, 20, (3,))
    case = random_case(np.random.default_rng(seed), shape, torch.float16, False)
    emulated_gpu.launches.clear()
    check(emulated, case, AUTO, "cpu")
    assert not any("sm80_decoder" in launch.kernel for launch in emulated_gpu.launches)


MISFITS = [
    ({"heads": 3}, "kv_heads must divide heads|must have shape"),
    ({"heads": 8}, "qkv_weight must have shape"),
    ({"fp8_cache": 1}, "caches must be INT8"),
    ({"rope": 3}, "rope must be 0 to 2, it is 3"),
    ({"activation": 99}, "activation must be 0 to 8"),
]


@pytest.mark.parametrize(("attributes", "message"), MISFITS)
def test_misfits_are_named(host: PluginHost, attributes: dict[str, int | float], message: str, seed: int) -> None:
    shape = SHAPES[0]
    case = random_case(np.random.default_rng(seed), shape, torch.float16, False)
    with pytest.raises(HostError, match=message):
        host.session(OP, case.inputs, shape.attributes(False) | attributes)


def test_tactics(host: PluginHost, seed: int) -> None:
    """One launch where it serves; the parts always, and nothing to time where they alone do."""
    rng = np.random.default_rng(seed)
    for shape, tactics in (
        (MIXTURES[0], [DECODER, GENERIC]),
        (MIXTURES[4], [GENERIC, DECODER]),
        (PARTS_ALONE, []),
        (SHAPES[0], [DECODER, GENERIC]),
        (SHAPES[3], [GENERIC, DECODER]),
        (Shape(1, 64, 96, 4, 2, 64, 40, 17, (3,)), []),
        (Shape(1, 64, 96, 2, 1, 192, 40, 1, (3,)), [DECODER, GENERIC]),
        (SHAPES[9], [GENERIC, DECODER]),
        (Shape(1, 64, 96, 2, 1, 200, 40, 1, (3,)), []),
        (Shape(1, 48, 96, 4, 2, 64, 40, 1, (3,)), []),
    ):
        case = random_case(rng, shape, torch.float16, False)
        with host.session(shape.op, case.inputs, shape.attributes(False)) as session:
            assert session.tactics == tactics
