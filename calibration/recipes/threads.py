"""Threads on a CPU: none within operations on small tensors, several beside one another for parts of a large one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

# Between two operations a thread waits for Python's lock: more of them gain nothing.
_MOST_THREADS = 8

Part = TypeVar("Part")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's CPU loops without threads: for small tensors their barriers cost more than they bring, a thousand times
    more where other processes keep the cores busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def side_by_side(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """`work` of each part, in their order, by up to as many threads as Torch may use, none of which has others.

    Unlike Torch's, these do not wait for one another behind every operation, so that a busy machine slows them down
    only by its share. For parts of 2^20 elements or so.
    """
    threads = max(1, min(torch.get_num_threads(), _MOST_THREADS, len(parts)))
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))
