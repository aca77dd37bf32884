"""The life of a plugin without a GPU: what TensorRT does when it builds an engine on a machine that has none."""

import numpy as np
import op_inputs
import pytest
import torch

from trt_nvfp4.plugins.host import HostError, PluginHost
from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS


def meta(case: op_inputs.Case) -> list[torch.Tensor]:
    return [x.to("meta") for x in case.inputs]


# CachedAttention has batches and caches in place of rows; its calls are test_attention.py's.
OPS_OF_ROWS = sorted(set(OPS) - {"CachedAttention", "NVFP4Decoder", "NVFP4MoEDecoder"})


def cases(m: int, dtype: torch.dtype = torch.float16) -> dict[str, list[torch.Tensor]]:
    rng = np.random.default_rng(m)
    return {
        "NVFP4Linear": meta(op_inputs.linear(rng, m, 40, 48, dtype)),
        "NVFP4GatedMLP": meta(op_inputs.gated_mlp(rng, m, 48, 80, 40, dtype)),
        "NVFP4PersistentMLP": meta(op_inputs.persistent_mlp(rng, 2, m, 48, 80, 48, dtype, gated=1)),
        "FP8GatedMLP": meta(op_inputs.fp8_gated_mlp(rng, m, 48, 80, 40, dtype)),
        "FP8MoE": meta(op_inputs.fp8_moe(rng, m, 48, 80, 4, dtype)),
        "NVFP4MoE": meta(op_inputs.moe(rng, m, 48, 80, 4, dtype)),
        "NVFP4Quantize": meta(op_inputs.quantize(rng, m, 48, dtype)),
    }


def test_every_op_has_a_plugin_with_its_attributes(host: PluginHost) -> None:
    assert sorted(host.ops) == sorted([*OPS, *STANDARD_OPS])
    for name, definition in OPS.items():
        advertised = host.attributes(name)
        assert sorted(advertised) == sorted(definition.attributes)
        for attribute, default in definition.attributes.items():
            assert type(advertised[attribute]) is type(default)
            assert advertised[attribute] == pytest.approx(default, rel=1e-6)


@pytest.mark.parametrize("op", OPS_OF_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types_and_shapes_follow_the_definition(host: PluginHost, op: str, dtype: torch.dtype) -> None:
    smallest, actual, largest = (cases(m, dtype)[op] for m in (1, 130, 300))
    with host.session(op, smallest, max_inputs=largest) as session:
        expected = OPS[op].output_shapes([tuple(x.shape) for x in actual])
        assert session.output_shapes(actual) == [tuple(shape) for shape in expected]
        assert session.output_dtypes[-1] == dtype
        workspace = {"workspace_kib": -(-session.workspace_size // 1024)}
        assert session.serialized == host.attributes(op) | workspace


@pytest.mark.parametrize("op", OPS_OF_ROWS)
def test_workspace_grows_with_the_rows(host: PluginHost, op: str) -> None:
    attributes = {"NVFP4Quantize": {"norm": 1}, "FP8GatedMLP": {}, "FP8MoE": {}}.get(op, {"quantize_activations": 1})
    sizes = []
    for m in (0, 1, 127, 500):
        with host.session(op, cases(m)[op], attributes) as session:
            sizes.append(session.workspace_size)
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_attributes_survive_serialization(host: PluginHost) -> None:
    attributes = {"activation": 7, "quantize_activations": 1, "scale_search": 2, "residual_channels": 0}
    attributes |= {"static_scales": 1, "alpha": 1.25, "limit": 3.5}
    with host.session("NVFP4GatedMLP", cases(3)["NVFP4GatedMLP"], attributes) as session:
        assert session.serialized.items() >= attributes.items()
        first = session.timing_cache_id
    with host.session("NVFP4GatedMLP", cases(3)["NVFP4GatedMLP"], {**attributes, "alpha": 1.5}) as session:
        assert session.timing_cache_id != first


def refused(host: PluginHost, op: str, inputs: list[torch.Tensor], attributes: dict[str, int | float]) -> str:
    with pytest.raises(HostError) as error, host.session(op, inputs, attributes):
        pass
    assert host.take_error() == "", "an error is read once"
    return str(error.value)


def empty(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device="meta")


def test_refusals_name_what_is_wrong(host: PluginHost) -> None:
    linear = cases(3)["NVFP4Linear"]
    known = ", ".join(OPS["NVFP4Linear"].attributes)
    found = refused(host, "NVFP4Linear", linear, {"alpha": 1.0})
    assert f"has no attribute alpha; it has {known}" in found
    assert "activation must be one INT, it is 1 of TensorRT's field type 1" in refused(
        host, "NVFP4Linear", linear, {"activation": 1.0}
    )
    assert "activation must be 0 to 6, it is 7" in refused(host, "NVFP4Linear", linear, {"activation": 7})
    assert "multiple of 16 (one block scale), it is 40" in refused(
        host, "NVFP4Linear", [empty(3, 40, like=linear[0]), empty(40, 20, like=linear[1]), *linear[2:]], {}
    )
    assert "weight_scales must have shape [128, 4], it has [128, 8]" in refused(
        host, "NVFP4Linear", [*linear[:2], empty(128, 8, like=linear[2]), *linear[3:]], {}
    )
    assert "bias must have shape [40], it has [41]" in refused(
        host, "NVFP4Linear", [*linear[:4], empty(41, like=linear[4]), linear[5]], {}
    )
    persistent = cases(3)["NVFP4PersistentMLP"]
    persistent[6] = empty(48, like=persistent[6])
    assert "down_weight has 1 dimensions, expected 2 or more" in refused(host, "NVFP4PersistentMLP", persistent, {})
    assert "has 6 inputs and 1 outputs, found 5 and 1" in refused(host, "NVFP4Linear", linear[:5], {})
    assert "no creator for NVFP4Nothing" in refused(host, "NVFP4Nothing", linear, {})


@pytest.mark.parametrize("position", range(6))
def test_wrong_types_are_not_supported(host: PluginHost, position: int) -> None:
    inputs = cases(3)["NVFP4Linear"]
    inputs[position] = inputs[position].to(torch.int32)
    assert "does not support data type" in refused(host, "NVFP4Linear", inputs, {})


def test_not_a_plugin_library() -> None:
    with pytest.raises(HostError, match=r"libm\.so\.6 exports no getCreators"):
        PluginHost("libm.so.6")
    with pytest.raises(HostError, match="cannot open shared object"):
        PluginHost("/nonexistent/library.so")
