"""The W4A16 decode kernel against float64, over token counts, odd shapes, layers, streams and graphs."""

import math
from typing import Any

import pytest
import torch
from op_inputs import float64
from test_kernels import require_gpu_of, require_streaming
from test_w4a16_ranges import assert_near

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS, Activation
from trt_nvfp4.plugins.ops.number_formats import e2m1_decode, tile_scales, unpack

pytestmark = pytest.mark.gpu

W4A16, W4A16_MMA_SYNC, W4A16_SM90 = 2, 6, 8
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def random_weight(n: int, k: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Packed codes, tiled scales of E4M3 with its extremes, tensor scale; and their float64 values."""
    packed = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, device="cuda")
    scales = (0.5 + torch.rand(n, k // 16, device="cuda")).to(torch.float8_e4m3fn)
    extremes = torch.tensor([0.0, 2.0**-9, 2.0**-6, 12.0], device="cuda").to(torch.float8_e4m3fn)
    where = torch.randint(0, scales.numel(), (4,), device="cuda")
    scales.view(torch.uint8).view(-1)[where] = extremes.view(torch.uint8)
    tensor_scale = torch.tensor(1.0 / (2.8 * math.sqrt(k)), device="cuda")
    values = e2m1_decode(unpack(packed.view(torch.uint8))).double()
    exact = values * scales.double().repeat_interleave(16, dim=1) * tensor_scale.double()
    return [packed, tile_scales(scales).view(torch.int8), tensor_scale], exact


def run_twice(
    host: PluginHost, op: str, inputs: list[torch.Tensor], attributes: dict[str, int | float], tactic: int = W4A16
) -> torch.Tensor:
    """The second run, in other memory, must give the same bits."""
    with host.session(op, inputs, attributes, tactic=tactic) as session:
        (first,), (second,) = session.run(inputs), session.run(inputs)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16)), "not deterministic"
    return first


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def linear_inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Inputs, outputs in float64, and the size of such outputs, had their terms random signs."""
    weight, exact = random_weight(n, k)
    x, bias = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, device="cuda").to(dtype)
    size = (x.double() ** 2 @ exact.T**2 + bias.double() ** 2).sqrt()
    return [x, *weight, bias, torch.zeros((), device="cuda")], x.double() @ exact.T + bias.double(), size


# The last is SM90's.
TACTICS = pytest.mark.parametrize("tactic", [W4A16, W4A16_SM90])
LINEAR_TACTICS = pytest.mark.parametrize("tactic", [W4A16, W4A16_MMA_SYNC, W4A16_SM90])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LINEAR_TACTICS
@pytest.mark.parametrize(
    ("m", "n", "k"),
    # Every count; and more of K than shared memory holds at once: what comes later must not overwrite what is still
    # being read.
    [*((m, 328, 736) for m in range(1, 65)), *((m, 11008, 4096) for m in (3, 8, 12, 20, 33, 48, 64, 65))],
)
def test_linear_at_token_counts(host: PluginHost, m: int, n: int, k: int, tactic: int, dtype: torch.dtype) -> None:
    require_gpu_of(tactic)
    inputs, reference, _ = linear_inputs(m, n, k, dtype)
    require_streaming(host, inputs, tactic)
    y = run_twice(host, "NVFP4Linear", inputs, {"activation": Activation.IDENTITY}, tactic)
    assert relative_error(y, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@LINEAR_TACTICS
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 1, 32),
        (5, 7, 96),
        (9, 129, 224),
        (2, 4096, 4096),
        (16, 1000, 8192),
        (33, 64, 16384),
        # Several tasks for a block.
        (1, 70000, 544),
        (1, 9000, 28704),
        # Blocks of SM90's that have the end of a tile and the begin of the next, or whole ones.
        (8, 9000, 4128),
        (13, 40000, 544),
        # Small linears: one to five stages, tiles without rows, K that ends within a chunk, two tiles for an SM; by
        # clusters: an odd number of chunks, two tiles for an SM; rings that are filled again, of both.
        (1, 40, 10240),
        (1, 8192, 2080),
        (4, 1000, 6176),
        (8, 2048, 1024),
        (12, 4096, 96),
        (8, 130, 4064),
        (16, 33, 4096),
        (11, 8200, 1824),
        (5, 6144, 2848),
        (1, 4096, 13856),
        (4, 3000, 14336),
        (8, 4096, 10272),
        (12, 3072, 7168),
        # In blocks of 64 tokens.
        (65, 77, 288),
        (200, 1000, 2048),
    ],
)
def test_linear_at_odd_shapes(host: PluginHost, m: int, n: int, k: int, tactic: int, dtype: torch.dtype) -> None:
    require_gpu_of(tactic)
    inputs, reference, size = linear_inputs(m, n, k, dtype)
    require_streaming(host, inputs, tactic)
    y = run_twice(host, "NVFP4Linear", inputs, {"activation": Activation.IDENTITY}, tactic)
    assert_near(y, float64(reference), float64(size))


