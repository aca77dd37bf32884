"""Runners of models to compare: ONNX (original or rewritten), bundles and engines, by Polygraphy."""

import os
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import IterationResult
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

from trt_nvfp4.builder.errors import BuildFailedError, ModelFaultError, UsageError
from trt_nvfp4.builder.model.layer_caches import with_layer_caches
from trt_nvfp4.builder.model.model_files import ENGINES
from trt_nvfp4.builder.model.onnx_file import check_plan, is_rewritten, opened
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.builder.tensorrt.bundle_manifest import changed_files, read_manifest
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.ops import DOMAIN


@dataclass(frozen=True)
class ModelRunner:
    """One of the two models compared. `kind`: onnx, rewritten, bundle or engine; `model` is the ONNX file, if any.

    `rounding`: what its nodes compute in bfloat16 is rounded to it, as a GPU does.
    """

    path: Path
    kind: str
    model: OnnxFile | None
    rounding: bool = False

    @classmethod
    def of(cls, model: Path | OnnxFile) -> "ModelRunner":
        """The runner of what lies at a path, or of an ONNX file that has been read. Raises BuilderError: model for what
        is missing or broken, usage for another file."""
        if isinstance(model, OnnxFile):
            return cls(model.path, "rewritten" if is_rewritten(model.proto) else "onnx", model)
        path = model
        if path.is_dir():
            return cls(path, "bundle", opened(_bundled_model(path)))
        if not path.exists():
            raise ModelFaultError(f"{path}: no such file or folder")
        if path.suffix in ENGINES:
            return cls(path, "engine", None)
        if path.suffix != ".onnx":
            raise UsageError(f"{path}: expected an ONNX file, an engine (.engine) or a bundle folder")
        return cls.of(opened(path))

    def subgraphs(self, plan: Path | None = None) -> dict[str, str]:
        """Output tensor -> name of every replaced subgraph that can be seen inside.

        From `plan` or the plan file beside; from the plugin nodes, which bear their subgraphs' names, without one.
        Raises UsageError where that plan is not the one that the model was rewritten by.
        """
        if self.model is None or self.kind == "onnx":
            return {}
        base = self.path.name.removesuffix(".onnx").removesuffix(".rewritten")
        beside = self.path.with_name(base + ".plan.yaml")
        if plan is not None or beside.is_file():
            followed = Plan.load(plan or beside)
            check_plan(self.model, followed)
            seen = {entry.output: entry.name for entry in followed.subgraphs if entry.decision != Decision.KEEP}
        else:
            seen = {node.output[0]: node.name for node in _plugin_nodes(self._structure)}
        return seen | self._joined(set(seen.values()))

    def _joined(self, names: set[str]) -> dict[str, str]:
        """Outputs of linears that one plugin node computes together, each with the subgraph's and its own name."""
        plugins = {node.output[0]: node.name for node in _plugin_nodes(self._structure) if node.name in names}
        return {
            output: f"{plugins[node.input[0]]}: {output}"
            for node in self._structure.graph.node
            if node.op_type == "Split" and node.input[0] in plugins and node.name == f"{plugins[node.input[0]]}/split"
            for output in node.output
        }

    def tensors(self) -> set[str]:
        """Names of the tensors that can be marked as outputs."""
        return {output for node in self._structure.graph.node for output in node.output}

    def outputs(self) -> set[str]:
        """Names of the outputs that the ONNX file has by itself."""
        return {value.name for value in self._structure.graph.output}

    @cached_property
    def _structure(self) -> onnx.ModelProto:
        """The ONNX file without its weights, which may be much of the memory; empty for an engine."""
        if self.model is None:
            return onnx.ModelProto()
        proto = with_layer_caches(self.model.copied())
        weights = {tensor.name for tensor in proto.graph.initializer}
        inputs = [value for value in proto.graph.input if value.name not in weights]  # older files list weights, too
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
        proto.graph.ClearField("initializer")
        return proto

    def runner(self, inner: Iterable[str]) -> BaseRunner:
        """Polygraphy's runner; the named inner tensors are outputs too. Raises BuilderError where it cannot run
        here."""
        if self.model is not None:
            model = self.model
            return OnnxrtRunner(lambda: session(model, inner, self.rounding), name=str(self.path))
        engine, loaded_by = runtime.load_engine(self.path)
        if loaded_by.module == "tensorrt_rtx":
            os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
        from polygraphy.backend.trt import TrtRunner

        runner: BaseRunner = TrtRunner(engine, name=str(self.path))
        return runner

    def input_specs(self, runner: BaseRunner) -> dict[str, InputSpec]:
        """Shapes and types of its inputs; `runner` is its runner, active."""
        if self.model is not None:
            return input_specs(self._structure)
        return {
            name: InputSpec(tuple("" if int(dim) < 0 else int(dim) for dim in spec.shape), _numpy_type(spec.dtype))
            for name, spec in runner.get_input_metadata().items()
        }


def run(model: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of an ONNX file, a bundle or an engine for one set of inputs. Raises BuilderError where it cannot run
    here or not on these inputs."""
    side = ModelRunner.of(model)
    with quiet(), side.runner(()) as runner:
        return dict(infer(side, runner, inputs))


def infer(side: ModelRunner, runner: BaseRunner, sample: Mapping[str, np.ndarray], advice: str = "") -> IterationResult:
    """The outputs of `runner`, that of `side`, for a sample. Raises UsageError for inputs that it does not take,
    BuildFailedError for a failure while it ran; `advice` ends the message."""
    try:
        outputs = runner.infer(feed_dict=dict(sample))
    except PolygraphyException as error:
        raise UsageError(f"{side.path}: cannot run on these inputs: {error}{advice}") from error
    except Exception as error:  # ONNX Runtime's own error types
        raise BuildFailedError(f"{side.path}: failed while it ran: {str(error).strip()}{advice}") from error
    return IterationResult(outputs, runner_name=runner.name)


def quiet() -> AbstractContextManager[None]:
    """Polygraphy without its log: what it raises it logs as well, with a word on stdout about colours."""
    above: AbstractContextManager[None] = G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1)
    return above


def with_byte_caches(sample: Mapping[str, np.ndarray], taken: AbstractSet[str]) -> dict[str, np.ndarray]:
    """The sample for a model whose inputs `taken` are FP8 caches as bytes. Raises UsageError for caches that
    hold numbers: only the model knows the scale to round them by."""
    given = dict(sample)
    for name in taken & given.keys():
        if given[name].dtype == np.int8:
            continue
        if np.any(given[name]):
            raise UsageError(
                f"input {name}: cached numbers cannot be given to a model with FP8 caches; give samples with empty "
                "caches, and the tokens themselves"
            )
        given[name] = np.zeros(given[name].shape, np.int8)
    return given


def _plugin_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.domain == DOMAIN]


def _bundled_model(folder: Path) -> Path:
    data = read_manifest(folder)
    if changed := changed_files(folder, data["checksums"]):
        raise ModelFaultError(f"{folder}: {', '.join(changed)} missing or changed since the bundle was written")
    try:
        return inside(folder, data["model"])
    except ValueError as error:
        raise ModelFaultError(f"{folder}: {error}; copy the bundle again") from error


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """bfloat16 inputs take float32 samples, as everywhere."""
    from polygraphy.datatype import DataType

    given = DataType.from_dtype(dtype)
    return np.dtype(np.float32) if given == DataType.BFLOAT16 else np.dtype(given.numpy())
