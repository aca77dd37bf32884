"""Whether a decoder whose caches are updated in place computes what the original does, whose caches grow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from trt_nvfp4.common.cpu_session import cpu_session
from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.decoders.inplace_cache import InPlaceCaches
from trt_nvfp4.graph_passes.patterns.attention.growing import given

from ..model.decoder_contract import Decoder

#: Largest error relative to the norm: rounding, and nothing else. bfloat16 is computed in float32.
_TOLERANCE, _TOLERANCE_FLOAT16 = 1e-3, 3e-2
_NEW = 3  # tokens of a step behind a long text
_MOST_BYTES = 2 << 30  # of two sequences' caches: longer texts are not compared
_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class _Step:
    """Two sequences, `new` tokens of each behind `past` cached ones: random ones if `fresh`, else the last step's."""

    number: int
    past: tuple[int, int]
    new: tuple[int, int]
    fresh: bool

    def ids(self, sequence: int, vocab: int) -> np.ndarray:
        generator = np.random.default_rng([self.number, sequence])
        return generator.integers(0, vocab, (1, self.new[sequence]))

    def caches(self, sequence: int, shapes: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        generator = np.random.default_rng([self.number, sequence, 1])
        for heads, dim in shapes:
            yield generator.standard_normal((1, heads, self.past[sequence], dim), np.float32)


def conversion_error(original: Path, converted: Path, decoder: Decoder, caches: InPlaceCaches) -> str | None:
    """How the decoder at `converted` differs from the one at `original`, in logits or new keys and values, or None.

    Both run in ONNX Runtime: over several steps, two sequences of unequal length, and behind texts that are longer than
    every constant in the arithmetic of positions.
    """
    layers = zip(decoder.kv_heads, decoder.head_dim, decoder.value_head_dim, strict=True)
    shapes = [(heads, dim) for heads, key, value in layers for dim in (key, value)]
    steps = list(_steps(decoder, caches.lengths, shapes))
    limit = _TOLERANCE_FLOAT16 if decoder.cache_dtype == "float16" else _TOLERANCE
    try:
        expected = list(_original(original, steps, decoder, caches, shapes))
        found = _converted(converted, steps, decoder, shapes)
        for step, theirs, ours in zip(steps, expected, found, strict=True):
            error = relative_error(found=list(ours), expected=list(theirs))
            if not error <= limit:
                return f"behind {step.past[0]} and {step.past[1]} tokens its results would differ by {error:.1%}"
    except Exception as error:  # ONNX Runtime's own error types
        return f"the comparison of both failed: {error}"
    return None


def _steps(decoder: Decoder, lengths: Sequence[int], shapes: Sequence[tuple[int, int]]) -> Iterator[_Step]:
    room, past = decoder.capacity, (0, 0)
    for number, new in enumerate(((5, 2), (1, 1), (2, 3), (1, 1))):
        if max(past[0] + new[0], past[1] + new[1]) <= room:
            yield _Step(number, past, new, fresh=not number)
            past = past[0] + new[0], past[1] + new[1]
    longest = _MOST_BYTES // (8 * sum(heads * dim for heads, dim in shapes))
    fitting = [length for length in lengths if length + _NEW <= room and length <= longest]
    for number, length in enumerate(fitting, 9):
        yield _Step(number, (length, fitting[-1 - fitting.index(length)]), (_NEW, 1), fresh=True)


def _session(path: Path) -> onnxruntime.InferenceSession:
    return cpu_session(widen(onnx.load(path, load_external_data=False)), path.parent)


def _original(
    path: Path, steps: Sequence[_Step], decoder: Decoder, caches: InPlaceCaches, shapes: Sequence[tuple[int, int]]
) -> Iterator[list[np.ndarray]]:
    """The logits of each step's last tokens, and its new keys and values, of one sequence after the other."""
    session = _session(path)
    inputs = session.get_inputs()
    types = {entry.name: _TYPES[entry.type] for entry in inputs}
    names = [past for past, _ in caches.original]
    outputs = ["logits", *(present for _, present in caches.original)]
    texts: list[list[np.ndarray]] = [[], []]
    for step in steps:
        results = []
        for sequence, (past, new) in enumerate(zip(step.past, step.new, strict=True)):
            if step.fresh:
                texts[sequence] = list(step.caches(sequence, shapes))
            ids = step.ids(sequence, decoder.vocab_size)
            feeds = dict(zip(names, texts[sequence], strict=True))
            feeds |= {e.name: given(e.name, len(e.shape), past, ids) for e in inputs if e.name not in feeds}
            found = session.run(outputs, {name: feeds[name].astype(types[name]) for name in types})
            texts[sequence] = found[1:]
            results += [found[0][0, -1], *(cache[0, :, past : past + new] for cache in found[1:])]
        yield results


def _converted(
    path: Path, steps: Sequence[_Step], decoder: Decoder, shapes: Sequence[tuple[int, int]]
) -> Iterator[list[np.ndarray]]:
    """The same of the converted decoder, both sequences in one batch."""
    session = _session(path)
    types = {entry.name: _TYPES[entry.type] for entry in session.get_inputs()}
    outputs = ["logits", *decoder.presents]
    texts: list[np.ndarray] = []
    for step in steps:
        if step.fresh:
            texts = [np.zeros((2, heads, decoder.capacity, dim), np.float32) for heads, dim in shapes]
            for sequence, past in enumerate(step.past):
                for text, cache in zip(texts, step.caches(sequence, shapes), strict=True):
                    text[sequence, :, :past] = cache[0]
        ids = np.zeros((2, max(step.new)), np.int64)
        for sequence, new in enumerate(step.new):
            ids[sequence, :new] = step.ids(sequence, decoder.vocab_size)[0]
        feeds = dict(zip(decoder.caches, texts, strict=True))
        feeds |= {"input_ids": ids, "past_length": np.array(step.past), "new_length": np.array(step.new)}
        found = session.run(outputs, {name: feeds[name].astype(types[name]) for name in types})
        texts = found[1:]
        results = []
        for sequence, (past, new) in enumerate(zip(step.past, step.new, strict=True)):
            results += [found[0][sequence, -1], *(cache[sequence, :, past : past + new] for cache in texts)]
        yield results
