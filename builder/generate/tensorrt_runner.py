"""A decoder's engine on its GPU: caches bound once and updated in place, the decode step as a CUDA graph.

Needs TensorRT's (or TensorRT-RTX's) package, NumPy and cuda-bindings: bundles carry this module.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.common.cache_names import is_past, is_state
from trt_nvfp4.common.json_text import read_json

from ..cuda.runtime import Cuda, recorded
from ..errors import BuildFailedError, ModelFaultError, UnavailableError
from ..model.decoder_contract import (
    HIDDEN,
    IDS,
    LOGIT_TOKENS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    PREVIOUS_HIDDEN,
    Decoder,
    decoder_of,
)
from ..records.bundle import MANIFEST
from ..tensorrt.load import load_engine
from .caches import cache_shapes, cache_types, last_logits, padded_step, row_axis
from .logits import HostLogits, Logits

# nvinfer's DataType by the cache's type.
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int8": "INT8"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# How the host reads logits: bfloat16 is the upper half of a float32.
_HOST_TYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_INT64 = np.dtype(np.int64)
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Profile:
    """An optimization profile: fewest and most new tokens per sequence, and the largest batch."""

    index: int
    fewest: int
    most: int
    batch: int


@dataclass(frozen=True)
class _Caches:
    """Addresses of the caches and states of `batch` rows, by the names of inputs and outputs. `copied`: to, from and
    how many bytes behind each step."""

    batch: int
    addresses: Mapping[str, int] = field(default_factory=dict)
    copied: tuple[int, int, int] | None = None


class TensorRTRunner:
    """Steps of few tokens run in the profile made for them, as CUDA graphs from the second of a length and batch on;
    shorter ones are padded to these lengths. Longer ones run in the prefill profile."""

    def __init__(
        self, engine: Any, trt: Any, decoder: Decoder, name: str, cuda: Cuda, communicator: Any = None
    ) -> None:
        """`engine` is an ICudaEngine of the module `trt`; `communicator`: NCCL's as a capsule, for one rank of
        several. Raises ModelFaultError where it is not the decoder that the metadata describes."""
        self._communicator = communicator
        self.name, self._engine, self._trt, self._cuda = name, engine, trt, cuda
        self._check(decoder)
        self._profiles = self._read_profiles()
        self.longest_step = max(profile.most for profile in self._profiles)
        self.decoder = replace(
            decoder, max_batch=min(decoder.max_batch, *(profile.batch for profile in self._profiles))
        )
        #: By profile, and by batch and length of recorded steps, or 0 for others.
        self._contexts: dict[tuple[int, ...], Any] = {}
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        #: Those of all rows; those that a row by itself is copied to, from the first such step on; those of this step.
        self._all, self._one = _Caches(0), _Caches(0)
        self._caches = self._all
        #: Addresses of all else that steps read and write.
        self._addresses: dict[str, int] = {}
        self._pinned: dict[str, np.ndarray] = {}
        self._hidden = np.zeros((0, 0, 0), np.float32)
        #: Address and bytes of the copy of every state.
        self._saved: dict[str, tuple[int, int]] = {}
        #: By the length of their steps and batch; None for one that cannot be recorded.
        self._graphs: dict[tuple[int, int], Any] = {}
        self._runs: Counter[tuple[int, int]] = Counter()

    def start(self, batch: int) -> None:
        if batch != self._all.batch:
            self._allocate(batch)
            return
        for name, size in self._cache_bytes(batch).items():
            self._cuda.clear(self._all.addresses[name], size)

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> Logits:
        tokens = padded_step(ids.shape[1], int(past.max()), self.decoder.capacity)
        if not any(profile.fewest <= tokens <= profile.most for profile in self._profiles):
            tokens = ids.shape[1]
        padding = (0, tokens - ids.shape[1])
        ids = np.pad(ids, ((0, 0), padding))
        profile = self._profile_for(tokens)
        context = self._context(profile, ids.shape)
        given = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        if previous is not None:
            given[PREVIOUS_HIDDEN] = np.pad(previous, ((0, 0), padding, (0, 0)))
        for name, value in given.items():
            staged = self._pinned[name].reshape(-1)[: value.size]
            staged[:] = _rounded(value.reshape(-1)) if staged.dtype == np.uint16 else value.reshape(-1)
            self._cuda.to_device(self._addresses[name], staged)
        self._enqueue(context, tokens)
        rows = min(tokens, self.decoder.verified_tokens)
        logits = self._to_host(rows, rows if self.decoder.all_logits else min(count, rows))
        if self.decoder.hidden_size:
            shape = (*ids.shape, self.decoder.hidden_size)
            self._hidden = self._pinned[HIDDEN].reshape(-1)[: int(np.prod(shape))].reshape(shape)
            self._cuda.to_host(self._hidden, self._addresses[HIDDEN])
        self._cuda.wait()
        return HostLogits(last_logits(self.decoder, _widened(logits), new, count))

    def hidden(self) -> np.ndarray:
        return _widened(self._hidden).astype(np.float32)

    def save_states(self) -> None:
        for name, (saved, size) in self._saved.items():
            self._cuda.on_device(saved, self._all.addresses[name], size)

    def restore_states(self, rows: Sequence[int]) -> None:
        for name, (saved, size) in self._saved.items():
            size //= self._all.batch
            for row in rows:
                self._cuda.on_device(self._all.addresses[name] + row * size, saved + row * size, size)

    def _to_host(self, rows: int, last: int) -> np.ndarray:
        """[batch, last, vocab]: the last of each sequence's `rows` of logits, which arrive with the next wait."""
        shape = (self._caches.batch, last, self.decoder.vocab_size)
        logits = self._pinned[LOGITS].reshape(-1)[: int(np.prod(shape))].reshape(shape)
        address, size = self._addresses[LOGITS], logits[0, 0].nbytes
        if last == rows:
            self._cuda.to_host(logits, address)
        else:
            for row, sequence in enumerate(logits):
                self._cuda.to_host(sequence, address + ((row + 1) * rows - last) * size)
        return logits

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Logits:
        if self._all.batch == 1:
            return self.step(ids, past, new, count)
        if not self._one.batch:
            self._one = self._made(1)
        self._copy(self._all, row, self._one, 0)
        self._caches = self._one
        try:
            logits = self.step(ids, past, new, count)
        finally:
            self._caches = self._all
        self._copy(self._one, 0, self._all, row)
        return logits

    def clear_row(self, row: int) -> None:
        for address, size in self._row(self._all, row):
            self._cuda.clear(address, size)

    def copy_row(self, source: int, target: int) -> None:
        self._copy(self._all, source, self._all, target)

    def _copy(self, source: _Caches, row: int, target: _Caches, to: int) -> None:
        for (read, size), (written, _) in zip(self._row(source, row), self._row(target, to), strict=True):
            self._cuda.on_device(written, read, size)

    def _row(self, caches: _Caches, row: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of every block that is one sequence's."""
        types = cache_types(self.decoder)
        for name, shape in cache_shapes(self.decoder, caches.batch).items():
            axis = row_axis(name)
            size = int(np.prod(shape[axis + 1 :])) * _BYTES[types[name]]
            for block in range(int(np.prod(shape[:axis]))):
                yield caches.addresses[name] + (block * shape[axis] + row) * size, size

    def close(self) -> None:
        self._drop_graphs()
        self._contexts = {}
        self._cuda.close()

    def _enqueue(self, context: Any, tokens: int) -> None:
        """Run the step: as the recorded graph if it is short. TensorRT allocates and compiles in the first run after
        shapes change, which cannot be recorded; the second is recorded."""
        if tokens > LOGIT_TOKENS:
            self._execute(context)
            return
        key = tokens, self._caches.batch
        self._runs[key] += 1
        if self._runs[key] == 2:
            self._graphs[key] = recorded(self._cuda, lambda: self._enqueued(context))
        if self._graphs.get(key) is None:
            self._execute(context)
        else:
            self._cuda.launch(self._graphs[key])

    def _execute(self, context: Any) -> None:
        if not self._enqueued(context):
            raise BuildFailedError(f"{self.name}: TensorRT could not run this engine")

    def _enqueued(self, context: Any) -> bool:
        """Enqueue the engine, and the copy of the states that it gives out beside those that it reads."""
        enqueued = bool(context.execute_async_v3(self._cuda.stream))
        if self._caches.copied:
            self._cuda.on_device(*self._caches.copied)
        return enqueued

    def _context(self, profile: _Profile, shape: tuple[int, ...]) -> Any:
        """A context of the profile, with inputs of `shape` [batch, tokens] and all addresses set. Each length that is
        recorded has its own: a graph is of one context's shapes."""
        key = (profile.index, *(shape if shape[1] <= LOGIT_TOKENS else (0, 0)))
        context = self._contexts.get(key)
        if context is None:
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(profile.index, self._cuda.stream):
                raise BuildFailedError(f"{self.name}: TensorRT has no memory for running this engine")
            self._communicate(context)
            self._contexts[key] = context
        if self._shapes.get(key) == shape:
            return context
        batch = shape[0]
        shapes = {IDS: shape, PAST_LENGTH: (batch,), NEW_LENGTH: (batch,), **cache_shapes(self.decoder, batch)}
        if self.decoder.takes_hidden:
            shapes[PREVIOUS_HIDDEN] = (*shape, self.decoder.hidden_size)
        for name, size in shapes.items():
            if not context.set_input_shape(name, size):
                raise BuildFailedError(f"{self.name}: input {name} does not take the shape {list(size)}")
        for name, address in {**self._addresses, **self._caches.addresses}.items():
            context.set_tensor_address(name, address)
        self._shapes[key] = shape
        return context

    def _communicate(self, context: Any) -> None:
        """Give a context what its collectives add up over. Every rank's process waits here for all others."""
        if self._communicator is None:
            return
        if not hasattr(context, "set_communicator"):
            raise UnavailableError(
                f"{self.name}: this TensorRT has no collectives between GPUs; use TensorRT 11 or newer"
            )
        if not context.set_communicator(self._communicator):
            raise BuildFailedError(f"{self.name}: TensorRT did not take NCCL's communicator of the ranks")

    def _profile_for(self, tokens: int) -> _Profile:
        fitting = [profile for profile in self._profiles if profile.fewest <= tokens <= profile.most]
        if not fitting:
            ranges = ", ".join(f"{profile.fewest} to {profile.most}" for profile in self._profiles)
            raise ModelFaultError(f"{self.name}: a step of {tokens} tokens fits no profile of the engine ({ranges})")
        return min(fitting, key=lambda profile: profile.most)

    def _allocate(self, batch: int) -> None:
        self._drop_graphs()
        self._cuda.free()
        self._contexts, self._shapes = {}, {}
        logits = _HOST_TYPES[self._engine.get_tensor_dtype(LOGITS).name]
        rows = min(self.longest_step, self.decoder.verified_tokens)
        host: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            IDS: ((batch, self.longest_step), _INT64),
            PAST_LENGTH: ((batch,), _INT64),
            NEW_LENGTH: ((batch,), _INT64),
            LOGITS: ((batch, rows, self.decoder.vocab_size), logits),
        }
        for name in (HIDDEN, PREVIOUS_HIDDEN)[: bool(self.decoder.hidden_size) + self.decoder.takes_hidden]:
            dtype = _HOST_TYPES[self._engine.get_tensor_dtype(name).name]
            host[name] = ((batch, self.longest_step, self.decoder.hidden_size), dtype)
        self._pinned = {name: self._cuda.pinned(shape, dtype) for name, (shape, dtype) in host.items()}
        self._addresses = {name: self._cuda.device(array.nbytes) for name, array in self._pinned.items()}
        sizes = self._cache_bytes(batch)
        self._saved = {name: (self._cuda.device(size), size) for name, size in sizes.items() if is_state(name)}
        self._caches = self._all = self._made(batch)
        self._one = _Caches(0)

    def _made(self, batch: int) -> _Caches:
        """Empty caches and states of so many rows."""
        sizes, copied = self._cache_bytes(batch), dict(self.decoder.copied)
        caches = {name: self._cuda.device(size) for name, size in sizes.items() if name not in copied}
        offsets, end = {}, 0
        for name in copied:
            offsets[name], end = end, end + -(-sizes[name] // _ALIGNMENT) * _ALIGNMENT
        copy = None
        if end:
            # Two blocks, so that one copy serves all of them.
            read, written = self._cuda.device(end), self._cuda.device(end)
            copy = (read, written, end)
            caches |= {name: read + offset for name, offset in offsets.items()}
        # The same memory in and out: TensorRT updates a cache in place.
        presents = {
            present: written + offsets[name] if name in offsets else caches[name]
            for name, present in zip(self.decoder.caches, self.decoder.presents, strict=True)
        }
        return _Caches(batch, caches | presents, copy)

    def _cache_bytes(self, batch: int) -> dict[str, int]:
        types = cache_types(self.decoder)
        return {
            name: int(np.prod(shape)) * _BYTES[types[name]] for name, shape in cache_shapes(self.decoder, batch).items()
        }

    def _drop_graphs(self) -> None:
        self._cuda.wait()
        for graph in self._graphs.values():
            if graph is not None:
                self._cuda.forget(graph)
        self._graphs, self._runs = {}, Counter()

    def _read_profiles(self) -> list[_Profile]:
        found = []
        for index in range(self._engine.num_optimization_profiles):
            smallest, _, largest = self._engine.get_tensor_profile_shape(IDS, index)
            found.append(_Profile(index, int(smallest[1]), int(largest[1]), int(largest[0])))
        return found

    def _check(self, decoder: Decoder) -> None:
        engine, modes = self._engine, self._trt.TensorIOMode
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = {name for name in names if engine.get_tensor_mode(name) == modes.INPUT}
        if not any(map(is_past, inputs)):
            raise ModelFaultError(
                f"{self.name}: this engine has no cache; build one from a Hugging Face directory (build-engine DIR "
                "--task generate)"
            )
        types = {IDS: "INT64", PAST_LENGTH: "INT64", NEW_LENGTH: "INT64"}
        types |= {name: _TYPES.get(kind, kind) for name, kind in cache_types(decoder).items()}
        if decoder.takes_hidden:
            types[PREVIOUS_HIDDEN] = engine.get_tensor_dtype(PREVIOUS_HIDDEN).name if PREVIOUS_HIDDEN in inputs else ""
        if inputs != types.keys():
            odd = sorted(inputs ^ types.keys())[0]
            what = "is not an input of the decoder" if odd in inputs else "is missing among the engine's inputs"
            raise ModelFaultError(f"{self.name}: {odd} {what}; build the engine again")
        hidden = [HIDDEN] if decoder.hidden_size else []
        missing = [name for name in (LOGITS, *hidden, *decoder.presents) if name not in set(names) - inputs]
        if missing:
            raise ModelFaultError(f"{self.name}: the engine has no output {missing[0]}; build it again")
        for name, expected in types.items():
            if (kind := engine.get_tensor_dtype(name).name) != expected:
                raise ModelFaultError(
                    f"{self.name}: input {name} is {kind}, expected {expected}; build the engine again"
                )
        # The batch is -1 in both.
        for name, shape in cache_shapes(decoder, -1).items():
            if (found := tuple(engine.get_tensor_shape(name))) != shape:
                raise ModelFaultError(
                    f"{self.name}: cache {name} has shape {list(found)}, expected {list(shape)} (-1: any batch); build "
                    "the engine again"
                )


def _widened(values: np.ndarray) -> np.ndarray:
    """bfloat16 as float32; other types as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16, to the nearest."""
    bits = values.astype(np.float32).view(np.uint32)
    found: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return found


def open_engine(path: Path, manifest: Path | None = None, communicator: Any = None) -> TensorRTRunner:
    """The runner of the engine at `path`, on this machine's GPU; for `manifest` see `open_runner`, for `communicator`
    `TensorRTRunner`.

    Raises BuilderError as `load_engine` does, and ModelFaultError where the engine is not a decoder."""
    engine, backend = load_engine(path)
    decoder, name = decoder_beside(path, manifest), f"{path} ({backend.module})"
    return TensorRTRunner(engine, backend.trt, decoder, name, Cuda(), communicator)


def decoder_beside(engine: Path, manifest: Path | None = None) -> Decoder:
    """The decoder's description by the manifest of the engine's bundle, or the rewritten model beside it. Raises
    ModelFaultError without either."""
    manifest, rewritten = manifest or engine.parent / MANIFEST, engine.with_suffix(".rewritten.onnx")
    try:
        if manifest.is_file() and (noted := read_json(manifest).get("decoder")) is not None:
            return Decoder.parse(json.dumps(noted))
        found = None
        if rewritten.is_file():
            import onnx

            found = decoder_of(onnx.load(rewritten, load_external_data=False))
    except Exception as error:  # JSON's, protobuf's
        raise ModelFaultError(f"{engine}: what lies beside it cannot be read: {error}") from error
    if found is None:
        raise ModelFaultError(
            f"{engine}: nothing beside it says that it is a decoder with caches ({rewritten.name}, or a bundle's "
            f"{MANIFEST}); build one with build-engine DIR --task generate, and keep the files together"
        )
    return found