def stack_inputs(layers: int, m: int, k: int, i: int, h: int, dtype: torch.dtype, *, gated: int) -> list[torch.Tensor]:
    rows = 2 * i if gated else i
    parts: list[torch.Tensor] = []
    for n, width in ((rows, k), (h, i)):
        weights = [random_weight(n, width)[0] for _ in range(layers)]
        parts += [torch.stack(tensors) for tensors in zip(*weights, strict=True)]
        parts.append((0.1 * torch.randn(layers, n, device="cuda")).to(dtype))
    x = torch.randn(m, k, device="cuda").to(dtype)
    norm = (1.0 + 0.1 * torch.randn(layers, k, device="cuda")).to(dtype)
    return [x, norm, *parts, torch.zeros(layers, device="cuda"), torch.zeros(layers, device="cuda")]


STACKS: list[tuple[tuple[int, int, int, int, int], dict[str, Any]]] = [
    ((1, 1, 64, 96, 40), {"gated": 1, "activation": Activation.SILU, "residual": 0}),
    ((2, 1, 2048, 16384, 2048), {"gated": 1, "activation": Activation.GELU_TANH, "residual": 0}),
    ((4, 1, 256, 512, 256), {"gated": 0, "activation": Activation.RELU2, "norm": 1, "residual": 1}),
    ((32, 1, 512, 1024, 512), {"gated": 1, "activation": Activation.GELU_QUICK, "norm": 1, "residual": 1}),
    ((1, 7, 544, 320, 1000), {"gated": 0, "activation": Activation.RELU2, "residual": 0}),
    ((2, 64, 512, 1056, 512), {"gated": 1, "activation": Activation.SWIGLU_CLAMPED, "norm": 1, "residual": 1}),
    ((2, 3, 512, 1056, 512), {"gated": 1, "activation": Activation.SILU_CLAMPED, "limit": 0.5, "residual": 1}),
    ((3, 16, 2048, 4096, 2048), {"gated": 1, "activation": Activation.GELU_TANH}),
    ((4, 33, 256, 512, 256), {"gated": 0, "activation": Activation.GELU, "residual": 1}),
    ((3, 130, 256, 512, 256), {"gated": 1, "activation": Activation.SILU, "norm": 1, "residual": 1}),
    ((32, 8, 512, 1024, 512), {"gated": 1, "activation": Activation.GELU_QUICK, "norm": 1, "residual": 1}),
    # Several tiles of up for a block.
    ((2, 6, 1312, 35008, 1312), {"gated": 1, "activation": Activation.SILU, "norm": 1, "residual": 1}),
    ((1, 40, 1312, 35008, 77), {"gated": 1, "activation": Activation.GELU, "residual": 0}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@TACTICS
@pytest.mark.parametrize(("shape", "attributes"), STACKS, ids=str)
def test_stack_matches_the_torch_reference(
    host: PluginHost, shape: tuple[int, int, int, int, int], attributes: dict[str, Any], tactic: int, dtype: torch.dtype
) -> None:
    require_gpu_of(tactic)
    inputs = stack_inputs(*shape, dtype, gated=attributes["gated"])
    y = run_twice(host, "NVFP4PersistentMLP", inputs, attributes, tactic)
    reference = OPS["NVFP4PersistentMLP"].reference(*inputs, **attributes)
    # Roundings between layers differ by a step here and there, and later layers amplify it.
    assert relative_error(y, reference) < TOLERANCE[dtype] * math.sqrt(shape[0])


def test_one_token_is_as_near_as_two(host: PluginHost) -> None:
    """Roundings of products, where there were any, would add up over layers."""
    require_gpu_of(W4A16_SM90)
    attributes = {"gated": 1, "activation": Activation.SILU, "norm": 1, "residual": 1}
    one = stack_inputs(8, 1, 1024, 2048, 1024, torch.float16, gated=1)
    two = [one[0].repeat(2, 1), *one[1:]]
    reference = OPS["NVFP4PersistentMLP"].reference(*one, **attributes)
    errors = [
        relative_error(run_twice(host, "NVFP4PersistentMLP", inputs, attributes, W4A16_SM90)[:1], reference)
        for inputs in (one, two)
    ]
    assert max(errors) < TOLERANCE[torch.float16]
    assert errors[0] < 1.8 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "width"), [(1, 1024), (3, 1024), (8, 1024), (16, 1024), (6, 3072), (16, 2048), (12, 4096)]
)
def test_small_linears_in_a_row(host: PluginHost, m: int, width: int, dtype: torch.dtype) -> None:
    """Each starts while the one before it ends, whose outputs it reads and whose inputs it overwrites."""
    calls = []
    buffers = [torch.empty(m, width, dtype=dtype, device="cuda") for _ in range(2)]
    for i in range(64):
        weights, _ = random_weight(width, width)
        bias = torch.randn(width, device="cuda").to(dtype)
        calls.append(([buffers[i % 2], *weights, bias, torch.zeros((), device="cuda")], buffers[(i + 1) % 2]))
    x = torch.randn(m, width, device="cuda").to(dtype)
    with host.session("NVFP4Linear", calls[0][0], {}, tactic=W4A16) as session:
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")

        def run(*, one_by_one: bool) -> torch.Tensor:
            buffers[0].copy_(x)
            for inputs, y in calls:
                session.enqueue(inputs, [y], workspace)
                if one_by_one:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            return buffers[0].clone()

        expected = run(one_by_one=True)
        assert expected.isfinite().all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs, y in calls:
                session.enqueue(inputs, [y], workspace)
        for _ in range(20):
            assert torch.equal(run(one_by_one=False), expected)
            buffers[0].copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(buffers[0], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 8, 9, 15, 16, 17, 25, 32, 33, 47, 63, 64, 65])
