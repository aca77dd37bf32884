"""The plugins against their function bodies: on a GPU, and as far as it goes without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from reference_host import ReferenceHost

from onnx_models import moe_spellings
from onnx_models.passes import rewritten_file
from trt_nvfp4.builder.accuracy.plugins import compare_plugins
from trt_nvfp4.builder.cuda.driver import local_compute_capability
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.builder.targets import arch_of
from trt_nvfp4.calibration.samples.samples import input_specs
from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost


def at_random(model: Path, count: int, rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return random_samples(input_specs(model), vocabulary(model), count, rng, shapes)


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_plugins_get_what_their_bodies_get(
    tmp_path: Path, save_gated_mlps: Callable[..., Path], rng: np.random.Generator, elem_type: int
) -> None:
    model = save_gated_mlps(tmp_path / "m.onnx", elem_type=elem_type)
    samples = at_random(model, 2, rng, x=(9, 64))
    rows = compare_plugins(rewritten_file(model), samples, ReferenceHost(), device="cpu")
    assert [row.name for row in rows] == ["gated_mlp_0", "gated_mlp_1"]
    # Rounding to 16 bits differs: ONNX Runtime computes bfloat16 in float32.
    assert all(row.sqnr_db > (40 if elem_type == TensorProto.BFLOAT16 else 60) for row in rows), rows


def test_plugins_get_what_the_model_computes(tmp_path: Path, rng: np.random.Generator) -> None:
    """An MoE block's router logits, which are no constant either."""
    moe_spellings.export(moe_spellings.Moe(moe_spellings.MoeSpec()), tmp_path / "m.onnx", 0)
    model = rewritten_file(tmp_path / "m.onnx")
    (row,) = compare_plugins(model, at_random(model, 2, rng, x=(2, 5, 64)), ReferenceHost(), device="cpu")
    assert row.sqnr_db > 60


@pytest.mark.gpu
def test_plugins_on_the_gpu(gated_mlps: Path, rng: np.random.Generator) -> None:
    capability = local_compute_capability()
    assert capability is not None
    host = PluginHost(build_library(arch_of(capability)))
    samples = at_random(gated_mlps, 2, rng, x=(9, 64))
    rows = compare_plugins(rewritten_file(gated_mlps), samples, host)
    assert all(row.sqnr_db > 50 for row in rows), rows
