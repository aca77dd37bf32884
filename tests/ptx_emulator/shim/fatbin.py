"""PTX text out of the fat binary that nvcc's host code registers."""

import ctypes
import hashlib
import struct
from collections.abc import Callable, Mapping

from ptx_emulator.errors import EmulatorError

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of all entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, header size, payload size
_PTX_KIND = 1
_ARCH_OFFSET, _FLAGS_OFFSET = 28, 40
_COMPRESSED = 0x2000 | 0x8000


def digest_of(image: bytes) -> str:
    return hashlib.sha256(image).hexdigest()


def ptx_of(image: int, capability: tuple[int, int], kept: Mapping[str, Callable[[], str]]) -> str:
    """The PTX for a compute capability in the fat binary at an address of this process, or what was `kept` of it, by
    the digest of the binary.

    Raises EmulatorError where there is none, or where it is compressed.
    """
    magic, _, header_size, size = _HEADER.unpack(ctypes.string_at(image, _HEADER.size))
    if magic != _MAGIC:
        raise EmulatorError(f"the registered image starts with {magic:#x}: no fat binary")
    if ptx := kept.get(digest_of(ctypes.string_at(image, header_size + size))):
        return ptx()
    data = ctypes.string_at(image + header_size, size)
    wanted = 10 * capability[0] + capability[1]
    found = []
    position = 0
    while position < size:
        kind, _, entry_header, payload = _ENTRY.unpack_from(data, position)
        arch = struct.unpack_from("<I", data, position + _ARCH_OFFSET)[0]
        flags = struct.unpack_from("<Q", data, position + _FLAGS_OFFSET)[0]
        if kind == _PTX_KIND:
            found.append(arch)
            if arch == wanted:
                if flags & _COMPRESSED:
                    raise EmulatorError("the program's PTX is compressed: compile it with nvcc --no-compress")
                start = position + entry_header
                return data[start : start + payload].rstrip(b"\0").decode()
        position += entry_header + payload
    raise EmulatorError(f"the program holds no PTX for compute capability {wanted}; PTX found for {found or 'none'}")
