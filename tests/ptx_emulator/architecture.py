"""Which architectures have an instruction, and the limits of a launch (PTX ISA, "Target ISA notes" of each instruction;
CUDA Programming Guide, "Technical Specifications per Compute Capability").

nvcc stops at PTX here, so ptxas does not say it.
"""

import re
from dataclasses import dataclass

from .errors import EmulatorError, UnknownInstructionError
from .ir import Instruction
from .program import Program

_DATACENTER = {100, 101, 103, 110}
_CONSUMER = {120, 121}
_BLACKWELL = _DATACENTER | _CONSUMER
_EXPANDED = {"b4x16_p64", "b6x16_p32"}
_NARROW = {"e2m1", "e2m3", "e3m2"}
_MAX_THREADS, _MAX_Z, _MAX_GRID = 1024, 64, (2**31 - 1, 65535, 65535)
_PORTABLE_CLUSTER = 8


@dataclass(frozen=True)
class Architecture:
    """`.target` of a module: its number, and whether it names the instructions of one architecture or family."""

    number: int
    specific: bool

    @classmethod
    def of(cls, target: str) -> "Architecture":
        """From a name such as sm_100a; raises EmulatorError if it is none."""
        match = re.fullmatch(r"sm_(\d+)([af]?)", target)
        if match is None:
            raise EmulatorError(f".target {target} is not an architecture")
        return cls(int(match[1]), bool(match[2]))

    @property
    def largest_cluster(self) -> int:
        """CTAs of a cluster, those beyond eight by cudaFuncAttributeNonPortableClusterSizeAllowed."""
        return 16 if self.number == 90 or self.number in _DATACENTER else _PORTABLE_CLUSTER if self.number > 90 else 1


def _needs(item: Instruction) -> tuple[int, set[int] | None]:
    """The oldest architecture that has an instruction, and the only ones that do, by their own names."""
    opcode = item.opcode
    narrow = any(part in _NARROW for part in opcode)
    if opcode[0] == "tcgen05":
        return 100, _DATACENTER
    if opcode[0] == "wgmma":
        return 90, {90}
    if opcode[0] == "setmaxnreg":
        return 90, {90} | _BLACKWELL
    if opcode[0] == "mma" and (narrow or any(part.startswith("kind::") for part in opcode)):
        return 120, _CONSUMER
    if opcode[0] in ("ldmatrix", "stmatrix") and ("b8" in opcode or _EXPANDED & set(opcode)):
        return 100, _BLACKWELL
    if opcode[0] == "cvt" and any(part.startswith(("e2m1", "e2m3", "e3m2", "ue8m0")) for part in opcode):
        return 100, _BLACKWELL
    if opcode[0] == "clusterlaunchcontrol":
        return 100, None
    if "multicast::cluster" in opcode:
        return 90, {90} | _DATACENTER
    if opcode[:3] == ("cp", "async", "bulk") or opcode[:2] in (("mbarrier", "try_wait"), ("barrier", "cluster")):
        return 90, None
    if opcode[0] in ("mapa", "getctarank", "elect", "griddepcontrol", "stmatrix", "tensormap"):
        return 90, None
    if opcode[0] in ("st", "red") and opcode[1:2] == ("async",):
        return 90, None
    if opcode[:2] == ("cp", "async") or opcode[0] in ("mbarrier", "redux"):
        return 80, None
    return 0, None


def check_instructions(program: Program, target: str) -> None:
    """Raises UnknownInstructionError for one that the target lacks, EmulatorError where tcgen05 mixes groups."""
    architecture = Architecture.of(target)
    groups: set[str] = set()
    for block in program.blocks:
        for item in block.instructions:
            oldest, only = _needs(item)
            missing = only is not None and (architecture.number not in only or not architecture.specific)
            # Multicast is in every PTX from sm_90 on, and slow where it is not in the hardware.
            if "multicast::cluster" in item.opcode:
                missing = architecture.number in _CONSUMER
            if architecture.number < oldest or missing:
                raise UnknownInstructionError(f"line {item.line}: {item.text}: {target} has no such instruction")
            if item.opcode[0] == "tcgen05":
                groups |= {part for part in item.opcode if part.startswith("cta_group::")}
                if len(groups) > 1:
                    raise EmulatorError(
                        f"line {item.line}: {item.text}: all tcgen05 instructions of a kernel name the same .cta_group"
                    )


def check_launch(
    program: Program,
    target: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    explicit: bool,
    non_portable: bool,
    sm_count: int,
) -> None:
    """Raises EmulatorError for a launch that CUDA refuses. explicit: the launch names its cluster."""
    directives, threads = program.directives, block[0] * block[1] * block[2]
    limit = directives.get("maxntid", (_MAX_THREADS,))
    most = min(limit[0] * (limit[1] if len(limit) > 1 else 1) * (limit[2] if len(limit) > 2 else 1), _MAX_THREADS)
    if not 1 <= threads <= most or block[2] > _MAX_Z:
        raise EmulatorError(f"block {block} has {threads} threads, the kernel allows {most}, and CUDA {_MAX_Z} along z")
    required = directives.get("reqntid")
    if required is not None and (*required, 1, 1)[:3] != block:
        raise EmulatorError(f"block {block}, but the kernel has .reqntid {required}")
    if any(not 1 <= g <= most_blocks for g, most_blocks in zip(grid, _MAX_GRID, strict=True)):
        raise EmulatorError(f"grid {grid} is not within {_MAX_GRID}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulatorError(f"grid {grid} is no multiple of cluster {cluster}")
    size = cluster[0] * cluster[1] * cluster[2]
    wanted = directives.get("reqnctapercluster")
    if wanted is not None and explicit and (*wanted, 1, 1)[:3] != cluster:
        raise EmulatorError(f"cluster {cluster}, but the kernel has .reqnctapercluster {wanted}")
    most = min(Architecture.of(target).largest_cluster, *directives.get("maxclusterrank", (size,)))
    if size > most:
        raise EmulatorError(f"cluster {cluster} has {size} CTAs, {target} and the kernel allow {most}")
    if size > _PORTABLE_CLUSTER and not non_portable:
        raise EmulatorError(
            f"cluster {cluster} has {size} CTAs: more than {_PORTABLE_CLUSTER} need "
            "cudaFuncAttributeNonPortableClusterSizeAllowed"
        )
    if size > sm_count:
        raise EmulatorError(f"cluster {cluster} has {size} CTAs, the GPU {sm_count} SMs")
