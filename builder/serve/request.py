"""One prompt to continue, as the scheduler takes it, and the events that it gives back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from trt_nvfp4.builder.generate.loop import Finish
from trt_nvfp4.builder.generate.sampling import Sampling


class Score(NamedTuple):
    """A token's log probability, and the likeliest tokens at its place as (id, log probability)."""

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Started:
    """The request has a slot: the tokens of its prompt, and how many of them were cached already."""

    prompt_tokens: int
    reused: int


class Generated(NamedTuple):
    """The next token; `finish` is set on a request's last one, `score` where log probabilities are wanted."""

    id: int
    finish: Finish | None
    score: Score | None = None


@dataclass(frozen=True)
class PromptScored:
    """The next scores of the prompt's tokens, from its second token on."""

    scores: Sequence[Score]


@dataclass(frozen=True)
class Failed:
    """The request ended without its last token."""

    reason: Literal["deadline", "model", "request"]
    message: str


Event = Started | Generated | PromptScored | Failed


class Constraint(Protocol):
    """A rule that the generated tokens must follow, such as JSON of a schema."""

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [vocab]."""

    def accept(self, token: int) -> bool:
        """Take in the next token; returns whether the text is complete."""


@dataclass(eq=False)
class Request:
    """`number` tells choices of one prompt with one seed apart. `top_scores`: how many of the likeliest tokens to
    score; None: no scores. `deadline`: a time of the scheduler's clock.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    number: int = 0
    top_scores: int | None = None
    scores_prompt: bool = False
    client: str = ""
    deadline: float = math.inf
    #: Images whose tokens the prompt has, which last as long as this.
    pictures: Sequence[object] = ()
    #: Set by whoever waits no longer.
    is_cancelled: bool = False
