"""Clocks that the W4A16 kernels take for a word: eight 4-bit codes of each lane of a warp, 256 weights.

What a kernel must issue bounds it as memory does. Instructions per word are counted in the machine code of each
architecture (`benchmarks/kernels/issue_slots.py`); what an instruction takes was measured on an H200
(`benchmarks/notes`, "What an SM can do"). On the other GPUs the same clocks per instruction are an assumption:
nothing is published about E2M1 conversions, and none of those GPUs was measured.
"""

import math
from dataclasses import dataclass

WORD_WEIGHTS = 256
# Schedulers of an SM, each with the pipes below.
SCHEDULERS = 4
# Two pipes of 16 lanes each; a product of eight tokens by mma.sync holds up both.
_PIPE_CLOCKS, _MMA_CLOCKS = 2.0, 6.3
# wgmma with weights in registers: its clocks, and those for every eight tokens.
_WGMMA_CLOCKS, _WGMMA_EACH_8 = 7.0, 2.23
# The most tokens that one pass over the weights serves.
_MMA_TOKENS, _WGMMA_TOKENS = 32, 64


@dataclass(frozen=True)
class Loop:
    """Instructions per word of a kernel's loop over weights: of the logic (`alu`) and multiplier (`fma`) pipes,
    products of the tensor cores for eight tokens (`mma`), and `issued` in all."""

    alu: float
    fma: float
    mma: int
    issued: float

    @property
    def clocks(self) -> float:
        """Clocks of a scheduler for a word: of the pipe that binds, or one for every instruction."""
        pipes = max(_PIPE_CLOCKS * self.alu, _PIPE_CLOCKS * self.fma + _MMA_CLOCKS * self.mma)
        return max(pipes, self.issued)


# (family, type of the activations) -> tokens of a pass -> loop. A test holds them to the record in
# benchmarks/results/kernels/issue_slots.json.
LOOPS: dict[tuple[str, str], dict[int, Loop]] = {
    ("sm89", "float16"): {
        1: Loop(7.72, 8.34, 0, 17.09),
        8: Loop(7.72, 7.94, 1, 17.78),
        16: Loop(7.75, 7.66, 2, 18.69),
        32: Loop(7.94, 7.78, 4, 21.50),
    },
    ("sm89", "bfloat16"): {
        1: Loop(7.72, 8.34, 0, 17.09),
        8: Loop(7.75, 8.22, 1, 18.22),
        16: Loop(8.72, 9.22, 2, 21.22),
        32: Loop(8.91, 9.34, 4, 24.03),
    },
    ("sm90", "float16"): {
        1: Loop(7.75, 8.22, 0, 16.75),
        8: Loop(7.88, 7.59, 1, 17.28),
        16: Loop(7.81, 7.41, 2, 18.28),
        32: Loop(8.09, 7.50, 4, 21.16),
    },
    ("sm90", "bfloat16"): {
        1: Loop(7.72, 8.25, 0, 16.75),
        8: Loop(7.88, 7.88, 1, 17.59),
        16: Loop(8.78, 8.94, 2, 20.78),
        32: Loop(9.03, 9.06, 4, 23.66),
    },
    ("sm100", "float16"): {
        1: Loop(4.66, 5.47, 0, 10.91),
        8: Loop(4.97, 4.53, 1, 11.38),
        16: Loop(4.78, 4.41, 2, 12.31),
        32: Loop(5.16, 4.50, 4, 15.28),
    },
    ("sm100", "bfloat16"): {
        1: Loop(4.66, 5.47, 0, 10.91),
        8: Loop(4.84, 4.84, 1, 11.56),
        16: Loop(8.75, 8.94, 2, 20.81),
        32: Loop(9.09, 9.06, 4, 23.78),
    },
    ("sm120", "float16"): {
        1: Loop(4.75, 5.38, 0, 10.91),
        8: Loop(4.91, 4.59, 1, 11.38),
        16: Loop(4.78, 4.41, 2, 12.78),
        32: Loop(5.03, 4.62, 4, 17.22),
    },
    ("sm120", "bfloat16"): {
        1: Loop(4.75, 5.38, 0, 10.91),
        8: Loop(4.81, 4.88, 1, 11.59),
        16: Loop(8.78, 8.91, 2, 21.16),
        32: Loop(9.03, 9.12, 4, 25.25),
    },
}


def word_clocks(family: str, dtype: str, tokens: int) -> float:
    """Clocks of a scheduler that a word takes at `tokens` rows of `dtype` ("float16" or "bfloat16"), all passes over
    the weights together.

    `family`: "sm89", "sm90", "sm100" (also SM103, SM110) or "sm120" (also SM121).
    """
    loops = LOOPS[family, dtype]
    most = _WGMMA_TOKENS if family == "sm90" else _MMA_TOKENS
    passes, rest = divmod(tokens, most)
    return passes * _pass_clocks(loops, family, most) + (_pass_clocks(loops, family, rest) if rest else 0)


def _pass_clocks(loops: dict[int, Loop], family: str, tokens: int) -> float:
    streamed = next((loop.clocks for most, loop in loops.items() if tokens <= most), None)
    if family != "sm90" or tokens == 1:
        assert streamed is not None
        return streamed
    decoding = _PIPE_CLOCKS * max(loops[8].alu, loops[8].fma)
    by_wgmma = decoding + _WGMMA_CLOCKS + _WGMMA_EACH_8 * math.ceil(tokens / 8)
    return by_wgmma if streamed is None else min(by_wgmma, streamed)
