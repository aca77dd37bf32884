"""Collects statistics pass by pass; a run that was interrupted goes on where its state was saved last."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from trt_nvfp4.calibration.device import device
from trt_nvfp4.calibration.samples.filled_caches import run
from trt_nvfp4.calibration.statistics import store as statistics_file
from trt_nvfp4.calibration.statistics.input_statistics import quantized
from trt_nvfp4.calibration.statistics.reductions import REDUCTIONS, Builder, keep_only_outputs
from trt_nvfp4.calibration.statistics.store import Arrays
from trt_nvfp4.common.cache_names import is_present
from trt_nvfp4.common.cpu_session import TooOldError, cpu_session
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.external_data import follow_links, inside
from trt_nvfp4.common.local_functions import add_op_functions, inlined
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.onnx_runtime import onnxruntime
from trt_nvfp4.common.widen import widen

Progress = Callable[[int, int], None]
Sample = Mapping[str, np.ndarray]
HESSIANS = ("hessian", "quantized_hessian", "quantized_cross")
KINDS = (*REDUCTIONS, *HESSIANS)
# The state is saved this often, but for no more than a twentieth of the time.
_SAVE_SECONDS, _SAVE_SHARE = 30.0, 20.0
_ROWS = 4096  # of activations that enter a Hessian at once
_DIGESTED = 4096  # bytes of each weight that tell one model from another


class CollectionRun:
    """One call of `statistics.collect`: see there.

    Pass 0 reduces inside the graph. Each later one sums the Hessians of a group of tensors. Sums are divided by the
    number of rows when their pass is over.
    """

    def __init__(
        self,
        model: OnnxFile,
        wanted: Mapping[str, Collection[str]],
        samples: Iterable[Sample],
        progress: Progress | None,
        resume: Path | None,
        budget_bytes: int,
    ) -> None:
        self._model, self._samples, self._progress = model, samples, progress
        self._resume, self._budget = resume, budget_bytes
        for name, kinds in wanted.items():
            if unknown := set(kinds) - set(KINDS):
                raise CalibrationError(
                    f"unknown statistic '{min(unknown)}' of tensor {name}; one of {', '.join(KINDS)}"
                )
        self._wanted = {
            name: [kind for kind in KINDS if kind == "amax" or kind in kinds] for name, kinds in wanted.items()
        }
        self._arrays: Arrays = {name: {} for name in wanted}
        self._sums: dict[tuple[str, str], torch.Tensor] = {}  # of the Hessians of this pass
        self.rows = dict.fromkeys(wanted, 0)
        self._widths = dict.fromkeys(wanted, 0)
        self._pass, self._done, self._count = 0, 0, 0  # passes over, samples done in this one, samples in all
        self._digest = hashlib.blake2b(digest_size=16)  # of the samples done in this pass
        self._expected = self._first_digest = ""  # of those that an interrupted run had done; of all
        self._saved, self._save_took = time.monotonic(), 0.0

    def finish(self) -> tuple[int, Arrays]:
        """The number of samples, and arrays by tensor and kind (amax among them)."""
        if (
            any(kind in HESSIANS for kinds in self._wanted.values() for kind in kinds)
            and iter(self._samples) is self._samples
        ):
            raise CalibrationError("Hessians take several passes: give samples that can be read again, such as a list")
        self._restore()
        try:
            if self._pass == 0:
                self._reduce()
            for group in self._groups()[self._pass - 1 :]:
                self._sum_hessians(group)
        except KeyboardInterrupt:
            if self._resume is None or not (state := statistics_file.state(self._resume)).is_file():
                raise
            raise KeyboardInterrupt(
                f"{state} keeps what the samples until the last half minute gave: the same command goes on from there"
            ) from None
        return self._count, self._arrays

    def _reduce(self) -> None:
        wanted = [(name, kind) for name, kinds in self._wanted.items() for kind in kinds if kind in REDUCTIONS]
        session = _session(self._model, list(self._wanted), wanted)
        tensors = len(self._wanted)
        for sample in self._stream():
            results = self._run(session, sample)
            shapes = dict(zip(self._wanted, results[tensors : 2 * tensors], strict=True))
            # Without rows, as of an expert that the sample does not reach, a maximum is -inf.
            values = {
                (name, kind): value if shapes[name].all() else np.zeros_like(value)
                for (name, kind), value in zip(wanted, results[2 * tensors :], strict=True)
            }
            self._check(results[:tensors], values)
            for name, shape in shapes.items():
                self._widths[name] = int(shape[-1]) if len(shape) else 1
                self.rows[name] += int(np.prod(shape[:-1]))
            with np.errstate(invalid="ignore"):  # Inf - Inf: refused when the pass is over
                for (name, kind), value in values.items():
                    value, known = value.astype(np.float64), self._arrays[name].get(kind)
                    self._arrays[name][kind] = value if known is None else REDUCTIONS[kind].combine(known, value)
        for name, kind in wanted:
            total = self._arrays[name][kind]
            self._finish_statistic(name, kind, REDUCTIONS[kind].finish(total, max(self.rows[name], 1)))
        self._end_pass()

    def _finish_statistic(self, name: str, kind: str, value: np.ndarray) -> None:
        """Magnitudes are finite by now; sums of their squares may not be."""
        if not np.isfinite(value).all():
            raise CalibrationError(
                f"{self._model}: the samples take tensor {name} to {self._arrays[name]['amax']:.3g}, and its {kind} "
                "beyond float32: give samples of the size that the model is made for, or choose a recipe that needs "
                "no such statistic, such as mse"
            )
        self._arrays[name][kind] = value.astype(np.float32)

    def _check(self, magnitudes: Sequence[np.ndarray], values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """NaN may pass a maximum unseen, but not a sum."""
        for name, total in zip(self._wanted, magnitudes, strict=True):
            if np.isnan(total) or not np.isfinite(values[name, "amax"]):
                raise CalibrationError(f"{self._model}: sample {self._done} makes tensor {name} NaN or Inf")

    def _groups(self) -> list[list[tuple[str, str]]]:
        """Hessians that are summed in one pass: as many as the budget holds, at least one."""
        groups: list[list[tuple[str, str]]] = []
        free = 0
        for name, kinds in self._wanted.items():
            for kind in (kind for kind in kinds if kind in HESSIANS):
                size = 4 * self._widths[name] ** 2
                if size > free:
                    groups.append([])
                    free = max(self._budget, size)
                groups[-1].append((name, kind))
                free -= size
        return groups

    def _sum_hessians(self, group: Sequence[tuple[str, str]]) -> None:
        names = list(dict.fromkeys(name for name, _ in group))
        session = _session(self._model, names, None)
        where = device()
        for name, kind in group:
            found = self._arrays[name].get(kind)
            width = self._widths[name]
            self._sums[name, kind] = (torch.zeros(width, width) if found is None else torch.tensor(found)).to(where)
        for sample in self._stream():
            for name, result in zip(names, self._run(session, sample), strict=True):
                if not len(result):
                    continue
                amax = torch.tensor(float(self._arrays[name]["amax"]))
                for rows in torch.split(torch.from_numpy(result), _ROWS):
                    for kind in (kind for kind in HESSIANS if (name, kind) in self._sums):
                        x = rows.to(where)
                        q = x if kind == "hessian" else quantized(rows, amax).to(where)
                        self._sums[name, kind].addmm_((q if kind == "quantized_hessian" else x).T, q)
        for (name, kind), total in self._sums.items():
            self._finish_statistic(name, kind, total.div_(max(self.rows[name], 1)).cpu().numpy())
        self._sums.clear()
        self._end_pass()

    def _stream(self) -> Iterator[Sample]:
        """The samples of this pass that are still to do. Counts each one when the next is taken."""
        skip, self._done, self._digest = self._done, 0, hashlib.blake2b(digest_size=16)
        for sample in self._samples:
            if self._done >= skip:
                yield sample
            _update(self._digest, sample)
            self._done += 1
            if self._done == skip:
                self._check_restored(self._digest.hexdigest() == self._expected)
            if self._done > skip:
                self._report()
                if time.monotonic() - self._saved > max(_SAVE_SECONDS, _SAVE_SHARE * self._save_took):
                    self._save()
        if not self._done:
            raise CalibrationError(f"{self._model}: no calibration sample was given")
        self._check_restored(self._done >= skip)
        if self._pass and self._digest.hexdigest() != self._first_digest:
            if self._resume is not None:
                statistics_file.remove_state(self._resume)
            raise CalibrationError(
                "the calibration samples changed between passes; they must read alike each time: a loader that draws "
                "random ones has to seed its generator"
            )

    def _check_restored(self, alike: bool) -> None:
        if self._resume is not None and not alike:
            raise CalibrationError(
                f"{statistics_file.state(self._resume)}: the interrupted run that it holds saw other samples; delete "
                "it to begin anew"
            )

    def _report(self) -> None:
        count = len(self._samples) if isinstance(self._samples, Sized) else self._count
        if self._progress is not None:
            self._progress(self._pass * count + self._done, count * (1 + len(self._groups())))

    def _end_pass(self) -> None:
        if self._pass == 0:
            self._count, self._first_digest = self._done, self._digest.hexdigest()
        self._pass, self._done = self._pass + 1, 0
        if self._resume is not None:
            self._save()
            # Mapped: they leave memory when it is needed.
            self._arrays |= statistics_file.read(statistics_file.state(self._resume))[1]

    def _save(self) -> None:
        if self._resume is None:
            return
        started = time.monotonic()
        arrays = {name: dict(kinds) for name, kinds in self._arrays.items()}
        for (name, kind), total in self._sums.items():
            arrays[name][kind] = total.cpu().numpy()
        unfinished = self._identity | {
            "pass": self._pass,
            "done": self._done,
            "digest": self._digest.hexdigest(),
            "first_digest": self._first_digest,
            "rows": self.rows,
            "widths": self._widths,
        }
        statistics_file.write_state(self._resume, {"samples": self._count, "unfinished": unfinished}, arrays)
        self._saved = time.monotonic()
        self._save_took = self._saved - started

    def _restore(self) -> None:
        """Take up the state of an interrupted run for the same model and tensors, if there is one.

        Whether it saw the same samples is known here, before any work, where its first pass is over; or else when this
        run has read as many.
        """
        if self._resume is None:
            return
        try:
            content, arrays = statistics_file.read(statistics_file.state(self._resume))
        except CalibrationError:
            return
        state = content.get("unfinished", {})
        if not self._identity.items() <= state.items():
            return
        self._arrays |= arrays
        self._count, self._pass, self._done = content["samples"], state["pass"], state["done"]
        self._expected, self._first_digest = state["digest"], state["first_digest"]
        self.rows, self._widths = state["rows"], state["widths"]
        if self._pass:
            found = hashlib.blake2b(digest_size=16)
            for sample in self._samples:
                _update(found, sample)
            self._check_restored(found.hexdigest() == self._first_digest)

    @cached_property
    def model_digest(self) -> str:
        return digest(self._model)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """The properties that two runs share if one can continue the other."""
        return {"model": self.model_digest, "tensors": self._wanted}

    def _run(self, session: onnxruntime.InferenceSession, sample: Sample) -> list[np.ndarray]:
        try:
            names = [output.name for output in session.get_outputs() if not is_present(output.name)]
            results = run(session, sample, names)
        except Exception as error:  # ONNX Runtime's exceptions have no common base but this
            raise CalibrationError(f"{self._model}: sample {self._done} does not run: {error}") from error
        return results


def _update(digest: hashlib.blake2b, sample: Sample) -> None:
    for name in sorted(sample):
        digest.update(np.ascontiguousarray(sample[name]).tobytes())


def digest(file: OnnxFile) -> str:
    """A digest of the model, and of the first bytes of every weight in a file beside it: reading all would take long,
    and other weights differ at once. Names of files and metadata do not count: exports differ in them."""
    model = file.copied()
    model.ClearField("metadata_props")
    found = hashlib.blake2b(digest_size=16)
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            with inside(file.path.parent, info.location).open("rb") as data:
                data.seek(info.offset or 0)
                found.update(data.read(min(_DIGESTED, info.length or _DIGESTED)))
            tensor.ClearField("external_data")
    found.update(model.SerializeToString(deterministic=True))
    return found.hexdigest()


def tensor_names(model: onnx.ModelProto) -> set[str]:
    """Names of the tensors that the main graph takes or computes, of a model whose functions are inlined."""
    return {value.name for value in model.graph.input} | {name for node in model.graph.node for name in node.output}


def observable(file: OnnxFile, tensors: Iterable[str]) -> list[str]:
    """Those of `tensors` that a model has in its main graph: `statistics.collect` can observe them."""
    known = tensor_names(inlined(file.copied()))
    return [name for name in tensors if name in known]


def _session(
    file: OnnxFile, tensors: Sequence[str], reductions: Sequence[tuple[str, str]] | None
) -> onnxruntime.InferenceSession:
    """A session that returns the sum of |x| and the shape of each tensor, then the reductions (tensor, kind); or,
    without reductions, each tensor as float32 [rows, K]. Behind them a decoder's caches, with which samples go on."""
    path, model = file.path, file.copied()
    try:
        folder = follow_links(model, path.parent)
        add_op_functions(model)
        model = inlined(model)  # what is inside functions has names then
    except ValueError as error:
        raise CalibrationError(f"{path}: {error}") from error
    known = tensor_names(model)
    unknown = [name for name in tensors if name not in known]
    if unknown:
        raise CalibrationError(f"{path}: no tensor named {unknown[0]} in its main graph")
    model = widen(model)
    presents = [output for output in model.graph.output if is_present(output.name)]
    graph = Builder(model)
    if reductions is None:
        for tensor in tensors:
            graph.output(graph.rows(tensor))
    else:
        for tensor in tensors:
            graph.output(graph.node("ReduceSum", graph.magnitudes(tensor), keepdims=0))
        for tensor in tensors:
            graph.output(graph.node("Shape", tensor), TensorProto.INT64)
        for tensor, kind in reductions:
            graph.output(REDUCTIONS[kind].value(graph, tensor))
    model.graph.output.extend(presents)
    keep_only_outputs(model)
    try:
        return cpu_session(model, folder)
    except TooOldError as error:
        raise TooOldError(f"{path}: {error}") from error
    except Exception as error:  # ONNX Runtime's exceptions have no common base but this
        raise CalibrationError(f"{path}: ONNX Runtime cannot load it: {error}") from error
