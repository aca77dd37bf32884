"""Accuracy as a number: a budget such as `cosine>=0.999`, and the score that a model's outputs reach."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trt_nvfp4.builder.accuracy.metrics import Agreement, can_be_logits, is_discrete
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.common.metrics import log_softmax

# Metric -> the relation that a budget states, and its range.
METRICS = {
    "cosine": (">=", 0.0, 1.0),
    "sqnr": (">=", -math.inf, math.inf),
    "kl": ("<=", 0.0, math.inf),
    "perplexity": ("<=", 1.0, math.inf),
}
_SYNTAX = re.compile(r"\s*([a-z]+)\s*(>=|<=)\s*(\S+?)\s*(?:dB)?\s*")


@dataclass(frozen=True)
class Budget:
    """A limit for the outputs on held-out samples; see `Score` for the metrics."""

    metric: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read `cosine>=0.999`, `sqnr>=30dB`, `kl<=0.01` or `perplexity<=16.5`; raises UsageError."""
        form = ", ".join(f"{metric}{relation}X" for metric, (relation, _, _) in METRICS.items())
        match = _SYNTAX.fullmatch(text)
        if match is None or match[1] not in METRICS:
            raise UsageError(f"--accuracy-budget '{text}': expected one of {form}, such as cosine>=0.999")
        metric, relation, number = match.groups()
        expected, least, most = METRICS[metric]
        if relation != expected:
            raise UsageError(f"--accuracy-budget '{text}': a budget of {metric} is {metric}{expected}X")
        try:
            limit = float(number)
        except ValueError:
            raise UsageError(f"--accuracy-budget '{text}': '{number}' is not a number") from None
        if not math.isfinite(limit) or not least <= limit <= most:
            raise UsageError(f"--accuracy-budget '{text}': {metric} lies between {least:g} and {most:g}")
        return cls(metric, limit)

    def __str__(self) -> str:
        # 15 digits: as many as every decimal number keeps as a float.
        return f"{self.metric}{METRICS[self.metric][0]}{self.limit:.15g}"

    def met_by(self, value: float) -> bool:
        """NaN meets nothing."""
        return value >= self.limit if METRICS[self.metric][0] == ">=" else value <= self.limit

    def shown(self, value: float) -> str:
        """A value for people: six digits, or as many more as it takes to be on its own side of the limit."""
        texts = (f"{value:.{digits}g}" for digits in range(6, 18))
        return next(text for text in texts if self.met_by(float(text)) == self.met_by(value))


