"""Instruction families; importing them registers their handlers."""

from . import arith, async_copy, cluster_launch, control, convert, logic, memory, sync, tensor, warp  # noqa: F401
