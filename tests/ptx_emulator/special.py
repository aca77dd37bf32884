"""Special registers."""

import time
from typing import Any

import numpy as np

from .errors import UnknownInstructionError
from .machine import Warp
from .memory import RESERVED_SHARED

_LANE = np.arange(32, dtype=np.uint32)
_AXIS = {"x": 0, "y": 1, "z": 2}


def _constant(value: int) -> Any:
    return np.full(32, value & 0xFFFFFFFF, np.uint32)


def _vector(warp: Warp, name: str, axis: int) -> Any:
    cta, launch = warp.cta, warp.cta.launch
    shape = cta.cluster.shape
    coordinate = cta.coordinates[axis]
    values = {
        "ntid": launch.block[axis],
        "ctaid": coordinate,
        "nctaid": launch.grid[axis],
        "clusterid": coordinate // shape[axis],
        "nclusterid": launch.grid[axis] // shape[axis],
        "cluster_ctaid": coordinate % shape[axis],
        "cluster_nctaid": shape[axis],
    }
    return _constant(values[name])


def _scalar(warp: Warp, name: str) -> Any:
    cta, launch = warp.cta, warp.cta.launch
    if name == "laneid":
        return _LANE
    if name.startswith("lanemask_"):
        one = np.uint32(1) << _LANE
        below = one - np.uint32(1)
        masks = {"eq": one, "lt": below, "le": below | one, "gt": ~(below | one), "ge": ~below}
        return masks[name[9:]]
    values = {
        "warpid": warp.index,
        "nwarpid": 64,
        "smid": cta.sm,
        "nsmid": launch.device.sm_count,
        "gridid": launch.number,
        "cluster_ctarank": cta.rank,
        "cluster_nctarank": cta.cluster.size,
        "is_explicit_cluster": int(launch.explicit_cluster),
        "dynamic_smem_size": launch.dynamic_shared,
        "total_smem_size": launch.shared_bytes + RESERVED_SHARED,
        "aggr_smem_size": launch.shared_bytes + RESERVED_SHARED,
    }
    if name not in values:
        raise UnknownInstructionError(f"special register %{name}")
    return _constant(values[name])


def special_register(warp: Warp, name: str) -> Any:
    """The 32 lanes of a special register (uint32, or uint64 for clocks); predicates as bool."""
    if name.startswith("tid."):
        return warp.tid[_AXIS[name[-1]]]
    if name in ("clock", "clock_hi", "clock64"):
        steps = warp.cta.launch.steps
        return np.full(32, steps >> 32 if name == "clock_hi" else steps, np.uint64)
    if name.startswith("globaltimer"):
        now = time.monotonic_ns()
        return np.full(32, now >> 32 if name.endswith("_hi") else now, np.uint64)
    cache = warp.cta.constants if not name.startswith("warpid") else None
    if cache is not None and name in cache:
        return cache[name]
    found = _vector(warp, name[:-2], _AXIS[name[-1]]) if name[-2] == "." else _scalar(warp, name)
    if cache is not None:
        cache[name] = found
    return found
