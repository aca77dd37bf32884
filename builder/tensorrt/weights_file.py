"""The file of plugin weights that engines built with --strip read: safetensors, named and checked by its content.

Its digest is the SHA-256 of one line per tensor, in the order of their names: the JSON list of name, type, shape and
the SHA-256 of the tensor's bytes, and a line feed. The file's metadata holds it, and so does the name of each engine's
network. Imports only Python's library: bundles carry it to the device.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trt_nvfp4.builder.errors import ModelFaultError

#: What the network of a stripped engine is called, in front of the digest.
ENGINE_NAME = "trt_nvfp4.weights:"
#: The digest's key in the file's metadata.
METADATA = "trt_nvfp4.digest"
#: Bytes of each type that a tensor may have, by safetensors' names.
BYTES = {"I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
CHUNK = 16 << 20
# A header of a tensor in a network has some 150 bytes.
_LONGEST_HEADER = 100 << 20
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Tensor:
    """A tensor's type by safetensors' name, and where in the file its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class WeightsFile:
    """The header of a file; see `read_header`."""

    path: Path
    digest: str
    tensors: tuple[Tensor, ...]

    def chunks(self, tensor: Tensor) -> Iterator[bytes]:
        """The bytes of a tensor, piece by piece. Raises ModelFaultError where the file ends before."""
        with self.path.open("rb") as file:
            yield from read_chunks(file, tensor.begin, tensor.size, str(self.path))

    def check_content(self, digests: Iterable[str]) -> None:
        """Raises ModelFaultError where the SHA-256 of the tensors' bytes, in their order, are not the file's."""
        if digest_of(self.tensors, digests) != self.digest:
            raise ModelFaultError(
                f"{self.path}: damaged: its content is not what it was when it was written; copy it again"
            )


def read_chunks(file: BinaryIO, begin: int, size: int, where: str) -> Iterator[bytes]:
    file.seek(begin)
    while size:
        chunk = file.read(min(size, CHUNK))
        if not chunk:
            raise ModelFaultError(f"{where}: ends before its tensors do; copy it again")
        size -= len(chunk)
        yield chunk


def file_name(digest: str) -> str:
    """The name of the file of this content: engines with the same weights find the same file."""
    return f"weights-{digest[:16]}.safetensors"


def named_digest(network: str) -> str | None:
    """The digest that the name of an engine's network holds; None for an engine that has all its weights."""
    found = network[len(ENGINE_NAME) :] if network.startswith(ENGINE_NAME) else ""
    return found if _DIGEST.fullmatch(found) else None


def digest_of(tensors: Sequence[Tensor], digests: Iterable[str]) -> str:
    """The digest of a file's content; `digests` are the SHA-256 of the tensors' bytes."""
    total = hashlib.sha256()
    for tensor, digest in sorted(zip(tensors, digests, strict=True), key=lambda pair: pair[0].name):
        total.update((json.dumps([tensor.name, tensor.dtype, list(tensor.shape), digest]) + "\n").encode())
    return total.hexdigest()


def write(folder: Path, tensors: Sequence[Tensor], read: Callable[[Tensor], Iterable[bytes]]) -> WeightsFile:
    """Write the tensors, whose bytes `read` gives piece by piece, into `folder`; the file is named by its content."""
    placed, begin = [], 0
    # The widest types first: every tensor then starts at a multiple of its type's size.
    for tensor in sorted(tensors, key=lambda tensor: -BYTES[tensor.dtype]):
        placed.append(Tensor(tensor.name, tensor.dtype, tensor.shape, begin))
        begin += tensor.size
    header = _header(placed, "0" * 64)
    partial, digests = folder / "weights.partial", []
    with partial.open("wb") as file:
        file.write(header)
        for tensor in placed:
            digest = hashlib.sha256()
            for chunk in read(tensor):
                digest.update(chunk)
                file.write(chunk)
            digests.append(digest.hexdigest())
        digest_of_all = digest_of(placed, digests)
        file.seek(0)
        file.write(_header(placed, digest_of_all))
    path = folder / file_name(digest_of_all)
    partial.rename(path)
    return WeightsFile(
        path, digest_of_all, tuple(Tensor(t.name, t.dtype, t.shape, len(header) + t.begin) for t in placed)
    )


def _header(tensors: Sequence[Tensor], digest: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "trt_nvfp4", METADATA: digest}}
    for tensor in tensors:
        offsets = [tensor.begin, tensor.begin + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> WeightsFile:
    """The header of a file of weights; its tensors are not read. Raises ModelFaultError for a missing file, and for one
    whose tensors do not fill it exactly, one behind the other."""
    if not path.is_file():
        raise ModelFaultError(
            f"{path}: no such file, and an engine built with --strip needs it beside it; copy the two together"
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"{size} bytes are too few for its header")
            entries = json.loads(file.read(length))
        return _parsed(path, entries, 8 + length, size)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFaultError(
            f"{path}: not a file of weights, or a damaged one ({error}); copy it again, or build again"
        ) from error


def _parsed(path: Path, entries: Any, begin: int, size: int) -> WeightsFile:
    digest = entries.pop("__metadata__")[METADATA]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"its metadata {METADATA} is not a SHA-256 digest")
    tensors, at = [], 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        shape, dtype = entry["shape"], entry["dtype"]
        if dtype not in BYTES or not all(type(dim) is int and dim > 0 for dim in shape):
            raise ValueError(f"tensor {name!r} is {dtype} {shape}")
        tensor = Tensor(name, dtype, tuple(shape), begin + at)
        if entry["data_offsets"] != [at, at + tensor.size]:
            raise ValueError(f"tensor {name!r} lies at {entry['data_offsets']}, expected {[at, at + tensor.size]}")
        tensors.append(tensor)
        at += tensor.size
    if begin + at != size:
        raise ValueError(f"its tensors end at byte {begin + at}, the file at {size}")
    return WeightsFile(path, digest, tuple(tensors))
