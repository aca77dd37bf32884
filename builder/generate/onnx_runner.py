"""A decoder in ONNX Runtime on the CPU: the exported or rewritten model, plugins by their function bodies."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from trt_nvfp4.common.cache_names import is_state
from trt_nvfp4.common.onnx_runtime import onnxruntime

from ..errors import BuilderError, ModelFaultError
from ..model.decoder_contract import (
    DECODER,
    HIDDEN,
    IDS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    PREVIOUS_HIDDEN,
    Decoder,
    decoder_of,
)
from ..model.layer_caches import with_layer_caches
from ..model.onnx_file import opened
from ..model.onnx_session import session
from .caches import cache_shapes, cache_types, last_logits
from .logits import HostLogits, Logits

_INTEGER = onnx.TensorProto.INT64
_ANY = -1  # a batch
# bfloat16 is computed in float32 here; see `widen`.
_CACHE_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32, "int8": np.int8}
_ELEMENTS = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16", "int8": "INT8"}


class OnnxRunner:
    """Caches are ONNX Runtime's own tensors: what a step gives out, the next takes in."""

    def __init__(self, model: Path, prefixes: Sequence[str] = ("",), described_by: Path | None = None) -> None:
        """`prefixes`: of the names of inputs and outputs, where `model` is several graphs that take the same tokens,
        each with caches of its own; `described_by` is one of them. The logits are the first one's.

        Raises ModelFaultError: no decoder with caches, or caches that are not what its metadata says."""
        self.name, self._prefixes = str(model), prefixes
        file = opened(model)
        described = file if described_by is None else opened(described_by)
        self.decoder = checked_decoder(with_layer_caches(described.copied()), described.path)
        self.longest_step = self.decoder.capacity
        self._hidden_type = _CACHE_TYPES[self.decoder.cache_dtype]
        self._session = session(file)
        self._caches: dict[str, onnxruntime.OrtValue] = {}
        self._saved: dict[str, onnxruntime.OrtValue] = {}
        self._hidden = np.zeros((0, 0, 0), np.float32)

    def start(self, batch: int) -> None:
        decoder = self.decoder
        types = cache_types(decoder)
        self._caches = {
            prefix + name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, _CACHE_TYPES[types[name]]))
            for prefix in self._prefixes
            for name, shape in cache_shapes(decoder, batch).items()
        }

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> Logits:
        given = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        if previous is not None:
            given[PREVIOUS_HIDDEN] = previous.astype(self._hidden_type)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in given.items()}
        feeds = {prefix + name: value for prefix in self._prefixes for name, value in values.items()}
        presents = [prefix + name for prefix in self._prefixes for name in self.decoder.presents]
        try:
            found = [self._prefixes[0] + name for name in (LOGITS, *([HIDDEN] if self.decoder.hidden_size else []))]
            outputs = self._session.run_with_ort_values([*found, *presents], {**feeds, **self._caches})
        except Exception as error:  # ONNX Runtime's own error types
            raise ModelFaultError(f"{self.name}: ONNX Runtime cannot run this model: {error}") from error
        self._caches = dict(zip(self._caches, outputs[len(found) :], strict=True))
        if self.decoder.hidden_size:
            self._hidden = outputs[1].numpy()
        return HostLogits(last_logits(self.decoder, outputs[0].numpy(), new, count))

    def hidden(self) -> np.ndarray:
        return self._hidden.astype(np.float32)

    def save_states(self) -> None:
        self._saved = {name: cache for name, cache in self._caches.items() if is_state(name)}  # a step makes others

    def restore_states(self, rows: Sequence[int]) -> None:
        for name, saved in self._saved.items():
            self._caches[name].numpy()[list(rows)] = saved.numpy()[list(rows)]

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Logits:
        whole = self._caches
        self._caches = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(cache.numpy()[row : row + 1].copy())
            for name, cache in whole.items()
        }
        try:
            logits = self.step(ids, past, new, count)
            for name, cache in whole.items():
                cache.numpy()[row : row + 1] = self._caches[name].numpy()
        finally:
            self._caches = whole
        return logits

    def clear_row(self, row: int) -> None:
        for cache in self._caches.values():
            cache.numpy()[row] = 0  # a view

    def copy_row(self, source: int, target: int) -> None:
        for cache in self._caches.values():
            cache.numpy()[target] = cache.numpy()[source]

    def close(self) -> None:
        self._caches, self._saved = {}, {}


