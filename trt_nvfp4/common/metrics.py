"""How far arrays are from a reference: each metric once, in float64."""

import math
from collections.abc import Sequence

import numpy as np


def relative_error(*, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest ||found - expected|| / ||expected|| of any tensor, in float64; for a reference of zeros ||found||."""
    errors = [0.0]
    for one, reference in zip(found, expected, strict=True):
        x, y = np.asarray(reference, np.float64), np.asarray(one, np.float64)
        errors.append(float(np.linalg.norm(y - x) / (np.linalg.norm(x) or 1.0)))
    return float(np.max(errors))


def cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """Cosine similarity of the flattened arrays; 0 where one of them is zero and the other is not, NaN where values are
    not finite.

    Equal arrays are alike entirely, which the quotient misses by a rounding error.
    """
    x, y = np.asarray(expected, np.float64).ravel(), np.asarray(found, np.float64).ravel()
    if np.array_equal(x, y) and np.isfinite(x).all():
        return 1.0
    norms = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float((x * y).sum()) / norms if norms else 0.0


def psnr(*, found: np.ndarray, expected: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB, by the reference's range of values; infinite for equal arrays."""
    x, y = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    error = float(np.square(y - x).mean())
    return 10 * math.log10(float(np.ptp(x)) ** 2 / error) if error else math.inf


@np.errstate(invalid="ignore")
def kl_divergence(x: np.ndarray, y: np.ndarray) -> float:
    """Mean of KL(softmax x || softmax y) over the vectors of the last axis of x and y [..., K], in nats; 0 without
    vectors. Masked entries of x, -inf, add nothing."""
    log_p, log_q = log_softmax(x), log_softmax(y)
    terms = np.where(np.isneginf(log_p), 0.0, np.exp(log_p) * (log_p - log_q))
    return float(terms.sum(axis=-1).mean()) if terms.size else 0.0


def log_softmax(x: np.ndarray) -> np.ndarray:
    """The log-softmax of x [..., K] over the last axis, in the same shape."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
