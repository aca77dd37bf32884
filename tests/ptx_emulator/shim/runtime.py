"""The emulated GPU behind the runtime shim: allocations, tensor maps and launches of a program's own host code."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.device import Device
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import toolkit
from ptx_emulator.shim.fatbin import ptx_of
from ptx_emulator.shim.targets import TARGETS, Target
from ptx_emulator.tensor_map import ElementType, Swizzle, TensorMap

if TYPE_CHECKING:
    from ptx_emulator.counters import Counters
    from ptx_emulator.launch import LoadedModule

#: Dynamic shared memory that a kernel has without asking, beside its static one.
_SHARED_BYTES = 48 * 1024
# cudaError_t and CUresult values.
_SUCCESS, _INVALID_VALUE, _INVALID_SYMBOL, _LAUNCH_FAILURE = 0, 1, 13, 719


class _Launch(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("preferred", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("cooperative", ctypes.c_int32),
        ("programmatic", ctypes.c_int32),
    )


class _FunctionInfo(ctypes.Structure):
    _fields_ = (
        ("max_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("param_bytes", ctypes.c_int32),
        ("ptx_version", ctypes.c_int32),
    )


_u64, _i32, _u32 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32
_u64s, _u32s = ctypes.POINTER(_u64), ctypes.POINTER(_u32)
_SIGNATURES = {
    "allocate": ctypes.CFUNCTYPE(_u64, _u64),
    "release": ctypes.CFUNCTYPE(_i32, _u64),
    "contains": ctypes.CFUNCTYPE(_i32, _u64, _u64),
    "launch": ctypes.CFUNCTYPE(_i32, ctypes.POINTER(_Launch)),
    "function_info": ctypes.CFUNCTYPE(_i32, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(_FunctionInfo)),
    "allow_shared": ctypes.CFUNCTYPE(_i32, ctypes.c_void_p, ctypes.c_char_p, _i32),
    "allow_clusters": ctypes.CFUNCTYPE(_i32, ctypes.c_void_p, ctypes.c_char_p, _i32),
    "symbol": ctypes.CFUNCTYPE(_u64, ctypes.c_void_p, ctypes.c_char_p),
    "attribute": ctypes.CFUNCTYPE(_i32, _i32, ctypes.POINTER(_i32)),
    "green_sms": ctypes.CFUNCTYPE(_i32),
    "encode_tiled": ctypes.CFUNCTYPE(
        _i32, ctypes.c_void_p, _i32, _u32, _u64, _u64s, _u64s, _u32s, _u32s, _i32, _i32, _i32, _i32
    ),
}


class _Callbacks(ctypes.Structure):
    _fields_ = tuple(_SIGNATURES.items())


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch: `parameters` is the kernel's packed parameter buffer, `counters` what the emulator counted."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    parameters: bytes
    counters: Counters | None


class Gpu:
    """The device that programs of this process see; `use` makes it the current one.

    target: a name of TARGETS, or a Target. seed, strict_exit: see Device. execute: False records launches without
    running them. on_error: told at once of what `raise_pending` will raise, for programs that exit when a CUDA call
    fails.
    """

    def __init__(
        self,
        target: str | Target,
        *,
        seed: int = 0,
        strict_exit: bool = True,
        execute: bool = True,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.target = TARGETS[target] if isinstance(target, str) else target
        self.device = Device(self.target.sm_count, self.target.shared_per_block, seed, strict_exit)
        self.execute = execute
        #: SMs of the green context that all streams are in; 0: in none.
        self.green_sms = 0
        self.launches: list[LaunchRecord] = []
        #: Dynamic shared memory that kernels have asked for, by name; in force until the next asks.
        self.shared_limits: dict[str, int] = {}
        #: Kernels that may have clusters of more than eight CTAs.
        self.large_clusters: set[str] = set()
        self.tensor_maps: list[TensorMap] = []
        self.error: Exception | None = None
        self.on_error = on_error
        #: PTX of fat binaries that hold only machine code, by their digest (see `fatbin`).
        self.kept_ptx: dict[str, Callable[[], str]] = {}
        self._modules: dict[int, LoadedModule] = {}
        self._by_text: dict[str, LoadedModule] = {}
        self._table = _Callbacks(*(signature(self._guarded(name)) for name, signature in _SIGNATURES.items()))

    def resize(self, **sizes: int) -> None:
        """Give the target other sizes, such as sm_count."""
        self.target = replace(self.target, **sizes)

    def use(self) -> None:
        """Make this the GPU of the process."""
        _library().shim_set_callbacks(ctypes.byref(self._table))

    def raise_pending(self) -> None:
        """Raise what stopped a kernel or call since the last time."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    @contextmanager
    def exposed(self, *buffers: tuple[int, int]) -> Iterator[None]:
        """Make host buffers (address, bytes) device memory inside the block: a caller that allocates for itself."""
        regions = []
        try:
            for address, size in buffers:
                data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
                regions.append(self.device.memory.adopt(data, size, "exposed host buffer"))
            yield
        finally:
            for region in regions:
                self.device.memory.free(region.base)

    def _guarded(self, name: str) -> Any:
        """The callback's method; an exception is kept for `raise_pending`, the host code sees a CUDA error."""
        method = getattr(self, f"_{name}")
        zero = ("allocate", "contains", "symbol", "green_sms")
        failure = 0 if name in zero else _INVALID_VALUE if name == "encode_tiled" else _LAUNCH_FAILURE

        def call(*arguments: Any) -> int:
            try:
                return int(method(*arguments))
            except Exception as error:
                self.error = self.error or error
                if self.on_error is not None:
                    self.on_error(error)
                return failure

        return call

    def module(self, image: int) -> LoadedModule:
        """The module of a registered fat binary, loaded on first use; libraries that link the same object share it."""
        if image not in self._modules:
            ptx = ptx_of(image, self.target.ptx_capability, self.kept_ptx)
            if ptx not in self._by_text:
                self._by_text[ptx] = self.device.load(ptx)
            self._modules[image] = self._by_text[ptx]
        return self._modules[image]

    @property
    def modules(self) -> list[LoadedModule]:
        """Those whose kernels were launched or asked about."""
        return list(self._by_text.values())

    # -- callbacks -------------------------------------------------------------------------------------------------

    def _allocate(self, size: int) -> int:
        return self.device.allocate(max(size, 1), f"cudaMalloc({size})").base

    def _release(self, address: int) -> int:
        self.device.memory.free(address)
        return _SUCCESS

    def _contains(self, address: int, size: int) -> int:
        try:
            region = self.device.memory.region(address)
        except EmulatorError:
            return 0
        return address + size <= region.base + region.size

    def _attribute(self, which: int, value: Any) -> int:
        attributes = self.target.attributes()
        if which not in attributes:
            raise EmulatorError(f"cudaDeviceGetAttribute({which}): the emulated GPU has no value for it")
        value[0] = attributes[which]
        return _SUCCESS

    def _green_sms(self) -> int:
        return self.green_sms

    def _symbol(self, image: int, name: bytes) -> int:
        return self.module(image).address(name.decode())

    def _function_info(self, image: int, name: bytes, info: Any) -> int:
        program, _ = self.module(image).program(name.decode())
        limit = program.directives.get("maxntid") or program.directives.get("reqntid") or (1024,)
        major, minor = self.target.ptx_capability
        info[0] = _FunctionInfo(
            min(int(np.prod(limit)), 1024), program.static_shared, 0, program.param_bytes, 10 * major + minor
        )
        return _SUCCESS

    def _allow_shared(self, image: int, name: bytes, size: int) -> int:
        program, _ = self.module(image).program(name.decode())
        if not 0 <= size <= self.target.shared_per_block - program.static_shared:
            return _INVALID_VALUE
        self.shared_limits[name.decode()] = size
        return _SUCCESS

    def _allow_clusters(self, _image: int, name: bytes, allowed: int) -> int:
        (self.large_clusters.add if allowed else self.large_clusters.discard)(name.decode())
        return _SUCCESS

    def _launch(self, pointer: Any) -> int:
        launch = pointer[0]
        name = launch.name.decode()
        module = self.module(launch.image)
        program, _ = module.program(name)
        parameters = bytearray(program.param_bytes)
        for index, (offset, size) in enumerate(zip(program.params.values(), program.param_sizes, strict=True)):
            parameters[offset : offset + size] = ctypes.string_at(launch.arguments[index], size)
        grid, block = tuple(launch.grid), tuple(launch.block)
        cluster = tuple(launch.cluster) if launch.cluster[0] else None
        preferred = tuple(launch.preferred) if launch.preferred[0] else None
        sms = self.green_sms or self.target.sm_count
        if launch.cooperative and int(np.prod(grid)) > sms:
            raise EmulatorError(f"cooperative launch of {grid} CTAs on {sms} SMs, one CTA each")
        limit = self.shared_limits.get(name, _SHARED_BYTES - program.static_shared)
        if launch.shared_bytes > limit:
            raise EmulatorError(
                f"{name} has {limit} bytes of dynamic shared memory, launched with {launch.shared_bytes}"
            )
        counters = None
        if self.execute:
            self.device.sm_count = sms
            counters = self.device.launch(
                module, name, grid, block, bytes(parameters), launch.shared_bytes, cluster, preferred,
                name in self.large_clusters, bool(launch.programmatic),
            )  # fmt: skip
        self.launches.append(LaunchRecord(name, grid, block, cluster, launch.shared_bytes, bytes(parameters), counters))
        return _SUCCESS

    def _encode_tiled(
        self,
        out: int,
        kind: int,
        rank: int,
        address: int,
        dims: Any,
        strides: Any,
        box: Any,
        element_strides: Any,
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> int:
        tensor_map = TensorMap(
            ElementType(kind),
            address,
            tuple(dims[:rank]),
            tuple(strides[: rank - 1]) if rank > 1 else (),
            tuple(box[:rank]),
            tuple(element_strides[:rank]),
            interleave,
            Swizzle(swizzle),
            l2_promotion,
            bool(fill),
        )
        self.tensor_maps.append(tensor_map)
        ctypes.memmove(out, tensor_map.to_bytes(), 128)
        return _SUCCESS


_loaded: list[ctypes.CDLL] = []


def _library() -> ctypes.CDLL:
    """The shim, loaded once."""
    if not _loaded:
        _loaded.append(ctypes.CDLL(str(toolkit.build_runtime())))
        # The programs' own exit handlers still call the runtime, when Python is gone.
        atexit.register(_loaded[0].shim_set_callbacks, None)
    return _loaded[0]


class Program:
    """A compiled program on a GPU. Arrays passed to `call` are device buffers, copied in and back."""

    def __init__(self, library: Path, gpu: Gpu) -> None:
        _library()
        self.gpu = gpu
        gpu.use()
        # Its own runtime comes before any that the process has, as torch's builds for GPUs bring one.
        self.library = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)

    @classmethod
    def compile(
        cls,
        source: str | Path | Sequence[Path],
        gpu: Gpu,
        *,
        flags: Sequence[str] = (),
        includes: Sequence[Path] = (),
        depends: Sequence[Path] = (),
    ) -> Program:
        """From CUDA text, a file or several, for the GPU's architecture; see toolkit.build_program."""
        if isinstance(source, str):
            source = toolkit.keep_source(source)
        sources = [source] if isinstance(source, Path) else list(source)
        library = toolkit.build_program(sources, gpu.target.arch, flags, includes, depends)
        return cls(library, gpu)

    def call(self, name: str, *arguments: Any) -> int:
        """Run `extern "C" int name(...)`: arrays as pointers to device memory, int as int, float as float.

        Other ctypes values pass as they are. Returns the function's result; raises what stopped a kernel.
        """
        self.gpu.use()
        regions = {
            i: self.gpu.device.upload(a, f"argument {i}") for i, a in enumerate(arguments) if isinstance(a, np.ndarray)
        }
        converted: list[Any] = []
        for index, argument in enumerate(arguments):
            if index in regions:
                converted.append(ctypes.c_void_p(regions[index].base))
            elif isinstance(argument, float):
                converted.append(ctypes.c_float(argument))
            else:
                converted.append(argument)
        result = int(getattr(self.library, name)(*converted))
        self.gpu.raise_pending()
        for index, region in regions.items():
            array = arguments[index]
            array[...] = self.gpu.device.download(region, array.dtype, array.shape)
            self.gpu.device.memory.free(region.base)
        return result
