"""A vision-language model as engines would run it: every plugin node of all its parts on the emulated GPU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from emulated_engine import emulated_parts
from emulated_gpu import emulated, emulated_gpu  # noqa: F401  fixtures
from split_host import SplitHost
from torch import Tensor

import trt_nvfp4
from trt_nvfp4.builder.components import check
from trt_nvfp4.builder.components.devices.torch_device import TorchDevice
from trt_nvfp4.builder.components.directory import of_directory
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.common.metrics import cosine, relative_error

from .families import saved
from .test_families import size_of

NAME = "qwen3_vl"
#: Of bfloat16 activations; and what NVFP4 weights make of the original's logits.
LARGEST_ERROR, LEAST_COSINE = 0.03, 0.9


def attention_left_out(op: str, inputs: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The attention is not launched: its output is what was there before."""
    return None if op == "CachedAttention" else inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "emulated_gpu", ["rtx-blackwell", pytest.param("b200", marks=pytest.mark.nightly)], indirect=True
)
def test_images_prompts_and_steps(
    emulated: SplitHost,  # noqa: F811  a fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Two prompts of different lengths with images among the text, then a step for each token that follows."""
    pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX")
    saved(NAME, tmp_path / "model", seed)
    out = tmp_path / "out"
    options = {"cache_capacity": 64, "max_batch": 2, "image_size": size_of(NAME), "accuracy_samples": 0}
    trt_nvfp4.build_parts(tmp_path / "model", target="rtx-blackwell", output=out, **options)
    manifest = Manifest.load(out)
    example = of_directory(tmp_path / "model", CacheOptions(64, 2), size_of(NAME)).example
    original = check.expected_of(example)
    expected = check.computed_by(out, manifest, example, original)
    assert min(cosine(a, b) for a, b in zip(expected, original, strict=True)) > LEAST_COSINE
    monkeypatch.setattr(check, "OnnxDevice", partial(TorchDevice, device="cpu"))

    def error(faults: Sequence[object] = ()) -> float:
        runs = emulated_parts(emulated, monkeypatch, faults)
        found = check.computed_by(out, manifest, example, original)
        assert len(runs) == 3  # images, prompts, the tokens behind them
        assert all(run.enqueued for run in runs)
        return relative_error(found=found, expected=expected) if all(map(np.isfinite, map(np.max, found))) else np.inf

    assert error() < LARGEST_ERROR
    assert error([attention_left_out]) > 2 * LARGEST_ERROR
