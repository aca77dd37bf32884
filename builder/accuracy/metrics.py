"""How one tensor agrees with its reference over all samples, and thresholds for that agreement."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from polygraphy.comparator import (
    CosineSimilarityCompareFunc,
    IterationResult,
    SimpleCompareFunc,
    SnrCompareFunc,
)
from rich.table import Table

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.records.contents import TensorAgreement
from trt_nvfp4.builder.terminal.tables import grid
from trt_nvfp4.common.metrics import cosine, kl_divergence

CompareFunc = Callable[[IterationResult, IterationResult], "OrderedDict[str, Any]"]


@dataclass
class Agreement:
    """How one tensor, `discrete` or not (see `is_discrete`), agrees with the reference's, over all samples.

    `cosine` is the worst sample's cosine similarity and `worst_sample` that sample's number, `sqnr_db` is
    10 log10(sum x^2 / sum (x - y)^2) over all samples, `max_rel` the greatest |x - y| / |x| (infinite where only x is
    0), `argmax` the share of last-axis vectors whose largest entry is at the same place, `equal` the share of equal
    values, `kl` the worst sample's mean KL(softmax x || softmax y) over those vectors, in nats (computed on request,
    where `can_be_logits`).
    """

    name: str
    kind: str
    with_kl: bool = False
    discrete: bool = False
    cosine: float = 1.0
    sqnr_db: float = math.inf
    max_abs: float = 0.0
    max_rel: float = 0.0
    argmax: float = 1.0
    equal: float = 1.0
    kl: float | None = None
    worst_sample: int = 0
    _samples: int = 0
    _signal: float = 0.0
    _noise: float = 0.0
    _same: int = 0
    _vectors: int = 0
    _equal: int = 0
    _values: int = 0

    @np.errstate(divide="ignore", invalid="ignore")  # NaN and infinity show in the metrics
    def add(self, expected: np.ndarray, actual: np.ndarray) -> None:
        """Account for one sample. Raises BuilderError when the shapes differ."""
        if expected.shape != actual.shape:
            raise UsageError(f"{self.name}: shapes {expected.shape} and {actual.shape} differ: not the same model")
        x, y = in_float64(expected, actual)
        difference = np.abs(x - y)
        noise = float(np.square(difference).sum())
        self._signal += float(np.square(x).sum())
        self._noise += noise
        alike = cosine(y, x)
        # NaN must show and not pass for the best so far.
        if not alike >= self.cosine and not math.isnan(self.cosine):
            self.cosine, self.worst_sample = alike, self._samples
        self.max_abs = _greatest(self.max_abs, difference)
        self.max_rel = _greatest(self.max_rel, np.where(difference == 0, 0.0, difference / np.abs(x)))
        self.sqnr_db = _decibels(self._signal / self._noise) if self._noise else math.inf
        self._equal += int((expected == actual).sum())
        self._values += x.size
        self.equal = self._equal / self._values if self._values else 1.0
        if x.ndim and x.shape[-1] > 1:
            same = x.argmax(-1) == y.argmax(-1)
            self._same += int(same.sum())
            self._vectors += same.size
            self.argmax = self._same / max(self._vectors, 1)
        if self.with_kl and can_be_logits(expected):
            self.kl = _greatest(self.kl or 0.0, np.asarray(kl_divergence(x, y)))
        self._samples += 1

    @property
    def reference_is_zero(self) -> bool:
        """In every sample: cosine and SQNR have no meaning then."""
        return self._signal == 0

    @property
    def is_empty(self) -> bool:
        """In every sample: there is nothing to agree on."""
        return self._values == 0

    def reached(self) -> dict[str, str]:
        """Each metric that has a threshold, by the word for it."""
        return {
            "cosine": f"{self.cosine:.6f}",
            "SQNR": f"{self.sqnr_db:.1f} dB",
            "max abs": f"{self.max_abs:.3g}",
            "max rel": f"{self.max_rel:.3g}",
            "KL": "none" if self.kl is None else f"{self.kl:.3g}",
        }

    def as_dict(self) -> TensorAgreement:
        """For JSON (see `for_json`)."""
        return {
            "name": self.name,
            "kind": self.kind,
            "discrete": self.discrete,
            "cosine": for_json(self.cosine),
            "sqnr_db": for_json(self.sqnr_db),
            "max_abs": for_json(self.max_abs),
            "max_rel": for_json(self.max_rel),
            "argmax": self.argmax,
            "equal": self.equal,
            "kl": None if self.kl is None else for_json(self.kl),
            "worst_sample": self.worst_sample,
        }


def for_json(value: float) -> float | None:
    """The number, or None for NaN and infinity (the SQNR of equal tensors), which JSON does not have."""
    return value if math.isfinite(value) else None


def is_discrete(values: np.ndarray) -> bool:
    """True for integers and booleans (indices, token ids, masks): a small error of the model may change them by any
    amount."""
    return values.dtype.kind in "biu"


def in_float64(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64, so that differences of integers do not wrap around and booleans can be subtracted. Integers
    beyond 2^53 that differ and have the same float64 become neighbours."""
    x, y = expected.astype(np.float64), actual.astype(np.float64)
    if is_discrete(expected):
        neighbour = np.nextafter(y, np.where(actual > expected, np.inf, -np.inf))
        y = np.where((x == y) & (expected != actual), neighbour, y)
    return x, y


