"""A decoder's samples over empty and over filled caches: the first half of a text, and what follows it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

import numpy as np

from trt_nvfp4.calibration.samples.samples import Sample
from trt_nvfp4.common.cache_names import is_past, present_of
from trt_nvfp4.common.onnx_runtime import onnxruntime

_IDS, _PAST_LENGTH, _NEW_LENGTH = "input_ids", "past_length", "new_length"


class Continuation(dict[str, np.ndarray]):
    """The tokens that follow `first`, a sample over empty caches. Its caches are not in it: the model that runs it
    makes them of `first`, in its own type."""

    def __init__(self, first: Sample, rest: Sample) -> None:
        super().__init__(rest)
        self.first = first


@dataclass(frozen=True)
class FilledCaches:
    """`samples`, of which each text of two tokens or more becomes two samples. Others pass as they are: batches, and
    models that are not decoders of `decoder_contract`. Iterable as often as `samples`."""

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
    return [name for name in sample if is_past(name)]


def run(
    session: onnxruntime.InferenceSession, sample: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
) -> list[np.ndarray]:
    """The outputs of a session for a sample; the caches of a Continuation are filled first."""
    given = dict(sample)
    if isinstance(sample, Continuation):
        caches = cache_names(sample.first)
        presents = [present_of(name) for name in caches]
        given |= dict(zip(caches, session.run(presents, sample.first), strict=True))
    found: list[np.ndarray] = session.run(outputs, given)
    return found
