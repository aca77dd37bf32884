"""Statistics of a model's inner tensors over samples, by ONNX Runtime on the CPU."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trt_nvfp4.calibration.statistics import store as statistics_file
from trt_nvfp4.calibration.statistics.collection import KINDS, CollectionRun, Progress, digest
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics
from trt_nvfp4.calibration.statistics.store import Arrays
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.onnx_files import OnnxFile

__all__ = ["KINDS", "Progress", "Statistics", "collect"]


@dataclass(frozen=True)
class Statistics:
    """max |x| of each tensor over all samples, arrays by tensor and kind, as fields of `InputStatistics`, the model's
    digest ("" where they come from elsewhere than `collect`), and the number of rows of each tensor that has arrays."""

    amax: dict[str, float]
    samples: int
    arrays: Arrays = field(default_factory=dict)
    model: str = ""
    rows: dict[str, int] = field(default_factory=dict)

    def of(self, tensor: str) -> InputStatistics:
        """The statistics of a tensor; empty where none were collected."""
        arrays = {kind: torch.from_numpy(array) for kind, array in self.arrays.get(tensor, {}).items()}
        return InputStatistics(self.rows.get(tensor), self.amax.get(tensor), **arrays)

    def save(self, path: str | Path) -> None:
        """Write as JSON, and the arrays to a folder beside it: whole, or not at all. The state of the run goes."""
        content = {"model": self.model, "samples": self.samples, "amax": self.amax, "rows": self.rows}
        statistics_file.write(Path(path), content, self.arrays)

    @classmethod
    def load(cls, path: str | Path, model: str | Path | OnnxFile | None = None) -> "Statistics":
        """Read what `save` wrote, arrays memory-mapped; raises CalibrationError for anything else, and for statistics
        of another model than `model`, an ONNX file, where one is given."""
        content, arrays = statistics_file.read(Path(path))
        try:
            if "unfinished" in content:
                raise ValueError("its run was interrupted; calibrate again with the samples to finish it")
            amax = {str(name): float(value) for name, value in content["amax"].items()}
            if not all(np.isfinite(value) and value >= 0 for value in amax.values()):
                raise ValueError("a largest magnitude is negative or not finite")
            for tensor, kinds in arrays.items():
                for kind, array in kinds.items():
                    if array.dtype != np.float32:
                        raise ValueError(f"{kind} of tensor {tensor} is {array.dtype}, expected float32")
            rows = {str(name): int(count) for name, count in content["rows"].items()}
            found = cls(amax, int(content["samples"]), arrays, str(content["model"]), rows)
        except KeyError as error:
            raise CalibrationError(f"{path}: not a file of activation statistics: it lacks {error}") from error
        except (ValueError, OverflowError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{path}: not a file of activation statistics: {error}") from error
        if model is not None and found.model != digest(OnnxFile.of(model)):
            raise CalibrationError(
                f"{path}: holds the statistics of another model than {model}, or of this one before its graph or "
                "weights changed; calibrate again: give input samples with --calib-data"
            )
        return found


def collect(
    model: str | Path | OnnxFile,
    tensors: Sequence[str] | Mapping[str, Collection[str]],
    samples: Iterable[Mapping[str, np.ndarray]],
    progress: Progress | None = None,
    *,
    resume: str | Path | None = None,
    budget_bytes: int = 2 << 30,
) -> Statistics:
    """Run `model` on every sample and keep statistics of `tensors` (names of the main graph's values, local functions
    inlined): max |x| of each, and the kinds that a mapping names (fields of `InputStatistics`).

    All but Hessians are reduced inside the graph in one pass over the samples, so that activations do not leave it;
    weights stay in their external file, which ONNX Runtime maps. Hessians take a further pass for as many tensors as
    `budget_bytes` holds, over the part of the model before them, summed on a GPU where Torch has one. bfloat16 is
    computed in float32.

    Args:
        progress: called with (done, total) after each sample of each pass; total is 0 where it is unknown.
        resume: where the statistics will be saved. The state of the run is kept beside it, saved about every half
            minute, and what is there stays; where a run ends early, the next one for the same model and tensors goes on
            from the state. Finished Hessians are kept on disk instead of in memory.

    Raises:
        CalibrationError: no sample; an unknown tensor or kind; an input that ONNX Runtime refuses; NaN or Inf in a
            tensor; other samples than those that an interrupted run, or an earlier pass, has seen.
    """
    wanted = tensors if isinstance(tensors, Mapping) else dict.fromkeys(tensors, ())
    file = OnnxFile.of(model)
    run = CollectionRun(file, wanted, samples, progress, None if resume is None else Path(resume), budget_bytes)
    count, arrays = run.finish()
    amax = {name: float(kinds.pop("amax")) for name, kinds in arrays.items()}
    arrays = {name: kinds for name, kinds in arrays.items() if kinds}
    return Statistics(amax, count, arrays, run.model_digest, {name: run.rows[name] for name in arrays})
