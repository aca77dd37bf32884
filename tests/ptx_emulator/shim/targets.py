"""The GPUs that the runtime shim can pretend to be: what host code asks about before it launches."""

from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Target:
    """A GPU as `cudaDeviceGetAttribute` describes it; sizes in bytes."""

    arch: str  # nvcc's name, such as "sm_120a"
    sm_count: int
    shared_per_sm: int
    l2_bytes: int
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    integrated: bool = False
    ptx_arch: str | None = None  # whose PTX its programs hold, where that is not its own

    @property
    def capability(self) -> tuple[int, int]:
        return _capability(self.arch)

    @property
    def ptx_capability(self) -> tuple[int, int]:
        return _capability(self.ptx_arch or self.arch)

    @property
    def shared_per_block(self) -> int:
        """What a kernel may opt in to: one KiB of an SM's shared memory is the system's."""
        return self.shared_per_sm - KIB

    def attributes(self) -> dict[int, int]:
        """cudaDeviceAttr -> value."""
        major, minor = self.capability
        return {
            1: 1024,  # MaxThreadsPerBlock
            2: 1024,  # MaxBlockDimX
            3: 1024,  # MaxBlockDimY
            4: 64,  # MaxBlockDimZ
            5: 2**31 - 1,  # MaxGridDimX
            6: 65535,  # MaxGridDimY
            7: 65535,  # MaxGridDimZ
            8: 48 * KIB,  # MaxSharedMemoryPerBlock
            10: 32,  # WarpSize
            12: 65536,  # MaxRegistersPerBlock
            13: 1_800_000,  # ClockRate, kHz
            16: self.sm_count,  # MultiProcessorCount
            18: int(self.integrated),  # Integrated
            36: 4_000_000,  # MemoryClockRate, kHz
            37: 256 if self.integrated else 512,  # GlobalMemoryBusWidth, bits
            38: self.l2_bytes,  # L2CacheSize
            39: self.threads_per_sm,  # MaxThreadsPerMultiProcessor
            41: 1,  # UnifiedAddressing
            75: major,  # ComputeCapabilityMajor
            76: minor,  # ComputeCapabilityMinor
            78: 1,  # StreamPrioritiesSupported
            81: self.shared_per_sm,  # MaxSharedMemoryPerMultiprocessor
            82: 65536,  # MaxRegistersPerMultiprocessor
            83: 1,  # ManagedMemory
            95: 1,  # CooperativeLaunch
            97: self.shared_per_block,  # MaxSharedMemoryPerBlockOptin
            106: self.blocks_per_sm,  # MaxBlocksPerMultiprocessor
            108: self.l2_bytes * 3 // 4,  # MaxPersistingL2CacheSize
            111: KIB,  # ReservedSharedMemoryPerBlock
            115: 1,  # MemoryPoolsSupported
            120: int(major >= 9),  # ClusterLaunch
        }


def _capability(arch: str) -> tuple[int, int]:
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


TARGETS = {
    "h200": Target("sm_90a", 132, 228 * KIB, 60 * MIB),
    "b200": Target("sm_100a", 148, 228 * KIB, 126 * MIB),
    "b300": Target("sm_103a", 148, 228 * KIB, 126 * MIB),
    "thor": Target("sm_110a", 20, 228 * KIB, 32 * MIB, integrated=True),
    "rtx-blackwell": Target("sm_120a", 188, 100 * KIB, 96 * MIB, threads_per_sm=1536, blocks_per_sm=24),
    "spark": Target("sm_121a", 48, 100 * KIB, 24 * MIB, threads_per_sm=1536, blocks_per_sm=24, integrated=True),
    "a100": Target("sm_80", 108, 164 * KIB, 40 * MIB),
    "ada": Target("sm_89", 128, 100 * KIB, 72 * MIB, threads_per_sm=1536, blocks_per_sm=24),
}
