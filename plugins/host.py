"""Drives a plugin library through its whole life without TensorRT: how plugins are tested and benchmarked where
TensorRT has no runtime for the GPU at hand.

    host = PluginHost(build_library("sm_90a"))
    with host.session("NVFP4Linear", inputs, {"activation": 3}) as session:  # create .. serialize .. attach
        (y,) = session.run(inputs)                                           # onShapeChange, enqueue

Without a GPU everything but ``run`` works, with tensors on the CPU or on the meta device.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trt_nvfp4.plugins.compile.library import build_host

#: nvinfer1::DataType
_DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.float8_e4m3fn: 6,
    torch.bfloat16: 7,
    torch.int64: 8,
}
_TORCH_TYPES = {number: dtype for dtype, number in _DATA_TYPES.items()}
_FIELD_FLOAT32, _FIELD_INT32, _FIELD_CHAR = 1, 5, 6
_FIELD_TYPES = {ctypes.c_float: _FIELD_FLOAT32, ctypes.c_int32: _FIELD_INT32}
_PHASE_BUILD, _PHASE_RUNTIME = 0, 1
_CAPACITY = 64
#: nvinfer1::Dims::MAX_DIMS
_MOST_DIMS = 8
_GUARD_BYTES = 256
#: Alternating bits; an absurd value in every data type.
_GUARD = 0xA5
#: Two bytes, a NaN as 16 and as 32 bits, and not all ones, which kernels take for what has not been written yet.
_POISON = (0xC1, 0xFF)


#: An attribute of an op.
Attribute = int | float | str


class HostError(RuntimeError):
    """A plugin call failed, or wrote where it must not."""


class _Dims(ctypes.Structure):
    _fields_ = (("nbDims", ctypes.c_int32), ("d", ctypes.c_int64 * _MOST_DIMS))


class _TensorDesc(ctypes.Structure):
    _fields_ = (("dims", _Dims), ("type", ctypes.c_int32), ("format", ctypes.c_int32), ("scale", ctypes.c_float))


class _DynamicTensorDesc(ctypes.Structure):
    _fields_ = (("desc", _TensorDesc), ("min", _Dims), ("max", _Dims), ("opt", _Dims))


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


@dataclass
class _Guarded:
    """Device memory of a tensor or workspace between two guards."""

    storage: torch.Tensor
    size: int

    @classmethod
    def allocate(cls, size: int, device: torch.device) -> "_Guarded":
        # Whole guards on both sides keep TensorRT's 256-byte alignment.
        padded = -(-size // _GUARD_BYTES) * _GUARD_BYTES + 2 * _GUARD_BYTES
        storage = torch.full((padded,), _GUARD, dtype=torch.uint8, device=device)
        for i, byte in enumerate(_POISON):
            storage[_GUARD_BYTES + i : _GUARD_BYTES + size : len(_POISON)] = byte
        return cls(storage, size)

    @property
    def bytes(self) -> torch.Tensor:
        return self.storage[_GUARD_BYTES : _GUARD_BYTES + self.size]

    def view(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        return self.bytes.view(dtype).view(tuple(shape))

    def intact(self) -> bool:
        around = torch.cat([self.storage[:_GUARD_BYTES], self.storage[_GUARD_BYTES + self.size :]])
        return bool((around == _GUARD).all())


class PluginHost:
    """A plugin library opened as TensorRT's registry opens it, through ``getCreators``."""

    def __init__(self, library: Path | str) -> None:
        """Raises HostError when ``library`` cannot be loaded."""
        self._lib = ctypes.CDLL(str(build_host()))
        for name, result, arguments in _PROTOTYPES:
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self._library = self._lib.hostOpen(str(library).encode())
        if not self._library:
            raise HostError(f"{library}: {self._lib.hostError().decode()}")

    @property
    def ops(self) -> list[str]:
        """Names of the ops that the library has creators for."""
        count = self._lib.hostCreatorCount(self._library)
        return [self._lib.hostCreatorName(self._library, i).decode() for i in range(count)]

    def attributes(self, op: str) -> dict[str, Attribute]:
        """Attributes of ``op`` with their defaults, as its creator advertises them."""
        fields = (_Field * _CAPACITY)()
        count = self._lib.hostFieldNames(self._library, op.encode(), fields, _CAPACITY)
        if count < 0:
            raise self.error(f"getFieldNames of {op}")
        return {item.name.decode(): _field_value(item) for item in fields[:count]}

    def session(
        self,
        op: str,
        inputs: Sequence[torch.Tensor],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        max_inputs: Sequence[torch.Tensor] | None = None,
        tactic: int = 0,
    ) -> "Session":
        """Takes one plugin from creation to a context: everything TensorRT does before the first enqueue.

        ``inputs`` give dtypes and shapes (meta tensors serve); ``max_inputs`` the profile's largest shapes, which size
        the workspace. Dimensions in which the two differ are symbols to the plugin's shape rule. ``tactic`` is what
        TensorRT would have chosen, of ``Session.tactics`` or not. Raises HostError, also where ``max_inputs`` are no
        larger shapes of ``inputs``.
        """
        return Session(self, op, list(inputs), dict(attributes or {}), list(max_inputs or inputs), tactic)

    def take_error(self) -> str:
        """The library's recorded error (``trtNvfp4LastError``), then cleared; empty without one."""
        return str(self._lib.hostLibraryError(self._library).decode())

    def error(self, call: str) -> HostError:
        """The exception to raise after ``call`` failed."""
        return HostError(f"{call} failed: {self.take_error() or self._lib.hostError().decode() or 'no message'}")


