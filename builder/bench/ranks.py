"""How fast the ranks of a split decoder are together: measured where there is a GPU for each, else predicted."""

import platform
from collections.abc import Callable
from contextlib import ExitStack

from trt_nvfp4.builder.bench.bench_options import RANKS
from trt_nvfp4.builder.bench.decoders import lengths_of, time_steps
from trt_nvfp4.builder.bench.result import Result
from trt_nvfp4.builder.bench.subject import Request
from trt_nvfp4.builder.bench.timing import Device
from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.builder.generate.ranks_runner import open_ranks
from trt_nvfp4.builder.generate.torch_runner import has_gpu
from trt_nvfp4.builder.parallel.launched import Launched
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.prediction import shown
from trt_nvfp4.builder.report.report import versions
from trt_nvfp4.builder.terminal.progress import Progress

_LABELS = {
    "engine": "measured: an engine in a process for each rank, as generate runs them",
    "plugins": "measured: plugins and torch in a process for each rank, as generate runs them",
    "roofline": "predicted: the least time of the ranks' products and of the sums between them; nothing was run",
}


def bench_ranks(request: Request, progress: Progress, device: Callable[[], Device]) -> Result:
    """The result for the folder of ranks `request.subject`. Raises UsageError for options that do not apply to ranks,
    and without a prediction where one is needed; as `open_ranks`."""
    if ignored := request.given(RANKS):
        raise UsageError(f"{request.subject}: its ranks are benched as built: leave {', '.join(ignored)} out")
    folder = RankFolder.read(request.subject)
    mode = request.mode or ("plugins" if has_gpu() else "roofline")
    result = Result(mode, str(request.subject), folder.target, _LABELS[mode], versions=versions())
    if folder.prediction is not None:
        result.notes.append(f"predicted: {shown(folder.prediction)}")
    if mode == "roofline":
        if folder.prediction is None:
            raise UsageError(f"{request.subject}: there is no prediction for its ranks; bench them on their GPUs")
        us = folder.prediction.products_us + folder.prediction.sums_us
        result.contestants = {"nvfp4": {"predicted_us": us}}
        return result
    if not has_gpu() and Launched.found() is None:
        count = folder.count
        predicts = "" if folder.prediction is None else "; --mode roofline predicts"
        raise UnavailableError(f"--mode {mode}: {count} ranks need {count} GPUs, and torch sees none here{predicts}")
    with ExitStack() as made:
        progress.stage(f"loading {folder.count} ranks")
        runner = open_ranks(request.subject, made, "tensorrt" if mode == "engine" else "torch")
        made.callback(runner.close)
        lengths = lengths_of(runner.decoder, request.lengths, request.accepted)
        environment = device().environment
        before = environment()
        progress.stage("timing steps")
        result.steps = time_steps({"nvfp4": runner}, lengths, request.rounds, request.warm_up)
        result.environment = {"before": before, "after": environment(), "machine": platform.platform()}
    result.contestants = {name: {"median_us": us} for name, us in result.steps[-1]["us"].items()}
    return result
