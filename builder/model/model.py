"""A model as a build sees it: its ONNX file, read once, and what follows from that."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir as ir

from trt_nvfp4.builder.model.decoder_contract import Decoder, decoder_of, tokenizer_beside
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs
from trt_nvfp4.common.onnx_files import OnnxFile


class Model(OnnxFile):
    """The ONNX file of a model that was given as `source`: that file itself, or what was made of a file or a Hugging
    Face directory. `weights`: by name, those that are read in place of what the file's external data holds."""

    def __init__(
        self,
        path: Path,
        source: Path,
        proto: onnx.ModelProto | None = None,
        weights: Mapping[str, ir.TensorProtocol] | None = None,
    ) -> None:
        """Raises BuilderError as `read` does, where the file's content (`proto`) is not given."""
        super().__init__(path, read(path) if proto is None else proto)
        self.source, self.weights = source, weights or {}

    @cached_property
    def specs(self) -> dict[str, InputSpec]:
        """Shapes and types of the inputs, by name."""
        return input_specs(self.proto)

    @cached_property
    def decoder(self) -> Decoder | None:
        """The decoder contract; None for a model without one. Raises ModelFaultError for an invalid one."""
        return decoder_of(self.proto)

    @property
    def tokenizer(self) -> Path:
        """The folder whose tokenizer reads texts for the model."""
        return tokenizer_of(self.source)

    def interface(self) -> tuple[list[str], list[str]]:
        """Names of the inputs and of the outputs."""
        graph = self.proto.graph
        return [value.name for value in graph.input], [value.name for value in graph.output]


def tokenizer_of(source: Path) -> Path:
    """The folder whose tokenizer reads texts for a model: a Hugging Face directory itself; beside a file `tokenizer/`,
    as exports have it, or the file's own folder."""
    if source.is_dir():
        return source
    beside = tokenizer_beside(source)
    return beside if beside.is_dir() else source.parent
