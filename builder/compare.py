"""How far a rewritten model is from the original: both run through Polygraphy's Comparator on the same inputs.

The rewritten model runs in ONNX Runtime on the ops' function bodies; on a machine with a GPU and the engine's runtime
the engine runs as well.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER
from rich.table import Table

from trt_nvfp4.calibration.samples import input_specs
from trt_nvfp4.calibration.widen import widen
from trt_nvfp4.graph_passes.plan import Plan

from .backend import local_compute_capability
from .errors import USAGE, BuilderError
from .shapes import derive_profiles

Sample = Mapping[str, np.ndarray]


@dataclass
class Agreement:
    """How one tensor of the second model agrees with the first's, over all samples.

    `cosine` is the worst sample's cosine similarity, `sqnr_db` is 10 log10(sum x^2 / sum (x - y)^2) over all samples,
    `argmax` the share of last-axis vectors whose largest entry is at the same place.
    """

    name: str
    kind: str
    cosine: float = 1.0
    sqnr_db: float = math.inf
    max_abs: float = 0.0
    argmax: float = 1.0
    _signal: float = 0.0
    _noise: float = 0.0
    _same: int = 0
    _vectors: int = 0

    def add(self, expected: np.ndarray, actual: np.ndarray) -> None:
        """Account for one sample."""
        if expected.shape != actual.shape:
            raise BuilderError(
                USAGE, f"{self.name}: shapes {expected.shape} and {actual.shape} differ: not the same model"
            )
        x, y = expected.astype(np.float64), actual.astype(np.float64)
        self._signal += float(np.square(x).sum())
        self._noise += float(np.square(x - y).sum())
        norms = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
        cosine = float((x * y).sum()) / norms if norms else float(np.array_equal(x, y))
        # NaN must show and not pass for the best so far.
        self.cosine = min(self.cosine, cosine) if cosine == cosine else cosine
        self.max_abs = float(np.fmax(self.max_abs, np.abs(x - y).max(initial=0.0)))
        self.sqnr_db = 10 * math.log10(self._signal / self._noise) if self._noise and self._signal else math.inf
        if x.ndim and x.shape[-1] > 1:
            same = x.argmax(-1) == y.argmax(-1)
            self._same += int(same.sum())
            self._vectors += same.size
            self.argmax = self._same / self._vectors

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


def compare(
    original: Path,
    rewritten: Path,
    samples: Iterable[Sample],
    plan: Plan | None = None,
    engine_runner: BaseRunner | None = None,
) -> dict[str, list[Agreement]]:
    """Agreement with `original` of every output, and of every replaced subgraph of `plan`; runner name -> agreements.

    The engine, where one runs, is compared at the outputs alone: its subgraphs' outputs are not visible.
    """
    inner = [entry.output for entry in plan.subgraphs if entry.decision != "keep"] if plan else []
    runners = [
        OnnxrtRunner(lambda: session(original, inner), name="original"),
        OnnxrtRunner(lambda: session(rewritten, inner), name="rewritten"),
    ]
    if engine_runner is not None:
        runners.append(engine_runner)
    names = {entry.output: entry.name for entry in plan.subgraphs} if plan else {}
    found: dict[str, OrderedDict[str, Agreement]] = {}

    def judge(expected: Any, actual: Any) -> OrderedDict[str, bool]:
        rows = found.setdefault(actual.runner_name, OrderedDict())
        for output, values in actual.items():
            if output not in expected:
                continue
            kind = "subgraph" if output in names else "output"
            row = rows.setdefault(output, Agreement(names.get(output, output), kind))
            row.add(np.asarray(expected[output]), np.asarray(values))
        return OrderedDict((output, True) for output in actual)

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run(runners, data_loader=list(samples))
        comparisons = [(0, index) for index in range(1, len(runners))]
        Comparator.compare_accuracy(results, compare_func=judge, comparisons=comparisons)
    return {runner: list(rows.values()) for runner, rows in found.items()}


def session(model: Path, extra_outputs: Iterable[str] = ()) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session on the CPU in which the named inner tensors are outputs too.

    bfloat16, which ONNX Runtime's CPU kernels lack, is computed in float32. Constant folding is off: it would hold
    every weight decoded to float32.
    """
    proto = onnx.load(model, load_external_data=False)
    present = {value.name for value in proto.graph.output}
    proto.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in extra_outputs if name not in present
    )
    proto = widen(proto)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(model.parent.resolve())
    )
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
    )


def engine_runner(path: Path) -> BaseRunner | None:
    """A runner of the engine, where this machine has a GPU and TensorRT; None elsewhere."""
    if path.suffix != ".engine" or local_compute_capability() is None:
        return None
    module = next((name for name in ("tensorrt", "tensorrt_rtx") if importlib.util.find_spec(name) is not None), None)
    if module is None:
        return None
    if module == "tensorrt_rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    runner: BaseRunner = TrtRunner(EngineFromBytes(BytesFromPath(str(path))), name="engine")
    return runner


def table(runner: str, agreements: list[Agreement]) -> Table:
    """Agreements for the terminal."""
    shown = Table(title=f"{runner} against original", title_justify="left")
    for heading in ("tensor", "kind", "cosine (worst)", "SQNR dB", "max abs", "argmax"):
        shown.add_column(heading, overflow="fold", justify="left" if heading in ("tensor", "kind") else "right")
    for row in agreements:
        numbers = f"{row.cosine:.6f}", f"{row.sqnr_db:.2f}", f"{row.max_abs:.4g}", f"{row.argmax:.2%}"
        shown.add_row(row.name, row.kind, *numbers)
    return shown


def random_samples(
    model: Path, count: int, rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[dict[str, np.ndarray]]:
    """Inputs that make sense to most models: ids within the vocabulary, masks of ones, rising positions, normal floats.

    Shapes are the derived typical ones, overridden by `shapes`.
    """
    specs = input_specs(model)
    profiles = derive_profiles({name: spec.shape for name, spec in specs.items()}, typical=shapes)
    vocabulary = _vocabulary(model)
    return [
        {
            name: _random_input(
                name,
                spec.dtype,
                profiles[name].typical if name in profiles else tuple(int(dim) for dim in spec.shape),
                vocabulary.get(name, 2),
                rng,
            )
            for name, spec in specs.items()
        }
        for _ in range(count)
    ]


def _vocabulary(model: Path) -> dict[str, int]:
    """Inputs that look a table up -> its rows."""
    graph = onnx.load(model, load_external_data=False).graph
    tables = {tensor.name: int(tensor.dims[0]) for tensor in graph.initializer if tensor.dims}
    return {
        node.input[1]: tables[node.input[0]]
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in tables
    }


def _random_input(
    name: str, dtype: np.dtype[Any], shape: tuple[int, ...], limit: int, rng: np.random.Generator
) -> np.ndarray:
    if "mask" in name or dtype == np.bool_:
        return np.ones(shape, dtype)
    if "position" in name:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, limit, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)