def can_be_logits(values: np.ndarray) -> bool:
    """True where a softmax of the last axis has a meaning: floats, and two entries or more."""
    return not is_discrete(values) and values.ndim > 0 and values.shape[-1] > 1


def _decibels(ratio: float) -> float:
    return 10 * math.log10(ratio) if ratio else -math.inf


def _greatest(so_far: float, values: np.ndarray) -> float:
    """NaN wins: it is the worst of differences."""
    return float(np.maximum(so_far, values.max(initial=0.0)))


@dataclass(frozen=True)
class Thresholds:
    """Limits that every sample has to meet; None: no limit. See the options of compare-engine."""

    min_cosine: float | None = None
    min_sqnr: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    max_kl: float | None = None

    def functions(self, reference: np.ndarray) -> Iterator[tuple[str, CompareFunc]]:
        """(threshold in words, Polygraphy comparison function) for a tensor like `reference`; the function takes the
        result first and the reference second."""
        if self.min_cosine is not None:
            yield f"cosine >= {self.min_cosine}", CosineSimilarityCompareFunc(self.min_cosine, check_shapes=True)
        if self.min_sqnr is not None:
            snr = SnrCompareFunc(self.min_sqnr, check_shapes=True)  # whose first argument is the signal: the reference
            yield f"SQNR >= {self.min_sqnr} dB", lambda result, reference: snr(reference, result)
        if self.max_abs is not None:
            yield f"max abs <= {self.max_abs}", _simple(atol=self.max_abs, rtol=0.0)
        if self.max_rel is not None:
            yield f"max rel <= {self.max_rel}", _simple(atol=0.0, rtol=self.max_rel)
        if self.max_kl is not None and can_be_logits(reference):
            yield f"KL <= {self.max_kl}", _kl_at_most(self.max_kl)


def _simple(atol: float, rtol: float) -> CompareFunc:
    function: CompareFunc = SimpleCompareFunc(atol=atol, rtol=rtol, check_error_stat="elemwise", check_shapes=True)
    return function


def _kl_at_most(limit: float) -> CompareFunc:
    def judge(result: IterationResult, reference: IterationResult) -> OrderedDict[str, bool]:
        return OrderedDict(
            (name, kl_divergence(np.float64(reference[name]), np.float64(result[name])) <= limit) for name in result
        )

    return judge


def table(title: str, agreements: list[Agreement]) -> Table:
    """Agreements for the terminal, the kinds of tensors one below the other."""
    with_kl = any(row.kl is not None for row in agreements)
    numbers = ["cosine", "SQNR dB", "max abs", "max rel", "argmax", *(["KL"] * with_kl)]
    shown = grid(title, ["tensor", *numbers], numbers)
    kinds = list(dict.fromkeys(row.kind for row in agreements))
    for kind in kinds:
        if len(kinds) > 1:
            shown.add_row(f"{kind}s:", *[""] * len(numbers))
        for row in agreements:
            if row.kind == kind:
                cells = [f"{row.cosine:.6f}", f"{row.sqnr_db:.1f}", f"{row.max_abs:.3g}", f"{row.max_rel:.3g}"]
                kl = ["-" if row.kl is None else f"{row.kl:.3g}"] * with_kl
                shown.add_row(row.name, *cells, f"{row.argmax:.1%}", *kl)
    return shown
