"""Whether torchrun or mpirun started this process as one of several ranks."""

import os
import sys
from dataclasses import dataclass

from trt_nvfp4.builder.errors import UsageError

# Variables of torchrun, Open MPI, and MPICH and its kin: rank, number of ranks, rank on this machine.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_ADDRESS, _PORT = "127.0.0.1", "29500"  # as torch.distributed's own default port


@dataclass(frozen=True)
class Launched:
    """This process is rank `rank` of `count`, and number `local` on this machine."""

    rank: int
    count: int
    local: int

    @classmethod
    def found(cls) -> "Launched | None":
        """The rank by the environment; None for a single process. Raises UsageError for invalid numbers."""
        for names in _VARIABLES:
            texts = [os.environ.get(name) for name in names]
            if texts[0] is None or texts[1] is None:
                continue
            try:
                rank, count, local = int(texts[0]), int(texts[1]), int(texts[2] or texts[0])
            except ValueError:
                rank = count = local = -1
            if not 0 <= rank < count or local < 0:
                shown = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
                raise UsageError(f"{shown}: not a rank of several processes; unset these variables")
            return cls(rank, count, local) if count > 1 else None
        return None

    def join(self, on_gpu: bool) -> bool:
        """Make torch.distributed's default group of all ranks; they meet at MASTER_ADDR, or on this machine. False for
        a group that was there before, which is another's to end."""
        from torch import distributed

        from trt_nvfp4.builder.parallel.ranks import join

        if distributed.is_initialized():
            return False
        address, port = os.environ.get("MASTER_ADDR", _ADDRESS), os.environ.get("MASTER_PORT", _PORT)
        join(self.rank, self.count, f"tcp://{address}:{port}", self.local if on_gpu else None)
        return True

    def leave(self) -> None:
        """End the group, once all ranks are here: one that ends earlier takes their connections away. A rank
        that fails does not wait; torchrun or mpirun ends the others."""
        from torch import distributed

        if sys.exc_info()[0] is None:
            distributed.barrier()
            distributed.destroy_process_group()


def is_first() -> bool:
    """True for the process that prints and writes: a single one, or the first of several ranks."""
    launched = Launched.found()
    return launched is None or launched.rank == 0
