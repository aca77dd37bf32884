"""One process for each rank. Where one fails or is killed, all end, and the message names it."""

import ctypes
import inspect
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, multiprocessing

from trt_nvfp4.builder.errors import BUILD_FAILED, BuilderError, UnavailableError, reported

T = TypeVar("T")
#: Seconds that a rank has to end by itself once another has failed.
GRACE = 5.0


def run_ranks(work: Callable[..., T], count: int, *arguments: Any, on_gpus: bool = True) -> list[T]:
    """The results of `work(rank, count, *arguments)`, rank by rank; for the rest see `Ranks`."""
    with Ranks(work, count, *arguments, on_gpus=on_gpus) as ranks:
        found: list[T] = ranks.first
        return found


class Ranks:
    """A process for each rank of `work(rank, count, *arguments)`, a function of a module. A context manager.

    In each process torch.distributed's default group holds all ranks: over NCCL, each on the GPU of its number, or over
    gloo on the CPU. Where `work` is a generator function the processes live on: `first` is what each yields first, and
    `ask` sends all ranks a value and returns what each yields next. Otherwise `first` is what each returns.

    Raises BuilderError: unavailable, where the machine has fewer GPUs; failed, naming the first rank that failed or was
    killed, once all have ended. A BuilderError that a rank raises itself keeps its exit code.
    """

    def __init__(self, work: Callable[..., Any], count: int, *arguments: Any, on_gpus: bool = True) -> None:
        if on_gpus and torch.cuda.device_count() < count:
            raise UnavailableError(
                f"{count} ranks need {count} GPUs, one each; this machine has {torch.cuda.device_count()}"
            )
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            meeting = f"file://{Path(self._folder.name) / 'ranks'}"
            for rank in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank, args=(theirs, meeting, on_gpus, work, rank, count, *arguments), daemon=True
                )
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
            self.first = self._answers()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: Any) -> list[Any]:
        """The answers of all ranks to `question`, rank by rank."""
        for _, pipe in self._ranks:
            with suppress(OSError):  # of a rank that has ended, which its answer tells
                pipe.send(question)
        try:
            return self._answers()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End all processes; those that run well end by themselves."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(GRACE)
        self._end()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        count = len(self._ranks)
        while len(found) < count:
            open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in found}
            for pipe in wait(list(open_pipes)):
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    error, value = self._ranks[rank][1].recv()
                except (EOFError, OSError):
                    self._ranks[rank][0].join(GRACE)
                    raise _failed(rank, count, _death(self._ranks[rank][0].exitcode)) from None
                if error is not None:
                    raise _failed(rank, count, f"failed:\n{str(error).strip()}", value)
                found[rank] = value
        return [found[rank] for rank in range(count)]

    def _end(self) -> None:
        """Terminate, then kill: a rank may be inside a collective, which no longer ends."""
        processes = [process for process, _ in self._ranks]
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _rank(
    pipe: Connection, meeting: str, on_gpus: bool, work: Callable[..., Any], rank: int, count: int, *arguments: Any
) -> None:
    """Answers are pairs: the error as text, or None; and the value, or the error's exit code."""
    try:
        join(rank, count, meeting, rank if on_gpus else None)
        found: Any = work(rank, count, *arguments)
        answers = inspect.isgenerator(found)
        if not answers:
            distributed.barrier()
            pipe.send((None, found))
        else:
            _serve(pipe, found)
            os._exit(0)  # a group whose sums were recorded in a CUDA graph may wait for itself at its end
    except BuilderError as error:
        pipe.send((str(error), error.exit_code))
        os._exit(1)  # the other ranks are waited for by what the group would do at exit
    except BaseException:
        pipe.send((traceback.format_exc(), BUILD_FAILED))
        os._exit(1)
    distributed.destroy_process_group()


def _serve(pipe: Connection, served: Generator[Any, Any, None]) -> None:
    """Answer until the pipe is closed."""
    answer = next(served)
    while True:
        pipe.send((None, answer))
        try:
            question = pipe.recv()
        except EOFError:
            served.close()
            return
        answer = served.send(question)


def join(rank: int, count: int, meeting: str, gpu: int | None) -> None:
    """Make this process one rank of `count`, on a GPU by its number or on the CPU; `meeting` as torch.distributed's
    `init_method`."""
    options: dict[str, Any] = {}
    if gpu is not None:
        torch.cuda.set_device(gpu)
        options["device_id"] = torch.device("cuda", gpu)
    distributed.init_process_group(
        "gloo" if gpu is None else "nccl", init_method=meeting, rank=rank, world_size=count, **options
    )


def _failed(rank: int, count: int, how: str, code: int = BUILD_FAILED) -> BuilderError:
    return reported(f"rank {rank} of {count} {how}\nThe other ranks were ended.", code)


def _death(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def communicator() -> Any:
    """NCCL's communicator of torch.distributed's default group, as the capsule that TensorRT takes. All ranks call
    this."""
    from torch.distributed import distributed_c10d

    distributed.barrier()  # which makes it
    backend: Any = distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(backend._comm_ptr(), None, None)
