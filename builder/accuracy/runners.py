"""What can be compared: an ONNX model (original or rewritten), a bundle, an engine; each as a Polygraphy runner."""

from __future__ import annotations

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

from trt_nvfp4.builder.errors import BUILD_FAILED, MODEL_AT_FAULT, UNAVAILABLE, USAGE, BuilderError
from trt_nvfp4.builder.export.layer_caches import with_layer_caches
from trt_nvfp4.builder.onnx_file import check_plan, is_rewritten, read
from trt_nvfp4.builder.report.inspection import changed_files, read_manifest
from trt_nvfp4.builder.tensorrt import load as runtime
from trt_nvfp4.calibration.samples.samples import InputSpec, input_specs
from trt_nvfp4.common.cpu_session import TooOldError, cpu_session
from trt_nvfp4.common.external_data import follow_links, inside
from trt_nvfp4.common.local_functions import add_op_functions
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen
from trt_nvfp4.graph_passes.lowerings.decision import Decision
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.plugins.ops import DOMAIN


@dataclass(frozen=True)
class Side:
    """One of the two things compared. `kind`: onnx, rewritten, bundle or engine; `model` is the ONNX file, if any.

    `rounding`: what its nodes compute in bfloat16 is rounded to it, as a GPU does.
    """

    path: Path
    kind: str
    model: Path | None
    rounding: bool = False

    @classmethod
    def of(cls, path: Path) -> Side:
        """Tell what `path` is. Raises BuilderError: model for what is missing or broken, usage for another file."""
        if path.is_dir():
            return cls(path, "bundle", _bundled_model(path))
        if not path.exists():
            raise BuilderError(MODEL_AT_FAULT, f"{path}: no such file or folder")
        if path.suffix in runtime.ENGINES:
            return cls(path, "engine", None)
        if path.suffix != ".onnx":
            raise BuilderError(USAGE, f"{path}: expected an ONNX file, an engine (.engine) or a bundle folder")
        return cls(path, "rewritten" if is_rewritten(read(path)) else "onnx", path)

    def subgraphs(self, plan: Path | None = None) -> dict[str, str]:
        """Output tensor -> name of every replaced subgraph that can be seen inside.

        From `plan` or the plan file beside; from the plugin nodes, which bear their subgraphs' names, without one.
        Raises BuilderError (usage) where that plan is not the one that the model was rewritten by.
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
        proto = with_layer_caches(read(self.model))
        proto.graph.ClearField("initializer")
        return proto

    def runner(self, inner: Iterable[str]) -> BaseRunner:
        """Runs it; the named inner tensors are outputs too. Raises BuilderError where it cannot run here."""
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
        """What its inputs take; `runner` is its runner, active."""
        if self.model is not None:
            return input_specs(self._structure)
        return {
            name: InputSpec(tuple("" if int(dim) < 0 else int(dim) for dim in spec.shape), _numpy_type(spec.dtype))
            for name, spec in runner.get_input_metadata().items()
        }


def run(model: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of an ONNX file, a bundle or an engine for one set of inputs. Raises BuilderError where it cannot run
    here or not on these inputs."""
    side = Side.of(model)
    with quiet(), side.runner(()) as runner:
        return dict(infer(side, runner, inputs))


def infer(side: Side, runner: BaseRunner, sample: Mapping[str, np.ndarray], advice: str = "") -> IterationResult:
    """What `runner`, that of `side`, makes of a sample. Raises BuilderError: usage for inputs that it does not take,
    build for a failure while it ran; `advice` ends the message."""
    try:
        outputs = runner.infer(feed_dict=dict(sample))
    except PolygraphyException as error:
        raise BuilderError(USAGE, f"{side.path}: cannot run on these inputs: {error}{advice}") from error
    except Exception as error:  # ONNX Runtime's own error types
        raise BuilderError(BUILD_FAILED, f"{side.path}: failed while it ran: {str(error).strip()}{advice}") from error
    return IterationResult(outputs, runner_name=runner.name)


def quiet() -> AbstractContextManager[None]:
    """Polygraphy without its log: what it raises it logs as well, with a word on stdout about colours."""
    above: AbstractContextManager[None] = G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1)
    return above


def with_byte_caches(sample: Mapping[str, np.ndarray], taken: AbstractSet[str]) -> dict[str, np.ndarray]:
    """The sample for a model whose inputs `taken` are FP8 caches as bytes. Raises BuilderError (usage) for caches that
    hold numbers: by what scale they would be rounded, the model alone knows."""
    given = dict(sample)
    for name in taken & given.keys():
        if given[name].dtype == np.int8:
            continue
        if np.any(given[name]):
            raise BuilderError(
                USAGE,
                f"input {name}: cached numbers cannot be given to a model with FP8 caches; give samples with empty "
                "caches, and the tokens themselves",
            )
        given[name] = np.zeros(given[name].shape, np.int8)
    return given


def session(model: Path, extra_outputs: Iterable[str] = (), rounding: bool = False) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU in which the named inner tensors are outputs too.

    bfloat16, which ONNX Runtime's CPU kernels lack, is computed in float32 (see `widen`); ops whose function bodies the
    file does not hold (a bundle's) get them. Raises BuilderError (model) for a file that ONNX Runtime cannot run.
    """
    proto = read(model)
    try:
        folder = follow_links(proto, model.parent)
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{model}: {error}") from error
    return session_of(proto, model, folder, extra_outputs, rounding)


def session_of(
    proto: onnx.ModelProto, source: Path, folder: Path, extra_outputs: Iterable[str] = (), rounding: bool = False
) -> onnxruntime.InferenceSession:
    """The same for a model in memory, which is changed; external data lies in `folder`, `source` is for messages."""
    present = {value.name for value in proto.graph.output}
    proto.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in extra_outputs if name not in present
    )
    add_op_functions(with_layer_caches(proto))
    try:
        return cpu_session(widen(proto, rounding), folder)
    except TooOldError as error:
        raise BuilderError(UNAVAILABLE, f"{source}: {error}") from error
    except Exception as error:  # ONNX Runtime's own error types
        raise BuilderError(MODEL_AT_FAULT, f"{source}: ONNX Runtime cannot run this model: {error}") from error


def _plugin_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.domain == DOMAIN]


def _bundled_model(folder: Path) -> Path:
    data = read_manifest(folder)
    if changed := changed_files(folder, data["checksums"]):
        raise BuilderError(
            MODEL_AT_FAULT, f"{folder}: {', '.join(changed)} missing or changed since the bundle was written"
        )
    try:
        return inside(folder, data["model"])
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{folder}: {error}; copy the bundle again") from error


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    """bfloat16 inputs take float32 samples, as everywhere."""
    from polygraphy.datatype import DataType

    given = DataType.from_dtype(dtype)
    return np.dtype(np.float32) if given == DataType.BFLOAT16 else np.dtype(given.numpy())
