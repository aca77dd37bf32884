"""Token ids that a runner of the project generates greedily."""

from collections.abc import Sequence
from typing import Any

from trt_nvfp4.builder.generate.loop import generate_ids
from trt_nvfp4.builder.generate.sampling import Sampling


def generated(runner: Any, prompts: Sequence[Sequence[int]], count: int, *stop: int) -> list[list[int]]:
    """For each prompt, at most `count` ids; behind one of `stop` its sequence ends."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in generate_ids(runner, prompts, count, Sampling(), stop):
        for token in step:
            found[token.sequence].append(token.id)
    return found