def checked_decoder(model: onnx.ModelProto, path: Path) -> Decoder:
    """The model's metadata of its caches, compared with its inputs and outputs. Raises ModelFaultError."""
    try:
        decoder = decoder_of(model)
    except BuilderError as error:
        raise BuilderError(f"{path}: {error}", error.exit_code) from error
    if decoder is None:
        raise ModelFaultError(
            f"{path}: a model without caches, which generates nothing (no metadata entry {DECODER}); "
            "build one from its Hugging Face directory (build-engine DIR --task generate)"
        )
    types, shapes = cache_types(decoder), cache_shapes(decoder, _ANY)
    if unknown_types := sorted(set(types.values()) - _CACHE_TYPES.keys()):
        raise ModelFaultError(
            f"{path}: its caches are {unknown_types[0]}, and generation knows {', '.join(_CACHE_TYPES)}; export the "
            "model again"
        )
    expected = {IDS: (_INTEGER, 2), PAST_LENGTH: (_INTEGER, 1), NEW_LENGTH: (_INTEGER, 1)}
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    outputs = {value.name: value.type.tensor_type for value in model.graph.output}
    for name, (kind, rank) in expected.items():
        if name not in inputs or inputs[name].elem_type != kind or len(inputs[name].shape.dim) != rank:
            raise ModelFaultError(f"{path}: input {name} must be int64 with {rank} dimensions")
    for name in (LOGITS, *([HIDDEN] if decoder.hidden_size else [])):
        if name not in outputs:
            raise ModelFaultError(f"{path}: has no output {name}")
    if decoder.takes_hidden and PREVIOUS_HIDDEN not in inputs:
        raise ModelFaultError(f"{path}: has no input {PREVIOUS_HIDDEN}, though it is a head by its metadata")
    for values, names, what in ((inputs, decoder.caches, "input"), (outputs, decoder.presents, "output")):
        for name, past in zip(names, decoder.caches, strict=True):
            if name not in values:
                raise ModelFaultError(f"{path}: has no {what} {name}, a cache by its metadata")
            held = onnx.TensorProto.DataType.Value(_ELEMENTS[types[past]])
            _check_cache(path, f"{what} {name}", values[name], held, shapes[past])
    known = {PREVIOUS_HIDDEN} if decoder.takes_hidden else set()
    if unknown := sorted(inputs.keys() - expected.keys() - shapes.keys() - known):
        raise ModelFaultError(f"{path}: a decoder has no input {unknown[0]}")
    return decoder


def _check_cache(path: Path, what: str, type_: onnx.TypeProto.Tensor, element: int, shape: tuple[int, ...]) -> None:
    name = onnx.TensorProto.DataType.Name
    if type_.elem_type != element:
        raise ModelFaultError(
            f"{path}: {what} is {name(type_.elem_type).lower()}, but the metadata says {name(element).lower()}; export "
            "the model again"
        )
    found = [dim.dim_value if dim.HasField("dim_value") else None for dim in type_.shape.dim]
    fits = len(found) == len(shape) and all(
        size == _ANY or dim in (None, size) for dim, size in zip(found, shape, strict=True)
    )
    if not fits and (what.startswith("input") or found):
        text = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in type_.shape.dim)
        expected = ", ".join("batch" if size == _ANY else str(size) for size in shape)
        raise ModelFaultError(
            f"{path}: {what} has shape [{text}], but the metadata says [{expected}]; export the model again"
        )
