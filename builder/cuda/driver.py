"""The GPUs of this machine, by the CUDA driver. Bundles carry this module."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. `memory` in bytes."""

    name: str
    compute_capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Driver:
    """The newest CUDA version that the driver serves, and its GPUs. `error`: cuInit's code, 0 for success."""

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]
    error: int = 0


def local_driver() -> Driver | None:
    """The CUDA driver of this machine; None without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    error = int(cuda.cuInit(0)) or int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    gpus = [] if error else [_gpu(cuda, number) for number in range(count.value)]
    found = tuple(gpu for gpu in gpus if gpu is not None)
    return Driver((version.value // 1000, version.value % 1000 // 10), found, error)


def _gpu(cuda: Any, number: int) -> Gpu | None:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetName(name, len(name), device):
        return None
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = [_attribute(cuda, device, which) for which in (_MAJOR, _MINOR)]
    return Gpu(name.value.decode(errors="replace"), (capability[0], capability[1]), memory.value)


def _attribute(cuda: Any, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value


def local_compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the first NVIDIA GPU in this machine; None without one."""
    driver = local_driver()
    return driver.gpus[0].compute_capability if driver is not None and driver.gpus else None
