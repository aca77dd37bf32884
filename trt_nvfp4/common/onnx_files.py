"""An ONNX file that is read once and shared."""

from functools import cached_property
from pathlib import Path

import onnx


class OnnxFile:
    """The structure of an ONNX file, read on first use and kept; external data stays on disk."""

    def __init__(self, path: str | Path, proto: onnx.ModelProto | None = None) -> None:
        """`proto`: the file's content without external data, where it has been read already."""
        self.path = Path(path)
        if proto is not None:
            self.proto = proto

    @classmethod
    def of(cls, model: "str | Path | OnnxFile") -> "OnnxFile":
        """`model` itself, or the file at that path."""
        return model if isinstance(model, OnnxFile) else OnnxFile(model)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The file's content, shared: not to be changed (see `copied`). Raises as `onnx.load` does."""
        return onnx.load(self.path, load_external_data=False)

    def copied(self) -> onnx.ModelProto:
        """A copy of the content that may be changed: external data is named relative to the file's folder."""
        copy = onnx.ModelProto()
        copy.CopyFrom(self.proto)
        return copy
