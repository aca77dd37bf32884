"""Drafts stop where they cost more time than they save, and go on where they gain."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trt_nvfp4.builder.generate.drafts.drafter import Drafter
from trt_nvfp4.builder.generate.drafts.drafting import Drafting


@dataclass
class World(Drafter):
    """Steps of a model that take a second, and drafts of which every token takes `of_draft` seconds to draft and
    `of_verifying` to verify. The first of each length take a hundred times as long, which `seconds` leaves out."""

    of_draft: float
    of_verifying: float
    name = "world"
    now: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    seen: Counter[int] = field(default_factory=Counter)

    def start(self, batch: int) -> None:
        pass

    def propose(self, texts: Sequence[Sequence[int]], wanted: Sequence[int]) -> list[list[int]]:
        self.spend(self.of_draft * max(wanted))
        return [[0] * most for most in wanted]

    def spend(self, seconds: float, times: int = 1) -> None:
        self.now += times * seconds
        self.seconds += seconds

    def run(self, rng: np.random.Generator, chance: float, batch: int, steps: int = 2000) -> float:
        """How many times as fast as without drafts; a drafted token is right by `chance`."""
        drafting = Drafting(self, clock=lambda: self.now)
        decoder: Any = SimpleNamespace(verified_tokens=16)
        drafting.start(SimpleNamespace(decoder=decoder, longest_step=100, name="world"), batch)  # type: ignore[arg-type]
        for _ in range(steps):
            drafts = drafting.propose([[0]] * batch, [15] * batch)
            longest = max(map(len, drafts))
            self.seen[longest] += 1
            slow = 100 if self.seen[longest] <= 2 else 1
            self.spend((1 + self.of_verifying * longest) * rng.uniform(1, 1.05), slow)
            for number, draft in enumerate(drafts):
                right = (rng.random(len(draft)) < chance).tolist()
                accepted = [*right, False].index(False)
                drafting.learn(number, len(draft), accepted)
                self.tokens += 1 + accepted
            self.now += rng.uniform(0, 50)  # whoever reads the tokens
        return self.tokens / batch / self.seconds / (1 / 1.025)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("of_draft", [0.0, 0.3, 1.0])
def test_drafts_without_hits_cost_little(rng: np.random.Generator, batch: int, of_draft: float) -> None:
    assert World(of_draft, 0.1).run(rng, 0.0, batch) > 0.97


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("of_draft", [0.5, 1.0])
def test_a_drafter_as_slow_as_the_model_costs_little_however_often_it_is_right(
    rng: np.random.Generator, of_draft: float, chance: float
) -> None:
    assert World(of_draft, 0.1).run(rng, chance, batch=2) > 0.97


def test_drafts_that_gain_go_on(rng: np.random.Generator) -> None:
    assert World(0.02, 0.02).run(rng, 0.8, batch=1) > 2.3
    assert World(0.1, 0.05).run(rng, 0.6, batch=4) > 1.28


def test_drafts_begin_again_once_they_gain(rng: np.random.Generator) -> None:
    world = World(0.1, 0.02)
    world.run(rng, 0.0, batch=1, steps=500)
    assert world.run(rng, 0.9, batch=1) > 1.5
