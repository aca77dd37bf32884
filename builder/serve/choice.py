"""The next token of one request, from logits: greedy, drawn, or within what a constraint allows; and its score."""

from collections.abc import Sequence

import numpy as np

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.generate.logits import HostLogits, Logits
from trt_nvfp4.builder.generate.loop import Finish
from trt_nvfp4.builder.generate.sampling import Sampler
from trt_nvfp4.builder.serve.request import Generated, Request, Score


class Choice:
    """Chooses the tokens of a request, in order."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sampler = Sampler(request.sampling, request.number + 1)
        self._score: Score | None = None
        #: Whether the likeliest token is all that is needed.
        self.is_greedy = (self._sampler.candidates, request.constraint, request.top_scores) == (1, None, None)
        #: Whether the constraint lets nothing follow.
        self.is_complete = False

    def choose(self, logits: Logits, row: int, text: Sequence[int], known: dict[int, int | None]) -> int:
        """The next token; `known` has it by row where `is_greedy`. Raises ModelFaultError for logits that hold NaN or
        Inf."""
        if self.is_greedy:
            if (token := known[row]) is None:
                raise _not_finite()
            return token
        request, read = self._request, logits.rows([row])
        if request.constraint is not None or request.top_scores is not None:
            values = _finite(read.host())
            read = HostLogits(values)
        if request.constraint is not None:
            read = HostLogits(np.where(request.constraint.allowed(), values, -np.inf))
        likeliest = read.likeliest(self._sampler.candidates)
        if request.constraint is None and not likeliest.finite[0]:
            raise _not_finite()
        token = self._sampler(likeliest, 0, request.number, text, len(request.prompt))
        if request.top_scores is not None:
            (self._score,) = _scores(values, [token], request.top_scores)
        if request.constraint is not None:
            self.is_complete = request.constraint.accept(token)
        return token

    def event(self, token: int, finish: Finish | None) -> Generated:
        """The chosen token."""
        return Generated(token, finish, self._score)

    def scores(self, logits: Logits, rows: Sequence[int], tokens: Sequence[int]) -> list[Score]:
        """The scores of `tokens`, each by its own row."""
        return _scores(_finite(logits.rows(rows).host()), tokens, self._request.top_scores or 0)


def _scores(values: np.ndarray, tokens: Sequence[int], top: int) -> list[Score]:
    """The scores of `tokens` by their logits [tokens, vocab], each with the `top` likeliest."""
    values = values.astype(np.float64) - values.max(-1, keepdims=True)
    values -= np.log(np.exp(values).sum(-1, keepdims=True))
    found = [Score(float(row[token]), []) for row, token in zip(values, tokens, strict=True)]
    if not top:
        return found
    best = HostLogits(values).likeliest(top)
    pairs = zip(best.ids.tolist(), best.values.tolist(), strict=True)
    likely = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
    return [Score(score.logprob, each) for score, each in zip(found, likely, strict=True)]


def _finite(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise _not_finite()
    return values


def _not_finite() -> ModelFaultError:
    return ModelFaultError("the model's logits hold NaN or Inf")
