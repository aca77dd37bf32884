"""Runs the ranks of a split decoder: a process and a GPU for each, or all in one graph on the CPU."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trt_nvfp4.builder.errors import UnavailableError, UsageError
from trt_nvfp4.builder.generate.logits import Likeliest, Logits
from trt_nvfp4.builder.generate.onnx_runner import OnnxRunner
from trt_nvfp4.builder.generate.runner import SlotRunner
from trt_nvfp4.builder.generate.tensorrt_runner import open_engine
from trt_nvfp4.builder.generate.torch_runner import TorchRunner, has_gpu
from trt_nvfp4.builder.model.decoder_contract import Decoder
from trt_nvfp4.builder.parallel.launched import Launched
from trt_nvfp4.builder.parallel.manifest import RankFolder
from trt_nvfp4.builder.parallel.ranks import Ranks, communicator
from trt_nvfp4.builder.parallel.simulate import prefix, save_simulated
from trt_nvfp4.common.replacing import scratch

Name = Literal["auto", "tensorrt", "onnxruntime", "torch"]


class RanksRunner:
    """A decoder whose ranks each live in a process; steps go to all of them, and the logits come from the first, as
    all have the same."""

    name: str
    decoder: Decoder
    longest_step: int

    def __init__(self, folder: RankFolder, runner: Name, on_gpus: bool = True) -> None:
        """`runner`: "torch" or "tensorrt". Raises BuilderError as `RankFolder.models` and `Ranks` do."""
        models = folder.models()
        files = [folder.engine(rank) for rank in range(folder.count)] if runner == "tensorrt" else models
        self._ranks = Ranks(_serve, folder.count, files, runner, on_gpus=on_gpus)
        where, self.decoder, self.longest_step = self._ranks.first[0]
        self.name = f"{folder.folder} ({folder.count} ranks, {where})"

    def start(self, batch: int) -> None:
        self._ranks.ask(("start", batch))

    def step(
        self, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1, previous: np.ndarray | None = None
    ) -> Logits:
        self._ranks.ask(("step", ids, past, new, count, previous))
        return _RankLogits(self._ranks)

    def step_row(self, row: int, ids: np.ndarray, past: np.ndarray, new: np.ndarray, count: int = 1) -> Logits:
        self._ranks.ask(("step_row", row, ids, past, new, count))
        return _RankLogits(self._ranks)

    def hidden(self) -> np.ndarray:
        found: np.ndarray = self._ranks.ask(("hidden",))[0]
        return found

    def save_states(self) -> None:
        self._ranks.ask(("save_states",))

    def restore_states(self, rows: Sequence[int]) -> None:
        self._ranks.ask(("restore_states", rows))

    def clear_row(self, row: int) -> None:
        self._ranks.ask(("clear_row", row))

    def copy_row(self, source: int, target: int) -> None:
        self._ranks.ask(("copy_row", source, target))

    def close(self) -> None:
        self._ranks.close()


class _RankLogits:
    """Logits of the last step, in the first rank's process."""

    is_pending = False

    def __init__(self, ranks: Ranks, rows: Sequence[int] | None = None) -> None:
        """`rows`: only these; None: all."""
        self._ranks, self._rows = ranks, rows

    def host(self) -> np.ndarray:
        found: np.ndarray = self._ranks.ask(("host", self._rows))[0]
        return found

    def likeliest(self, count: int | None) -> Likeliest:
        found: Likeliest = self._ranks.ask(("likeliest", self._rows, count))[0]
        return found

    def rows(self, numbers: Sequence[int]) -> "_RankLogits":
        return _RankLogits(self._ranks, numbers if self._rows is None else [self._rows[number] for number in numbers])


def _serve(rank: int, count: int, files: list[Path], runner: Name) -> Generator[Any, tuple[Any, ...], None]:
    """In a rank's process: carries out what `RanksRunner` asks for."""
    own = _of_rank(files[rank], runner)
    try:
        question = yield (_where(own), own.decoder, own.longest_step)
        logits: Logits | None = None
        while True:
            asked, *given = question
            answer: Any = None
            if asked in ("step", "step_row"):
                logits = getattr(own, asked)(*given)
            elif asked in ("start", "clear_row", "copy_row", "save_states", "restore_states"):
                getattr(own, asked)(*given)
            elif asked == "hidden":
                answer = own.hidden() if rank == 0 else None
            elif rank == 0 and logits is not None:
                rows, *rest = given
                read = logits if rows is None else logits.rows(rows)
                answer = read.host() if asked == "host" else read.likeliest(*rest)
            question = yield answer
    finally:
        own.close()


def _of_rank(file: Path, runner: Name) -> SlotRunner:
    return open_engine(file, communicator=communicator()) if runner == "tensorrt" else TorchRunner(file)


def _where(runner: SlotRunner) -> str:
    """The part of a runner's name behind the file."""
    return runner.name.rpartition("(")[2].rstrip(")")


def open_ranks(path: Path, made: ExitStack, runner: Name = "auto") -> SlotRunner:
    """The runner of the ranks in the folder `path`; `made` ends what it needs.

    auto: with torch, a process and a GPU for each rank, where this machine has a GPU; otherwise onnxruntime, all ranks
    in one graph on the CPU. In a process that torchrun or mpirun started, this process runs its own rank, and all of
    them must do the same. Raises BuilderError: model for ranks that do not fit together, unavailable where this machine
    has fewer GPUs than ranks, usage where another number of processes was started, failed where a rank ends.
    """
    folder = RankFolder.read(path)
    launched = Launched.found()
    if runner == "auto":
        runner = "torch" if has_gpu() else "onnxruntime"
    if runner == "onnxruntime":
        if launched is not None:
            raise UsageError("--runner onnxruntime runs all ranks in one process: start it without torchrun or mpirun")
        return _in_one_graph(folder, made)
    if launched is not None:
        return _launched(folder, runner, launched, made)
    if not has_gpu():
        raise UnavailableError(
            f"--runner {runner}: {folder.count} ranks need {folder.count} GPUs, and torch sees none here; "
            "--runner onnxruntime runs them in one process on the CPU"
        )
    return RanksRunner(folder, runner)


def _launched(folder: RankFolder, runner: Name, launched: Launched, made: ExitStack) -> SlotRunner:
    if launched.count != folder.count:
        raise UsageError(
            f"{folder.folder}: holds {folder.count} ranks, and {launched.count} processes were started; start "
            f"{folder.count}"
        )
    models = folder.models()
    if launched.join(on_gpu=has_gpu()):
        made.callback(launched.leave)  # once its runner is closed
    own = _of_rank(folder.engine(launched.rank) if runner == "tensorrt" else models[launched.rank], runner)
    own.name = f"{folder.folder} ({folder.count} ranks, {_where(own)})"
    return own


def _in_one_graph(folder: RankFolder, made: ExitStack) -> SlotRunner:
    file = made.enter_context(scratch(None)) / "ranks.onnx"
    models = folder.models()
    save_simulated(models, file)
    found = OnnxRunner(file, [prefix(rank) for rank in range(folder.count)], models[0])
    found.name = f"{folder.folder} ({folder.count} ranks in one process, ONNX Runtime, CPU)"
    return found
