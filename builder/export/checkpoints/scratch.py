"""Dequantized weights in files without a name: mapped, so that memory holds what is read of them and no more."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from trt_nvfp4.builder.errors import BUILD_FAILED, BuilderError

# Smaller tensors stay in memory: a file each costs more than they take.
_SMALLEST = 1 << 20


def mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """`tensor`, mapped from a file in `folder` that is gone when nothing refers to it any more; a small one itself.

    Raises BuilderError (build) where the disk is full.
    """
    if tensor.nbytes < _SMALLEST:
        return tensor
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".dequantized-", suffix=".data") as file:
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            mapped = torch.from_file(file.name, shared=False, size=tensor.numel(), dtype=tensor.dtype)
    except OSError as error:
        raise BuilderError(
            BUILD_FAILED,
            f"{folder}: dequantized weights cannot be written ({error.strerror}); free some space, or write to another "
            "disk with -o",
        ) from error
    return mapped.view(tensor.shape)
