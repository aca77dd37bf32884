"""Policies that denoise actions by flow matching behind a vision-language model: pi0, pi0.5, SmolVLA."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

from trt_nvfp4.builder.components.manifest import Flow, Loop
from trt_nvfp4.builder.components.parts import TorchPart
from trt_nvfp4.builder.components.policies.processing import IMAGES, MASK, STATE, TOKENS
from trt_nvfp4.builder.components.policies.taken_apart import ACTION, CHUNK, NEXT, NOISE, TURN, TakenApart

_VISION, _PREFIX = "vision", "prefix"
_FEATURES, _SEEN = "features", "seen"
# The function by which the library turns times into sines and cosines.
_EMBEDDING = "create_sinusoidal_pos_embedding"


class _Vision(torch.nn.Module):
    """(cameras, each [1, 3, height, width]) -> features [1, cameras * tokens, width]."""

    def __init__(self, policy: Any, cameras: Sequence[str]) -> None:
        super().__init__()
        self.policy, self.cameras = policy, cameras

    def forward(self, *images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen, _ = _images(self.policy, dict(zip(self.cameras, images, strict=True)))
        return (torch.cat([_network(self.policy.model).embed_image(image) for image in seen], 1),)


class _Prefix(torch.nn.Module):
    """(features, what else is observed) -> which tokens count, bool [1, tokens], and keys and values of every layer,
    [1, heads, tokens, head_dim]: the library's own sampling, up to its first denoising step."""

    def __init__(self, policy: Any, images: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self.policy, self.names = policy, names
        pixels, self.masks = _images(policy, images)
        self.count = len(pixels)

    def forward(self, features: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = dict(zip(self.names, rest, strict=True))
        model, config = self.policy.model, self.policy.config
        # pi0's prefix only counts the states; pi0.5 has them in its text.
        state = self.policy.prepare_state(batch) if STATE in batch else features.new_zeros(1, config.max_state_dim)
        observed = [batch[TOKENS], batch[MASK], *([] if config.type == "pi05" else [state])]
        noise = features.new_zeros(1, config.chunk_size, config.max_action_dim)
        found: dict[str, Any] = {}

        def denoise_step(**given: Any) -> torch.Tensor:
            found.update(given)
            return torch.zeros_like(given["x_t"])

        with (
            patch.object(model, "denoise_step", denoise_step),
            patch.object(_network(model), "embed_image", lambda x: x),
        ):
            model.sample_actions(list(features.chunk(self.count, 1)), self.masks, *observed, noise=noise)
        caches = [tensor for layer in found["past_key_values"].layers for tensor in (layer.keys, layer.values)]
        return found["prefix_pad_masks"], *caches


class _Step(torch.nn.Module):
    """(actions [1, rows, width], turn int64 [1], [state,] what the prefix gives) -> actions of the next step, float32,
    and the joints' share of them. What depends on the time is a table of all steps, which the library computes in
    float64."""

    def __init__(self, policy: Any, steps: int) -> None:
        super().__init__()
        self.policy, self.steps = policy, steps
        self.library = sys.modules[type(policy.model).__module__]

    def forward(self, actions: torch.Tensor, turn: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache

        times = torch.tensor([1 - step / self.steps for step in range(self.steps)])
        embedding = getattr(self.library, _EMBEDDING)
        own = {}
        if self.policy.config.type == "pi0":
            state, *rest = rest  # type: ignore[assignment]
            own["state"] = self.policy.prepare_state({STATE: state})
        seen, *caches = rest
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(caches[::2], caches[1::2], strict=True)):
            cache.update(keys, values, layer)

        def of_turn(time: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
            table: torch.Tensor = embedding(times, *sizes, **options)
            return table.float().index_select(0, turn)

        with patch.object(self.library, _EMBEDDING, of_turn):
            velocity = self.policy.model.denoise_step(
                prefix_pad_masks=seen, past_key_values=cache, x_t=actions, timestep=times[:1], **own
            )
        found = actions - velocity.float() / self.steps
        return found, found[:, :, : self.policy.config.action_feature.shape[0]]


def take_apart(policy: Any, observation: Mapping[str, torch.Tensor]) -> TakenApart:
    """The parts `vision`, `prefix` and `action`, which runs as often as the configuration says."""
    config = policy.config
    steps = getattr(config, "num_inference_steps", None) or config.num_steps
    images = {name: value for name, value in observation.items() if name.startswith(IMAGES)}
    rest = {name: value for name, value in observation.items() if name not in images}
    state = {name: rest[name] for name in [STATE] if name in rest}
    into_prefix = {name: value for name, value in rest.items() if config.type == "smolvla" or name != STATE}
    into_action = state if config.type == "pi0" else {}
    noise = torch.randn(1, config.chunk_size, config.max_action_dim)

    vision = _Vision(policy, list(images))
    prefix = _Prefix(policy, images, list(into_prefix))
    with torch.no_grad():
        (features,) = vision(*images.values())
        made = prefix(features, *into_prefix.values())
    names = [_SEEN, *(f"{kind}_{layer}" for layer in range(len(made) // 2) for kind in ("key", "value"))]
    loop = Loop(steps, {NEXT: NOISE}, {TURN: list(range(steps))})
    turn = torch.zeros(1, dtype=torch.int64)
    inputs = {NOISE: noise, TURN: turn, **into_action, **dict(zip(names, made, strict=True))}
    parts = [
        TorchPart(_VISION, vision, images, [_FEATURES], {}),
        TorchPart(_PREFIX, prefix, {_FEATURES: features, **into_prefix}, names, {}),
        TorchPart(ACTION, _Step(policy, steps), inputs, [NEXT, CHUNK], {}, loop=loop),
    ]
    flows = [Flow(f"{_VISION}.{_FEATURES}", f"{_PREFIX}.{_FEATURES}")]
    flows += [Flow(f"{_PREFIX}.{name}", f"{ACTION}.{name}") for name in names]
    chunk = policy.predict_action_chunk(dict(observation), noise=noise)
    return TakenApart(parts, flows, {**images, **into_prefix, **into_action, NOISE: noise}, chunk)


def _network(model: Any) -> Any:
    """The vision-language model with its expert."""
    return getattr(model, "paligemma_with_expert", None) or model.vlm_with_expert


def _images(policy: Any, batch: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every camera's image as the encoder takes it, empty ones too, and which of them count."""
    prepare = getattr(policy, "prepare_images", None) or policy._preprocess_images
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = prepare(dict(batch))
    return found
