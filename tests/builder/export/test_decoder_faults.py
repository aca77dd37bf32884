"""What modeling code raises over caches of fixed capacity is the model's fault, and what the machine lacks is not."""

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from onnx_models.any_causal_lm import made
from onnx_models.small_decoders import LATENT, TOKENS
from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.export import decoders
from trt_nvfp4.builder.export.decoder import check as decoder_check
from trt_nvfp4.builder.export.decoder.caches import StepCache, StepLayer, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder.step import Step
from trt_nvfp4.builder.model.decoder_contract import CacheOptions

transformers = pytest.importorskip("transformers")


def attempt(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    monkeypatch.setattr(decoders, "Step", MagicMock())
    monkeypatch.setattr(decoders, "_probed", Mock(side_effect=raised))
    model = MagicMock(config=SimpleNamespace(model_type="some"))
    decoders.decoder_step(Path("m"), model, 16, CacheOptions(16))


@pytest.mark.parametrize(
    "raised",
    [OSError(errno.ENOSPC, "No space left on device"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=["disk", "memory", "CUDA"],
)
def test_what_the_machine_lacks_stays(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    with pytest.raises(type(raised)) as failure:
        attempt(monkeypatch, raised)
    assert failure.value is raised


def test_the_message_names_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFaultError, match=r"fixed capacity \(TypeError: no argument 'past'\); add"):
        attempt(monkeypatch, TypeError("no argument 'past'\nand where"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        # Keys of fewer heads than its code splits them into.
        ("DeepseekV3", {**LATENT, "num_key_value_heads": 2}, "does not run, without a cache either: .* config.json")
    ],
)
def test_one_reason(name: str, options: dict[str, Any], message: str) -> None:
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).eval()
    with pytest.raises(ModelFaultError, match=message) as failure:
        decoders.decoder_step(Path("m"), model, 16, CacheOptions(16))
    assert "StepCache" not in str(failure.value)


def test_a_state_that_caches_here_lack_is_the_reason() -> None:
    length = torch.zeros(1, dtype=torch.int64)
    for cache in (StepLayer(length, 16), StepCache(length, 16, 2, (), ())):
        assert not hasattr(cache, "indexer_keys")  # code that asks goes on
        with pytest.raises(UnsupportedCacheError, match="its code reads 'indexer_keys' of its cache, which holds only"):
            cache.indexer_keys  # noqa: B018


def test_masks_of_an_encoder_that_is_not_there() -> None:
    """Decoders of translation models compute one beside their own."""
    config = transformers.PegasusConfig(
        d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=128, is_decoder=True, **TOKENS
    )
    program = decoders.decoder_step(Path("m"), transformers.PegasusForCausalLM(config).eval(), 32, CacheOptions(32, 3))
    assert (program.decoder.layers, program.decoder.max_batch) == (2, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: (cache.update_conv_state(torch.zeros(1, 4, 2), 0), cache.slots),
        lambda cache: cache.update_recurrent_state(torch.zeros(1, 4), 0),
        lambda cache: cache.advance("conv", torch.zeros(1), lambda past: (past, past)),
    ],
    ids=["convolution", "recurrence", "no layer"],
)
def test_a_state_that_no_known_function_computes_is_the_reason(use: Callable[[StepCache], Any]) -> None:
    with pytest.raises(UnsupportedCacheError, match=r"a state of their own arithmetic \(see docs/how_to/hybrids.md"):
        use(StepCache(torch.zeros(1, dtype=torch.int64), 16, 2, (), ()))


@pytest.mark.parametrize(("shift", "is_right"), [(0, True), (1, False)])
def test_rounding_is_measured_by_the_models_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, shift: int, is_right: bool
) -> None:
    """In 16 bits, by how far the model's own ways to attend differ; another position is no rounding."""
    torch.manual_seed(seed)
    model = made("Qwen3ForCausalLM").bfloat16()
    step = Step(model, 32, all_logits=False).eval()
    with torch.no_grad():
        empty = step.probe()
        monkeypatch.setattr(decoder_check, "TOLERANCE_16_BITS", 0.0)
        forward = step.forward
        monkeypatch.setattr(step, "forward", lambda ids, past, *rest: forward(ids, past + shift, *rest))
        assert (decoder_check.cache_error(model, step, empty) is None) == is_right
