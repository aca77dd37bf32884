"""Files of weights for tests: what arrays become, and what is none."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.tensorrt import weights_file
from trt_nvfp4.builder.tensorrt.weights_file import METADATA, Tensor, WeightsFile

_NAMES = {np.dtype(np.int8): "I8", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


def written(folder: Path, arrays: dict[str, np.ndarray]) -> WeightsFile:
    tensors = [Tensor(name, _NAMES[array.dtype], array.shape) for name, array in arrays.items()]
    return weights_file.write(folder, tensors, lambda tensor: [arrays[tensor.name].tobytes()])


def file_of(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _header(**entry: Any) -> dict[str, Any]:
    return {"__metadata__": {METADATA: "0" * 64}, "a": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]} | entry}


#: Headers, whole or as bytes, and the data behind them, which no reader may take.
BROKEN: list[tuple[Any, bytes]] = [
    (b"{", bytes(8)),
    (b"[" * 100_000, bytes(8)),
    (b"\xff\xfe", bytes(8)),
    ([1], bytes(8)),
    ({}, b""),
    ({"__metadata__": {METADATA: "0" * 63 + "g"}}, b""),
    ({"__metadata__": {METADATA: "/" * 64}}, b""),
    ({"__metadata__": 3}, b""),
    (_header(), bytes(7)),
    (_header(), bytes(9)),
    (_header(dtype="U8"), bytes(8)),
    (_header(dtype=["I8"]), bytes(8)),
    (_header(shape=[-8]), bytes(8)),
    (_header(shape=[8.0]), bytes(8)),
    (_header(shape=[True] * 8, data_offsets=[0, 1]), bytes(1)),
    (_header(shape=[1 << 62, 1 << 62]), bytes(8)),
    (_header(data_offsets=[0, 7]), bytes(8)),
    (_header(data_offsets=[1, 9]), bytes(9)),
    (_header(data_offsets="08"), bytes(8)),
    ({**_header(), "b": {"dtype": "I8", "shape": [8], "data_offsets": [4, 12]}}, bytes(12)),
    ({**_header(), "b": 3}, bytes(8)),
    (_header(dtype="U8", shape=[0], data_offsets=[0, 0]), b""),
]
