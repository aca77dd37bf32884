"""One prompt to continue, as the scheduler takes it, and the events that it gives back."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from trt_nvfp4.builder.generate.loop import Finish
from trt_nvfp4.builder.generate.sampling import Sampling


@dataclass(frozen=True)
class Score:
    """A token's log probability, and the likeliest tokens at its place as (id, log probability)."""

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Generated:
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

    reason: Literal["deadline", "model", "request", "stopped"]
    message: str


Event = Generated | PromptScored | Failed


class Constraint(Protocol):
    """A rule that the generated tokens must follow, such as JSON of a schema."""

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [vocab]."""

    def accept(self, token: int) -> bool:
        """Take in the next token; returns whether the text is complete."""


@dataclass(eq=False)
class Request:
    """`emit` is called from the scheduler's thread, in order. `ends(token)` says whether the text ends with a token
    that is not one of `stop`; it sees each token once, before its event.

    `number` tells choices of one prompt with one seed apart. `top_scores`: how many of the likeliest tokens to score;
    None: no scores. `deadline`: a time of the scheduler's clock.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    emit: Callable[[Event], None]
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    ends: Callable[[int], bool] | None = None
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
    #: Prompt tokens that were cached already; set by the scheduler.
    reused: int = 0
