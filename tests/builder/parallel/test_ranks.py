"""Processes of ranks: what they compute together, and that none outlives one that failed."""

import os
import signal
import time

import pytest
import torch
from torch import distributed

from trt_nvfp4.builder.errors import BuilderError, BuildFailedError, UnavailableError
from trt_nvfp4.builder.parallel.ranks import communicator, run_ranks


def device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"


def add_up(rank: int, count: int, value: float) -> float:
    x = torch.full((3,), value * (rank + 1), device=device())
    distributed.all_reduce(x)
    return float(x[0])


def fails(rank: int, count: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("this rank has no weights")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    distributed.all_reduce(torch.ones(3, device=device()))  # waits for the one that never comes
    time.sleep(600)


@pytest.mark.slow
def test_ranks_compute_together() -> None:
    assert run_ranks(add_up, 3, 2.0, on_gpus=False) == [12.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 of 2 failed:\n(.|\n)*ValueError: this rank has no weights"),
        ("is killed", "rank 1 of 2 was killed by SIGKILL"),
        ("ends", "rank 1 of 2 ended with status 7"),
    ],
)
def test_all_ranks_end_with_one_that_fails(how: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(BuildFailedError, match=f"{message}(.|\n)*other ranks were ended"):
        run_ranks(fails, 2, how, on_gpus=False)
    assert time.monotonic() - start < 120


def test_fewer_gpus_than_ranks() -> None:
    with pytest.raises(UnavailableError, match="99 ranks need 99 GPUs"):
        run_ranks(add_up, 99, 1.0)


@pytest.mark.gpu
def test_on_every_gpu() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    assert run_ranks(add_up, count, 2.0) == [count * (count + 1.0)] * count
    for how, message in (("raises", "no weights"), ("is killed", "was killed by SIGKILL")):
        start = time.monotonic()
        with pytest.raises(BuilderError, match=message):
            run_ranks(fails, count, how)
        assert time.monotonic() - start < 120


def capsule(rank: int, count: int) -> str:
    return str(communicator())


@pytest.mark.gpu
def test_the_communicator_for_tensorrt() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert all(text.startswith("<capsule object NULL at 0x") for text in run_ranks(capsule, 2))
