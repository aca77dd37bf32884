"""A decoder in ONNX Runtime on the CPU: the exported or rewritten model, plugins by their function bodies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from trt_nvfp4.common.onnx_runtime import onnxruntime

from ..accuracy.runners import session
from ..errors import MODEL_AT_FAULT, BuilderError
from ..export.decoder_contract import DECODER, IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, Decoder, decoder_of
from ..export.layer_caches import with_layer_caches
from ..onnx_file import read
from .caches import cache_shapes, last_logits
from .logits import HostLogits, Logits

_INTEGER = onnx.TensorProto.INT64
_ANY = -1  # a batch
# bfloat16 is computed in float32 here; see `widen`.
_CACHE_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}


class OnnxRunner:
    """Caches are ONNX Runtime's own tensors: what a step gives out, the next takes in."""

    def __init__(self, model: Path, prefixes: Sequence[str] = ("",), described_by: Path | None = None) -> None:
        """`prefixes`: of the names of inputs and outputs, where `model` is several graphs that take the same tokens,
        each with caches of its own; `described_by` is one of them. The logits are the first one's.

        Raises BuilderError (model): no decoder with caches, or caches that are not what its metadata says."""
        self.name, self._prefixes = str(model), prefixes
        described = described_by or model
        self.decoder = checked_decoder(with_layer_caches(read(described)), described)
        self.longest_step = self.decoder.capacity
        self._session = session(model)
        self._caches: dict[str, onnxruntime.OrtValue] = {}

    def start(self, batch: int) -> None:
        decoder = self.decoder
        dtype = _CACHE_TYPES[decoder.cache_dtype]
        types = {name: np.int8 if name in decoder.fp8_caches else dtype for name in decoder.caches}
        self._caches = {
            prefix + name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, types[name]))
            for prefix in self._prefixes
            for name, shape in cache_shapes(decoder, batch).items()
        }

    def step(self, ids: np.ndarray, past: np.ndarray, new: np.ndarray) -> Logits:
        lengths = {IDS: ids, PAST_LENGTH: past, NEW_LENGTH: new}
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in lengths.items()}
        feeds = {prefix + name: value for prefix in self._prefixes for name, value in values.items()}
        presents = [prefix + name for prefix in self._prefixes for name in self.decoder.presents]
        try:
            logits, *caches = self._session.run_with_ort_values(
                [self._prefixes[0] + LOGITS, *presents], {**feeds, **self._caches}
            )
        except Exception as error:  # ONNX Runtime's own error types
            raise BuilderError(MODEL_AT_FAULT, f"{self.name}: ONNX Runtime cannot run this model: {error}") from error
        self._caches = dict(zip(self._caches, caches, strict=True))
        return HostLogits(last_logits(logits.numpy(), new))

    def close(self) -> None:
        self._caches = {}


def checked_decoder(model: onnx.ModelProto, path: Path) -> Decoder:
    """The model's metadata of its caches, compared with its inputs and outputs. Raises BuilderError (model)."""
    try:
        decoder = decoder_of(model)
    except BuilderError as error:
        raise BuilderError(error.exit_code, f"{path}: {error}") from error
    if decoder is None:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{path}: a model without caches, which generates nothing (no metadata entry {DECODER}); "
            "build one from its Hugging Face directory (build-engine DIR --task generate)",
        )
    if decoder.cache_dtype not in _CACHE_TYPES:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{path}: its caches are {decoder.cache_dtype}, and generation knows {', '.join(_CACHE_TYPES)}; export the "
            "model again",
        )
    element = onnx.TensorProto.DataType.Value(
        {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}[decoder.cache_dtype]
    )
    shapes = cache_shapes(decoder, _ANY)
    expected = {IDS: (_INTEGER, 2), PAST_LENGTH: (_INTEGER, 1), NEW_LENGTH: (_INTEGER, 1)}
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    outputs = {value.name: value.type.tensor_type for value in model.graph.output}
    for name, (kind, rank) in expected.items():
        if name not in inputs or inputs[name].elem_type != kind or len(inputs[name].shape.dim) != rank:
            raise BuilderError(MODEL_AT_FAULT, f"{path}: input {name} must be int64 with {rank} dimensions")
    if LOGITS not in outputs:
        raise BuilderError(MODEL_AT_FAULT, f"{path}: has no output {LOGITS}")
    presents = dict(zip(decoder.presents, shapes.values(), strict=True))
    for values, caches, what in ((inputs, shapes, "input"), (outputs, presents, "output")):
        for name, shape in caches.items():
            if name not in values:
                raise BuilderError(MODEL_AT_FAULT, f"{path}: has no {what} {name}, a cache by its metadata")
            is_fp8 = name.replace("present.", "past_key_values.") in decoder.fp8_caches
            held = onnx.TensorProto.INT8 if is_fp8 else element
            _check_cache(path, f"{what} {name}", values[name], held, shape)
    if unknown := sorted(inputs.keys() - expected.keys() - shapes.keys()):
        raise BuilderError(MODEL_AT_FAULT, f"{path}: input {unknown[0]} is none that a decoder has")
    return decoder


def _check_cache(path: Path, what: str, type_: onnx.TypeProto.Tensor, element: int, shape: tuple[int, ...]) -> None:
    name = onnx.TensorProto.DataType.Name
    if type_.elem_type != element:
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{path}: {what} is {name(type_.elem_type).lower()}, but the metadata says {name(element).lower()}; export "
            "the model again",
        )
    found = [dim.dim_value if dim.HasField("dim_value") else None for dim in type_.shape.dim]
    fits = len(found) == len(shape) and all(
        size == _ANY or dim in (None, size) for dim, size in zip(found, shape, strict=True)
    )
    if not fits and (what.startswith("input") or found):
        text = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in type_.shape.dim)
        expected = ", ".join("batch" if size == _ANY else str(size) for size in shape)
        raise BuilderError(
            MODEL_AT_FAULT,
            f"{path}: {what} has shape [{text}], but the metadata says [{expected}]; export the model again",
        )
