"""Sums over the ranks of a split model, by torch.distributed."""

import torch
from torch import Tensor, distributed

from .registry import operator


@operator("DistCollective")
def dist_collective(
    x: Tensor, *, collective_operation: str, reduce_op: str, root: int = -1, group_size: int = 0, nb_rank: int = 1
) -> Tensor:
    if not distributed.is_initialized() or distributed.get_world_size() != nb_rank:
        raise ValueError(f"it adds up over {nb_rank} ranks; run the folder that holds all of them")
    if (collective_operation, reduce_op) != ("all_reduce", "sum"):
        raise ValueError(f"{collective_operation} by {reduce_op} is not known here")
    # On a CPU, gloo has no 16-bit sums.
    total = x.clone() if x.is_cuda else x.to(torch.float32, copy=True)
    distributed.all_reduce(total)
    return total.to(x.dtype)
