"""One process for each rank. Where one fails or is killed, all end, and the message names it."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, multiprocessing

from trt_nvfp4.builder.errors import BUILD_FAILED, UNAVAILABLE, BuilderError

T = TypeVar("T")
#: Seconds that a rank has to end by itself once another has failed.
GRACE = 5.0


def run_ranks(work: Callable[..., T], count: int, *arguments: Any, on_gpus: bool = True) -> list[T]:
    """What `work(rank, count, *arguments)` returns, rank by rank.

    `work` is a function of a module, run in a process of its own in which torch.distributed's default group holds all
    ranks: over NCCL, each on the GPU of its number, or over gloo on the CPU. Raises BuilderError: unavailable, where
    the machine has fewer GPUs; failed, naming the first rank that failed or was killed, once all have ended.
    """
    if on_gpus and torch.cuda.device_count() < count:
        raise BuilderError(
            UNAVAILABLE, f"{count} ranks need {count} GPUs, one each; this machine has {torch.cuda.device_count()}"
        )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'ranks'}"
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(theirs, meeting, on_gpus, work, rank, count, *arguments), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            found = _results(ranks)
            for running, _ in ranks:
                running.join(GRACE)
            return found
        finally:
            _end([process for process, _ in ranks])


def _rank(
    results: Connection, meeting: str, on_gpus: bool, work: Callable[..., Any], rank: int, count: int, *arguments: Any
) -> None:
    try:
        options: dict[str, Any] = {}
        if on_gpus:
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        distributed.init_process_group(
            "nccl" if on_gpus else "gloo", init_method=meeting, rank=rank, world_size=count, **options
        )
        found = work(rank, count, *arguments)
        distributed.barrier()
    except BaseException:
        results.send((False, traceback.format_exc()))
        os._exit(1)  # the other ranks are waited for by what the group would do at exit
    results.send((True, found))
    distributed.destroy_process_group()


def _results(ranks: list[tuple[BaseProcess, Connection]]) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in found}
        for pipe in wait(list(open_pipes)):
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                succeeded, value = ranks[rank][1].recv()
            except EOFError:
                ranks[rank][0].join(GRACE)
                raise _failed(rank, len(ranks), _death(ranks[rank][0].exitcode)) from None
            if not succeeded:
                raise _failed(rank, len(ranks), f"failed:\n{str(value).strip()}")
            found[rank] = value
    return [found[rank] for rank in range(len(ranks))]


def _failed(rank: int, count: int, how: str) -> BuilderError:
    return BuilderError(BUILD_FAILED, f"rank {rank} of {count} {how}\nThe other ranks were ended.")


def _death(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _end(processes: list[BaseProcess]) -> None:
    """A rank may be inside a collective, which no longer ends: it is told to end, then killed."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()
