"""The plan that NVFP4MoE's kernels start from, on the PTX emulator: experts, weights, sorted pairs and jobs, exactly as
the op's reference and the plan's header say."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from op_inputs import given_logits

from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import Gpu, Program, find_toolkit
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.ops import moe_routing

SOURCE = r"""
#include "moe_plan.cu"
#include "error.cpp"

struct Routing {
    int scoring, renormalize, tokens, experts, hidden, top_k, groups, open_groups, group_score_top, dtype, job_tokens;
    int absent_jobs;
    float scaling_factor;
};

extern "C" int make_plan(Routing const* r, float const* logits, float const* bias, void const* x, void const* gate,
                         int* experts, float* weights, int* position, int* order, float* shared_factor, void* jobs,
                         int* totals, void* absent, int64_t absents, uint32_t* ticket) {
    trt_nvfp4::MoePlan const plan{experts, weights, position,   order, shared_factor,
                                  static_cast<trt_nvfp4::WorkItem*>(jobs), totals, totals + 1};
    trt_nvfp4::RouteArgs const args{
        static_cast<TrtNvfp4Scoring>(r->scoring), r->renormalize != 0, r->tokens, r->experts, r->hidden, r->top_k,
        r->groups, r->open_groups, r->group_score_top, r->scaling_factor, logits, bias, x, gate, plan, r->job_tokens,
        absent, absents, r->absent_jobs, ticket};
    return trt_nvfp4::dispatch_dtype(static_cast<TrtNvfp4DataType>(r->dtype), [&](auto element) {
        return trt_nvfp4::launch_plan<decltype(element)>(args, nullptr);
    });
}
"""
HIDDEN = 304
ATTRIBUTES = {
    "scoring": 0,
    "renormalize": 0,
    "scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "group_score_top": 1,
}
DEEPSEEK = {"scoring": 1, "n_group": 8, "topk_group": 4, "group_score_top": 2, "renormalize": 1, "scaling_factor": 2.5}


class Routing(ctypes.Structure):
    _fields_ = (
        ("scoring", ctypes.c_int32),
        ("renormalize", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("open_groups", ctypes.c_int32),
        ("group_score_top", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("job_tokens", ctypes.c_int32),
        ("absent_jobs", ctypes.c_int32),
        ("scaling_factor", ctypes.c_float),
    )


@dataclass
class Plan:
    experts: np.ndarray
    weights: np.ndarray
    position: np.ndarray
    order: np.ndarray
    shared_factor: np.ndarray
    jobs: np.ndarray  # expert, first, count, cost before
    totals: np.ndarray  # jobs, cost
    absent: np.ndarray
    ticket: np.ndarray


@pytest.fixture(scope="module")
def program() -> Program:
    try:
        find_toolkit()
    except EmulatorError as error:
        pytest.skip(str(error))
    headers = [*(ROOT / "kernels").rglob("*.cuh"), *(ROOT / "kernels").rglob("*.h")]
    api = ROOT / "kernels" / "api"
    sources = [api / "moe" / "moe_plan.cu", api / "error.cpp"]
    return Program.compile(
        SOURCE, Gpu("rtx-blackwell"), includes=[api, api / "moe", ROOT / "kernels"], depends=[*sources, *headers]
    )


def make_plan(
    program: Program,
    logits: np.ndarray,
    bias: np.ndarray,
    top_k: int,
    attributes: dict[str, Any],
    x: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    job_tokens: int = 8,
    jobs_are_flags: bool = False,
) -> Plan:
    program.gpu.launches.clear()
    tokens, experts = logits.shape
    pairs = tokens * top_k
    dtype = 0 if x is None else [torch.float32, torch.float16, torch.bfloat16].index(x.dtype)
    complete = {**ATTRIBUTES, **attributes}
    routing = Routing(
        complete["scoring"],
        complete["renormalize"],
        tokens,
        experts,
        HIDDEN,
        top_k,
        complete["n_group"],
        complete["topk_group"],
        complete["group_score_top"],
        dtype,
        job_tokens,
        min(pairs, experts + pairs // job_tokens) if jobs_are_flags else 0,
        complete["scaling_factor"],
    )
    ints = [np.full(pairs, -7, np.int32) for _ in range(3)]
    plan = Plan(
        ints[0],
        np.zeros(pairs, np.float32),
        ints[1],
        ints[2],
        np.zeros(tokens, np.float32),
        np.full((min(pairs, experts + pairs // job_tokens), 4), -7, np.int32),
        np.zeros(2, np.int32),
        np.zeros(70_000, np.uint8),
        np.full(1, 7, np.uint32),
    )
    outputs = (plan.experts, plan.weights, plan.position, plan.order, plan.shared_factor, plan.jobs, plan.totals)
    tensors = [None if t is None else t.view(torch.uint8).numpy() for t in (x, gate)]
    status = program.call(
        "make_plan",
        ctypes.byref(routing),
        logits,
        bias,
        *tensors,
        *outputs,
        plan.absent,
        ctypes.c_int64(69_984),
        plan.ticket,
    )
    assert status == 0
    return plan


def check(plan: Plan, logits: np.ndarray, bias: np.ndarray, top_k: int, attributes: dict[str, Any]) -> None:
    experts, weights = moe_routing.route(
        torch.from_numpy(logits), torch.from_numpy(bias), top_k=top_k, **{**ATTRIBUTES, **attributes}
    )
    chosen = experts.numpy().reshape(-1)
    np.testing.assert_array_equal(plan.experts, chosen)
    np.testing.assert_allclose(plan.weights, weights.numpy().reshape(-1), rtol=2e-5, atol=1e-37)

    order = np.argsort(chosen, kind="stable")
    np.testing.assert_array_equal(plan.order, order)
    np.testing.assert_array_equal(plan.position[order], np.arange(len(order)))

    expected = []
    cost = first = 0
    for expert, count in enumerate(np.bincount(chosen)):
        for done in range(0, count, 8):
            pairs = min(8, count - done)
            expected.append((expert, first + done, pairs, cost))
            cost += 5  # of at most eight pairs
        first += count
    np.testing.assert_array_equal(plan.jobs[: plan.totals[0]], expected)
    np.testing.assert_array_equal(plan.totals, [len(expected), cost])
    assert (plan.absent[:69_984] == 0xFF).all()
    assert not plan.absent[69_984:].any()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "attributes"),
    [
        (1, 8, 2, {"renormalize": 1}),
        (1, 128, 8, {"scoring": 2}),
        (5, 256, 8, DEEPSEEK),
        (32, 60, 4, {"scoring": 1}),
        (33, 128, 40, {}),
        (3, 160, 6, {"n_group": 8, "topk_group": 3, "scaling_factor": 16.0}),
        (2, 66, 3, {"n_group": 33, "topk_group": 2, "group_score_top": 2}),
        (2, 512, 10, {"renormalize": 1}),
        (4, 64, 6, {"n_group": 2, "topk_group": 1, "group_score_top": 3, "scoring": 2}),  # groups of 32
        (3, 6, 2, {"n_group": 3, "topk_group": 2, "group_score_top": 2}),
        (17, 512, 10, {"n_group": 512, "topk_group": 40}),
        (3, 288, 6, {"n_group": 3, "topk_group": 2, "group_score_top": 2}),
        (2, 1024, 64, {"scoring": 3}),
        (40, 1, 1, {"scoring": 1}),
        (3, 256, 6, {"scoring": 4, "renormalize": 1, "scaling_factor": 1.5}),
        (4, 70, 60, {"scoring": 5, "scaling_factor": 1.5}),
        (5, 64, 6, {"scoring": 5, "n_group": 4, "topk_group": 2}),
    ],
    ids=str,
)
def test_against_the_reference(
    program: Program, seed: int, tokens: int, experts: int, top_k: int, attributes: dict[str, Any]
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(tokens, experts)).astype(np.float32)
    bias = (0.1 * generator.normal(size=experts)).astype(np.float32)
    plan = make_plan(program, logits, bias, top_k, attributes)
    check(plan, logits, bias, top_k, attributes)
    assert (plan.shared_factor == 1).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (1, 256, 40), (1, 600, 3), (4, 64, 6), (32, 16, 2), (40, 300, 5)]
)
def test_jobs_as_flags(program: Program, seed: int, tokens: int, experts: int, top_k: int) -> None:
    """The same plan; jobs that there might have been stay absent, and tickets begin at zero."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(tokens, experts)).astype(np.float32)
    bias = np.zeros(experts, np.float32)
    plan = make_plan(program, logits, bias, top_k, {}, jobs_are_flags=True)
    check(plan, logits, bias, top_k, {})
    assert (plan.jobs[plan.totals[0] :] == -1).all()
    assert plan.ticket == 0


