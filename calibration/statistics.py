"""The largest magnitudes of a model's inner tensors over samples, by ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from .errors import CalibrationError
from .widen import widen

Progress = Callable[[int, int], None]
_FORMAT = "trt-nvfp4 activation statistics 1"


@dataclass(frozen=True)
class Statistics:
    """max |x| of each tensor over all samples."""

    amax: dict[str, float]
    samples: int

    def save(self, path: str | Path) -> None:
        """Write as JSON: whole, or not at all."""
        path = Path(path)
        text = json.dumps({"format": _FORMAT, "samples": self.samples, "amax": self.amax}, indent=1)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what `save` wrote; raises CalibrationError for anything else."""
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            amax = {str(name): float(value) for name, value in content["amax"].items()}
            if not all(np.isfinite(value) and value >= 0 for value in amax.values()):
                raise ValueError("a largest magnitude is negative or not finite")
            return cls(amax, int(content["samples"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{path}: not a file of activation statistics: {error!r}") from error


def collect(
    model: str | Path,
    tensors: Sequence[str],
    samples: Iterable[Mapping[str, np.ndarray]],
    progress: Progress | None = None,
) -> Statistics:
    """Run `model` on every sample and keep max |x| of each of `tensors` (names of the main graph's values, local
    functions inlined).

    The maxima are taken inside the graph, so that only scalars leave it; weights stay in their external file, which
    ONNX Runtime maps. bfloat16 is computed in float32. `progress(done, total)` is called after each sample; total is 0
    where it is unknown.

    Raises CalibrationError: no sample; an unknown tensor; an input that ONNX Runtime refuses; NaN or Inf in a tensor.
    """
    tensors = list(dict.fromkeys(tensors))
    session = _session(Path(model), tensors)
    total = len(samples) if isinstance(samples, Sized) else 0
    amax = np.zeros(len(tensors), np.float32)
    count = 0
    for sample in samples:
        try:
            results = session.run(None, dict(sample))
        except Exception as error:  # ONNX Runtime's exceptions have no common base but this
            raise CalibrationError(f"{model}: sample {count} does not run: {error}") from error
        sample_amax = np.array(results[: len(tensors)], np.float32)
        sums = np.array(results[len(tensors) :], np.float32)
        for name, largest, total_magnitude in zip(tensors, sample_amax, sums, strict=True):
            if np.isnan(total_magnitude) or not np.isfinite(largest):
                raise CalibrationError(f"{model}: sample {count} makes tensor {name} NaN or Inf")
        amax = np.maximum(amax, sample_amax)
        count += 1
        if progress is not None:
            progress(count, total)
    if not count:
        raise CalibrationError(f"{model}: no calibration sample was given")
    return Statistics({name: float(value) for name, value in zip(tensors, amax, strict=True)}, count)


def _session(path: Path, tensors: Sequence[str]) -> onnxruntime.InferenceSession:
    model = onnx.load(path, load_external_data=False)
    if model.functions:  # what is inside them has names once they are inlined
        model = onnx.inliner.inline_local_functions(model)
    known = {value.name for value in model.graph.input} | {name for node in model.graph.node for name in node.output}
    unknown = [name for name in tensors if name not in known]
    if unknown:
        raise CalibrationError(f"{path}: no tensor named {unknown[0]} in its main graph")
    _output_only_amax(widen(model), tensors)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")  # a packed copy of every weight
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],  # a widened copy of every weight
        )
    except Exception as error:  # ONNX Runtime's exceptions have no common base but this
        raise CalibrationError(f"{path}: ONNX Runtime cannot load it: {error}") from error


def _output_only_amax(model: ModelProto, tensors: Sequence[str]) -> None:
    """Replace the outputs by max |x| of each tensor, then the sum of |x| of each, which NaN cannot hide from."""
    graph = model.graph
    del graph.output[:]
    for reduction in ("ReduceMax", "ReduceSum"):
        for i, tensor in enumerate(tensors):
            magnitude = f"calibration/{i}/abs"
            if reduction == "ReduceMax":
                wide = f"calibration/{i}/float"
                graph.node.append(helper.make_node("Cast", [tensor], [wide], to=TensorProto.FLOAT))
                graph.node.append(helper.make_node("Abs", [wide], [magnitude]))
            output = f"calibration/{i}/{reduction}"
            graph.node.append(helper.make_node(reduction, [magnitude], [output], keepdims=0))
            graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
