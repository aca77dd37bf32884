"""Loads a policy with LeRobot, which defines it; nothing of the checkpoint runs as code, and nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.components.policies.checkpoint import WEIGHTS
from trt_nvfp4.builder.errors import BuilderError, ModelFaultError, UnavailableError, first_line
from trt_nvfp4.builder.export.huggingface import quiet
from trt_nvfp4.common.safetensors_files import SafetensorsFiles

#: What a configuration asks for when it trains, and whose weights the checkpoint holds already.
_OVERRIDES = {
    "device": "cpu",
    "compile_model": False,
    "gradient_checkpointing": False,
    "load_vlm_weights": False,
    "pretrained_backbone_weights": None,
    "rtc_config": None,
}


def load_policy(directory: Path) -> Any:
    """The policy in evaluation mode, on the CPU. Raises UnavailableError without LeRobot; ModelFaultError where LeRobot
    cannot make it, and where its weights are not those of the checkpoint."""
    try:
        from lerobot.configs import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class
    except ImportError as error:
        raise UnavailableError(
            f"{directory}: LeRobot makes the models of its policies: pip install 'trt-nvfp4[robotics]' ({error})",
        ) from error
    try:
        with quiet():
            config = PreTrainedConfig.from_pretrained(directory, local_files_only=True)
            for name, value in _OVERRIDES.items():
                if hasattr(config, name):
                    setattr(config, name, value)
            if hasattr(config, "vlm_model_name"):
                config.vlm_model_name = str(local_copy(directory, config.vlm_model_name))
            policy = get_policy_class(config.type).from_pretrained(directory, config=config, local_files_only=True)
    except BuilderError:
        raise
    except Exception as error:  # LeRobot, draccus and torch raise types of their own for whatever does not fit
        raise ModelFaultError(f"{directory}: LeRobot cannot load it: {first_line(error)}") from error
    _check_weights(directory, policy)
    return policy.eval()


def local_copy(directory: Path, name: str) -> Path:
    """The folder of a model of the Hugging Face Hub that a policy names: in its own directory, by the last part of the
    name, or in the local cache. Raises ModelFaultError where it is in neither."""
    from huggingface_hub import snapshot_download

    beside = directory / Path(name).name
    if beside.is_dir():
        return beside
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # an invalid name, or one that is not in the cache
        raise ModelFaultError(
            f"{directory}: needs the files of {name[:80]!r} except its weights: hf download {name[:80]} --exclude "
            f"'*.safetensors' --local-dir {beside}",
        ) from error


def _check_weights(directory: Path, policy: torch.nn.Module) -> None:
    """LeRobot only prints that weights are missing. Raises ModelFaultError for a tensor that is, or differs."""
    held = SafetensorsFiles(directory / WEIGHTS)
    checked = set()
    lacking = []
    for name, tensor in policy.state_dict().items():
        own = next((key for key in (name, name.removeprefix("model.")) if key in held), None)
        if own is None:
            lacking.append((name, tensor.data_ptr()))
        elif not torch.equal(held.read(own).to(tensor.dtype), tensor):
            raise ModelFaultError(
                f"{directory / WEIGHTS}: LeRobot did not take its tensor {own}; install the LeRobot that wrote it"
            )
        else:
            checked.add(tensor.data_ptr())
    absent = [name for name, place in lacking if place not in checked]  # others are one weight with a second name
    if absent:
        raise ModelFaultError(
            f"{directory / WEIGHTS}: lacks {len(absent)} of the policy's weights, such as {absent[0]}; download it "
            "again",
        )
