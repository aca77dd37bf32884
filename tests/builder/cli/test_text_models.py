"""Refusals of models that give no text, by `generate` and `serve` before they load them."""

import json
from pathlib import Path
from typing import Any

import pytest

from trt_nvfp4.builder.cli.text_models import check_gives_text
from trt_nvfp4.builder.components.manifest import Manifest, Part, Port
from trt_nvfp4.builder.errors import ModelFaultError, UsageError

PART = Part("first", {"x": Port("float32", [1])}, {"y": Port("float32", [1])})


def test_a_checkpoint_of_a_policy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "act", "output_features": {}}))
    with pytest.raises(UsageError, match=r"a robot policy, .*build-engine .* --bundle DIR.*trt_nvfp4\.lerobot\.load"):
        check_gives_text(tmp_path)


@pytest.mark.parametrize(
    ("task", "settings", "runs"),
    [
        ("run", {}, "Pipeline.run"),
        ("run", {"embeds": {}}, "Pipeline.embed"),
        ("run", {"policy": {}}, "lerobot.load"),
        ("diffuse", {}, "diffusers.load"),
    ],
)
def test_parts_without_a_decoder(
    tmp_path: Path, task: str, settings: dict[str, Any], runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manifest, "check", lambda manifest, _: manifest)  # of the rest of the settings
    Manifest(task, [PART], settings=settings).save(tmp_path)
    with pytest.raises(UsageError, match=rf"parts of a model without a decoder.* trt_nvfp4\.{runs} runs them"):
        check_gives_text(tmp_path)


def test_what_may_give_text(tmp_path: Path) -> None:
    check_gives_text(tmp_path)
    Manifest("generate", [PART]).save(tmp_path)
    check_gives_text(tmp_path)
    with pytest.raises(ModelFaultError, match="no such file or folder"):
        check_gives_text(tmp_path / "nowhere")