@dataclass
class Session:
    """One plugin, configured and attached to a context. Use as a context manager, or ``close`` it."""

    host: PluginHost
    op: str
    inputs: list[torch.Tensor]
    attributes: dict[str, Attribute]
    max_inputs: list[torch.Tensor]
    tactic: int
    #: What the life up to here brought to light.
    tactics: list[int] = field(init=False)  # that TensorRT is to time; empty: only AUTO
    workspace_size: int = field(init=False)
    serialized: dict[str, Attribute] = field(init=False)
    timing_cache_id: str = field(init=False)
    output_dtypes: list[torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        self._lib = self.host._lib
        self._plugins: list[int] = []
        self._check(self.max_inputs)
        self._check_largest(self.inputs)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroys the plugin and its clones."""
        while self._plugins:
            self._lib.hostDestroy(self._plugins.pop())

    def output_shapes(self, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        """The shape rule at ``inputs``' shapes."""
        declared = [
            [a if a == b else -1 for a, b in zip(x.shape, y.shape, strict=True)]
            for x, y in zip(self.inputs, self.max_inputs, strict=True)
        ]
        outputs = (_Dims * len(self.output_dtypes))()
        status = self._lib.hostOutputShapes(
            self._build_plugin,
            _array(_Dims, [_dims(shape) for shape in declared]),
            _array(_Dims, [_dims(x.shape) for x in inputs]),
            len(inputs),
            outputs,
            len(outputs),
        )
        if status != 0:
            raise self.host.error(f"getOutputShapes of {self.op}")
        return [tuple(dims.d[: dims.nbDims]) for dims in outputs]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """onShapeChange and enqueue at ``inputs``' shapes, on the current CUDA stream.

        Inputs are copied between guards, outputs and workspace are poisoned and guarded. Raises HostError when a call
        fails, a guard is damaged or an input is changed.
        """
        self._check(inputs)
        device = inputs[0].device
        guarded_inputs = []
        for x in inputs:
            guarded = _Guarded.allocate(x.numel() * x.element_size(), device)
            guarded.bytes.copy_(x.contiguous().view(-1).view(torch.uint8))
            guarded_inputs.append(guarded)
        shapes = self.output_shapes(inputs)
        guarded_outputs = [
            _Guarded.allocate(torch.Size(shape).numel() * dtype.itemsize, device)
            for shape, dtype in zip(shapes, self.output_dtypes, strict=True)
        ]
        workspace = _Guarded.allocate(self.workspace_size, device)
        outputs = [
            guarded.view(dtype, shape)
            for guarded, dtype, shape in zip(guarded_outputs, self.output_dtypes, shapes, strict=True)
        ]
        views = [g.view(x.dtype, x.shape) for g, x in zip(guarded_inputs, inputs, strict=True)]
        self.enqueue(views, outputs, workspace.bytes)
        torch.cuda.synchronize(device)
        for name, guards in (("input", guarded_inputs), ("output", guarded_outputs), ("workspace", [workspace])):
            for i, guarded in enumerate(guards):
                if not guarded.intact():
                    raise HostError(f"{self.op} wrote outside {name} {i} ({guarded.size} bytes)")
        for i, (guarded, x) in enumerate(zip(guarded_inputs, inputs, strict=True)):
            if not torch.equal(guarded.bytes, x.contiguous().view(-1).view(torch.uint8)):
                raise HostError(f"{self.op} changed its input {i}")
        return outputs

    def enqueue(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], workspace: torch.Tensor) -> None:
        """onShapeChange and one enqueue on the current CUDA stream, with the caller's memory; a CUDA graph can hold it.

        ``workspace`` is a uint8 tensor of at least ``workspace_size`` bytes, 256-byte aligned. Raises HostError, before
        anything is written, for a tensor that is not contiguous or that the session was not made for; also, with the
        outputs written, when AUTO served the call because ``tactic`` could not.
        """
        self._check(inputs)
        for what, tensors in (("input", inputs), ("output", outputs), ("workspace", [workspace])):
            for i, x in enumerate(tensors):
                if not x.is_contiguous():
                    raise HostError(f"{self.op}: {what} {i} is not contiguous, with strides {list(x.stride())}")
        if workspace.numel() < self.workspace_size:
            raise HostError(f"{self.op}: the workspace holds {workspace.numel()} bytes of {self.workspace_size}")
        descs = _array(_TensorDesc, [_desc(x) for x in [*inputs, *outputs]])
        if self._lib.hostOnShapeChange(self._context_plugin, descs, len(inputs), len(outputs)) != 0:
            raise self.host.error(f"onShapeChange of {self.op}")
        self._check_largest(inputs)
        status = self._lib.hostEnqueue(
            self._context_plugin,
            descs,
            len(inputs),
            _array(ctypes.c_void_p, [x.data_ptr() for x in inputs]),
            _array(ctypes.c_void_p, [x.data_ptr() for x in outputs]),
            workspace.data_ptr(),
            torch.cuda.current_stream(workspace.device).cuda_stream,
        )
        if status != 0:
            raise self.host.error(f"enqueue of {self.op}")
        if not self.metadata.endswith(f" tactic={self.tactic}"):
            raise HostError(f"{self.op}: tactic {self.tactic} cannot serve this call; AUTO did")

    @property
    def metadata(self) -> str:
        """The plugin's metadata: attributes and the tactic in use."""
        return str(self._lib.hostMetadata(self._context_plugin).decode())

    def set_tactic(self, tactic: int) -> None:
        """Sets another tactic, as TensorRT does when it times them. Raises HostError."""
        self._set_tactic(self._context_plugin, tactic)
        self.tactic = tactic

    def _set_tactic(self, plugin: int, tactic: int) -> None:
        if self._lib.hostSetTactic(plugin, tactic) != 0:
            raise self.host.error(f"setTactic({tactic}) of {self.op}")

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Number, types and ranks are the session's."""
        if len(inputs) != len(self.inputs):
            raise HostError(f"{self.op}: the session has {len(self.inputs)} inputs, found {len(inputs)}")
        for i, (x, own) in enumerate(zip(inputs, self.inputs, strict=True)):
            if (x.dtype, x.dim()) != (own.dtype, own.dim()):
                raise HostError(
                    f"{self.op}: input {i} is {own.dtype} of {own.dim()} dimensions in this session, found {x.dtype} "
                    f"of {x.dim()}"
                )

    def _check_largest(self, inputs: Sequence[torch.Tensor]) -> None:
        """No dimension is beyond the profile's: the workspace is sized for that."""
        for i, (x, largest) in enumerate(zip(inputs, self.max_inputs, strict=True)):
            if any(size > most for size, most in zip(x.shape, largest.shape, strict=True)):
                raise HostError(
                    f"{self.op}: input {i} has shape {list(x.shape)}, the session's largest is {list(largest.shape)}"
                )

    def _build(self) -> None:
        """The build phase, then the runtime phase from the serialized fields, in TensorRT's order."""
        created = self._own(self._create(self.attributes, _PHASE_BUILD), "createPlugin")
        self._build_plugin = self._own(self._lib.hostClone(created), "clone")
        self._ask_types()
        self._configure()
        self.serialized = self._fields_to_serialize()
        self.timing_cache_id = self._lib.hostTimingCacheId(self._build_plugin).decode()
        recreated = self._own(self._create(self.serialized, _PHASE_RUNTIME), "createPlugin from serialized fields")
        # No field holds the tactic: TensorRT keeps it, and a context's clone inherits it.
        self._set_tactic(recreated, self.tactic)
        self._context_plugin = self._own(self._lib.hostAttach(recreated), "attachToContext")

    def _create(self, attributes: Mapping[str, Attribute], phase: int) -> int | None:
        values = [_field_of(f"{self.op}: attribute {name}", value) for name, value in attributes.items()]
        fields = [
            _Field(
                name.encode(),
                ctypes.addressof(value),
                _FIELD_TYPES.get(type(value), _FIELD_CHAR),
                len(value) if isinstance(value, ctypes.Array) else 1,
            )
            for name, value in zip(attributes, values, strict=True)
        ]
        plugin: int | None = self._lib.hostCreate(
            self.host._library, self.op.encode(), _array(_Field, fields), len(fields), phase
        )
        return plugin

    def _own(self, plugin: int | None, call: str) -> int:
        if not plugin:
            raise self.host.error(f"{call} of {self.op}")
        self._plugins.append(plugin)
        return plugin

    def _ask_types(self) -> None:
        types = (ctypes.c_int32 * self._lib.hostOutputCount(self._build_plugin))()
        given = _array(ctypes.c_int32, [_desc(x).type for x in self.inputs])
        if self._lib.hostOutputTypes(self._build_plugin, given, len(self.inputs), types, len(types)) != 0:
            raise self.host.error(f"getOutputDataTypes of {self.op}")
        self.output_dtypes = [_TORCH_TYPES[number] for number in types]

    def _configure(self) -> None:
        outputs, max_outputs = (
            [
                torch.empty(shape, dtype=dtype, device="meta")
                for shape, dtype in zip(self.output_shapes(inputs), self.output_dtypes, strict=True)
            ]
            for inputs in (self.inputs, self.max_inputs)
        )
        tensors = [
            _DynamicTensorDesc(_desc(x), _dims(x.shape), _dims(largest.shape), _dims(x.shape))
            for x, largest in zip([*self.inputs, *outputs], [*self.max_inputs, *max_outputs], strict=True)
        ]
        descs = _array(_DynamicTensorDesc, tensors)
        counts = (len(self.inputs), len(outputs))
        for position in range(sum(counts)):
            if not self._lib.hostSupportsFormat(self._build_plugin, position, descs, *counts):
                kind = tensors[position].desc.type
                raise HostError(f"{self.op} does not support data type {kind} at position {position}")
        if self._lib.hostConfigure(self._build_plugin, descs, *counts) != 0:
            raise self.host.error(f"configurePlugin of {self.op}")
        self._set_tactic(self._build_plugin, self.tactic)
        self.workspace_size = self._lib.hostWorkspaceSize(self._build_plugin, descs, *counts)
        if message := self.host.take_error():
            raise HostError(f"getWorkspaceSize of {self.op} failed: {message}")
        tactics = (ctypes.c_int32 * _CAPACITY)()
        count = self._lib.hostTactics(self._build_plugin, tactics, _CAPACITY)
        if count < 0:
            raise self.host.error(f"getValidTactics of {self.op}")
        self.tactics = list(tactics[:count])

    def _fields_to_serialize(self) -> dict[str, Attribute]:
        fields = (_Field * _CAPACITY)()
        count = self._lib.hostFieldsToSerialize(self._build_plugin, fields, _CAPACITY)
        if count < 0:
            raise self.host.error(f"getFieldsToSerialize of {self.op}")
        return {item.name.decode(): _field_value(item) for item in fields[:count]}