@pytest.mark.parametrize("scoring", range(6))
@pytest.mark.parametrize(("experts", "groups"), [(32, 1), (60, 1), (60, 3), (160, 5)])
def test_ties_go_to_the_lower_index(program: Program, seed: int, scoring: int, experts: int, groups: int) -> None:
    """Few values, zeros of both signs, NaN and infinities: nearly everything ties."""
    generator = np.random.default_rng(seed)
    values = np.array([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf], np.float32)
    logits = generator.choice(values, size=(24, experts))
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2] = -0.0
    bias = generator.choice(np.array([0.0, -0.0], np.float32), size=experts)
    attributes = {"scoring": scoring, "n_group": groups, "topk_group": max(1, groups - 1), "group_score_top": 3}
    attributes["renormalize"] = int(groups == 1)
    check(make_plan(program, logits, bias, 7, attributes), logits, bias, 7, attributes)


@pytest.mark.parametrize("experts", [6, 200])
def test_square_roots_of_softplus_of_near_and_far_logits(program: Program, seed: int, experts: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(6, experts)) * np.array([[1], [10], [1e4], [1e30], [1], [1]])
    logits[4] = -20 - 5 * np.abs(logits[4])
    logits[5] = -1e4 * (1 + np.abs(logits[5]))  # all scores are 0
    logits, bias = logits.astype(np.float32), np.zeros(experts, np.float32)
    check(make_plan(program, logits, bias, 3, {"scoring": 4}), logits, bias, 3, {"scoring": 4})


