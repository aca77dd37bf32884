"""Which kernels a library links: the groups cover all sources, and what is missing is an error and never a crash."""

import itertools

import attention_cases
import numpy as np
import op_inputs
import pytest
import torch

from trt_nvfp4.plugins.compile.kernel_groups import CORE, GROUPS, OpUse, all_groups, groups_of, ops_of
from trt_nvfp4.plugins.compile.library import ROOT, build_library
from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS

TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def test_every_source_is_of_one_group() -> None:
    patterns = [*CORE, *(pattern for group in GROUPS for pattern in group.sources)]
    of_groups = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(of_groups) == len(set(of_groups))
    sources = [*ROOT.glob("adapters/*.cpp"), *ROOT.glob("kernels/**/*.cpp"), *ROOT.glob("kernels/**/*.cu")]
    assert set(of_groups) == set(sources)
    assert ops_of(all_groups()) == {*OPS, *STANDARD_OPS}


def test_a_node_of_unknown_type_needs_the_kernels_of_all() -> None:
    for op in OPS.values():
        attributes = op.complete_attributes()
        assert groups_of([OpUse(op.name, attributes)]) == groups_of(OpUse(op.name, attributes, name) for name in TYPES)


def uses() -> list[OpUse]:
    """Of every op, with each arithmetic, cache and type: one of those that need the same kernels."""
    found = {}
    for op, dtype in itertools.product(OPS.values(), TYPES):
        flags = [name for name in ("quantize_activations", "fp8_cache") if name in op.attributes]
        for values in itertools.product((0, 1), repeat=len(flags)):
            use = OpUse(op.name, op.complete_attributes(**dict(zip(flags, values, strict=True))), dtype)
            found[op.name, groups_of([use])] = use
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("use", uses(), ids=lambda use: f"{use.op}-{use.dtype}-{sorted(groups_of([use]))}")
def test_the_smallest_library_of_a_node_links_and_creates_it(use: OpUse) -> None:
    host = PluginHost(build_library("sm_120a", groups=groups_of([use])))
    assert set(host.ops) == ops_of(groups_of([use]))
    assert use.op in host.ops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "attributes", "missing"),
    [
        ("NVFP4Linear", {}, "w4a16"),
        ("NVFP4Linear", {"quantize_activations": 1}, "w4a4"),
        ("NVFP4GatedMLP", {}, "w4a16"),
        ("NVFP4MoE", {"top_k": 2, "quantize_activations": 1}, "w4a4_moe"),
        ("CachedAttention", attention_cases.RAGGED.attributes(False), "tensor_core_attention"),
    ],
)
def test_a_missing_kernel_is_an_error_when_the_engine_is_built(
    op: str, attributes: dict[str, int | float], missing: str, seed: int
) -> None:
    """Of what the op could need at any shape, not only at those that are configured."""
    rng, dtype = np.random.default_rng(seed), torch.float16
    inputs = {
        "NVFP4Linear": lambda: op_inputs.linear(rng, 3, 64, 64, dtype).inputs,
        "NVFP4GatedMLP": lambda: op_inputs.gated_mlp(rng, 3, 64, 64, 64, dtype).inputs,
        "NVFP4MoE": lambda: op_inputs.moe(rng, 3, 64, 64, 4, dtype).inputs,
        "CachedAttention": lambda: attention_cases.inputs(rng, attention_cases.RAGGED, dtype, False),
    }[op]()
    groups = groups_of([OpUse(op, OPS[op].complete_attributes(**attributes), "float16")])
    assert missing in groups
    host = PluginHost(build_library("sm_120a", groups=groups - {missing}))
    with pytest.raises(HostError, match=f"kernels {missing} were not linked.*--set all-kernels=yes"):
        host.session(op, inputs, attributes)
