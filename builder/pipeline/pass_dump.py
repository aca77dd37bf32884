"""The graph after each pass, for `--set dump-passes=DIR`."""

from pathlib import Path

import onnx
import onnx_ir as ir

from trt_nvfp4.graph_passes.load.normalize import without_weights


class PassDump:
    """Writes FOLDER/NN-pass.onnx after each pass: the structure, without large weights."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def __call__(self, name: str, model: ir.Model) -> None:
        """Raises OSError where it cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        onnx.save(without_weights(model), self._folder / f"{self._number:02}-{name}.onnx")