def test_resident_layers_at_every_kernel_s_token_counts(host: PluginHost, m: int, dtype: torch.dtype) -> None:
    require_gpu_of(W4A16_SM90)
    attributes = {"gated": 1, "activation": Activation.SILU, "norm": 1, "residual": 1}
    inputs = stack_inputs(2, m, 544, 1312, 544, dtype, gated=1)
    y = run_twice(host, "NVFP4PersistentMLP", inputs, attributes, W4A16_SM90)
    reference = OPS["NVFP4PersistentMLP"].reference(*inputs, **attributes)
    assert relative_error(y, reference) < TOLERANCE[dtype] * math.sqrt(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("m", [4, 16])
def test_an_infinite_hidden_value_gives_infinities(host: PluginHost, m: int, layers: int, dtype: torch.dtype) -> None:
    """Partial sums of few tokens carry their layer's parity in their last bit: an infinity with that is no number."""
    require_gpu_of(W4A16_SM90)
    attributes: dict[str, Any] = {"gated": 0, "activation": Activation.RELU2, "residual": 0}
    inputs = stack_inputs(layers, m, 512, 1024, 512, dtype, gated=0)
    up_bias, down_codes = inputs[5], inputs[6]
    up_bias[-1, 0] = math.inf
    y = run_twice(host, "NVFP4PersistentMLP", inputs, attributes, W4A16_SM90)
    weights = e2m1_decode(unpack(down_codes[-1].view(torch.uint8)))[:, 0]
    rows = weights != 0  # zero times infinity is no number
    assert rows.any()
    # Of four scales at random places one is zero.
    assert (y[:, rows] == weights[rows].sign().to(y) * math.inf).all(dim=0).sum() >= rows.sum() - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@TACTICS
@pytest.mark.parametrize("m", [4, 8])
def test_a_token_that_is_no_number_is_lost_alone(host: PluginHost, m: int, tactic: int, dtype: torch.dtype) -> None:
    """All of its bits are set, as of activations that blocks still wait for."""
    require_gpu_of(tactic)
    attributes: dict[str, Any] = {"gated": 1, "activation": Activation.SILU, "residual": 1}
    inputs = stack_inputs(2, m, 512, 1024, 512, dtype, gated=1)
    inputs[0].view(torch.int16)[1] = -1
    y = run_twice(host, "NVFP4PersistentMLP", inputs, attributes, tactic)
    reference = OPS["NVFP4PersistentMLP"].reference(*inputs, **attributes)
    others = torch.arange(m) != 1
    assert y[1].isnan().all()
    assert relative_error(y[others], reference[others]) < TOLERANCE[dtype] * math.sqrt(2)


def test_explicit_tactic_is_refused_where_it_cannot_serve(host: PluginHost) -> None:
    inputs, _, _ = linear_inputs(1, 64, 64, torch.float16)
    odd = [inputs[0][:, :48].contiguous(), inputs[1][:, :24].contiguous(), *inputs[2:]]
    with host.session("NVFP4Linear", odd, {}, tactic=W4A16) as session, pytest.raises(HostError, match="tactic 2"):
        session.run(odd)


# One token has a kernel of its own.
FEW_TOKENS = pytest.mark.parametrize(("tactic", "m"), [(W4A16, 1), (W4A16, 4), (W4A16_SM90, 4)])


@FEW_TOKENS
def test_two_streams_at_once_and_many_launches(host: PluginHost, tactic: int, m: int) -> None:
    """Two persistent launches that each fill the GPU compete for it, each with its own workspace, 10,000 times in a
    row: of a launch all blocks start or none does."""
    require_gpu_of(tactic)
    attributes = {"gated": 1, "activation": Activation.SILU}
    inputs = [stack_inputs(2, m, 2048, 8192, 2048, torch.float16, gated=1) for _ in range(2)]
    expected = [run_twice(host, "NVFP4PersistentMLP", each, attributes, tactic) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs = [torch.empty_like(y) for y in expected]
    with (
        host.session("NVFP4PersistentMLP", inputs[0], attributes, tactic=tactic) as first,
        host.session("NVFP4PersistentMLP", inputs[1], attributes, tactic=tactic) as second,
    ):
        workspaces = [torch.empty(s.workspace_size, dtype=torch.uint8, device="cuda") for s in (first, second)]
        torch.cuda.synchronize()
        for _ in range(5000):
            for session, stream, x, y, workspace in zip(
                (first, second), streams, inputs, outputs, workspaces, strict=True
            ):
                with torch.cuda.stream(stream):
                    session.enqueue(x, [y], workspace)
        torch.cuda.synchronize()
    for y, reference in zip(outputs, expected, strict=True):
        assert torch.equal(y, reference)


@FEW_TOKENS
def test_graph_replays_with_new_inputs(host: PluginHost, tactic: int, m: int) -> None:
    require_gpu_of(tactic)
    attributes = {"gated": 1, "activation": Activation.SILU}
    inputs = stack_inputs(3, m, 512, 1024, 512, torch.bfloat16, gated=1)
    with host.session("NVFP4PersistentMLP", inputs, attributes, tactic=tactic) as session:
        y = torch.empty_like(inputs[0])
        workspace = torch.empty(session.workspace_size, dtype=torch.uint8, device="cuda")
        session.enqueue(inputs, [y], workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            session.enqueue(inputs, [y], workspace)
        for _ in range(3):
            inputs[0].copy_(torch.randn_like(inputs[0]))
            workspace.random_(0, 255)  # its content between launches is arbitrary
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, run_twice(host, "NVFP4PersistentMLP", inputs, attributes, tactic))
