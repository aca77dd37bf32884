"""What a launch did: instructions by class, bytes by memory space and path, matrix operations, barrier waits."""

import json
from collections import Counter

from .program import Program


class Counters:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.block_executions = [0] * len(program.blocks)
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()
        self.mma_operations: Counter[str] = Counter()
        self.barrier_waits: Counter[str] = Counter()

    def instructions(self) -> dict[str, int]:
        """Executed warp instructions by opcode name (fragments of a diverged warp count each)."""
        total: Counter[str] = Counter()
        for block, count in zip(self.program.blocks, self.block_executions, strict=True):
            if count:
                for item in block.instructions:
                    total[item.name] += count
        return dict(total)

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {
            "instructions": self.instructions(),
            "bytes_read": dict(self.bytes_read),
            "bytes_written": dict(self.bytes_written),
            "mma_operations": dict(self.mma_operations),
            "barrier_waits": dict(self.barrier_waits),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, sort_keys=True)