def _field_value(item: _Field) -> Attribute:
    if item.type == _FIELD_CHAR:
        return ctypes.string_at(item.data, item.length).decode()
    if item.type == _FIELD_FLOAT32:
        return float(ctypes.cast(item.data, ctypes.POINTER(ctypes.c_float))[0])
    if item.type == _FIELD_INT32:
        return int(ctypes.cast(item.data, ctypes.POINTER(ctypes.c_int32))[0])
    raise HostError(f"field {item.name.decode()} has type {item.type}; expected FLOAT32, INT32 or CHAR")


def _field_of(what: str, value: Attribute) -> ctypes.c_float | ctypes.c_int32 | ctypes.Array[ctypes.c_char]:
    """An ONNX attribute as TensorRT's parser passes it; integers are cut to 32 bits."""
    if isinstance(value, str):
        return ctypes.create_string_buffer(value.encode(), len(value))
    if isinstance(value, float):
        return ctypes.c_float(value)
    if not isinstance(value, int) or ctypes.c_int32(value).value != value:
        raise HostError(f"{what} must be a float, a string or an integer of 32 bits, found {value!r}")
    return ctypes.c_int32(value)


def _dims(shape: Sequence[int]) -> _Dims:
    if len(shape) > _MOST_DIMS:
        raise HostError(f"TensorRT's tensors have at most {_MOST_DIMS} dimensions, found shape {list(shape)}")
    return _Dims(len(shape), (ctypes.c_int64 * _MOST_DIMS)(*shape))


