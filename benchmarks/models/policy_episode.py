"""An episode of PushT in which a diffusion policy's engines act, in ONNX Runtime, beside LeRobot's own policy.

    python -m benchmarks.models.policy_episode DIR ENGINES [--steps 100] [--out FILE]

Both see every observation and the same noise; the engines' actions move the robot. Recorded is the largest difference
of an action, in pixels of the board's 512. Needs LeRobot, gym-pusht and no GPU; the noise schedule must be DDIM's.
"""

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

import gym_pusht  # noqa: F401, registers the environment
import gymnasium
import numpy as np
import torch
from lerobot.policies.factory import make_pre_post_processors

import trt_nvfp4.lerobot
from benchmarks.harness import HERE, command, record
from trt_nvfp4.builder.components.policies.library import load_policy

SEED = 0


def episode(directory: Path, engines: Path, steps: int) -> dict[str, Any]:
    ours = trt_nvfp4.lerobot.load(directory, engines, runner="onnxruntime", seed=SEED)
    theirs, draws = load_policy(directory), np.random.default_rng(SEED)
    before, behind = make_pre_post_processors(
        theirs.config, str(directory), preprocessor_overrides={"device_processor": {"device": "cpu"}}
    )
    shape = (1, theirs.config.horizon, theirs.config.action_feature.shape[0])
    camera = next(iter(theirs.config.image_features))
    world = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos")
    seen, _ = world.reset(seed=SEED)
    largest = reward = 0.0
    for _ in range(steps):
        batch = {
            camera: torch.from_numpy(seen["pixels"]).permute(2, 0, 1) / 255,
            "observation.state": torch.from_numpy(seen["agent_pos"]).float(),
        }
        is_empty = not theirs._queues["action"]
        noise = torch.from_numpy(draws.standard_normal(shape, np.float32)) if is_empty else None
        expected = behind(theirs.select_action(before(batch), noise=noise))[0].numpy()
        action = ours.raw.select_action({camera: seen["pixels"], "observation.state": seen["agent_pos"]})
        largest = max(largest, float(np.abs(action - expected).max()))
        seen, reward, *_ = world.step(np.clip(action, 0, 512))
    return {"steps": steps, "largest_difference_pixels": largest, "last_reward": float(reward)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "policy_episode.json")
    arguments = parser.parse_args()
    found = episode(arguments.directory, arguments.engines, arguments.steps)
    versions = {name: metadata.version(name) for name in ("lerobot", "torch", "onnxruntime", "gym-pusht")}
    record(arguments.out, {"command": command(), "versions": versions, **found})


if __name__ == "__main__":
    main()
