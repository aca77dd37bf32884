"""A decoder's samples over empty and over filled caches: the first half of a text, and what follows it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np

from trt_nvfp4.calibration.samples.samples import Sample
from trt_nvfp4.common.onnx_runtime import onnxruntime

_PAST, _PRESENT = "past_key_values.", "present."
# Of the names in a graph of all ranks of a split model.
_RANK = r"(rank\d+\.)?"
_IS_PAST, _IS_PRESENT = re.compile(_RANK + re.escape(_PAST)), re.compile(_RANK + re.escape(_PRESENT))
_IDS, _PAST_LENGTH, _NEW_LENGTH = "input_ids", "past_length", "new_length"


class Continuation(dict[str, np.ndarray]):
    """What follows `first`, a sample over empty caches. It has none of its own: they are those that the model that runs
    it makes of `first`, in that model's own type."""

    def __init__(self, first: Sample, rest: Sample) -> None:
        super().__init__(rest)
        self.first = first


@dataclass(frozen=True)
class FilledCaches:
    """`samples`, of which each text of two tokens or more becomes two samples. Others pass as they are: batches, and
    models that are no decoder of `decoder_contract`. Iterable as often as `samples`."""

    samples: Iterable[Sample]

    def __iter__(self) -> Iterator[Sample]:
        for sample in self.samples:
            yield from halves(sample)


class _Counted(FilledCaches):
    """For progress: a text of one token counts as two."""

    def __len__(self) -> int:
        assert isinstance(self.samples, Sized)
        return 2 * len(self.samples)


def with_filled_caches(samples: Iterable[Sample]) -> FilledCaches:
    return _Counted(samples) if isinstance(samples, Sized) else FilledCaches(samples)


def halves(sample: Sample) -> list[Sample]:
    """The two halves of a text over empty caches, or the sample itself."""
    caches = cache_names(sample)
    others = sample.keys() - set(caches)
    if not caches or others != {_IDS, _PAST_LENGTH, _NEW_LENGTH}:
        return [sample]
    ids, new = sample[_IDS], sample[_NEW_LENGTH]
    if len(ids) != 1 or new[0] < 2 or sample[_PAST_LENGTH][0] != 0:
        return [sample]
    half, whole = int(new[0]) // 2, int(new[0])
    first = {**sample, _IDS: ids[:, :half], _NEW_LENGTH: np.full_like(new, half)}
    lengths = {_PAST_LENGTH: np.full_like(new, half), _NEW_LENGTH: np.full_like(new, whole - half)}
    return [first, Continuation(first, {_IDS: ids[:, half:whole], **lengths})]


def cache_names(sample: Mapping[str, np.ndarray]) -> list[str]:
    return [name for name in sample if _IS_PAST.match(name)]


def is_present(name: str) -> bool:
    """Whether an output is a cache with the new tokens."""
    return _IS_PRESENT.match(name) is not None


def run(
    session: onnxruntime.InferenceSession, sample: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
) -> list[np.ndarray]:
    """What a session computes of a sample, whose caches it fills first where it is a Continuation."""
    given = dict(sample)
    if isinstance(sample, Continuation):
        caches = cache_names(sample.first)
        presents = [name.replace(_PAST, _PRESENT, 1) for name in caches]
        given |= dict(zip(caches, session.run(presents, sample.first), strict=True))
    found: list[np.ndarray] = session.run(outputs, given)
    return found
