"""The emulated device: memory, modules, launches."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counters import Counters
from .launch import Dim3, Launch, LoadedModule
from .memory import GlobalMemory, Region

#: What the ISA does not allow and kernels that work on hardware do (CUTLASS's examples 67 and 92): reads of shared
#: memory that a predicated copy left as it was; cp.async into what the async proxy reads, with no fence. And launches
#: that use what those before them write with no griddepcontrol.wait, ordered in ways that are not modelled.
TOLERABLE = ("uninitialised", "unfenced-cp-async", "early-launches")


class Device:
    """A GPU of `sm_count` SMs, each holding one CTA at a time, or `ctas_per_sm`.

    `seed` draws the order in which pending asynchronous operations finish, and what `disorder`, a share, disturbs:
    waits behind which warps are slow, peeks that fail, stores that land in several turns. With `strict_exit`, a copy
    that nobody waited for when its CTA exits is an error; else it finishes then (working code that prefetches too far
    needs that).
    """

    def __init__(
        self,
        sm_count: int = 4,
        max_shared: int = 227 * 1024,
        seed: int = 0,
        strict_exit: bool = True,
        disorder: float = 0.0,
    ) -> None:
        self.memory = GlobalMemory()
        self.sm_count = sm_count
        self.max_shared = max_shared
        self.reseed(seed)
        self.disorder = disorder
        self.strict_exit = strict_exit
        #: CTAs that an SM holds at a time, which share its tensor memory; that they fit is not checked.
        self.ctas_per_sm = 1
        #: Names of TOLERABLE that launches may do from now on.
        self.tolerated: frozenset[str] = frozenset()
        #: blockIdx.x of a CTA that goes on when no other can, or now and then where others poll; None: all in turn.
        self.lagging: int | None = None

    def reseed(self, seed: int) -> None:
        """What is launched from now on draws from `seed`."""
        self.seed = seed
        self.launches = 0

    def load(self, ptx: str) -> LoadedModule:
        """Parse a PTX module, its entries when they run, and place its variables; raises PtxSyntaxError."""
        return LoadedModule(self, ptx)

    def allocate(self, size: int, name: str = "allocation") -> Region:
        """Uninitialised device memory: every byte is 0xFF."""
        return self.memory.allocate(size, name)

    def upload(self, array: NDArray[Any], name: str = "input") -> Region:
        """A device copy of a host array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        region = self.memory.allocate(raw.size, name)
        region.data[: raw.size] = raw
        return region

    def download(self, region: Region, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        count = int(np.prod(shape))
        data: NDArray[Any] = region.data[: count * np.dtype(dtype).itemsize].view(dtype).reshape(shape).copy()
        return data

    def launch(
        self,
        module: LoadedModule,
        entry: str,
        grid: Dim3,
        block: Dim3,
        params: bytes,
        dynamic_shared: int = 0,
        cluster: Dim3 | None = None,
        preferred_cluster: Dim3 | None = None,
        non_portable: bool = False,
        programmatic: bool = False,
    ) -> Counters:
        """Run a kernel to its end; raises EmulatorError. `params` is the kernel's parameter buffer.

        preferred_cluster: some clusters, drawn from the seed, have this shape. non_portable: the kernel may have
        clusters of more than eight CTAs. programmatic: it may start while the launches before it run.
        """
        self.launches += 1
        launch = Launch(
            self, module, entry, grid, block, params, dynamic_shared, cluster, preferred_cluster, non_portable,
            programmatic,
        )  # fmt: skip
        return launch.run()


def pack_params(*values: int | float | Region | np.generic) -> bytes:
    """A parameter buffer of pointers (Region or int: 8 bytes), float (4 bytes) and numpy scalars, naturally aligned."""
    out = b""
    for value in values:
        if isinstance(value, Region):
            raw = struct.pack("<Q", value.base)
        elif isinstance(value, np.generic):
            raw = value.tobytes()
        else:
            raw = struct.pack("<f", value) if isinstance(value, float) else struct.pack("<i", value)
        out += bytes(-len(out) % len(raw)) + raw
    return out
