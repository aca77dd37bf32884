"""Diffusion policies: an encoder of observations, and a denoiser that runs once for each step of the noise schedule."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from trt_nvfp4.builder.components.manifest import Flow, Loop
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.policies.processing import IMAGES
from trt_nvfp4.builder.components.policies.taken_apart import ACTION, CHUNK, NEXT, NOISE, STEP_NOISE, TURN, TakenApart

_ENCODER, _CONDITION = "encoder", "condition"
_STACKED = IMAGES.removesuffix(".")


class _Encoder(torch.nn.Module):
    """(observations, each [1, history, ...]) -> condition [1, width]."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *observations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = _stacked(dict(zip(self.names, observations, strict=True)))
        return (self.model._prepare_global_conditioning(batch),)


class _Denoiser(torch.nn.Module):
    """(actions [1, horizon, size], turn int64 [1], condition, [step_noise [steps, 1, horizon, size]]) -> actions of
    the next step, float32, and the rows of them that are carried out."""

    def __init__(self, policy: Any, numbers: torch.Tensor) -> None:
        super().__init__()
        scheduler, first = policy.diffusion.noise_scheduler.config, policy.config.n_obs_steps - 1
        self.unet = policy.diffusion.unet
        self.limit = scheduler.clip_sample_range if scheduler.clip_sample else None
        self.rows = slice(first, first + policy.config.n_action_steps)
        self.register_buffer("numbers", numbers)

    def forward(
        self, actions: torch.Tensor, turn: torch.Tensor, condition: torch.Tensor, *noise: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        numbers = self.get_buffer("numbers").index_select(0, turn)[0]
        time, x0_of_x, x0_of_output, next_of_x0, next_of_x, next_of_output, deviation = numbers.unsqueeze(1)
        output = self.unet(actions, time, global_cond=condition)
        x0 = x0_of_x * actions + x0_of_output * output
        if self.limit is not None:
            x0 = x0.clamp(-self.limit, self.limit)
        found = next_of_x0 * x0 + next_of_x * actions + next_of_output * output
        for drawn in noise:
            found = found + deviation * drawn.index_select(0, turn)[0]
        return found, found[:, self.rows]


def take_apart(policy: Any, observation: Mapping[str, torch.Tensor]) -> TakenApart:
    """The parts `encoder` and `action`, which runs as often as the configuration says."""
    model, config = policy.diffusion, policy.config
    observations = {name: torch.stack([value] * config.n_obs_steps, 1) for name, value in observation.items()}
    numbers = _numbers(model.noise_scheduler, model.num_inference_steps)
    deviations = numbers[:, -1]
    noise = {NOISE: torch.randn(1, config.horizon, config.action_feature.shape[0])}
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        chunk = model.generate_actions(_stacked(observations), noise=noise[NOISE])
        torch.manual_seed(0)  # as the scheduler draws it
        if deviations.any():
            drawn = [torch.randn_like(noise[NOISE]) * bool(deviation) for deviation in deviations]
            noise[STEP_NOISE] = torch.stack(drawn)
    encoder = _Encoder(model, list(observations))
    (condition,) = encoder(*observations.values())
    inputs = {NOISE: noise[NOISE], TURN: torch.zeros(1, dtype=torch.int64), _CONDITION: condition, **noise}
    steps = len(numbers)
    loop = Loop(steps, {NEXT: NOISE}, {TURN: list(range(steps))})
    parts = [
        TorchPart(_ENCODER, encoder, observations, [_CONDITION], {}),
        TorchPart(ACTION, _Denoiser(policy, numbers.float()), inputs, [NEXT, CHUNK], {}, loop=loop),
    ]
    return TakenApart(parts, [Flow(f"{_ENCODER}.{_CONDITION}", f"{ACTION}.{_CONDITION}")], observations | noise, chunk)


def _stacked(observations: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cameras [1, history, 3, height, width] as one tensor [1, history, cameras, 3, height, width]."""
    cameras = [value for name, value in observations.items() if name.startswith(IMAGES)]
    rest = {name: value for name, value in observations.items() if not name.startswith(IMAGES)}
    return {**rest, _STACKED: torch.stack(cameras, 2)} if cameras else rest


def _numbers(scheduler: Any, steps: int) -> torch.Tensor:
    """A row for each step of DDPM, or of DDIM without noise: its time, and what x0 = clip(a x + b output) and
    next = c x0 + d x + e output + deviation * noise multiply; float64 [steps, 7].

    From Ho et al. 2020 (equations 7 and 15) and Song et al. 2021 (equation 12), for a network that predicts the noise
    or x0.
    """
    scheduler.set_timesteps(steps)
    kept = scheduler.alphas_cumprod.double()
    is_ddim = type(scheduler).__name__.startswith("DDIM")
    of_noise = scheduler.config.prediction_type == "epsilon"
    rows = []
    for time in map(int, scheduler.timesteps):
        before = time - scheduler.config.num_train_timesteps // steps
        now = float(kept[time])
        last = float(kept[before]) if before >= 0 else float(scheduler.final_alpha_cumprod) if is_ddim else 1.0
        x0 = (now**-0.5, -math.sqrt(1 / now - 1)) if of_noise else (0.0, 1.0)
        if is_ddim:
            left = math.sqrt(1 - last)
            direction = (0.0, left) if of_noise else (left / math.sqrt(1 - now), -left * math.sqrt(now / (1 - now)))
            rows.append((time, *x0, math.sqrt(last), *direction, 0.0))
        else:
            beta = 1 - now / last
            deviation = math.sqrt(max((1 - last) / (1 - now) * beta, 1e-20)) if time > 0 else 0.0
            x = math.sqrt(1 - beta) * (1 - last) / (1 - now)
            rows.append((time, *x0, math.sqrt(last) * beta / (1 - now), x, 0.0, deviation))
    return torch.tensor(rows, dtype=torch.float64)
