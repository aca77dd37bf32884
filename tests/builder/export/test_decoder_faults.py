"""What modeling code raises over caches of fixed capacity is the model's fault, and what the machine lacks is not."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from onnx_models.small_decoders import DECODER, LATENT, TOKENS
from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.export import decoders
from trt_nvfp4.builder.export.decoder_caches import StepCache, StepLayer, UnsupportedCacheError
from trt_nvfp4.builder.export.decoder_contract import CacheOptions

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
    with pytest.raises(BuilderError, match=r"fixed capacity \(TypeError: no argument 'past'\); add") as failure:
        attempt(monkeypatch, TypeError("no argument 'past'\nand where"))
    assert failure.value.exit_code == MODEL_AT_FAULT


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        # Keys of fewer heads than its code splits them into.
        ("DeepseekV3", {**LATENT, "num_key_value_heads": 2}, "does not run, without a cache either: .* config.json"),
        ("MiniMax", {**DECODER, "num_local_experts": 4}, "its code accepts only its own cache class; add --task"),
    ],
)
def test_one_reason(name: str, options: dict[str, Any], message: str) -> None:
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).eval()
    with pytest.raises(BuilderError, match=message) as failure:
        decoders.decoder_step(Path("m"), model, 16, CacheOptions(16))
    assert failure.value.exit_code == MODEL_AT_FAULT
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


def test_a_question_about_another_state_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 answers it with an error of its own."""
    asked = Mock(side_effect=ValueError("You called it on an attention layer"))
    monkeypatch.setattr(transformers.cache_utils.Cache, "has_previous_state", asked)
    with pytest.raises(UnsupportedCacheError, match="a state of another kind"):
        StepCache(torch.zeros(1, dtype=torch.int64), 16, 2, (), ()).has_previous_state(0)
