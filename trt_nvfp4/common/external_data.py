"""The one way to files that a model, a checkpoint or a manifest names: regular files inside its own folder only."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from .nested_graphs import bodies


def inside(folder: Path, name: str) -> Path:
    """The file that is called `name` in `folder`, with all links resolved; it may be missing.

    A link may lead to another file in `folder`, or, in a snapshot of the Hugging Face cache, to that cache's blobs:
    whoever wrote the name could otherwise read any file of this machine. Raises ValueError for an absolute name, one
    that leaves the folder, and anything but a regular file.
    """
    if Path(name).is_absolute() or "\0" in name:
        raise ValueError(f"{name!r} lies outside the model's folder {folder}: expected a name relative to that folder")
    try:
        file = (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ValueError(f"{folder / name}: cannot be resolved: {error}") from error
    # Links in a circle, of which Python 3.13 says nothing; what it finds has no other link.
    if any(part.is_symlink() for part in (file, *file.parents)):
        raise ValueError(f"{folder / name}: cannot be resolved: its links lead in a circle")
    if not any(root in file.parents for root in _roots(folder)):
        raise ValueError(f"{folder / name} lies outside the model's folder, at {file}; put the file itself there")
    try:
        is_other = file.exists() and not file.is_file()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{name[:40]}...: {error.strerror}; expected the name of a file") from error
    if is_other:
        raise ValueError(f"{folder / name} is a folder, a pipe or a device; expected a regular file")
    return file


def _roots(folder: Path) -> Iterator[Path]:
    """Where the files of `folder` may lie."""
    folder = folder.resolve()
    yield folder
    for parent in folder.parents:
        blobs = parent.parent / "blobs"
        if parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            yield blobs


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers, sparse ones and attributes, in bodies and functions too."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from _of_sparse(sparse)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            # By what is there, whatever `type` says.
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (
                [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else attribute.sparse_tensors
            ):
                yield from _of_sparse(sparse)
        for body in bodies(node):
            yield from _of_graph(body)


def _of_sparse(sparse: onnx.SparseTensorProto) -> Iterator[onnx.TensorProto]:
    yield from (sparse.values, sparse.indices)


def external_files(model: onnx.ModelProto, folder: Path) -> dict[str, Path]:
    """The files of the model's external data by the names in `model`, whose file lies in `folder`.

    Raises ValueError, naming the tensor: see `inside`; a file is missing, or ends before the tensor does; offset or
    length make no sense.
    """
    found: dict[str, Path] = {}
    for tensor in filter(uses_external_data, tensors(model)):
        try:
            info = ExternalDataInfo(tensor)
            needed = math.ceil(math.prod(tensor.dims) * ir.DataType(tensor.data_type).itemsize)
            if min(tensor.dims, default=0) < 0:
                raise ValueError(f"its shape is {list(tensor.dims)}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"tensor '{tensor.name}' is damaged: {error}") from error
        for entry in _locations(tensor):
            if entry.value not in found:
                try:
                    found[entry.value] = inside(folder, entry.value)
                except ValueError as error:
                    raise ValueError(f"external data of tensor '{tensor.name}': {error}") from error
        file = found.get(info.location)
        if file is None or not file.is_file():
            raise ValueError(
                f"external data file '{info.location}' of tensor '{tensor.name}' is missing; it belongs beside the "
                "model"
            )
        if info.length is not None and info.length != needed:
            raise ValueError(f"tensor '{tensor.name}' needs {needed} bytes, its external data says {info.length}")
        end, size = (info.offset or 0) + needed, file.stat().st_size
        if end > size:
            raise ValueError(
                f"external data file '{info.location}' is too short: tensor '{tensor.name}' ends at byte {end}, the "
                f"file has {size}"
            )
    return found


def rename(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Name the files of the model's external data anew."""
    for tensor in filter(uses_external_data, tensors(model)):
        for entry in _locations(tensor):
            entry.value = names[entry.value]


def _locations(tensor: onnx.TensorProto) -> list[onnx.StringStringEntryProto]:
    return [entry for entry in tensor.external_data if entry.key == "location"]


def follow_links(model: onnx.ModelProto, folder: Path) -> Path:
    """Name in `model`, whose file lies in `folder`, the files that its external data is linked to, as in the Hugging
    Face cache: ONNX and ONNX Runtime read no link that leads elsewhere. Returns the folder that the names start from.

    Raises ValueError: see `external_files`.
    """
    files = external_files(model, folder)
    base = Path(os.path.commonpath([folder.resolve(), *(file.parent for file in files.values())]))
    rename(model, {name: str(file.relative_to(base)) for name, file in files.items()})
    return base
