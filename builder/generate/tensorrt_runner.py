"""A decoder's engine on its GPU: caches bound once and updated in place, the decode step as a CUDA graph.

Needs TensorRT's (or TensorRT-RTX's) package, NumPy and cuda-bindings: bundles carry this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.common.json_text import read_json

from ..errors import BUILD_FAILED, MODEL_AT_FAULT, UNAVAILABLE, BuilderError
from ..export.decoder_contract import IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, Decoder, decoder_of
from ..tensorrt.build_script import MANIFEST
from ..tensorrt.load import load_engine
from .caches import cache_shapes, last_logits
from .cuda import Cuda, recorded
from .logits import HostLogits, Logits

# nvinfer's DataType by the cache's type.
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
# How the host reads logits: bfloat16 is the upper half of a float32.
_HOST_TYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_INT64 = np.dtype(np.int64)


@dataclass(frozen=True)
class _Profile:
    """An optimization profile: fewest and most new tokens per sequence, and the largest batch."""

    index: int
    fewest: int
    most: int
    batch: int


class TensorRTRunner:
    """Steps of one token run in the profile made for them, and as a CUDA graph from the third such step of a batch
    on; longer ones run in the prefill profile."""

    def __init__(
        self, engine: Any, trt: Any, decoder: Decoder, name: str, cuda: Cuda, communicator: Any = None
    ) -> None:
        """`engine` is an ICudaEngine of the module `trt`; `communicator`: NCCL's as a capsule, for one rank of
        several. Raises BuilderError (model) where it is not the decoder that the metadata describes."""
        self._communicator = communicator
        self.name, self._engine, self._trt, self._cuda = name, engine, trt, cuda
        self._check(decoder)
        self._profiles = self._read_profiles()
        self.longest_step = max(profile.most for profile in self._profiles)
        self.decoder = replace(
            decoder, max_batch=min(decoder.max_batch, *(profile.batch for profile in self._profiles))
        )
        self._contexts: dict[int, Any] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        self._batch = 0
        self._addresses: dict[str, int] = {}
        self._pinned: dict[str, np.ndarray] = {}
        self._graph: Any = None
        self._single_steps = 0

    def start(self, batch: int) -> None:
        if batch != self._batch:
            self._allocate(batch)
            return
        for name, size in self._cache_bytes(batch).items():
            self._cuda.clear(self._addresses[name], size)

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> Logits:
        profile = self._profile_for(ids.shape[1])
        context = self._context(profile, ids.shape)
        for name, value in {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}.items():
            staged = self._pinned[name].reshape(-1)[: value.size]
            staged[:] = value.reshape(-1)
            self._cuda.to_device(self._addresses[name], staged)
        self._enqueue(context, ids.shape[1])
        tokens = ids.shape[1] if self.decoder.all_logits else 1
        logits = self._pinned[LOGITS].reshape(-1)[: self._batch * tokens * self.decoder.vocab_size]
        self._cuda.to_host(logits, self._addresses[LOGITS])
        self._cuda.wait()
        if logits.dtype == np.uint16:
            logits = (logits.astype(np.uint32) << 16).view(np.float32)
        return HostLogits(last_logits(logits.reshape(self._batch, tokens, -1), new))

    def close(self) -> None:
        self._drop_graph()
        self._contexts = {}
        self._cuda.close()

    def _enqueue(self, context: Any, tokens: int) -> None:
        """Run the step: as the recorded graph if it is one token per sequence. TensorRT allocates and compiles in the
        first run after shapes change, which cannot be recorded; the second is recorded."""
        if tokens > 1:
            self._execute(context)
            return
        self._single_steps += 1
        if self._single_steps == 2:
            self._graph = recorded(self._cuda, context)
        if self._graph is None:
            self._execute(context)
        else:
            self._cuda.launch(self._graph)

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self._cuda.stream):
            raise BuilderError(BUILD_FAILED, f"{self.name}: TensorRT could not run this engine")

    def _context(self, profile: _Profile, shape: tuple[int, ...]) -> Any:
        """The profile's context, with inputs of `shape` [batch, tokens] and all addresses set."""
        context = self._contexts.get(profile.index)
        if context is None:
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(profile.index, self._cuda.stream):
                raise BuilderError(BUILD_FAILED, f"{self.name}: TensorRT has no memory for running this engine")
            self._communicate(context)
            self._contexts[profile.index] = context
        if self._shapes.get(profile.index) == shape:
            return context
        batch = shape[0]
        shapes = {IDS: shape, PAST_LENGTH: (batch,), NEW_LENGTH: (batch,), **cache_shapes(self.decoder, batch)}
        for name, size in shapes.items():
            if not context.set_input_shape(name, size):
                raise BuilderError(BUILD_FAILED, f"{self.name}: input {name} does not take the shape {list(size)}")
        for name, address in self._addresses.items():
            context.set_tensor_address(name, address)
        self._shapes[profile.index] = (shape[0], shape[1])
        return context

    def _communicate(self, context: Any) -> None:
        """Give a context what its collectives add up over. Every rank's process waits here for all others."""
        if self._communicator is None:
            return
        if not hasattr(context, "set_communicator"):
            raise BuilderError(
                UNAVAILABLE, f"{self.name}: this TensorRT has no collectives between GPUs; use TensorRT 11 or newer"
            )
        if not context.set_communicator(self._communicator):
            raise BuilderError(BUILD_FAILED, f"{self.name}: TensorRT did not take NCCL's communicator of the ranks")

    def _profile_for(self, tokens: int) -> _Profile:
        fitting = [profile for profile in self._profiles if profile.fewest <= tokens <= profile.most]
        if not fitting:
            ranges = ", ".join(f"{profile.fewest} to {profile.most}" for profile in self._profiles)
            raise BuilderError(
                MODEL_AT_FAULT, f"{self.name}: a step of {tokens} tokens fits no profile of the engine ({ranges})"
            )
        return min(fitting, key=lambda profile: profile.most)

    def _allocate(self, batch: int) -> None:
        self._drop_graph()
        self._cuda.free()
        self._shapes, self._batch, self._addresses = {}, batch, {}
        logits = _HOST_TYPES[self._engine.get_tensor_dtype(LOGITS).name]
        tokens = self.longest_step if self.decoder.all_logits else 1
        host: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            IDS: ((batch, self.longest_step), _INT64),
            PAST_LENGTH: ((batch,), _INT64),
            NEW_LENGTH: ((batch,), _INT64),
            LOGITS: ((batch, tokens, self.decoder.vocab_size), logits),
        }
        self._pinned = {name: self._cuda.pinned(shape, dtype) for name, (shape, dtype) in host.items()}
        addresses = {name: self._cuda.device(array.nbytes) for name, array in self._pinned.items()}
        caches = {name: self._cuda.device(size) for name, size in self._cache_bytes(batch).items()}
        # The same memory in and out: TensorRT updates a cache in place.
        presents = dict(zip(self.decoder.presents, caches.values(), strict=True))
        self._addresses = addresses | caches | presents

    def _cache_bytes(self, batch: int) -> dict[str, int]:
        item = 4 if self.decoder.cache_dtype == "float32" else 2
        fp8 = self.decoder.fp8_caches
        return {
            name: int(np.prod(shape)) * (1 if name in fp8 else item)
            for name, shape in cache_shapes(self.decoder, batch).items()
        }

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.wait()
            self._cuda.forget(self._graph)
        self._graph, self._single_steps = None, 0

    def _read_profiles(self) -> list[_Profile]:
        found = []
        for index in range(self._engine.num_optimization_profiles):
            least, _, most = self._engine.get_tensor_profile_shape(IDS, index)
            found.append(_Profile(index, int(least[1]), int(most[1]), int(most[0])))
        return found

    def _check(self, decoder: Decoder) -> None:
        engine, modes = self._engine, self._trt.TensorIOMode
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = {name for name in names if engine.get_tensor_mode(name) == modes.INPUT}
        if not any(name.startswith("past_key_values.") for name in inputs):
            raise BuilderError(
                MODEL_AT_FAULT,
                f"{self.name}: this engine has no cache; build one from a Hugging Face directory (build-engine DIR "
                "--task generate)",
            )
        types = {IDS: "INT64", PAST_LENGTH: "INT64", NEW_LENGTH: "INT64"}
        types |= dict.fromkeys(decoder.caches, _TYPES.get(decoder.cache_dtype, decoder.cache_dtype))
        types |= dict.fromkeys(decoder.fp8_caches, "INT8")
        if inputs != types.keys():
            odd = sorted(inputs ^ types.keys())[0]
            what = "is none of the decoder's inputs" if odd in inputs else "is missing among the engine's inputs"
            raise BuilderError(MODEL_AT_FAULT, f"{self.name}: {odd} {what}; build the engine again")
        missing = [name for name in (LOGITS, *decoder.presents) if name not in set(names) - inputs]
        if missing:
            raise BuilderError(MODEL_AT_FAULT, f"{self.name}: the engine has no output {missing[0]}; build it again")
        for name, expected in types.items():
            if (kind := engine.get_tensor_dtype(name).name) != expected:
                raise BuilderError(
                    MODEL_AT_FAULT, f"{self.name}: input {name} is {kind}, expected {expected}; build the engine again"
                )
        # The batch is -1 in both.
        for name, shape in cache_shapes(decoder, -1).items():
            if (found := tuple(engine.get_tensor_shape(name))) != shape:
                raise BuilderError(
                    MODEL_AT_FAULT,
                    f"{self.name}: cache {name} has shape {list(found)}, expected {list(shape)} (-1: any batch); build "
                    "the engine again",
                )


