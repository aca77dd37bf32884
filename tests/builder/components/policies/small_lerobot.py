"""A small LeRobot for tests: its interface, with networks and sampling written from the papers.

LeRobot pins an older torch and transformers than this project, so that one environment cannot hold both.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

STATE, TOP, WRIST = "observation.state", "observation.images.top", "observation.images.wrist"
TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
JOINTS, WIDTH, ROWS, PADDED = 6, 32, 8, 8


class _Act(nn.Module):
    """A chunk from the state and what is seen."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.see = nn.Conv2d(3, WIDTH, 16, 16)
        self.mix = nn.Sequential(nn.Linear(2 * WIDTH + JOINTS, 64), nn.SiLU(), nn.Linear(64, ROWS * JOINTS))

    def predict_action_chunk(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        seen = [self.see(batch[name]).relu().mean((2, 3)) for name in (TOP, WRIST)]
        return self.mix(torch.cat([*seen, batch[STATE]], 1)).unflatten(1, (ROWS, JOINTS))


class _Scheduler:
    """The noise schedule of DDPM (Ho et al. 2020) or DDIM (Song et al. 2021), with linear betas."""

    def __init__(self, config: Any) -> None:
        self.config = SimpleNamespace(
            num_train_timesteps=config.num_train_timesteps,
            prediction_type=config.prediction_type,
            clip_sample=True,
            clip_sample_range=1.0,
        )
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, config.num_train_timesteps), 0)
        self.final_alpha_cumprod = torch.tensor(1.0)

    def set_timesteps(self, steps: int) -> None:
        self.stride = self.config.num_train_timesteps // steps
        self.timesteps = torch.arange(steps).flip(0) * self.stride

    def predicted(
        self, x: torch.Tensor, output: torch.Tensor, time: int
    ) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
        """x0 (within its range), the noise, and how much of the signal is left now and in the step before."""
        now = self.alphas_cumprod[time]
        before = self.alphas_cumprod[time - self.stride] if time >= self.stride else torch.tensor(1.0)
        if self.config.prediction_type == "epsilon":
            noise, x0 = output, (x - (1 - now).sqrt() * output) / now.sqrt()
        else:
            noise, x0 = (x - now.sqrt() * output) / (1 - now).sqrt(), output
        return x0.clamp(-1, 1), noise, now, before


class DDPMScheduler(_Scheduler):
    def step(self, output: torch.Tensor, time: int, x: torch.Tensor) -> torch.Tensor:
        x0, _, now, before = self.predicted(x, output, time)
        beta = 1 - now / before
        mean = before.sqrt() * beta / (1 - now) * x0 + (1 - beta).sqrt() * (1 - before) / (1 - now) * x
        return mean if time == 0 else mean + ((1 - before) / (1 - now) * beta).sqrt() * torch.randn(x.shape)


class DDIMScheduler(_Scheduler):
    def step(self, output: torch.Tensor, time: int, x: torch.Tensor) -> torch.Tensor:
        x0, noise, _, before = self.predicted(x, output, time)
        return before.sqrt() * x0 + (1 - before).sqrt() * noise


class _UNet(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(ROWS * size + WIDTH + 2, 64), nn.SiLU(), nn.Linear(64, ROWS * size))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, global_cond: torch.Tensor) -> torch.Tensor:
        time = timestep.float()[:, None] / 10
        return self.mix(torch.cat([x.flatten(1), global_cond, time.sin(), time.cos()], 1)).view_as(x)


