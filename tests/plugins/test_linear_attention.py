"""LinearAttention's kernels against float64, on this machine's GPU and on emulated ones."""

from typing import Any

import numpy as np
import pytest
import torch
from recurrent_cases import (
    AUTO,
    CHUNKED,
    CHUNKS,
    RECURRENT,
    SMALL,
    Shape,
    expected,
    linear_attention_inputs,
    relative_error,
    tactics,
)
from recurrent_cases import LINEAR_ATTENTION as OP

from ptx_emulator.shim import Gpu
from trt_nvfp4.plugins.host import HostError, PluginHost

RULES = ("linear", "gated", "delta", "gated_delta")
#: Of the outputs' norm. Chunks round the state and what the delta rule corrects to T.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check(
    host: PluginHost, shape: Shape, dtype: torch.dtype, tactic: int, seed: int, device: str, *,
    state: torch.dtype = torch.float32, grown: float = 1,
) -> None:  # fmt: skip
    tensors = linear_attention_inputs(np.random.default_rng(seed), shape, dtype, state)
    if shape.past:
        tensors[3] *= grown
    moved = [x.to(device) for x in tensors]
    with host.session(OP, moved, shape.attributes, tactic=tactic) as session:
        y, present = (x.cpu() for x in session.run(moved))
        again = [x.cpu() for x in session.run(moved)]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((y, present), again, strict=True))
    wanted_y, wanted_state = expected(shape, tensors)
    assert (y.dtype, present.dtype) == (dtype, tensors[3].dtype if shape.past else dtype)
    assert relative_error(wanted_y, y) <= TOLERANCE[dtype], "output"
    rounding = dtype if tactic in (AUTO, CHUNKED) else torch.float32
    assert relative_error(wanted_state, present) <= TOLERANCE[rounding] + TOLERANCE[present.dtype] / 2, "state"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17, 63, 64, 65, 200])