@dataclass
class Score:
    """How a model's floating-point outputs compare with the original's over samples; integers and booleans, such as
    indices, are left out (`left_out` names them).

    Metrics: "cosine" and "kl" are those of the worst sample and output, "sqnr" in dB that of the worst output over all
    samples (as compare-engine states them), "perplexity" the exponential of the mean negative log likelihood of the
    tokens `input_ids` under the first such output, logits [..., sequence, vocabulary], where attention_mask is not 0.
    """

    metric: str
    left_out: set[str] = field(default_factory=set)
    _outputs: dict[str, Agreement] = field(default_factory=dict)
    _nll: float = 0.0
    _tokens: int = 0

    def add(
        self, sample: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]
    ) -> None:
        """Account for one sample's outputs, the original's and the model's. Raises UsageError where the
        metric does not apply to the model."""
        with_kl = self.metric in ("kl", "perplexity")
        discrete = [name for name, values in actual.items() if isinstance(values, np.ndarray) and is_discrete(values)]
        if len(discrete) == len(actual):
            needed = "logits" if with_kl else "an output of floating-point numbers"
            raise UsageError(
                f"a budget of {self.metric} needs {needed}; "
                + ", ".join(f"output {name} is {actual[name].dtype} {actual[name].shape}" for name in discrete)
            )
        self.left_out.update(discrete)
        counted = {name: values for name, values in actual.items() if name not in self.left_out}
        for name, values in counted.items():
            if not isinstance(values, np.ndarray) or values.dtype.kind in "OSU":
                raise UsageError(f"a budget of {self.metric} needs tensors of numbers; output {name} is not one")
            if values.shape != expected[name].shape:
                raise UsageError(
                    f"a budget of {self.metric} compares outputs element by element, and the shape of output {name} "
                    f"depends on values: {expected[name].shape} by the original, {values.shape} when quantized; "
                    "give a model that ends before it"
                )
            if with_kl and not can_be_logits(values):
                raise UsageError(
                    f"a budget of {self.metric} needs logits; output {name} is {values.dtype} {values.shape}"
                )
            self._outputs.setdefault(name, Agreement(name, "output", with_kl)).add(expected[name], values)
        if self.metric == "perplexity":
            self._add_tokens(sample, next(iter(counted.values())))

    @np.errstate(invalid="ignore")
    def _add_tokens(self, sample: Mapping[str, np.ndarray], logits: np.ndarray) -> None:
        ids = sample.get("input_ids")
        if ids is None or logits.ndim != ids.ndim + 1 or logits.shape[:-1] != ids.shape:
            raise UsageError(
                "a budget of perplexity needs a language model: an input input_ids [batch, sequence] and logits "
                "[batch, sequence, vocabulary] as first floating-point output; found "
                f"{sorted(sample)} and {logits.shape}"
            )
        mask = sample.get("attention_mask", np.ones_like(ids))
        if mask.shape != ids.shape:
            raise UsageError(
                f"a budget of perplexity counts tokens by attention_mask, which must have the shape of input_ids, "
                f"{ids.shape}; found {mask.shape}"
            )
        if ids.size and not 0 <= ids.min() <= ids.max() < logits.shape[-1]:
            raise UsageError(
                f"a budget of perplexity needs input_ids from 0 to {logits.shape[-1] - 1}, of which there are logits; "
                f"found {ids.min()} to {ids.max()}"
            )
        counted = mask[..., 1:] != 0
        likelihoods = log_softmax(logits[..., :-1, :].astype(np.float64))
        chosen = np.take_along_axis(likelihoods, ids[..., 1:, None].astype(np.int64), -1)[..., 0]
        self._nll -= float(chosen[counted].sum())
        self._tokens += int(counted.sum())

    @property
    def value(self) -> float:
        """The metric."""
        if self.metric != "perplexity":
            return self._worst[1]
        with np.errstate(over="ignore"):
            return float(np.exp(self._nll / self._tokens)) if self._tokens else math.nan

    @property
    def loss(self) -> float:
        """The error as a sum of small errors: 1 - cosine, the noise-to-signal ratio, or KL (for perplexity too, whose
        own differences are noisier)."""
        if self.metric == "cosine":
            return 1 - self.value
        if self.metric == "sqnr":
            return float(10 ** (-self.value / 10))
        return self._worst[1]

    @property
    def worst_output(self) -> str:
        """The output that decides the metric; "" where all have the same value, or there is only one."""
        if self.metric == "perplexity" or len(set(self._by_output().values())) < 2:
            return ""
        return self._worst[0]

    @property
    def _worst(self) -> tuple[str, float]:
        """The output that agrees least, and how much; NaN is the worst."""
        found = self._by_output()
        if not found:
            return "", math.nan
        sign = -1 if METRICS[self.metric][0] == "<=" else 1
        return min(found.items(), key=lambda item: -math.inf if math.isnan(item[1]) else sign * item[1])

    def _by_output(self) -> dict[str, float]:
        """The metric of each output, KL for perplexity."""
        if self.metric == "cosine":
            return {name: row.cosine for name, row in self._outputs.items()}
        if self.metric == "sqnr":
            return {name: row.sqnr_db for name, row in self._outputs.items()}
        return {name: row.kl or 0.0 for name, row in self._outputs.items()}