@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize(("experts", "top_k"), [(6, 3), (200, 40)])
def test_fewer_experts_given_than_chosen(
    program: Program, seed: int, experts: int, top_k: int, renormalize: int
) -> None:
    """What is given is what comes out, without a sign where it is divided by its sum."""
    generator = np.random.default_rng(seed)
    logits = given_logits(generator, 45, experts, top_k).numpy()
    if renormalize:
        logits = -np.abs(logits)
    is_given = logits > np.finfo(np.float32).min
    expected = np.where(is_given, logits, 0).astype(np.float64)
    if renormalize:
        expected /= np.minimum(expected.sum(1, keepdims=True), -1e-20)
    attributes = {"scoring": 5, "renormalize": renormalize}
    bias = np.zeros(experts, np.float32)
    plan = make_plan(program, logits, bias, top_k, attributes)
    check(plan, logits, bias, top_k, attributes)
    chosen, weights = (values.reshape(-1, top_k) for values in (plan.experts, plan.weights))
    found = np.zeros(expected.shape)
    np.put_along_axis(found, chosen, weights, 1)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_more_tokens_than_bits_at_a_time(program: Program, seed: int) -> None:
    """A thousand experts leave shared memory for the bits of 128 tokens; all tokens like one expert."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(150, 1000)).astype(np.float32)
    bias = np.zeros(1000, np.float32)
    bias[777] = 100
    check(make_plan(program, logits, bias, 2, {"scoring": 1}), logits, bias, 2, {"scoring": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 34])
def test_gate_of_the_shared_expert(program: Program, seed: int, tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    gate = (0.1 * torch.randn(HIDDEN, generator=generator)).to(dtype)
    logits = torch.randn(tokens, 4, generator=generator).numpy()
    plan = make_plan(program, logits, np.zeros(4, np.float32), 2, {}, x, gate)
    expected = (x.double() @ gate.double()).sigmoid()
    np.testing.assert_allclose(plan.shared_factor, expected, rtol=1e-5)


def test_few_tokens_take_one_launch(program: Program, seed: int) -> None:
    for tokens, launches in ((1, 1), (32, 1), (33, 2)):
        logits = np.random.default_rng(seed).normal(size=(tokens, 16)).astype(np.float32)
        make_plan(program, logits, np.zeros(16, np.float32), 2, {})
        assert len(program.gpu.launches) == launches
