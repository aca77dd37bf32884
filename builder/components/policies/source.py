"""A policy's directory as parts: one source of those that `build-engine` builds."""

from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.builder.components.policies import act, diffusion, flow_matching
from trt_nvfp4.builder.components.policies.checkpoint import processing_of
from trt_nvfp4.builder.components.policies.library import load_policy
from trt_nvfp4.builder.components.policies.processing import MASK, POLICY, TOKENS, Processing
from trt_nvfp4.builder.components.policies.taken_apart import ACTION, CHUNK
from trt_nvfp4.builder.components.source import Example, Source, as_array
from trt_nvfp4.builder.errors import ModelFaultError, exit_code, first_line

_STRUCTURES: dict[str, Any] = {
    "act": act.take_apart,
    "diffusion": diffusion.take_apart,
    **dict.fromkeys(("pi0", "pi05", "smolvla"), flow_matching.take_apart),
}


def of_policy(directory: Path) -> Source:
    """The parts of the policy in `directory`, with a random observation and what LeRobot makes of it.

    Raises BuilderError as `processing_of` and `load_policy`; ModelFaultError for a policy that does not come apart.
    """
    processing = processing_of(directory)
    policy = load_policy(directory)
    observation = _random(processing)
    try:
        with torch.no_grad():
            taken = _STRUCTURES[processing.type](policy, observation)
    except Exception as error:  # whatever modeling code raises where it is called in another way than its own
        if exit_code(error) is not None:
            raise
        raise ModelFaultError(
            f"{directory}: this {processing.type} does not come apart as those of its type do; give a Python file with "
            f"its parts (model.py:components); {first_line(error)}",
        ) from error
    example = Example(
        {name: as_array(value) for name, value in taken.given.items()},
        outputs={f"{ACTION}.{CHUNK}": as_array(taken.chunk)},
    )
    settings = {POLICY: processing.json()}
    return Source(directory.name, "run", taken.parts, taken.flows, settings, example)


def _random(processing: Processing) -> dict[str, torch.Tensor]:
    """Normalized values of every feature, [1, ...], and tokens of half the longest text."""
    found = {
        name: torch.rand(1, *feature.shape)
        if feature.is_image and not len(feature.center)
        else torch.randn(1, *feature.shape)
        for name, feature in processing.features.items()
    }
    if processing.text is not None:
        longest = processing.text.longest
        found[TOKENS] = torch.randint(3, 100, (1, longest))
        found[MASK] = torch.arange(longest)[None] < (longest + 1) // 2
    return found