def test_against_float64(host: PluginHost, rule: str, tokens: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng([seed, tokens, RULES.index(rule)])
    for _ in range(3):
        sizes = [int(16 * n) for n in rng.integers(1, 17, 2)]
        batch, heads, group = (int(n) for n in rng.integers(1, 4, 3))
        shape = Shape(
            rule, batch, tokens, heads, *sizes, group, per_row=rng.random() < 0.3, shared_beta=rng.random() < 0.3
        )
        for tactic in tactics(shape, dtype):
            check(host, shape, dtype, tactic, int(rng.integers(2**31)), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [
    Shape("gated_delta", 1, 2100, 32, 128, 128),
    Shape("gated", 2, 1500, 64, 128, 64),
    Shape("delta", 3, 4100, 22, 64, 64),  # more chunks than one pair of launches covers
    Shape("gated_delta", 2, 300, 4, 256, 256),
], ids=str)  # fmt: skip
def test_many_chunks(host: PluginHost, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    check(host, shape, dtype, AUTO, seed, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SMALL, *CHUNKS], ids=str)
def test_emulated(emulated: PluginHost, shape: Shape, seed: int) -> None:
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    for tactic in [t for t in tactics(shape, dtype) if (t == CHUNKED) == (shape in CHUNKS)]:
        check(emulated, shape, dtype, tactic, seed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_states_of_other_types_and_none(emulated: PluginHost, seed: int) -> None:
    for state in (torch.float16, torch.bfloat16):
        check(emulated, SMALL[0], torch.bfloat16, AUTO, seed, "cpu", state=state)
    check(emulated, Shape("linear", 1, 2, 1, 16, 16, past=False), torch.float16, AUTO, seed, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_a_state_beyond_float16(emulated: PluginHost, seed: int) -> None:
    """Which chunks multiply as float16."""
    shape = Shape("gated", 1, 66, 1, 16, 16, options={"scale": 2.0**-14})
    check(emulated, shape, torch.float16, CHUNKED, seed, "cpu", grown=2.0**18)


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
def test_more_chunks_than_two_launches_take(
    emulated: PluginHost, emulated_gpu: Gpu, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next two start from the state that these leave. Only launched, since they are long."""
    shape = Shape("linear", 1, 4160, 64, 16, 16)
    tensors = linear_attention_inputs(np.random.default_rng(seed), shape, torch.float16)
    y, present = torch.empty_like(tensors[2]), torch.empty_like(tensors[3])
    monkeypatch.setattr(emulated_gpu, "execute", False)
    emulated_gpu.launches.clear()
    with emulated.session(OP, tensors, shape.attributes, tactic=CHUNKED) as session:
        session.enqueue(tensors, [y, present], torch.empty(session.workspace_size, dtype=torch.uint8))
    scans = [launch.parameters for launch in emulated_gpu.launches if "scan" in launch.kernel]
    assert [scan.count(present.data_ptr().to_bytes(8, "little")) for scan in scans] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("emulated_gpu", ["rtx-blackwell"], indirect=True)
@pytest.mark.parametrize("tactic", [RECURRENT, CHUNKED])
def test_nan_in_place_and_padding(emulated: PluginHost, emulated_gpu: Gpu, tactic: int, seed: int) -> None:
    """One sequence's NaN stays there; a padded one's state keeps its bits; past and present are one buffer."""
    shape = Shape("gated_delta", 3, 5, 1, 32, 32)
    tensors = linear_attention_inputs(np.random.default_rng(seed), shape, torch.bfloat16)
    tensors[2][0, 1] = torch.nan
    for x in (tensors[1], tensors[4], tensors[5]):
        x[1] = 0
    past = tensors[3].clone()
    wanted_y, wanted_state = expected(shape, tensors)
    with emulated.session(OP, tensors, shape.attributes, tactic=tactic) as session:
        y = torch.empty(wanted_y.shape, dtype=torch.bfloat16)
        workspace = torch.zeros(session.workspace_size, dtype=torch.uint8)
        session.enqueue(tensors, [y, tensors[3]], workspace)
    assert y[0, 1:].isnan().all()
    assert tensors[3][0].isnan().all()
    assert torch.equal(tensors[3][1], past[1])
    assert relative_error(wanted_y[1:], y[1:]) <= TOLERANCE[torch.bfloat16]
    assert relative_error(wanted_state[1:], tensors[3][1:]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300])
def test_two_streams_at_once(host: PluginHost, tokens: int) -> None:
    """Calls of two contexts that overlap, each with a state in place, give the bits of calls one by one."""
    shape = Shape("gated_delta", 2, tokens, 8, 128, 128)

    def steps(together: bool) -> list[torch.Tensor]:
        kept, streams = [], [torch.cuda.Stream() for _ in range(2)]
        calls = []
        for index in range(2):
            given = [x.cuda() for x in linear_attention_inputs(np.random.default_rng(index), shape, torch.bfloat16)]
            session = host.session(OP, given, shape.attributes)
            workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
            calls.append((session, given, torch.empty_like(given[2]), workspace))
        torch.cuda.synchronize()
        for _ in range(50):
            for stream, (session, given, y, workspace) in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream if together else streams[0]):
                    session.enqueue(given, [y, given[3]], workspace)
                    kept.append(y.clone())
        torch.cuda.synchronize()
        return kept + [given[3] for _, given, _, _ in calls]

    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(steps(False), steps(True), strict=True)
    )


MISFITS = [
    ({"update_rule": "gate"}, 'update_rule must be one of linear, gated, delta, gated_delta, it is "gate"'),
    ({"q_num_heads": 3}, "must have shape|must divide"),
    ({"kv_num_heads": 0}, "kv_num_heads must be 1 to 65535, it is 0"),
]


@pytest.mark.parametrize(("attributes", "message"), MISFITS)
def test_misfits_are_named(host: PluginHost, attributes: dict[str, Any], message: str, seed: int) -> None:
    shape = Shape("gated_delta", 1, 2, 2, 16, 16)
    tensors = linear_attention_inputs(np.random.default_rng(seed), shape, torch.float16)
    with pytest.raises(HostError, match=message):
        host.session(OP, tensors, shape.attributes | attributes)


def test_a_missing_input_is_named(host: PluginHost, seed: int) -> None:
    shape = Shape("gated_delta", 1, 2, 2, 16, 16)
    tensors = linear_attention_inputs(np.random.default_rng(seed), shape, torch.float16)
    for count, message in ((5, "need a beta"), (4, "need a decay"), (2, "has 3 to 6 inputs")):
        with pytest.raises(HostError, match=message):
            host.session(OP, tensors[:count], shape.attributes)
