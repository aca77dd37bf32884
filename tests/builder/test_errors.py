"""Failures that are told apart by more than their type."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trt_nvfp4.builder import errors


def raise_of_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raise_of_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory", "weights.data")


def raise_without_words() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (raise_without_words, "out of memory; "),
        (lambda: np.empty(1 << 50), "out of memory (Unable to allocate 8.00 PiB"),
        (lambda: torch.empty(1 << 50), "you tried to allocate 4503599627370496 bytes"),
        (raise_of_cuda, "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.); "),
        (raise_of_the_system, "weights.data: Cannot allocate memory; "),
    ],
)
def test_too_little_memory_is_no_defect(fail: Callable[[], object], words: str) -> None:
    with pytest.raises((MemoryError, RuntimeError, OSError)) as failure:
        fail()
    assert errors.exit_code(failure.value) == errors.BUILD_FAILED
    text = errors.message(failure.value)
    assert words in text
    assert text.endswith("; end other programs that use it, or run this on a machine with more")


def test_a_disk_that_is_full_and_a_stream_that_is() -> None:
    """Elsewhere is where -o says, which a stream does not depend on."""
    full = (errno.ENOSPC, "No space left on device")
    said = "No space left on device; free some space"
    assert errors.message(OSError(*full, "o.engine")) == f"o.engine: {said}, or write elsewhere with -o"
    assert errors.message(OSError(*full, errors.STDOUT)) == f"stdout: {said}"
    assert errors.message(OSError(*full)) == said


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EDQUOT, "free some space"), (errno.EFBIG, "raise the limit of a file's size (ulimit -f)")],
)
def test_limits_of_a_user(number: int, advice: str) -> None:
    said = f"{os.strerror(number)}; {advice}, or write elsewhere with -o"
    assert errors.message(OSError(number, os.strerror(number), "o.engine")) == f"o.engine: {said}"


def test_a_folder_that_another_run_made_first(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name / "sources").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty") as failure:
        (tmp_path / "ours").rename(tmp_path / "theirs")
    assert errors.exit_code(failure.value) == errors.USAGE
    expected = f"{tmp_path / 'theirs'}: exists already; choose a new folder or remove this one"
    assert errors.message(failure.value) == expected


def test_other_failures_of_libraries_are_defects() -> None:
    error = RuntimeError("expected two tensors of the same size")
    assert errors.exit_code(error) is None
    assert errors.message(error) == str(error)


def test_names_that_would_fill_the_terminal() -> None:
    text = errors.message(errors.UsageError(f"plan.yaml: unknown decision '{'x' * 100_000}'; one of a, b"))
    assert len(text) < 3100
    assert text.startswith("plan.yaml: unknown decision 'xxx")
    assert text.endswith("xxx'; one of a, b")


def test_an_interruption_says_what_is_left() -> None:
    assert errors.message(KeyboardInterrupt()) == "interrupted; nothing half-written was left"
    assert errors.message(KeyboardInterrupt("5 samples are kept")) == "interrupted; 5 samples are kept"