def open_engine(path: Path, manifest: Path | None = None, communicator: Any = None) -> TensorRTRunner:
    """The runner of the engine at `path`, on this machine's GPU; for `manifest` see `open_runner`, for `communicator`
    `TensorRTRunner`.

    Raises BuilderError as `load_engine` does, and (model) where the engine is no decoder."""
    engine, backend = load_engine(path)
    decoder, name = decoder_beside(path, manifest), f"{path} ({backend.module})"
    return TensorRTRunner(engine, backend.trt, decoder, name, Cuda(), communicator)


def decoder_beside(engine: Path, manifest: Path | None = None) -> Decoder:
    """What an engine's decoder is: by the manifest of its bundle, or the rewritten model beside it. Raises BuilderError
    (model) without either."""
    manifest, rewritten = manifest or engine.parent / MANIFEST, engine.with_suffix(".rewritten.onnx")
    try:
        if manifest.is_file() and (noted := read_json(manifest).get("decoder")) is not None:
            return Decoder.parse(json.dumps(noted))
        found = None
        if rewritten.is_file():
            import onnx

            found = decoder_of(onnx.load(rewritten, load_external_data=False))
    except Exception as error:  # JSON's, protobuf's
        raise BuilderError(MODEL_AT_FAULT, f"{engine}: what lies beside it cannot be read: {error}") from error
    if found is None:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{engine}: nothing beside it says that it is a decoder with caches ({rewritten.name}, or a bundle's "
            f"{MANIFEST}); build one with build-engine DIR --task generate, and keep the files together",
        )
    return found
