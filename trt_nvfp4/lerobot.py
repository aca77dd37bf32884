"""A policy of LeRobot's whose network is engines, with the interface that LeRobot's own scripts call.

    import trt_nvfp4.lerobot

    policy = trt_nvfp4.lerobot.load("act_so101", "act_so101-engines")

LeRobot's processors stay in front of it and behind it. `policy.raw` is the same policy without them: it takes images
and joints as the robot gives them. Needs torch; LeRobot only where a script asks for its class.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.components.policies.checkpoint import processing_of
from trt_nvfp4.builder.components.policies.policy import Policy
from trt_nvfp4.builder.components.policies.processing import MASK, TOKENS
from trt_nvfp4.builder.components.policies.taken_apart import NOISE
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.generate.open import RunnerName
from trt_nvfp4.common.model_config import read_config


class EnginePolicy:
    """Takes and gives tensors of one robot, [1, ...], normalized as LeRobot's processors leave them."""

    def __init__(self, pipeline: Pipeline, policy: Policy, config: Any) -> None:
        self.raw, self.config = policy, config
        self.name, self.runs_on = policy.processing.type, pipeline.runs_on
        self._pipeline = pipeline

    def reset(self) -> None:
        """Forget observations and actions, at the beginning of an episode."""
        self.raw.reset()

    def select_action(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The next action, float32 [1, joints]."""
        return torch.from_numpy(self.raw.next_action(self._arrays(batch)))[None]

    def predict_action_chunk(self, batch: Mapping[str, Any], noise: torch.Tensor | None = None) -> torch.Tensor:
        """All actions that follow this observation, float32 [1, rows, joints]; `noise` [1, rows, width] is random
        without one."""
        given = None if noise is None else {NOISE: noise.float().numpy(force=True)}
        return torch.from_numpy(self.raw.next_chunk(self._arrays(batch), given))[None]

    def eval(self) -> "EnginePolicy":
        """The policy itself, which only evaluates."""
        return self

    def to(self, *device: Any, **options: Any) -> "EnginePolicy":
        """The policy itself: its engines stay on their GPU."""
        return self

    def parameters(self) -> Iterator[torch.Tensor]:
        """No tensors: engines hold the weights."""
        return iter(())

    def close(self) -> None:
        """Free what the engines hold."""
        self._pipeline.close()

    def _arrays(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        names = [*self.raw.processing.features, *([TOKENS, MASK] if self.raw.processing.text else [])]
        if missing := [name for name in names if name not in batch]:
            raise UsageError(f"the batch lacks {missing[0]}; put LeRobot's pre-processor in front, or use raw")
        found = {name: batch[name].numpy(force=True) for name in names}
        if len(found[names[0]]) != 1:
            raise UsageError(f"the batch holds {len(found[names[0]])} robots; the engines take one")
        if self.raw.processing.text is not None:  # LeRobot may pad less
            counted = found[MASK][0].astype(bool)
            found |= self.raw.processing.text.padded(found[TOKENS][0][counted].tolist())
        return found


def load(
    policy_dir: str | Path, engines: str | Path, *, runner: RunnerName = "auto", seed: int | None = None
) -> EnginePolicy:
    """The policy of LeRobot's directory `policy_dir`, run by what `build-engine policy_dir -o engines` wrote.

    `runner` as for `Pipeline`. Raises UsageError where the engines are another policy's, ModelFaultError for files
    that are missing or cannot be read.
    """
    directory, folder = Path(policy_dir), Path(engines)
    expected = processing_of(directory)
    pipeline = Pipeline(folder, runner=runner)
    policy = Policy(pipeline.manifest, pipeline.run, pipeline.encode, seed)
    if policy.processing != expected:
        raise UsageError(f"{folder}: was not built from {directory}; build it again, or name its directory")
    return EnginePolicy(pipeline, policy, _config(directory))


def _config(directory: Path) -> Any:
    """LeRobot's configuration, for a computer without the GPU that trained; its values where LeRobot is missing."""
    if importlib.util.find_spec("lerobot") is None:
        return SimpleNamespace(**{**read_config(directory), "device": "cpu"})
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy

    PreTrainedPolicy.register(EnginePolicy)  # its scripts ask for the class
    config = PreTrainedConfig.from_pretrained(directory, local_files_only=True)
    config.device = "cpu"
    return config