def _desc(x: torch.Tensor) -> _TensorDesc:
    if x.dtype not in _DATA_TYPES:
        raise HostError(f"a plugin's tensor cannot be {x.dtype}; it must be one of {', '.join(map(str, _DATA_TYPES))}")
    return _TensorDesc(_dims(x.shape), _DATA_TYPES[x.dtype], 0, 1.0)


def _array(kind: Any, items: Sequence[Any]) -> Any:
    return (kind * len(items))(*items)


_POINTER, _INT, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p
_PROTOTYPES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("hostError", _TEXT, ()),
    ("hostOpen", _POINTER, (_TEXT,)),
    ("hostLibraryError", _TEXT, (_POINTER,)),
    ("hostCreatorCount", _INT, (_POINTER,)),
    ("hostCreatorName", _TEXT, (_POINTER, _INT)),
    ("hostFieldNames", _INT, (_POINTER, _TEXT, _POINTER, _INT)),
    ("hostCreate", _POINTER, (_POINTER, _TEXT, _POINTER, _INT, _INT)),
    ("hostClone", _POINTER, (_POINTER,)),
    ("hostAttach", _POINTER, (_POINTER,)),
    ("hostDestroy", None, (_POINTER,)),
    ("hostTimingCacheId", _TEXT, (_POINTER,)),
    ("hostMetadata", _TEXT, (_POINTER,)),
    ("hostOutputCount", _INT, (_POINTER,)),
    ("hostOutputTypes", _INT, (_POINTER, _POINTER, _INT, _POINTER, _INT)),
    ("hostOutputShapes", _INT, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT)),
    ("hostSupportsFormat", _INT, (_POINTER, _INT, _POINTER, _INT, _INT)),
    ("hostConfigure", _INT, (_POINTER, _POINTER, _INT, _INT)),
    ("hostWorkspaceSize", ctypes.c_size_t, (_POINTER, _POINTER, _INT, _INT)),
    ("hostTactics", _INT, (_POINTER, _POINTER, _INT)),
    ("hostFieldsToSerialize", _INT, (_POINTER, _POINTER, _INT)),
    ("hostSetTactic", _INT, (_POINTER, _INT)),
    ("hostOnShapeChange", _INT, (_POINTER, _POINTER, _INT, _INT)),
    ("hostEnqueue", _INT, (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER)),
)
