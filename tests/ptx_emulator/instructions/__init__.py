"""Instruction families; importing them registers their handlers."""

from . import (  # noqa: F401
    arith,
    async_copy,
    cluster_launch,
    control,
    convert,
    fences,
    logic,
    memory,
    sync,
    tensor,
    tensormap,
    warp,
    warpgroup,
)
