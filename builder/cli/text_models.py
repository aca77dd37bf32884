"""Refusals of models that give no text, before `generate` and `serve` load them."""

from pathlib import Path

from trt_nvfp4.builder.components.manifest import DIFFUSE, FILE, Manifest
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.model.model_files import check_exists, is_policy


def check_gives_text(path: Path) -> None:
    """Raise UsageError for a robot policy and for parts without a decoder, with what runs them; (model) as
    `check_exists` and `Manifest.load`."""
    check_exists(path)
    if is_policy(path):
        raise UsageError(
            f"{path}: a robot policy, which gives actions and no text; build it (build-engine {path} --bundle DIR), "
            "and trt_nvfp4.lerobot.load or the bundle's run_policy.py runs it"
        )
    if not (path / FILE).is_file():
        return
    manifest = Manifest.load(path)
    if manifest.task == "generate":
        return
    if manifest.task == DIFFUSE:
        runs = "trt_nvfp4.diffusers.load"
    elif "policy" in manifest.settings:
        runs = "trt_nvfp4.lerobot.load"
    else:
        runs = f"trt_nvfp4.Pipeline.{'embed' if 'embeds' in manifest.settings else 'run'}"
    raise UsageError(f"{path}: the parts of a model without a decoder, which give no text; {runs} runs them in Python")