class _Diffusion(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.diffusion = config, _DiffusionModel(config)


class _DiffusionModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.see, self.mix = nn.Conv2d(3, WIDTH, 16, 16), nn.Linear(config.n_obs_steps * (WIDTH + JOINTS), WIDTH)
        self.unet = _UNet(JOINTS)
        kinds = {"DDPM": DDPMScheduler, "DDIM": DDIMScheduler}
        self.noise_scheduler = kinds[config.noise_scheduler_type](config)
        self.num_inference_steps = config.num_inference_steps or config.num_train_timesteps

    def _prepare_global_conditioning(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        images = batch["observation.images"]  # [1, history, cameras, 3, height, width]
        seen = self.see(images.flatten(0, 2)).relu().mean((2, 3)).unflatten(0, images.shape[:3]).mean(2)
        return self.mix(torch.cat([seen, batch[STATE]], 2).flatten(1))

    def generate_actions(self, batch: Mapping[str, torch.Tensor], noise: torch.Tensor) -> torch.Tensor:
        condition, x = self._prepare_global_conditioning(batch), noise
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for time in self.noise_scheduler.timesteps:
            output = self.unet(x, time[None], global_cond=condition)
            x = self.noise_scheduler.step(output, int(time), x)
        return x[:, 1:5]  # two observations, four actions


class _Flow(nn.Module):
    """A prefix of images, tokens and state; an expert that attends to its keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, _FlowModel(config)

    def prepare_images(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        seen = [batch[name] * 2 - 1 for name in (TOP, WRIST)]
        empty = -torch.ones_like(seen[0])  # a camera that is not there
        return [*seen, empty], [torch.ones(1, dtype=torch.bool)] * 2 + [torch.zeros(1, dtype=torch.bool)]

    def prepare_state(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.pad(batch[STATE], (0, PADDED - JOINTS))

    def predict_action_chunk(self, batch: dict[str, torch.Tensor], noise: torch.Tensor) -> torch.Tensor:
        images, masks = self.prepare_images(batch)
        state = [] if self.config.type == "pi05" else [self.prepare_state(batch)]
        return self.model.sample_actions(images, masks, batch[TOKENS], batch[MASK], *state, noise=noise)[..., :JOINTS]


def create_sinusoidal_pos_embedding(time: torch.Tensor, size: int, shortest: float, longest: float) -> torch.Tensor:
    """Sines and cosines of times, [times, size], in float64."""
    periods = shortest * (longest / shortest) ** torch.linspace(0, 1, size // 2, dtype=torch.float64)
    angles = 2 * torch.pi * time[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], 1)


class _FlowModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.vlm_with_expert = config, _Seeing()
        self.words, self.state = nn.Embedding(100, WIDTH), nn.Linear(PADDED, WIDTH)
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.enter, self.leave = nn.Linear(PADDED, WIDTH), nn.Linear(WIDTH, PADDED)
        self.query, self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def sample_actions(
        self, images: Any, masks: Any, tokens: Any, mask: torch.Tensor, state: Any = None, *, noise: torch.Tensor
    ) -> torch.Tensor:
        seen = [self.vlm_with_expert.embed_image(image) for image in images]
        rows = torch.cat([*seen, self.words(tokens)], 1)
        counted = torch.cat([*(m[:, None].expand(1, s.shape[1]) for m, s in zip(masks, seen, strict=True)), mask], 1)
        if self.config.type == "smolvla":
            rows = torch.cat([rows, self.state(state)[:, None]], 1)
            counted = torch.cat([counted, torch.ones(1, 1, dtype=torch.bool)], 1)
        cache = DynamicCache()
        cache.update(self.keys(rows)[:, None], self.values(rows)[:, None], 0)
        own = {"state": state} if self.config.type == "pi0" else {}
        x = noise
        for step in range(self.config.num_steps):
            time = torch.tensor([1 - step / self.config.num_steps])
            x = (
                x
                - self.denoise_step(prefix_pad_masks=counted, past_key_values=cache, x_t=x, timestep=time, **own)
                / self.config.num_steps
            )
        return x

    def denoise_step(
        self, prefix_pad_masks: torch.Tensor, past_key_values: Any, x_t: torch.Tensor, timestep: Any, state: Any = None
    ) -> torch.Tensor:
        layer = past_key_values.layers[0]
        hidden = self.enter(x_t) + create_sinusoidal_pos_embedding(timestep, WIDTH, 4e-3, 4.0).float()
        if state is not None:
            hidden = hidden + self.state(state)[:, None]
        scores = self.query(hidden)[:, None] @ layer.keys.mT / WIDTH**0.5
        weights = scores.masked_fill(~prefix_pad_masks[:, None, None], -1e9).softmax(-1)
        hidden = hidden + (weights @ layer.values)[:, 0]
        hidden = hidden + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return self.leave(hidden)


class _Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)

    def embed_image(self, image: torch.Tensor) -> torch.Tensor:
        return self.patches(image).flatten(2).mT


_CLASSES: dict[str, type[nn.Module]] = {
    "act": _Act,
    "diffusion": _Diffusion,
    **dict.fromkeys(("pi0", "pi05", "smolvla"), _Flow),
}


def _config(directory: Path, **_: Any) -> Any:
    config = json.loads((directory / "config.json").read_text())
    return SimpleNamespace(**config, action_feature=SimpleNamespace(shape=(JOINTS,)))


def _class(kind: str) -> Any:
    def loaded(directory: Path, config: Any, **_: Any) -> nn.Module:
        policy = _CLASSES[kind](config)
        policy.load_state_dict(load_file(directory / "model.safetensors"), strict=False)  # as LeRobot does
        return policy

    return SimpleNamespace(from_pretrained=loaded)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let `import lerobot` find this."""
    for name, content in {
        "lerobot": {},
        "lerobot.configs": {"PreTrainedConfig": SimpleNamespace(from_pretrained=_config)},
        "lerobot.policies": {},
        "lerobot.policies.factory": {"get_policy_class": _class},
        "lerobot.policies.pretrained": {"PreTrainedPolicy": SimpleNamespace(register=lambda policy: None)},
    }.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)


def write(directory: Path, kind: str, **changes: Any) -> Path:
    """A policy of that type with random weights, in the files of LeRobot 0.6."""
    cameras = {name: {"type": "VISUAL", "shape": [3, 32, 48]} for name in (TOP, WRIST)}
    sees_text = kind not in ("act", "diffusion")
    config = {
        "type": kind,
        "n_obs_steps": 2 if kind == "diffusion" else 1,
        "input_features": {STATE: {"type": "STATE", "shape": [JOINTS]}, **cameras},
        "output_features": {"action": {"type": "ACTION", "shape": [JOINTS]}},
        "chunk_size": ROWS,
        "horizon": ROWS,
        "n_action_steps": 4,
        "max_action_dim": PADDED,
        "max_state_dim": PADDED,
        "num_steps": 10,
        "device": "cuda",
        "noise_scheduler_type": "DDPM",
        "prediction_type": "epsilon",
        "num_train_timesteps": 20,
        "num_inference_steps": None if kind == "diffusion" else 10,
        **changes,
    }
    features = {**config["input_features"], **config["output_features"]}
    modes = {"VISUAL": "IDENTITY" if sees_text else "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    options = {"eps": 1e-8, "norm_map": modes}
    of_text: list[Any] = [{"registry_name": "tokenizer_processor", "config": {"max_length": 12}}]
    if kind == "pi05":
        of_text.insert(0, {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}})
    steps = {
        "pre": [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {
                "registry_name": "normalizer_processor",
                "config": {**options, "features": features},
                "state_file": "pre.safetensors",
            },
            *(of_text if sees_text else []),
        ],
        "post": [
            {
                "registry_name": "unnormalizer_processor",
                "config": {**options, "features": {"action": features["action"]}},
                "state_file": "post.safetensors",
            }
        ],
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_CLASSES[kind](SimpleNamespace(**config)).state_dict(), directory / "model.safetensors")
    statistics = {}
    for name, feature in features.items():
        shape = (3, 1, 1) if len(feature["shape"]) == 3 else (JOINTS,)
        low, width = torch.randn(shape), torch.rand(shape) + 0.5
        statistics |= {
            f"{name}.mean": low,
            f"{name}.std": width,
            f"{name}.min": low.clone(),
            f"{name}.max": low + width,
        }
    for when, listed in steps.items():
        (directory / f"policy_{when}processor.json").write_text(json.dumps({"steps": listed}))
        save_file(statistics, directory / f"{when}.safetensors")
    return directory
